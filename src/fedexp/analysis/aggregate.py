"""A directory of runs as tables: means over seeds, rounds to a target, and, for a named sweep,
beside the print."""

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis import compare, layout, paper_table, parts, readings
from fedexp.analysis.benchmark import benchmark_sections, rankings, runs_of
from fedexp.analysis.claims import with_claims
from fedexp.analysis.compare import WHERE, load_jobs, load_runs, rounds_to
from fedexp.analysis.elsewhere import found_for
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
# Beginnings of overrides that change no result, or that the table says otherwise.
UNSAID = (
    "seed",
    "hydra",
    "tracker",
    "figures",
    "test_views",
    "evaluate",
    "keep_models",
    "objective",
    *WHERE,
)
UNSAID = (*UNSAID, "checkpoint_interval", "profile", "data_dir")
# columns of table.csv that table.md leaves out
ORIGIN = ("diverged", "seeds", "commits", "hardware")
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
    most: dict[tuple[str, Any], int] = {}
    for run in runs:
        name = key_of(run)[0], run.summary.get("seed")
        most[name] = max(len(run.views), most.get(name, 0))
    return [run for run in runs if len(run.views) == most[key_of(run)[0], run.summary.get("seed")]]


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
    tidy, targets, search = tables.tidy, tables.targets, sweep_of(directory)
    if tables.sweep is not None:
        shown, head = parts.all_parts(tidy), heading(tables.sweep, tidy)
    else:
        head = f"# {directory.name}\n"
        means_ = tidy.drop(columns=list(ORIGIN)).set_index("run").map(layout.plain_number)
        shown, finished = [layout.Section("", means_)], [run for run in jobs if run.finished]
        if search is not None and search.choose:
            shown += sections(search, finished)
        if search is not None and search.ranks:
            head, shown = f"# {search.title}\n", benchmark_sections(search, finished) or shown
    head += "".join(f"\n{line}\n" for line in left_out)
    own_layout = paper_table.Layout() if asked is None else asked
    if tables.sweep is None or own_layout != paper_table.Layout():
        tex = paper_table.latex([run for run in jobs if run.finished], own_layout)
    else:
        tex = layout.latex(shown)
    numbers = layout.markdown(targets.set_index("run").map(layout.plain_number))
    contents = {
        "table.csv": tidy.to_csv(index=False),
        "table.md": (
            f"{head}\n{layout.all_markdown(shown)}\n## Rounds to target\n\n{WHAT_A_IS}\n\n{numbers}"
        ),
        "table.tex": tex,
        "rounds_to_target.csv": targets.to_csv(index=False),
    }
    for name, content in contents.items():
        storage.write_atomically(directory / name, content.encode())
    return [directory / name for name in contents]


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
        layout.LEGEND,
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


def parts_of(
    choices: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[list[str], list[str], list[str]]:
    """Return the parts of a run but for its seed: (data set and partition, algorithm and its
    options, other overrides), options in an order of their own, in whatever order they were
    given."""
    data, algorithm = (
        [str(choices.get(name)) for name in ("dataset", "partition")],
        str(choices.get("algorithm")),
    )
    changes = sorted(o for o in overrides if not o.startswith(UNSAID))
    others = [o for o in changes if not o.startswith(("algorithm", "dataset=", "partition="))]
    return data, [algorithm, *(o for o in changes if o.startswith("algorithm."))], others


def key_of(run: RunDirectory) -> tuple[str, str]:
    """(what it is but for the seed, the same but for the algorithm and the precision as well)."""
    data, method, others = parts_of(run.summary, run.overrides)
    setting = [text for text in others if not text.startswith("hardware.precision=")]
    return " ".join([*data, *method, *others]), " ".join([*data, *setting])


def means(runs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Mean and standard deviation over the seeds of each run."""
    groups: dict[str, list[RunDirectory]] = {}
    for run in runs:
        groups.setdefault(key_of(run)[0], []).append(run)
    rows = []
    for name, members in groups.items():
        row: dict[str, Any] = {
            "run": name,
            "n": len(members),
            "diverged": sum(run.diverged for run in members),
        }
        row |= compare.origin(members)
        for value in VALUES:
            found = [
                v
                for run in members
                if not run.diverged and (v := run.summary.get(value)) is not None
            ]
            if found:
                row[value] = float(np.mean(found))
                row[f"{value}_std"] = float(np.std(found, ddof=1)) if len(found) > 1 else None
        rows.append(row)
    return pd.DataFrame(rows)


def printed_targets(sweep: Sweep, runs: Sequence[RunDirectory]) -> dict[str, float]:
    """The printed A of those settings (`key_of`) that have one: Flashback's."""
    rows = [row for row in compare.printed_cells(sweep) if row["metric"] == "target_accuracy"]
    found = {}
    for run in runs:
        _, fields = cell_of(sweep, run.overrides) or (None, {})
        for row in rows:
            if all(row[key] == fields.get(key) for key in ("dataset", "partition_param")):
                found[key_of(run)[1]] = float(row["value"])
    return found


def rounds_to_targets(runs: Sequence[RunDirectory], printed: Mapping[str, float]) -> pd.DataFrame:
    """Rounds to 0.75, 0.9 and 1 times A, mean over seeds, and how many times faster than FedAvg;
    empty where a seed diverged or never gets there. A is 0.95 of the best accuracy of any run of
    the setting that did not diverge and, where `printed` has the setting, in a second row that
    one."""
    settings: dict[str, dict[str, list[RunDirectory]]] = {}
    for run in runs:
        name, setting = key_of(run)
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
    source: str, accuracy: float, members: Mapping[str, Sequence[RunDirectory]]
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
    rows = []
    for name, values in rounds.items():
        row: dict[str, Any] = {"run": name, "target": source, "A": accuracy}
        row |= {
            f"rounds_to_{factor:g}A": value for factor, value in zip(FACTORS, values, strict=True)
        }
        # in no precision but another one
        nothing = next(iter(fedavg.values()), [None] * len(FACTORS))
        bases = fedavg.get(compare.precision_of(members[name][0]), nothing)
        for factor, value, base in zip(FACTORS, values, bases, strict=True):
            row[f"speedup_{factor:g}A"] = base / value if base and value else None
        rows.append(row)
    return rows


def is_fedavg(run: RunDirectory) -> bool:
    return run.summary.get("algorithm") == "fedavg" and not any(
        o.startswith("algorithm.") for o in run.overrides
    )


def mean_rounds(runs: Sequence[RunDirectory], accuracy: float) -> float | None:
    """Return the mean over seeds of the rounds to an accuracy; None where one diverged or never
    gets there."""
    found = [None if run.diverged else rounds_to(run, accuracy) for run in runs]
    return (
        None if None in found else float(np.mean([value for value in found if value is not None]))
    )
