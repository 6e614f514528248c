"""A directory of runs as tables: means over seeds, rounds to a target, and, for a named sweep,
beside the print."""

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedexp.analysis import layout, paper_table
from fedexp.analysis.aggregate import (
    WHAT_A_IS,
    chosen_values,
    damage_of,
    labels_of,
    rounds_to_targets,
    states_of,
    without_repeats,
)
from fedexp.analysis.benchmark import benchmark_sections, rankings, runs_of
from fedexp.analysis.sweep import Sweep, load_sweep, sweep_of
from fedexp.analysis.sweep_figures import look_of_sweep, slug, sweep_pictures
from fedexp.config.options import conf_directory
from fedexp.core import storage
from fedexp.figures import save_all
from fedexp.papers import compare, parts, readings
from fedexp.papers.claims import of_text, with_claims
from fedexp.papers.compare import load_jobs, load_runs
from fedexp.papers.elsewhere import found_for
from fedexp.papers.paper_figures import paper_pictures
from fedexp.rundir.evidence import with_kept
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import MARKER as MARKER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fedexp")


def write_report(
    directory: Path, figures: bool, flags: argparse.Namespace | None = None
) -> list[Path]:
    """Write the tables of a sweep and, if asked for, its pictures; return the paths. A picture that
    fails costs no table. flags: those of `fedexp.cli.flags`."""
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


def beside_print(directory: Path, runs: Sequence[RunDirectory]) -> dict[str, Any] | None:
    """Return the table of a sweep as `fedexp view` shows it; None of one without printed values."""
    found = tables_of(directory, runs)
    if found is None or found.sweep is None:
        return None
    tidy = found.tidy[~of_text(found.tidy)]
    named = tidy.assign(column=layout.column_names(tidy))
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (method, column), group in named.groupby(["method", "column"], sort=False):
        records: list[Mapping[Any, Any]] = list(group.to_dict("records"))
        cells.setdefault(str(method), {})[str(column)] = list(map(cell, records))
    caption = f"{verdicts(found.tidy)} Rule: {found.sweep.rule}. {compare.TOLERANCES}"
    columns = [str(name) for name in named["column"].unique()]
    return {"title": found.sweep.title, "caption": caption, "columns": columns, "cells": cells}


def cell(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell with one printed value and ours."""
    ours, printed = layout.both(row)
    said = {name: str(row[name]) for name in ("metric", "unit", "verdict", "note")}
    return {
        "ours": ours,
        "printed": printed,
        "n": int(row["n"]),
        "diverged": int(row["diverged"]),
    } | said
