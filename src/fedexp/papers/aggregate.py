"""Write the tables of a sweep: means over seeds, rounds to targets and published values."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedexp.analysis import layout, paper_table
from fedexp.analysis.aggregate import (
    WHAT_A_IS,
    choose_values,
    describe_left_out,
    describe_states,
    drop_repeats,
    label_rows,
    rounds_to_targets,
)
from fedexp.analysis.sweep import Sweep, find_sweep
from fedexp.analysis.sweep_figures import read_settings_of_sweep, sweep_pictures
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.figures import save_all
from fedexp.figures.pictures import PNG
from fedexp.papers import readings
from fedexp.papers.cells import published_cells
from fedexp.papers.evidence import all_jobs
from fedexp.papers.judge import TOLERANCES
from fedexp.papers.paper_figures import make_pictures
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import find_jobs

log = logging.getLogger("fedexp")


def write_sweep_reports(options: argparse.Namespace) -> None:
    """Write the report of each sweep and print its table.

    options: the flags of `fedexp report`.

    Raises ConfigError if a directory has no finished run.
    """
    PNG.changed(options)  # raises ConfigError for an invalid flag before anything is written
    for directory in options.directories:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: is not a directory")
        paths = write_report(directory, not options.no_figures, options)
        if not paths:
            raise ConfigError(f"no finished run in {directory}")
        print_table(directory, paths)


def write_report(
    directory: Path, figures: bool, flags: argparse.Namespace | None = None
) -> list[Path]:
    """Write a sweep's tables and page, and its figures if `figures` is true. Return all paths.

    If a figure cannot be drawn, the report is written without it. flags: the command line's flags,
    see `fedexp.cli.flags`.
    """
    with all_jobs(directory) as jobs:
        paths = write_tables(directory, jobs, paper_table.Layout.of(flags) if flags else None)
        if not paths:
            return []
        if figures:
            try:
                paths += draw_figures(directory, jobs, flags)
            except Exception:
                again = "the figures could not be drawn; run `fedexp report %s` to try again"
                log.exception(again, directory)
        return [*paths, write_page(directory, paths)]


def draw_figures(
    directory: Path, jobs: Sequence[RunDirectory], flags: argparse.Namespace | None
) -> list[Path]:
    """Draw a sweep's figures. Return their paths."""
    runs = drop_repeats([job for job in jobs if job.finished])
    sweep = find_sweep(directory)
    look = read_settings_of_sweep(runs)
    look = look.changed(flags) if flags else look
    drawn = (make_pictures(sweep, runs), sweep_pictures(runs))
    return [path for each in drawn for path in save_all(directory / "figures", each, look)]


def write_page(directory: Path, paths: Sequence[Path]) -> Path:
    """Write index.html, which shows a sweep's tables and figures. Return its path.

    paths: the files of the report
    """
    from jinja2 import Environment, FileSystemLoader

    tables = {
        path.stem: pd.read_csv(path, keep_default_na=False, na_values=[""])
        .dropna(axis="columns", how="all")
        .to_html(index=False, na_rep="", border=0, float_format="{:.4g}".format)  # escapes text
        for path in paths
        if path.suffix == ".csv"
    }
    folder = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=folder, autoescape=True).get_template("index.html.j2")
    names = [path.relative_to(directory).as_posix() for path in paths]
    page = template.render(title=directory.absolute().name, tables=tables, names=names)
    storage.write_atomically(directory / "index.html", page.encode())
    return directory / "index.html"


def print_table(directory: Path, paths: Sequence[Path]) -> None:
    """Print a sweep's table, and the paths that `write_report` returned."""
    print((directory / "table.md").read_text(encoding="utf-8"))
    print("\n".join(f"  {storage.display_path(path)}" for path in paths))


def write_tables(
    directory: Path,
    jobs: list[RunDirectory] | None = None,
    asked: paper_table.Layout | None = None,
) -> list[Path]:
    """Write a sweep's table.csv, table.md, table.tex and rounds_to_target.csv. Return the paths.

    Nothing is written if no run is finished. jobs: the sweep's runs. By default, they are read from
    the sweep's run directories. asked: the layout of table.tex.
    """
    jobs, sweep = find_jobs(directory) if jobs is None else jobs, find_sweep(directory)
    left_out = describe_left_out(jobs)
    for line in left_out:
        log.warning("%s: %s", directory, line)
    finished = [run for run in jobs if run.finished]
    runs = drop_repeats(finished)
    if not runs:
        return []
    wanted = paper_table.Layout() if asked is None else asked
    own, wished = paper_table.make_table(runs, wanted), paper_table.absolute_targets(runs)
    table = paper_table.means(runs, wished)
    shown, head = [own], f"# {layout.markdown_text(directory.name)}\n{describe_states(jobs)}"
    in_latex = shown
    if sweep is not None and len(published_cells(sweep)):
        table = readings.compare_sweep(sweep, directory)
        shown, head = readings.report_sections(sweep, table), make_heading(sweep, table)
        in_latex = shown if wanted == paper_table.Layout() else [own]
    elif sweep is not None and sweep.choose:
        shown = [own, choose_values(table)]
    head += "".join(f"\n{layout.markdown_text(line)}\n" for line in left_out)
    every = rounds_to_targets(runs)
    hidden = ["setting", "method", *([] if every["diverged"].any() else ["diverged"])]
    targets = every.drop(columns=hidden).dropna(axis=1, how="all")
    targets = targets.set_axis(label_rows(every), axis="index").map(layout.plain_number)
    parts = [f"{head}\n{layout.all_markdown(shown)}", "## Rounds to target\n"]
    if wished:
        asked_for = paper_table.make_table(runs, paper_table.Layout(wished))
        parts.append(layout.all_markdown([asked_for]))
    parts.append(f"{WHAT_A_IS}\n")
    contents = {
        "table.csv": layout.csv(table),
        "table.md": "\n".join([*parts, layout.markdown(targets)]),
        "table.tex": layout.latex(in_latex),
        "rounds_to_target.csv": layout.csv(every),
    }
    for name, content in contents.items():
        storage.write_atomically(directory / name, content.encode())
    return [directory / name for name in contents]


def make_heading(sweep: Sweep, tidy: pd.DataFrame) -> str:
    """Return the heading of table.md.

    The heading contains the title, the rule, the tolerances, the numbers of verdicts and any
    departures from the protocol.
    """
    lines = [f"# {sweep.title}", f"Rule: {sweep.rule}. {TOLERANCES}", describe_verdicts(tidy)]
    if sources := sorted({name for text in tidy["from"] for name in text.split()}):
        names = ", ".join(f"`{name}`" for name in sources)
        lines.append(f"The table includes runs of other sweeps: {names}.")
    if changes := [text for text in tidy["changes"].unique() if text]:
        lines.append(f"Other protocols (`~`): {'; '.join(f'`{text}`' for text in changes)}.")
    return "\n\n".join(lines) + "\n"


def describe_verdicts(tidy: pd.DataFrame) -> str:
    """Return a sentence with the number of published values and how many have each verdict."""
    counts = readings.first_reading(tidy)["verdict"].value_counts()
    texts = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    return f"{counts.sum()} published values: {texts}."
