"""Write the report of a sweep: means over seeds, rounds to targets, figures and a page."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from hydra.utils import get_method

from fedexp.analysis import layout, means_table
from fedexp.analysis.aggregate import (
    WHAT_A_IS,
    choose_values,
    describe_left_out,
    describe_states,
    drop_repeats,
    label_rows,
    rounds_to_targets,
)
from fedexp.analysis.sweep import find_sweep
from fedexp.analysis.sweep_figures import read_settings_of_sweep, sweep_pictures
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.figures import save_all
from fedexp.figures.pictures import PNG
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import find_jobs

log = logging.getLogger("fedexp")
PICTURES = ("png", "svg")  # formats that a browser shows


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
    jobs = find_jobs(directory)
    paths = write_tables(directory, jobs, means_table.Layout.of(flags) if flags else None)
    if not paths:
        return []
    if figures:
        try:
            paths += draw_figures(directory, jobs, flags)
        except Exception:
            again = "the figures could not be drawn; run `fedexp report %s` to try again"
            log.exception(again, directory)
    return [*paths, write_page(directory)]


def draw_figures(
    directory: Path, jobs: Sequence[RunDirectory], flags: argparse.Namespace | None
) -> list[Path]:
    """Draw a sweep's figures. Return their paths."""
    runs = select_runs(jobs)
    look = read_settings_of_sweep(runs)
    look = look.changed(flags) if flags else look
    return save_all(directory / "figures", sweep_pictures(runs), look)


def select_runs(jobs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Return the finished runs of a sweep that count: once per method and seed."""
    return drop_repeats([run for run in jobs if run.finished])


def write_page(directory: Path) -> Path:
    """Write index.html with the tables and figures in a sweep's directory. Return its path."""
    from jinja2 import Environment, FileSystemLoader

    tables = {
        path.stem: pd.read_csv(path, keep_default_na=False, na_values=[""])
        .dropna(axis="columns", how="all")
        .to_html(index=False, na_rep="", border=0, float_format="{:.4g}".format)  # escapes text
        for path in sorted(directory.glob("*.csv"))
    }
    figures = (path for form in PICTURES for path in directory.glob(f"figures/*.{form}"))
    folder = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=folder, autoescape=True).get_template("index.html.j2")
    page = template.render(
        title=directory.absolute().name,
        tables=tables,
        figures=[path.relative_to(directory).as_posix() for path in sorted(figures)],
    )
    storage.write_atomically(directory / "index.html", page.encode())
    return directory / "index.html"


def print_table(directory: Path, paths: Sequence[Path]) -> None:
    """Print a sweep's table, and the paths that `write_report` returned."""
    print((directory / "table.md").read_text(encoding="utf-8"))
    print("\n".join(f"  {storage.display_path(path)}" for path in paths))


def finish_sweep(directory: Path, figures: bool) -> None:
    """Call the function that a sweep's file names (`finish`), and print the paths that it returns.

    figures: whether to draw figures
    """
    sweep = find_sweep(directory)
    if sweep is not None and sweep.finish:
        for path in get_method(sweep.finish)(directory, figures):
            print(f"  {storage.display_path(path)}")


def write_tables(
    directory: Path,
    jobs: list[RunDirectory] | None = None,
    asked: means_table.Layout | None = None,
) -> list[Path]:
    """Write a sweep's table.csv, table.md and rounds_to_target.csv. Return the paths.

    Nothing is written if no run is finished. jobs: the sweep's runs. By default, they are read from
    the sweep's run directories. asked: the layout of table.md.
    """
    jobs, sweep = find_jobs(directory) if jobs is None else jobs, find_sweep(directory)
    left_out = describe_left_out(jobs)
    for line in left_out:
        log.warning("%s: %s", directory, line)
    runs = drop_repeats([run for run in jobs if run.finished])
    if not runs:
        return []
    table = means_table.means(runs, means_table.absolute_targets(runs))
    shown = [means_table.make_table(runs, means_table.Layout() if asked is None else asked)]
    if sweep is not None and sweep.choose:
        shown.append(choose_values(table))
    head = f"# {layout.markdown_text(directory.name)}\n{describe_states(jobs)}"
    head += "".join(f"\n{layout.markdown_text(line)}\n" for line in left_out)
    contents = {
        "table.csv": layout.csv(table),
        "table.md": f"{head}\n{layout.all_markdown(shown)}\n{describe_targets(runs)}",
        "rounds_to_target.csv": layout.csv(rounds_to_targets(runs)),
    }
    for name, content in contents.items():
        storage.write_atomically(directory / name, content.encode())
    return [directory / name for name in contents]


def describe_targets(runs: Sequence[RunDirectory]) -> str:
    """Return the section of a report with the rounds to fractions of A and to the key `targets`."""
    every, wished = rounds_to_targets(runs), means_table.absolute_targets(runs)
    hidden = ["setting", "method", *([] if every["diverged"].any() else ["diverged"])]
    targets = every.drop(columns=hidden).dropna(axis=1, how="all")
    targets = targets.set_axis(label_rows(every), axis="index").map(layout.plain_number)
    parts = ["## Rounds to target\n"]
    if wished:
        parts.append(
            layout.all_markdown([means_table.make_table(runs, means_table.Layout(wished))])
        )
    return "\n".join([*parts, f"{WHAT_A_IS}\n", layout.markdown(targets)])
