"""One table of a sweep's runs, from which all tables of its report are computed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis.groups import differing_values, measured_values
from fedexp.analysis.measures import describe_origin, less_is_better, main_measures
from fedexp.analysis.naming import differing, displayed, names
from fedexp.core.console import plural
from fedexp.metrics.forgetting_metric import main_columns
from fedexp.metrics.task_matrix import MEASURES
from fedexp.metrics.tasks import over_clients
from fedexp.rundir import jobs
from fedexp.rundir.objective import TARGETS
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import deeper_runs, other_runs, replaced_jobs

PURPOSES = ("partition", "sampling", "training")  # of the seeds in summary.json
KEYS = ["setting", "method"]


def tidy(runs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Return one row per run: setting, method, seeds, diverged, run, and its numbers.

    The column `run` has the RunDirectory. A number is nan if it is undefined. The rounds to targets
    are in the columns rounds_to_target_<target>, and inf if the run never reached the target.
    """
    table = pd.DataFrame(names(runs, of_data=True), columns=KEYS)
    table["seeds"] = [seeds_of(run) or str(run.directory) for run in runs]
    table["diverged"] = [run.diverged for run in runs]
    table["run"] = pd.Series(list(runs), dtype=object)
    return table.join(pd.DataFrame(map(numbers_of, runs), table.index, dtype=float))


def numbers_of(run: RunDirectory) -> dict[str, float]:
    """Return the numbers in summary.json and the measures between tasks, see `tidy`."""
    found = {key: value for key, value in run.summary.items() if is_number(value)}
    if run.summary.get("tasks"):
        found |= task_measures(run, MEASURES)
    targets = run.summary.get(TARGETS) or {}
    return found | {
        f"{TARGETS}_{target}": math.inf if number is None else number
        for target, number in targets.items()
    }


def task_measures(run: RunDirectory, names: Iterable[str]) -> dict[str, float]:
    """Return measures of forgetting between tasks.

    A measure is nan if the run has no tasks, or if the measure needs the initial model's accuracy
    but the run did not record it.
    """
    matrix = np.array(
        [end["accuracies"] for end in run.summary.get("tasks") or []], dtype=np.float64
    )
    if not len(matrix):
        return dict.fromkeys(names, float("nan"))
    start = np.full(matrix.shape[1], np.nan)
    if run.tasks is not None:
        first = run.tasks[run.tasks["round"] == 0]
        start[first["evaluated_task"].to_numpy(dtype=np.int64) - 1] = first["accuracy"]
    orders = run.summary.get("task_orders")
    columns = None if orders is None else np.array(orders, dtype=np.int64) - 1
    return {name: over_clients(MEASURES[name], columns, matrix, start) for name in names}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def seeds_of(run: RunDirectory) -> str:
    """Return the run's seeds of all purposes as text, or "" if they are unknown."""
    if run.summary.get("seed") is None:
        return ""
    # older summaries only have the seed of all purposes
    seeds = run.summary.get("seeds") or dict.fromkeys(PURPOSES, run.summary["seed"])
    return " ".join(f"{purpose}={seed}" for purpose, seed in sorted(seeds.items()))


def absolute_targets(table: pd.DataFrame) -> list[str]:
    """Return the columns for the option `targets`, without fractions of the best accuracy."""
    keys = [str(key) for key in table]
    return [key for key in keys if key.startswith(TARGETS) and not key.endswith("best")]


def average(table: pd.DataFrame, values: Iterable[str]) -> pd.DataFrame:
    """Return the mean and standard deviation over seeds for each setting and method.

    Runs that diverged are left out. table: see `tidy`. values: names of columns. The columns are
    setting, method, n, diverged, seeds, commits, hardware, <value> and <value>_std. <value>_n is
    the number of seeds with a value if it is not n, else nan; for targets, <value>_reached is the
    number of seeds that reached the target.
    """
    known = [value for value in dict.fromkeys(values) if value in table]
    targets = [value for value in known if value.startswith(TARGETS)]
    rows = []
    for (setting, method), group in table.groupby(KEYS, sort=False):
        row = {"setting": setting, "method": method}
        row |= {"n": len(group), "diverged": int(group["diverged"].sum())}
        row |= describe_origin(run.summary for run in group["run"])
        sound = group.loc[~group["diverged"], known].replace(math.inf, math.nan)
        for value in known:
            row |= {value: sound[value].mean(), f"{value}_std": sound[value].std()}
            size = int(sound[value].count())
            if value not in targets:
                row[f"{value}_n"] = math.nan if size == len(group) else size
            elif group[value].notna().any():
                row[f"{value}_reached"] = size
        rows.append(row)
    return pd.DataFrame(rows)


def main_keys(table: pd.DataFrame) -> list[str]:
    """Return the keys of the runs' main measures. table: see `tidy`."""
    return [measure.key for measure in main_measures(table["run"])]


def means(table: pd.DataFrame) -> pd.DataFrame:
    """Return table.csv: the averages of `main_columns` and targets, the best method first.

    In each setting, methods are sorted by the main accuracy. table: see `tidy`.
    """
    main = main_keys(table)
    shown = (column.key for column in main_columns())
    found = average(table, [*main, *shown, *absolute_targets(table)])
    found = found.dropna(axis="columns", how="all")
    by = [name for name in ("setting", main[0]) if name in found]
    ascending = [True, less_is_better(main[0]) is not False]
    return found.sort_values(by, ascending=ascending[: len(by)])


def find_repeats(runs: Sequence[RunDirectory]) -> dict[Path, RunDirectory]:
    """Return the runs whose method and seeds another run has, each with the run that counts.

    Such a run, for example a copy, does not count as a further seed. Of several runs, the longest
    counts, since `stop.minutes` may have ended others, and of those the one with most test views.
    """
    found: dict[Path, RunDirectory] = {}
    counted: dict[Any, RunDirectory] = {}
    named = zip(runs, names(runs), strict=True)
    for run, name in sorted(named, key=lambda pair: sizes_of(pair[0]), reverse=True):
        seeds = seeds_of(run)
        first = counted.setdefault((name, seeds), run)
        if seeds and first is not run:
            found[run.directory] = first
    return found


def sizes_of(run: RunDirectory) -> tuple[int, int]:
    """Return the numbers of rounds and of test views."""
    return run.summary.get("rounds", 0), len(run.views)


def select_runs(every: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Return the finished runs of a sweep that count: once per method and seed."""
    finished = [run for run in every if run.finished]
    repeated = find_repeats(finished)
    return [run for run in finished if run.directory not in repeated]


def describe_left_out(every: Sequence[RunDirectory]) -> list[str]:
    """Return one line for each job that failed or is counted once, with the reason."""
    repeats = find_repeats([run for run in every if run.finished])
    lines = []
    for run in every:
        if run.status == "failed":
            why = f"failed: {run.summary.get('error') or 'see error.txt'}"
        elif run.directory in repeats:
            why = f"has the settings and seeds of {repeats[run.directory].directory.name}"
        else:
            continue
        lines.append(f"Not in the tables: {run.directory.name} {why}")
    return lines


def describe_others(sweep: Path) -> list[str]:
    """Return one line for each run or directory in a sweep's directory that is not part of it."""
    found = [f"{run.directory.name} {reason}" for run, reason in other_runs(sweep).items()]
    found += [f"{plural(n, 'run')} in {folder}" for folder, n in deeper_runs(sweep).items()]
    return [f"Not in the tables: {each}" for each in found]


def describe_mixed(table: pd.DataFrame) -> list[str]:
    """Return one line for each setting and value in which its numbers are not comparable.

    table: see `tidy`.
    """
    lines = []
    for setting, runs in table.groupby("setting", sort=False)["run"]:
        values = [measured_values(run) for run in runs]
        for key in sorted({key for each in values for key in each}):
            found: dict[Any, list[str]] = {}
            for run, each in zip(runs, values, strict=True):
                if key in each:
                    found.setdefault(each[key], []).append(run.directory.name)
            (usual, _), *others = sorted(found.items(), key=lambda item: -len(item[1]))
            lines += [
                f"Not comparable in {setting}: {key} is {usual}, but {value} in {', '.join(names)}"
                for value, names in others
            ]
    return lines


def describe_replaced(sweep: Path) -> list[str]:
    """Return one line for all jobs of a sweep that other jobs replaced for the same reason."""
    found: dict[str, list[str]] = {}
    for run, new in replaced_jobs(sweep).items():
        found.setdefault(describe_difference(run, new), []).append(run.directory.name)
    return [
        f"Not in the tables: {', '.join(names)}: a later command has other runs for the same"
        f" overrides ({change})"
        for change, names in found.items()
    ]


def describe_difference(old: RunDirectory, new: RunDirectory) -> str:
    """Return the values and versions in which a run differs from the one that replaced it."""
    for run, words in ((old, "it has no configuration"), (new, "which has not begun")):
        if not run.config:
            return words
    pairs = differing_values(old, new)
    versions = [(run.summary.get("versions") or {}).get("fedexp") for run in (old, new)]
    if None not in versions and versions[0] != versions[1]:
        pairs["fedexp"] = (versions[0], versions[1])
    texts = [f"{key}: {before}, now {now}" for key, (before, now) in pairs.items()]
    return "; ".join(texts) or "with equal values"


def describe_earlier(sweep: Path, table: pd.DataFrame) -> str:
    """Return a sentence that names the groups without a run of the sweep's last command, or "".

    table: see `tidy`.
    """
    known = jobs.read(sweep)
    numbers = [known.commands.get(run.directory.name, 0) for run in table["run"]]
    latest = table.assign(command=numbers).groupby(KEYS, sort=False)["command"].max()
    shown = displayed(differing(" ".join(name) for name in latest.index))
    found = [name for name, last in zip(shown, latest, strict=True) if last < known.last_command]
    return f"Not in the last command, but in an earlier one: {'; '.join(found)}." if found else ""


def describe_states(every: Iterable[RunDirectory]) -> str:
    """Return a sentence that counts the runs by status, or "" if all runs are completed."""
    found = Counter(run.status for run in every)
    if not found.keys() - {"completed"}:
        return ""
    counts = ", ".join(f"{number} {state}" for state, number in sorted(found.items()))
    return f"{found.total()} runs: {counts}."
