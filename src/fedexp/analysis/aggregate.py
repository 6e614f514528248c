"""A directory of runs as tables: means over seeds, rounds to a target, and, for a named sweep,
beside the print."""

import argparse
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedexp.analysis import compare, layout, paper_table, parts, readings
from fedexp.analysis.benchmark import benchmark_sections, rankings, runs_of
from fedexp.analysis.claims import with_claims
from fedexp.analysis.compare import load_jobs, load_runs, rounds_to
from fedexp.analysis.elsewhere import found_for
from fedexp.analysis.measures import is_pruned
from fedexp.analysis.naming import differing, displayed, grouped, names
from fedexp.analysis.paper_figures import paper_pictures
from fedexp.analysis.sweep import Sweep, load_sweep
from fedexp.analysis.sweep_figures import look_of_sweep, slug, sweep_pictures
from fedexp.config.options import conf_directory
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.figures import save_all
from fedexp.rundir.evidence import with_kept
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import MARKER as MARKER
from fedexp.rundir.sweeps import SweepDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fedexp")

# Flashback Table 1: rounds to these parts of A, which is 0.95 of the best
FACTORS, SHARE = (0.75, 0.9, 1.0), 0.95
CHOSEN = "Chosen values: the highest accuracy in the last round, mean over seeds"
WHAT_A_IS = (
    f"A is {SHARE:g} of the best accuracy of any run of the setting; speed-ups are against FedAvg."
    " `-`: some seed never gets there."
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
            runs, sweep, folder = load_runs(source), sweep_of(directory), directory / "figures"
            look = look_of_sweep(runs)
            look = look.changed(flags) if flags else look
            paths = paths + save_all(folder, paper_pictures(sweep, runs), look)
            paths = paths + save_all(folder, sweep_pictures(runs), look)
            return paths + save_all(folder, rank_pictures(sweep, runs), look)
        except Exception:
            log.exception(
                "the figures could not be drawn; `fedexp report %s` tries again", directory
            )
            return paths


def rank_pictures(
    sweep: Sweep | None, runs: Sequence[RunDirectory]
) -> "Iterator[tuple[str, Callable[[], Figure]]]":
    """Yield (name, call that draws it) of the critical-difference diagrams of a benchmark."""
    from fedexp.analysis.draw_ranks import diagram

    if sweep is not None and sweep.ranks:
        for each in rankings(sweep, runs_of(sweep, runs)):
            name = " ".join(["critical difference", each.measure, *each.settings])
            yield slug(name), partial(diagram, each)


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
    targets = rounds_to_targets(runs)
    if sweep is not None and compare.printed_cells(sweep):
        return Tables(tidy_table(sweep, directory.absolute(), jobs), targets, sweep)
    return Tables(paper_table.means(runs), targets, None)


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
            shown.append(chosen_values(tables.tidy))
    head += "".join(f"\n{line}\n" for line in left_out)
    targets = tables.targets.drop(columns=["setting", "method"]).dropna(axis=1, how="all")
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


def chosen_values(means: pd.DataFrame) -> layout.Section:
    """Return, for each setting and algorithm of a search, the value with the highest accuracy. A
    value of which every run diverged is not chosen."""
    names = means["method"].str.partition(" ")
    known = means.assign(algorithm=names[0], chosen=names[2])[means["n"] > means["diverged"]]
    best = known.drop_duplicates(["setting", "algorithm"]).assign(method=known["algorithm"])
    table = pd.DataFrame(
        {"chosen": best["chosen"], "accuracy (%)": (100 * best["accuracy"]).map("{:.2f}".format)}
    )
    return layout.Section(CHOSEN, table.set_axis(labels_of(best), axis="index"))


def labels_of(table: pd.DataFrame) -> list[str]:
    """Return the names of the rows of a table of settings and methods, as they are shown."""
    columns = ["setting", "method"] if table["setting"].nunique() > 1 else ["method"]
    return displayed(differing(table[columns].agg(" ".join, axis="columns")))


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


def rounds_to_targets(runs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Rounds to 0.75, 0.9 and 1 times A, mean over seeds, and how many times faster than FedAvg;
    empty where a seed diverged or never gets there. A is 0.95 of the best accuracy of any run of
    the setting that did not diverge."""
    rows: list[dict[str, Any]] = []
    for setting, members in grouped(runs, of_data=True).items():
        sound = [run for group in members.values() for run in group if not run.diverged]
        goal = SHARE * max(map(best_of, sound), default=math.nan)
        rounds = {
            name: [mean_rounds(group, goal * factor) for factor in FACTORS]
            for name, group in members.items()
        }
        for method, values in rounds.items():
            row: dict[str, Any] = {"setting": setting, "method": method, "A": goal}
            row |= {f"rounds_to_{f:g}A": each for f, each in zip(FACTORS, values, strict=True)}
            bases = fedavg_of(members, rounds, compare.precision_of(members[method][0]))
            for factor, each, base in zip(FACTORS, values, bases, strict=True):
                row[f"speedup_{factor:g}A"] = base / each if base and each else None
            rows.append(row)
    fastest_first = ["setting", *(f"rounds_to_{factor:g}A" for factor in reversed(FACTORS))]
    return pd.DataFrame(rows).sort_values(fastest_first, kind="stable")


def fedavg_of(
    members: Mapping[str, Sequence[RunDirectory]],
    rounds: Mapping[str, Sequence[float | None]],
    precision: str,
) -> list[float | None]:
    """Return the rounds of FedAvg in a precision, or in another where there is none: of several
    with different options the fewest."""
    known = {name: group[0] for name, group in members.items() if is_fedavg(group[0])}
    same = [name for name, run in known.items() if compare.precision_of(run) == precision]
    columns = [[rounds[name][i] for name in same or known] for i in range(len(FACTORS))]
    return [min(filter(None, column), default=None) for column in columns]


def best_of(run: RunDirectory) -> float:
    """Return the best accuracy of a run, on the validation set where there is one."""
    return float(run.summary.get("validation_best_accuracy", run.summary.get("best_accuracy", 0.0)))


def is_fedavg(run: RunDirectory) -> bool:
    changed = any(text.startswith("algorithm.") for text in run.overrides)
    return run.summary.get("algorithm") == "fedavg" and not changed


def mean_rounds(runs: Sequence[RunDirectory], accuracy: float) -> float | None:
    """Return the mean over seeds of the rounds to an accuracy; None where one diverged or never
    gets there."""
    found = [None if run.diverged else rounds_to(run, accuracy) for run in runs]
    known = [rounds for rounds in found if rounds is not None]
    return float(np.mean(known)) if len(known) == len(found) else None
