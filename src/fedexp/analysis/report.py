"""Write the report of a sweep: means over seeds, rounds to targets, figures and a page."""

import argparse
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.utils import get_method

from fedexp.analysis import layout
from fedexp.analysis.appendix import describe_sweep
from fedexp.analysis.frame import (
    describe_earlier,
    describe_left_out,
    describe_mixed,
    describe_others,
    describe_replaced,
    describe_states,
    main_keys,
    means,
    select_runs,
    tidy,
)
from fedexp.analysis.means_table import Layout, choose_values, make_table, shown_metrics
from fedexp.analysis.page import PAGE, write_page
from fedexp.analysis.run_report import report_run
from fedexp.analysis.significance import differences, find_baseline, tabulate
from fedexp.analysis.sweep import find_sweep
from fedexp.analysis.targets import describe_targets, rounds_to_targets
from fedexp.analysis.task_means import average_tasks, task_sections
from fedexp.config.named import search_path, user_first
from fedexp.core import storage
from fedexp.core.errors import FAILED, ConfigError, reason_of
from fedexp.core.storage import typed_path
from fedexp.figures import read_settings, save_all
from fedexp.figures.pictures import PNG
from fedexp.rundir import files
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import config_folders, own_jobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fedexp")
DIFFERENCES, TASKS, LATEX = "differences.csv", "task_means.csv", "table.tex"
APPENDIX = ("appendix.md", "appendix.tex")


def write_sweep_reports(options: argparse.Namespace) -> int:
    """Write the report of each sweep or run, and print its tables.

    options: the flags of `fedexp report`. Return the exit code: 1 if the figures of a sweep could
    not be drawn.

    Raises ConfigError if a directory has no finished run.
    """
    PNG.changed(options)  # raises ConfigError for an invalid flag before anything is written
    code = 0
    for directory in {path.resolve(): path for path in options.directories}.values():
        if not directory.is_dir():
            raise ConfigError(f"{directory}: is not a directory")
        if (directory / files.CONFIG).exists():
            report_run(directory, options)
            continue
        paths = write_report(directory, not options.no_figures, options)
        if not paths:
            raise ConfigError(f"no finished run in {directory}")
        print_table(directory, [*paths, write_page(directory, paths)])
        if not options.no_figures and not any(path.parent.name == "figures" for path in paths):
            code = FAILED
    return code


def write_report(
    directory: Path, figures: bool, flags: argparse.Namespace | None = None
) -> list[Path]:
    """Write a sweep's tables, and its figures if `figures` is true. Return all paths.

    If a figure cannot be drawn, the report is written without it. flags: the command line's flags,
    see `add_picture_flags` and `add_layout_flags`.
    """
    jobs = own_jobs(directory)
    asked = Layout()
    if flags is not None:
        names = [field.name for field in fields(Layout)]
        asked = Layout(**{name: getattr(flags, name) for name in names})
    paths = write_tables(directory, jobs, asked)
    if not paths:
        return []
    if figures:
        from fedexp.analysis.draw_sweep import sweep_pictures

        try:
            runs = select_runs(jobs)
            paths += draw_figures(directory, runs, sweep_pictures(runs), flags)
        except Exception:
            again = "the figures could not be drawn; run `fedexp report %s` to try again"
            log.exception(again, typed_path(directory))
    storage.remove_leftovers([*paths, directory / PAGE])
    return paths


def draw_figures(
    directory: Path,
    runs: Iterable[RunDirectory],
    pictures: "Iterable[tuple[str, Callable[[], Figure]]]",
    flags: argparse.Namespace | None,
) -> list[Path]:
    """Draw pictures (name, function that draws it) in `figures/` of a sweep. Return the paths.

    The settings are those of the first run whose configuration has any, changed by the flags.
    """
    found = (read_settings(run.directory) for run in runs if "figures" in run.config)
    look = next(found, PNG)
    return save_all(directory / "figures", pictures, look.changed(flags) if flags else look)


def print_table(directory: Path, paths: Sequence[Path]) -> None:
    """Print a sweep's table and the paths of its report."""
    print((directory / "table.md").read_text(encoding="utf-8"))
    print_paths(paths)


def print_paths(paths: Iterable[Path]) -> None:
    for path in paths:
        print(f"  {storage.display_path(path)}")


def finish_sweep(directory: Path, figures: bool) -> None:
    """Call the function that a sweep's file names (`finish`), and print the paths that it returns.

    figures: whether to draw figures
    """
    # only folders of this command, since the directory may come from another person
    sweep = find_sweep(directory, search_path())
    if sweep is None or not sweep.finish:
        return
    try:
        function = get_method(sweep.finish)
    except Exception as error:
        message = f"sweep={sweep.name}: finish={sweep.finish}: {reason_of(error)}"
        raise ConfigError(message) from error
    print_paths(function(directory, figures))


def write_tables(directory: Path, jobs: Sequence[RunDirectory], asked: Layout) -> list[Path]:
    """Write a sweep's tables as csv, as Markdown in table.md and, if asked for, as LaTeX.

    Return the paths. Nothing is written if no run is finished. asked: the layout of table.md.
    """
    sweep = find_sweep(directory, user_first(config_folders(directory)))
    runs = select_runs(jobs)
    every = tidy(runs)
    notes = [*describe_left_out(jobs), *describe_replaced(directory), *describe_mixed(every)]
    for line in notes:
        log.warning("%s: %s", directory, line)
    if not runs:
        return []
    table, shown = means(every), [make_table(every, asked)]
    baseline = find_baseline(every["method"].unique(), asked.baseline)
    compared = differences(every, shown_metrics(every, asked), baseline)
    compared_text = tabulate(compared, baseline, every["setting"].unique())
    shown += compared_text
    if sweep is not None and sweep.choose:
        shown.append(choose_values(table, main_keys(every)[0]))
    of_tasks = average_tasks(every)
    shown += task_sections(of_tasks)
    notes += describe_others(directory)  # which `own_jobs` has logged
    lines = [describe_states(jobs), describe_earlier(directory, every), *notes]
    if sweep is not None:
        lines.insert(0, sweep.title)
    head = f"# {layout.markdown_text(directory.absolute().name)}\n"
    head += "".join(f"\n{layout.markdown_text(line)}\n" for line in filter(None, lines))
    targets = describe_targets(every)
    contents = {
        "table.csv": layout.csv(table),
        "table.md": f"{head}\n{layout.all_markdown(shown)}\n## Rounds to target\n\n"
        + layout.all_markdown(targets),
        "rounds_to_target.csv": layout.csv(rounds_to_targets(every)),
    }
    for name in (DIFFERENCES, TASKS):
        (directory / name).unlink(missing_ok=True)  # of an earlier report
    if compared_text:
        contents[DIFFERENCES] = layout.csv(compared.assign(baseline=baseline))
    if len(of_tasks):
        contents[TASKS] = layout.csv(of_tasks)
    if asked.latex or (directory / LATEX).exists():
        contents[LATEX] = "\n".join(map(layout.latex, [*shown, *targets]))
    if asked.appendix or any((directory / name).exists() for name in APPENDIX):
        described = describe_sweep(every)
        tex = layout.latex_appendix(directory.absolute().name, lines, described)
        written = f"{head}\n{layout.all_markdown(described, level=2)}", tex
        contents |= dict(zip(APPENDIX, written, strict=True))
    return storage.write_texts(directory, contents)
