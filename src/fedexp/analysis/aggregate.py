"""A directory of runs as tables: means over seeds, rounds to a target, and, for a named sweep,
beside the print."""

import argparse
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis import compare, layout, paper_table, parts, readings
from fedexp.analysis.benchmark import benchmark_sections, rankings, runs_of
from fedexp.analysis.claims import with_claims
from fedexp.analysis.compare import load_jobs, load_runs, rounds_to
from fedexp.analysis.elsewhere import found_for
from fedexp.analysis.measures import is_pruned, less_is_better, main_measures
from fedexp.analysis.naming import displayed, grouped, names
from fedexp.analysis.paper_figures import paper_pictures
from fedexp.analysis.search import sections
from fedexp.analysis.sweep import Sweep, cell_of, load_sweep
from fedexp.analysis.sweep_figures import look_of_sweep, make_sweep_figures, slug
from fedexp.config.options import conf_directory
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.pictures import Pictures
from fedexp.figures import save_all
from fedexp.rundir.evidence import with_kept
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import MARKER as MARKER
from fedexp.rundir.sweeps import SweepDirectory

log = logging.getLogger("fedexp")

VALUES = (
    "accuracy",
    "best_accuracy",
    "forgetting",
    "round_forgetting",
    "average_accuracy",
    "new_task_accuracy",
    "task_forgetting",
    "validation_accuracy",
    "validation_best_accuracy",
    "best_round",
    "validation_forgetting",
    "validation_average_accuracy",
    "personal_accuracy",
    "personal_accuracy_worst",
    "personal_forgetting",
    "personal_global_accuracy",
)
# columns of table.csv beside the values
COUNTS = ("n", "diverged", "pruned", "seeds", "commits", "hardware")
PRECISION = "hardware.precision"  # makes no setting: A is one for all
# Flashback Table 1: rounds to these parts of A, which is 0.95 of the best
FACTORS, SHARE = (0.75, 0.9, 1.0), 0.95
WHAT_A_IS = (
    f"A is {SHARE:g} of the best accuracy of any run of the setting (measured) or the paper's"
    " (printed); speed-ups are against FedAvg. `-`: some seed never gets there."
)


def mark(directory: Path, sweep: str) -> None:
    """Notes in a directory which sweep it holds."""
    SweepDirectory(directory).mark(sweep)


def sweep_of(directory: Path) -> Sweep | None:
    """The named sweep of a directory; None for another."""
    try:
        return load_sweep(SweepDirectory(directory).name, [conf_directory()])
    except ConfigError:
        return None


def write_report(
    directory: Path, figures: bool, flags: argparse.Namespace | None = None
) -> list[Path]:
    """Write the tables of a sweep and, if asked for, its pictures; return the paths. A picture that
    fails costs no table. flags: those of `core.pictures.add_flags` and
    `paper_table.add_layout_flags`."""
    with with_kept(directory) as source:
        paths = write_tables(directory, source, paper_table.Layout.of(flags) if flags else None)
        if not paths or not figures:
            return paths
        try:
            runs = load_runs(source)
            look = look_of_sweep(runs)
            look = look.changed(flags) if flags else look
            of_paper = save_all(
                directory / "figures", paper_pictures(sweep_of(directory), runs), look
            )
            return (
                paths
                + of_paper
                + make_sweep_figures(directory, runs, look)
                + make_rank_figures(directory, runs, look)
            )
        except Exception:
            log.exception(
                "the figures could not be drawn; `fedexp report %s` tries again", directory
            )
            return paths


def make_rank_figures(directory: Path, runs: Sequence[RunDirectory], look: Pictures) -> list[Path]:
    """Draw the critical-difference diagrams of a benchmark; return the paths, none for another
    sweep."""
    sweep = sweep_of(directory)
    found = rankings(sweep, runs_of(sweep, runs)) if sweep is not None and sweep.ranks else []
    if not found:
        return []
    from fedexp.analysis.draw_ranks import diagram

    names = [
        slug(" ".join(["critical difference", each.measure, *each.settings])) for each in found
    ]
    return save_all(
        directory / "figures",
        zip(names, [partial(diagram, each) for each in found], strict=True),
        look,
    )


@dataclass(frozen=True)
class Tables:
    """Results of the runs together."""

    tidy: pd.DataFrame  # compare.cells where `sweep` is given, else means
    targets: pd.DataFrame  # rounds_to_targets
    sweep: Sweep | None  # named and with printed values


def tables_of(directory: Path, jobs: Sequence[RunDirectory]) -> Tables | None:
    """Return the tables of the jobs of a sweep, finished or not; None where no run is over."""
    sweep, runs = sweep_of(directory), without_repeats([run for run in jobs if run.finished])
    if not runs:
        return None
    targets = rounds_to_targets(runs, printed_targets(sweep, runs) if sweep is not None else {})
    if sweep is not None and compare.printed_cells(sweep):
        return Tables(tidy_table(sweep, directory.absolute(), jobs), targets, sweep)
    return Tables(means(runs), targets, None)


def without_repeats(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Return the runs without those of a seed that was run again with more test views."""
    keys = [(name, run.summary.get("seed")) for name, run in zip(names(runs), runs, strict=True)]
    most: Counter[Any] = Counter()
    for key, run in zip(keys, runs, strict=True):
        most[key] = max(len(run.views), most[key])
    return [run for key, run in zip(keys, runs, strict=True) if len(run.views) == most[key]]


def tidy_table(sweep: Sweep, directory: Path, jobs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Return compare.cells of a sweep, with other readings of its cells and what the text claims of
    them."""
    others = [load_sweep(name, [conf_directory()]) for name in sweep.readings]
    own = [run for run in jobs if not any(readings.is_of(other, run) for other in others)]

    def jobs_of(other: Sweep) -> list[RunDirectory]:
        folder = directory.parent / other.name
        found = [run for run in jobs if readings.is_of(other, run)] + load_jobs(folder)
        made = [run.directory.absolute() for run in found if run.finished]
        elsewhere = found_for(other, folder, conf_directory(), made)
        return found + [RunDirectory(each.directory, each.overrides) for each in elsewhere]

    return with_claims(
        readings.with_readings(compare.cells(sweep, own), sweep, others, jobs_of), sweep
    )


def all_jobs(directory: Path) -> list[RunDirectory]:
    """Return all jobs of a sweep, with those that other sweeps have run for a named one that has
    printed values."""
    jobs, sweep = load_jobs(directory), sweep_of(directory)
    if sweep is None or not compare.printed_cells(sweep):
        return jobs
    own = [run.directory for run in jobs if run.finished]
    found = found_for(sweep, directory.absolute(), conf_directory(), own)
    return jobs + [RunDirectory(other.directory, other.overrides) for other in found]


def write_tables(
    directory: Path, source: Path | None = None, asked: paper_table.Layout | None = None
) -> list[Path]:
    """Write table.csv, .md and .tex of a sweep, and rounds_to_target.csv; return the paths. Nothing
    where no run is over. source: where its runs lie, if not in its own directory; asked: how
    table.tex is to be laid out."""
    jobs = all_jobs(source or directory)
    for line in (left_out := damage_of(jobs)):
        log.warning("%s: %s", directory, line)
    tables = tables_of(source or directory, jobs)
    if tables is None:
        return []
    sweep, finished = sweep_of(directory), [run for run in jobs if run.finished]
    wanted = paper_table.Layout() if asked is None else asked
    own = paper_table.table_of(without_repeats(finished), wanted)
    if tables.sweep is not None:
        shown, head = parts.all_parts(tables.tidy), heading(tables.sweep, tables.tidy)
    elif sweep is not None and sweep.ranks and (ranked := benchmark_sections(sweep, finished)):
        shown, head = ranked, f"# {sweep.title}\n"
    else:
        shown, head = [own], f"# {directory.name}\n{states_of(jobs)}"
        if sweep is not None and sweep.choose:
            shown += sections(sweep, finished)
    head += "".join(f"\n{line}\n" for line in left_out)
    targets = trimmed(tables.targets).drop(columns=["setting", "method"])
    targets = targets.set_axis(labels_of(tables.targets), axis="index")
    beside_print = tables.sweep is not None and wanted == paper_table.Layout()
    contents = {
        "table.csv": tables.tidy.to_csv(index=False),
        "table.md": "\n".join(
            [
                f"{head}\n{layout.all_markdown(shown)}",
                f"## Rounds to target\n\n{WHAT_A_IS}\n",
                layout.markdown(targets.map(layout.plain_number)),
            ]
        ),
        "table.tex": layout.latex(shown if beside_print else [own]),
        "rounds_to_target.csv": tables.targets.to_csv(index=False),
    }
    for name, content in contents.items():
        storage.write_atomically(directory / name, content.encode())
    return [directory / name for name in contents]


def states_of(jobs: Iterable[RunDirectory]) -> str:
    """Return how many runs there are of each status, as a sentence; "" where all are completed.
    Damaged ones have lines of their own."""
    sound = [run for run in jobs if not run.damaged]
    found = Counter("pruned" if is_pruned(run) else run.status for run in sound)
    if not found.keys() - {"completed"}:
        return ""
    counts = ", ".join(f"{number} {state}" for state, number in sorted(found.items()))
    return f"\n{found.total()} runs: {counts}.\n"


def labels_of(table: pd.DataFrame) -> list[str]:
    """Return the names of the rows of a table of settings and methods, as they are shown."""
    several = table["setting"].nunique() > 1
    pairs = zip(table["setting"], table["method"], strict=True)
    return displayed([f"{setting} {method}" if several else method for setting, method in pairs])


def trimmed(targets: pd.DataFrame) -> pd.DataFrame:
    """Return rounds_to_target.csv without columns that say nothing."""
    alike = ["target"] * (set(targets["target"]) == {"measured"})
    return targets.drop(columns=alike).dropna(axis="columns", how="all")


def damage_of(jobs: Sequence[RunDirectory]) -> list[str]:
    """A line for each job that no table counts because its files are damaged."""
    return [
        f"Left out, damaged: {run.directory.name}: {run.describe_damage()} (the same `--multirun`"
        " runs it again)"
        for run in jobs
        if run.damaged
    ]


def heading(sweep: Sweep, tidy: pd.DataFrame) -> str:
    """Return what the table shows, how many verdicts of each kind there are, and what was run at
    another protocol."""
    lines = [
        f"# {sweep.title}",
        f"Rule: {sweep.rule}. {compare.TOLERANCES}",
        verdicts(tidy),
    ]
    if sources := sorted({name for text in tidy["from"] for name in text.split()}):
        lines.append(
            "Counted too are runs that other sweeps have made:"
            f" {', '.join(f'`{name}`' for name in sources)}."
        )
    if changes := [text for text in tidy["changes"].unique() if text]:
        lines.append(f"Other protocols (`~`): {'; '.join(f'`{text}`' for text in changes)}.")
    return "\n\n".join(lines) + "\n"


def verdicts(tidy: pd.DataFrame) -> str:
    """Return how many printed values have which verdict, each counted in its first reading."""
    tidy = parts.printed_once(tidy)
    counts = ", ".join(
        f"{number} {kind}" for kind, number in tidy["verdict"].value_counts().items()
    )
    return f"{len(tidy)} printed values: {counts}."


def means(runs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Mean and standard deviation over the seeds of each run, by setting; in each the best value
    of the main accuracy first, and what a search has stopped last."""
    values = list(dict.fromkeys([*(each.key for each in main_measures(runs)), *VALUES]))
    rows = []
    for setting, methods in grouped(runs).items():
        for method, members in methods.items():
            rows.append(mean_row(members, values) | {"setting": setting, "method": method})
    columns = [name for value in values for name in (value, f"{value}_std")]
    known = {name for row in rows for name in row}
    frame = pd.DataFrame(
        rows, columns=["setting", "method", *COUNTS, *(each for each in columns if each in known)]
    )
    by = [name for name in ("setting", "pruned", values[0]) if name in frame]
    return frame.sort_values(by, ascending=[*[True] * (len(by) - 1), less_is_better(by[-1])])


def mean_row(runs: Sequence[RunDirectory], values: Iterable[str]) -> dict[str, Any]:
    """Return what table.csv says of the seeds of a run. values: keys of summary.json."""
    row: dict[str, Any] = {
        "n": len(runs),
        "diverged": sum(run.diverged for run in runs),
        "pruned": sum(map(is_pruned, runs)),
    }
    row |= compare.origin(runs)
    for value in values:
        every = [run.summary.get(value) for run in runs if not run.diverged]
        found = [each for each in every if each is not None]
        if found:
            row[value] = float(np.mean(found))
        if len(found) > 1:
            row[f"{value}_std"] = float(np.std(found, ddof=1))
    return row


def printed_targets(sweep: Sweep, runs: Sequence[RunDirectory]) -> dict[str, float]:
    """The printed A of those settings that have one: Flashback's."""
    rows = [row for row in compare.printed_cells(sweep) if row["metric"] == "target_accuracy"]
    found = {}
    for run, (setting, _) in zip(runs, names(runs, PRECISION), strict=True):
        _, fields = cell_of(sweep, run.overrides) or (None, {})
        for row in rows:
            if all(row[key] == fields.get(key) for key in ("dataset", "partition_param")):
                found[setting] = float(row["value"])
    return found


def rounds_to_targets(runs: Sequence[RunDirectory], printed: Mapping[str, float]) -> pd.DataFrame:
    """Rounds to 0.75, 0.9 and 1 times A, mean over seeds, and how many times faster than FedAvg;
    empty where a seed diverged or never gets there. A is 0.95 of the best accuracy of any run of
    the setting that did not diverge and, where `printed` has the setting, in a second row that
    one."""
    settings: dict[str, dict[tuple[str, str], list[RunDirectory]]] = {}
    places = [setting for setting, _ in names(runs, PRECISION)]
    for run, setting, name in zip(runs, places, names(runs), strict=True):
        settings.setdefault(setting, {}).setdefault(name, []).append(run)
    rows: list[dict[str, Any]] = []
    for setting, members in settings.items():
        found = [best_of(run) for group in members.values() for run in group if not run.diverged]
        rows += rounds_to_rows("measured", SHARE * max(found, default=math.nan), members)
        if setting in printed:
            rows += rounds_to_rows("printed", printed[setting], members)
    return pd.DataFrame(rows)


def best_of(run: RunDirectory) -> float:
    """Return the best accuracy of a run, on the validation set where there is one."""
    return float(run.summary.get("validation_best_accuracy", run.summary.get("best_accuracy", 0.0)))


def rounds_to_rows(
    source: str, accuracy: float, members: Mapping[tuple[str, str], Sequence[RunDirectory]]
) -> list[dict[str, Any]]:
    """The rows of one setting for one A; members: its runs by their names."""
    rounds = {
        name: [mean_rounds(group, accuracy * factor) for factor in FACTORS]
        for name, group in members.items()
    }
    fedavg = {
        compare.precision_of(group[0]): rounds[name]
        for name, group in members.items()
        if is_fedavg(group[0])
    }
    # in no precision but another one
    nothing = next(iter(fedavg.values()), [None] * len(FACTORS))
    rows = []
    for (setting, method), values in rounds.items():
        row: dict[str, Any] = {"setting": setting, "method": method}
        row |= {"target": source, "A": accuracy}
        row |= dict(zip([f"rounds_to_{factor:g}A" for factor in FACTORS], values, strict=True))
        bases = fedavg.get(compare.precision_of(members[setting, method][0]), nothing)
        for factor, value, base in zip(FACTORS, values, bases, strict=True):
            row[f"speedup_{factor:g}A"] = base / value if base and value else None
        rows.append(row)
    return rows


def is_fedavg(run: RunDirectory) -> bool:
    changed = any(text.startswith("algorithm.") for text in run.overrides)
    return run.summary.get("algorithm") == "fedavg" and not changed


def mean_rounds(runs: Sequence[RunDirectory], accuracy: float) -> float | None:
    """Return the mean over seeds of the rounds to an accuracy; None where one diverged or never
    gets there."""
    found = [None if run.diverged else rounds_to(run, accuracy) for run in runs]
    known = [rounds for rounds in found if rounds is not None]
    return float(np.mean(known)) if len(known) == len(found) else None
