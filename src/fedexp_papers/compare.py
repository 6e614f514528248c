"""Write the comparison of a sweep with its paper: comparison.csv, comparison.md and the figures."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedexp.analysis.frame import (
    describe_left_out,
    describe_mixed,
    describe_replaced,
    select_runs,
    tidy,
)
from fedexp.analysis.layout import all_markdown, csv, markdown_text
from fedexp.analysis.page import mark_of
from fedexp.analysis.report import draw_figures
from fedexp.analysis.targets import describe_targets
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.figures.pictures import PNG, given_picture_flags
from fedexp.rundir.reader import RunDirectory
from fedexp_papers import readings
from fedexp_papers.baselines import compare_with
from fedexp_papers.cells import published_cells
from fedexp_papers.evidence import all_jobs
from fedexp_papers.figures import make_pictures
from fedexp_papers.judge import TOLERANCES
from fedexp_papers.sweeps import PaperSweep, find_paper_sweep

log = logging.getLogger("fedexp")


def compare(options: Namespace) -> list[str]:
    """Compare each sweep with its paper. Return lines with the paths of the files.

    With `--with`, compare each sweep with the committed runs of a paper's sweep.

    options: the flags of `fedexp-papers compare`. Raises ConfigError for a directory without a
    finished run of a paper's sweep, and for flags of figures beside `--with`, which draws none.
    """
    PNG.changed(options)  # raises ConfigError for an invalid flag before anything is written
    if options.baselines and (flags := given_picture_flags(options)):
        raise ConfigError(
            f"--with {options.baselines}: writes no figures; leave out {', '.join(flags)}"
        )
    paths, lines = [], []
    for directory in options.directories:
        if options.baselines:
            written, notes = compare_with(directory, options.baselines)
            paths += written
            lines += notes
            continue
        found = compare_sweep(directory, not options.no_figures, options)
        if not found:
            raise ConfigError(f"no finished run in {directory}")
        paths += found
    return [*lines, *(f"  {storage.display_path(path)}" for path in paths)]


def compare_sweep(directory: Path, figures: bool, flags: Namespace | None = None) -> list[Path]:
    """Compare a sweep with its paper. Return the paths of the files; none without finished runs.

    The sweep's file names this function, so it is also called when the sweep ends. A sweep without
    published values only has figures. flags: the command line's flags for figures, see
    `fedexp.figures.pictures`.
    """
    sweep = find_paper_sweep(directory)
    with all_jobs(directory) as found:
        jobs = list(found)
        runs = select_runs(jobs)
        if not runs:
            return []
        paths = []
        if len(published_cells(sweep)):
            paths += write_comparison(directory, sweep, jobs, runs)
        if figures:
            paths += draw_figures(directory, runs, make_pictures(sweep, runs), flags)
    return paths


def write_comparison(
    directory: Path,
    sweep: PaperSweep,
    jobs: Sequence[RunDirectory],
    runs: Sequence[RunDirectory],
) -> list[Path]:
    """Write comparison.csv and comparison.md.

    jobs: all jobs of the sweep. runs: the finished runs that count.
    """
    table = readings.join_readings(sweep, directory)
    every = tidy(runs)
    notes = [*describe_left_out(jobs), *describe_replaced(directory), *describe_mixed(every)]
    head = make_heading(sweep, table)
    head += "".join(f"\n{markdown_text(line)}\n" for line in notes)
    text = all_markdown(readings.report_sections(sweep, table))
    targets = all_markdown(describe_targets(every))
    contents = {
        "comparison.csv": csv(table),
        "comparison.md": f"{head}\n{text}\n## Rounds to target\n\n{targets}{mark_of(directory)}",
    }
    return storage.write_texts(directory, contents)


def make_heading(sweep: PaperSweep, tidy: pd.DataFrame) -> str:
    """Return the heading of comparison.md.

    The heading contains the title, the rule, the tolerances and any departures from the protocol.
    """
    lines = [f"# {sweep.title}", f"Rule: {sweep.rule}. {TOLERANCES}"]
    if sources := sorted({name for text in tidy["from"] for name in text.split()}):
        names = ", ".join(f"`{name}`" for name in sources)
        lines.append(f"The table includes runs of other sweeps: {names}.")
    if changes := [text for text in tidy["changes"].unique() if text]:
        lines.append(f"Other protocols (`~`): {'; '.join(f'`{text}`' for text in changes)}.")
    return "\n\n".join(lines) + "\n"
