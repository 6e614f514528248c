"""Compare each published value of a paper's table with the runs of its sweep.

`cells` returns the rows of comparison.csv. Runs with different protocols are never averaged. If any
runs follow the sweep's protocol, only these runs count. Otherwise, the largest group of runs with
the same other protocol counts.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.algorithms.local_training import SCHEDULES_OVER_ALL_ROUNDS
from fedexp.analysis.frame import seeds_of
from fedexp.analysis.measures import describe_origin
from fedexp.data.views import PLAIN, VALIDATION, name_in_view
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir.identity import value_of
from fedexp.rundir.reader import OVER, RunDirectory
from fedexp_papers.evidence import all_jobs
from fedexp_papers.judge import ENDED_EARLY, compute_tolerance, judge
from fedexp_papers.rules import Rule
from fedexp_papers.sweeps import PaperSweep, find_cell, find_protocol_changes

TABLES = Path(__file__).parent / "published" / "tables.csv"
# results that the papers' released code is known to give with the published protocol
RELEASED = TABLES.with_name("released.csv")
CELL = (
    *("dataset", "partition", "partition_param", "clients", "participation", "local_epochs"),
    *("setting", "method"),
)
EMPTY = ("not_applicable", "not_run")  # prefixes of notes on cells without a value
OF_RULE, OF_TASKS = ("accuracy", "forgetting"), ("average_accuracy", "new_task_accuracy")
AGAINST_FEDAVG = ("rounds_to_fedavg", "speedup_to_fedavg")
NUMBERS = ["value", "error", "plain_last", "plain_last10"]
MEASURED = [
    *("cell", "kind", "run", "status", "summary", "table", "seeds", "precision", "made_by"),
    *("changes", "diverged", *NUMBERS),
]
# measure -> column of rounds.csv in the plain view
MEASURES = {
    "accuracy": "test_accuracy",
    "forgetting": "forgetting",
    "average_accuracy": "average_accuracy",
    "new_task_accuracy": "new_task_accuracy",
}
LAST, LAST_TEN = Rule("last"), Rule("mean_of_last(10)")
EXPECTED = {  # number in the key `expected` of an experiment -> its noun
    "train": "training examples",
    "test": "test examples",
    "classes": "classes",
    "clients": "clients",
}
ROUNDING = 0.001  # relative tolerance of expected numbers, as splits may be rounded differently


@cache
def load_entries() -> pd.DataFrame:
    """Return all entries of the published tables as text, including those without a result."""
    return pd.read_csv(TABLES, dtype=str, keep_default_na=False)


@cache
def load_published() -> pd.DataFrame:
    """Return all published values as text.

    The column `released` contains values that the paper's released code is known to give, such as
    `84.5 (round 110, seed 1)`.
    """
    table = load_entries()
    released = pd.read_csv(RELEASED, dtype=str, keep_default_na=False).drop(columns="source")
    known = table[~table["note"].str.startswith(EMPTY)]
    return known.merge(released, how="left").fillna({"released": ""})


def published_cells(sweep: PaperSweep, table: str = "") -> pd.DataFrame:
    """Return the published values of the sweep's table, or of another table of the paper.

    table: the other table, or empty for the sweep's table.
    """
    known = load_published()
    mine = (known["paper"] == sweep.paper) & (known["table"] == (table or sweep.table))
    return known[mine & (known["method"] != "(all)")]


def cells(sweep: PaperSweep, directory: Path) -> pd.DataFrame:
    """Return one row for each published value of a sweep, including values that have not been run.

    directory: of the sweep. If it does not exist, the sweep has no runs. Raises ConfigError if its
    table of runs is damaged.
    """
    printed = published_cells(sweep)
    found = measure_runs(sweep, printed, directory)
    every: dict[Any, dict[Any, Any]] = printed.to_dict("index")
    if not every:
        return pd.DataFrame()
    jobs = dict(iter(found.groupby("cell")))
    # Most published values have no runs. Their rows differ only in what the paper gives.
    blank = make_row(sweep, next(iter(every.values())), found[:0])
    rows = [
        make_row(sweep, row, jobs[cell])
        if cell in jobs
        else {**blank, **published_fields(row), "tolerance": compute_tolerance(row)}
        for cell, row in every.items()
    ]
    return pd.DataFrame(rows, index=printed.index)


def published_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a published value that do not depend on runs."""
    names = ("paper", "table", *CELL, "metric", "unit", "note", "released")
    numbers = {"printed": float(row["value"] or "nan"), "printed_std": float(row["std"] or "nan")}
    return {name: row[name] for name in names} | numbers


def measure_runs(sweep: PaperSweep, printed: pd.DataFrame, directory: Path) -> pd.DataFrame:
    """Return one row for each pair of a run and a published value (`cell`) to compare with it.

    kind: the type of the measured value, from `measures` in the sweep's file
    run, status, summary, table: the run's name, status, summary.json, and rounds from round 1 on
    seeds: the run's seeds of all purposes as text, or the run's name if they are unknown
    precision: the run's precision, or None if unknown
    made_by: name of the sweep that made the run, if it was another one
    value: the measured value, which is a fraction or a number of rounds (inf if never reached)
    error: the standard error of the value within the run
    changes: how the run departs from the protocol of the paper's table
    """
    rows: list[dict[str, Any]] = []
    with all_jobs(directory) as jobs:
        for run, line in jobs.items():
            block, fields = find_cell(sweep, run.overrides) or (None, {})
            for measure in block.measures if block else ():
                named = {k: str(measure[k]) for k in ("metric", "setting") if k in measure}
                wanted = pd.Series(fields | named)
                mine = printed[(printed[wanted.index] == wanted).all(axis=1)]
                known = {
                    "kind": measure["value"],
                    "run": run.directory.name,
                    "status": run.status,
                    "summary": run.summary,
                    "table": run.table,
                    "seeds": seeds_of(run) or run.directory.name,
                    "precision": (run.summary.get("hardware") or {}).get("precision"),
                    "made_by": line.get("made_by", ""),
                }
                for cell, row in mine.iterrows():
                    numbers = measure_run(sweep, row, run, line, measure)
                    rows.append({"cell": cell, **known, **numbers})
    table = pd.DataFrame(rows, columns=MEASURED)
    table = table.astype({"diverged": bool} | dict.fromkeys(NUMBERS, float))
    is_relative = table["kind"].isin(AGAINST_FEDAVG).any()
    return add_rounds_to_fedavg(table, printed) if is_relative else table


def measure_run(
    sweep: PaperSweep,
    row: Any,
    run: RunDirectory,
    line: Mapping[str, Any],
    measure: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the numbers that are measured in one run for a published value.

    row: the row of the published value. line: the run's line in the table of runs. measure: an
    entry of `measures` in the sweep's file.
    """
    kind, table = str(measure["value"]), run.table
    found: dict[str, Any] = {
        "diverged": run.diverged,
        "changes": find_departures(sweep, run, line),
    }
    if kind in OF_RULE:
        values, plain = select_curve(table, kind, sweep.rule.view), select_curve(table, kind)
        found["value"] = sweep.rule.reported(values.tolist(), kind)
        found["error"] = sweep.rule.standard_error(values.tolist())
        found["plain_last"] = LAST.reported(plain.tolist(), kind)
        found["plain_last10"] = LAST_TEN.reported(plain.tolist(), kind)
    elif kind in OF_TASKS:
        task = int(measure["task"])
        ends = {end["task"]: end[kind] for end in run.summary.get("tasks") or ()}
        found["value"] = ends.get(task)
        found["error"] = LAST.standard_error(select_curve(table, kind, task=task).tolist())
    elif kind == "accuracy_at":
        found["value"] = select_curve(table).get(int(measure["round"]))
    elif kind == "rounds_to":
        curve = select_curve(table, view=VALIDATION)
        curve = curve if len(curve) else select_curve(table)
        found["value"] = count_rounds_to(curve, float(measure["factor"]) * look_up_target(row))
        schedule = (run.config.get("local") or {}).get("schedule")
        # A smaller number of rounds does not change when a target is reached.
        if np.isfinite(found["value"]) and schedule not in SCHEDULES_OVER_ALL_ROUNDS:
            found["changes"] = find_departures(sweep, run, line, but="rounds=")
    elif kind == "alignment":
        layers = dict(enumerate(run.summary.get("alignment") or (), 1))
        found["value"] = layers.get(int(measure["layer"]), {}).get(measure["pair"])
    return found


def select_curve(
    table: pd.DataFrame, measure: str = "accuracy", view: str = PLAIN, task: int = 0
) -> pd.Series:
    """Return the known values of a measure as fractions, indexed by round.

    table: a table of rounds. measure: a key of MEASURES. task: the number of a task. 0 selects all
    rounds.
    """
    name = name_in_view(MEASURES[measure], view)
    if name not in table:
        return pd.Series(dtype=float)
    mine = table[table["task"] == task] if task else table
    return mine.set_index("round")[name].dropna()


def count_rounds_to(curve: pd.Series, accuracy: float) -> float:
    """Return the first round that reaches an accuracy, or infinity if no round does."""
    found = rounds_to_target(curve.index.tolist(), curve.tolist(), [accuracy], ())
    (number,) = found.values()
    return math.inf if number is None else float(number)


def look_up_target(row: Mapping[str, Any]) -> float:
    """Return Flashback's target accuracy A for the setting of a row, as a fraction."""
    known = load_published()
    same = known["metric"] == "target_accuracy"
    for name in ("paper", "table", "dataset", "partition_param"):
        same &= known[name] == row[name]
    return float(known.loc[same, "value"].iloc[0])


def add_rounds_to_fedavg(table: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """Add the rounds that each run needs to reach FedAvg's last accuracy, or the run's speed-up.

    The speed-up is FedAvg's number of rounds divided by the run's. FedAvg's accuracy and rounds are
    averaged over the seeds that have the same data set and protocol. Rows of FedAvg get no value.
    """
    place = printed.loc[table["cell"], ["dataset", "method"]].set_index(table.index)
    table = table.join(place)
    over = table[table["status"].isin(OVER)]
    over = over.assign(curve=over["table"].map(select_curve))
    is_fedavg, key = over["method"] == "FedAvg", ["dataset", "changes"]
    is_known = over["curve"].map(len) > 0
    base = over[is_fedavg & is_known & ~over["diverged"]]
    base = base.drop_duplicates([*key, "seeds"])
    base = base.assign(
        end=[curve.iloc[-1] for curve in base["curve"]],
        last=[curve.index[-1] for curve in base["curve"]],
    )
    ends = base.groupby(key)[["end", "last"]].mean()
    for i, row in over[over["kind"].isin(AGAINST_FEDAVG) & ~is_fedavg].iterrows():
        if (row["dataset"], row["changes"]) in ends.index:
            end, last = ends.loc[(row["dataset"], row["changes"])]
            rounds = count_rounds_to(row["curve"], end)
            table.loc[i, "value"] = last / rounds if "speedup" in row["kind"] else rounds
    return table


def find_departures(
    sweep: PaperSweep, run: RunDirectory, line: Mapping[str, Any], but: str | tuple[str, ...] = ()
) -> str:
    """Return how a run departs from the protocol of the paper's table, or "" if it does not.

    The departures are changed options and the reasons of `reasons_not_to_judge`, which a line of
    the table of runs contains. but: prefixes of options to ignore.
    """
    options = find_protocol_changes(sweep, run.overrides)
    kept = " ".join(text for text in options if not text.startswith(but))
    reasons = line.get("not_judged")
    if reasons is None:
        reasons = reasons_not_to_judge(sweep, run.config, run.summary)
    return "; ".join(filter(None, [kept, *reasons]))


def reasons_not_to_judge(
    sweep: PaperSweep, config: Mapping[str, Any], summary: Mapping[str, Any]
) -> list[str]:
    """Return why a run must not be compared with the published values, besides its overrides.

    The reasons are values other than those that the sweep requires, and different data that have
    the same name.
    """
    values = ((key, value_of(config, key), wanted) for key, wanted in sweep.required.items())
    other = [
        f"another protocol: {key}={value or 'unset'}, not {wanted}"
        for key, value, wanted in values
        if value != wanted
    ]
    return [*other, *find_data_changes(config, summary)]


def find_data_changes(config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Return the differences between a run's data and the data that its experiment expects.

    An example is `data: 10,000 training examples, not 502,180`. The list is empty if the summary or
    the configuration do not contain these numbers.
    """
    found, wanted = summary.get("data") or {}, dict(config.get("expected") or {})
    if found.get("clients") in (1, config.get("num_clients")):  # 1: algorithm.paradigm=centralized
        wanted["clients"] = None
    # the test set of each client is rounded
    rounded = config.get("num_clients", 0) if config.get("test_per_client") else 0
    both = [(word, found.get(name), wanted.get(name)) for name, word in EXPECTED.items()]
    return [
        f"data: {there:,} {word}, not {number:,}"
        for word, there, number in both
        if number is not None
        and there is not None
        and abs(there - number) > ROUNDING * number + (rounded if word.endswith("examples") else 0)
    ]


def select_one_per_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of a cell that count: one per seed.

    Runs are of one seed if their seeds of all purposes are equal. If some runs have the view that
    the rule requires, all other runs are ignored. If a seed was run twice, the run with the
    precision that most runs have is selected.
    """
    there = runs["value"].notna()
    known = runs[there | runs["diverged"]] if there.any() else runs
    frequency = known.groupby(known["precision"].astype(str))["run"].transform("size")
    best = known.assign(frequency=frequency, there=known["value"].notna())
    best = best.sort_values(["frequency", "there"], ascending=False, kind="stable")
    return known.loc[sorted(best[~best["seeds"].duplicated()].index)]


def make_row(sweep: PaperSweep, row: Mapping[str, Any], jobs: pd.DataFrame) -> dict[str, Any]:
    """Return the row of a published value, with the results of its runs.

    jobs: the rows from `measure_runs` for this value.
    """
    over = jobs[jobs["status"].isin(OVER)]
    is_full = (over["changes"] == "").any() or not len(over)
    changes = "" if is_full else str(over["changes"].value_counts().index[0])
    used = select_one_per_seed(over[over["changes"] == changes])
    states = [f"{count} {state}" for state, count in Counter(jobs["status"]).items()]
    protocol = "full" if is_full else "reduced"
    values = compare_to_published(sweep, row, used)
    both = {**row, **values}
    why = reason_not_judged(sweep, both, used, over)
    return {
        **{name: row[name] for name in ("paper", "table", *CELL, "metric", "unit")},
        "status": ", ".join(states) or "not run",
        "n": len(used),
        "diverged": int(used["diverged"].sum()),
        **values,
        "verdict": judge(both, used["diverged"].tolist(), why),
        "protocol": protocol if len(used) else "",
        "changes": changes,
        "not_shown": len(over) - len(used),
        **describe_origin(used["summary"]),
        "from": " ".join(sorted(set(used["made_by"]) - {""})),
        "note": row["note"],
        "released": row["released"],
    }


def compare_to_published(
    sweep: PaperSweep, row: Mapping[str, Any], used: pd.DataFrame
) -> dict[str, Any]:
    """Compare the mean of the runs with the published value.

    Return the mean with its errors, its difference from the published value, and the tolerance.
    used: the runs that count.
    """
    scale = 100.0 if row["unit"] == "percent" else 1.0
    numbers = used.loc[~used["diverged"], NUMBERS] * scale
    known, printed = numbers["value"].dropna(), float(row["value"] or "nan")
    never = bool(np.isinf(known).any())  # a mean over the other seeds would be too optimistic
    error = math.nan if never else standard_error(known, numbers["error"])
    is_ruled = used["kind"].isin(OF_RULE).any()
    over_seeds = sweep.rule.error_over_seeds(row["metric"] if is_ruled else "", len(known))
    return {
        "rule": str(sweep.rule) if is_ruled else "",
        "mean": known.mean(),
        "std": math.nan if never else known.std(),
        "error": error,
        "plain_last": numbers["plain_last"].mean(),
        "plain_last10": numbers["plain_last10"].mean(),
        "printed": printed,
        "printed_std": float(row["std"] or "nan"),
        "difference": known.mean() - printed,
        "tolerance": compute_tolerance(row, error if over_seeds is None else over_seeds * scale),
    }


def standard_error(values: pd.Series, within: pd.Series) -> float:
    """Return the standard error of a mean over seeds.

    For a single seed, the standard error within its run is returned. values: one value per seed.
    within: the errors within the runs.
    """
    return values.std() / math.sqrt(len(values)) if len(values) > 1 else within.mean()


def misses_target(row: Mapping[str, Any], used: pd.DataFrame) -> bool:
    """Return whether runs that only have fewer rounds end too late for the published number.

    None has reached the target, and each has as many rounds as the tolerance allows.
    """
    rounds = pd.to_numeric(used["changes"].str.removeprefix("rounds="), errors="coerce")
    is_late = rounds >= row["printed"] + row["tolerance"]
    return bool((is_late & np.isinf(used["value"])).all())


def reason_not_judged(
    sweep: PaperSweep, row: Mapping[str, Any], used: pd.DataFrame, over: pd.DataFrame
) -> str:
    """Return the reason why a value cannot be judged, or "" if it can be judged.

    row: the published value and the result of `compare_to_published`. over: all finished runs.
    used: those that count.
    """
    if used["changes"].any() and not misses_target(row, used):
        return "reduced protocol"
    if row["method"] == "FedAvg" and used["kind"].isin(AGAINST_FEDAVG).any():
        return "by definition"
    if row["rule"] and sweep.rule.view != PLAIN and math.isnan(row["mean"]):
        return f"no {sweep.rule.view} view"
    known = used.loc[~used["diverged"], "value"].dropna()
    if row["metric"] == "speedup":
        known = known.replace(0, np.inf)  # FedAvg's accuracy was never reached
    reached = int(np.isfinite(known).sum())
    # a shorter run counts only if it reached the target, so the others must not be forgotten
    is_short = over["changes"].str.fullmatch(ENDED_EARLY) & np.isinf(over["value"])
    tried = len(known) + over.loc[is_short & ~over["seeds"].isin(used["seeds"]), "seeds"].nunique()
    return f"reached by {reached} of {tried}" if 0 < reached < tried else ""
