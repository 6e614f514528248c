"""The subcommands of `fedexp`, such as `fedexp report multirun/x`.

`SUBCOMMANDS` maps each name to its function. The function adds its arguments to the parser, and
then imports the modules that it needs. Late imports keep help fast. The function's
docstring is the help text.
"""

import platform
import re
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from inspect import getdoc
from pathlib import Path

import fedexp
from fedexp.config.removed import explain_removed
from fedexp.core import interrupts
from fedexp.core.console import Parser
from fedexp.core.errors import FAILED, ConfigError, StorageError, nearest, say
from fedexp.rundir import files

WORD = re.compile(r"[A-Za-z][\w-]*")
PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf", "wandb")


def is_subcommand(arguments: Sequence[str]) -> bool:
    """Return whether a command line calls a subcommand.

    Raises ConfigError if the first word looks like a subcommand but is not one.
    """
    if not arguments or not WORD.fullmatch(arguments[0]):
        return False
    if arguments[0] not in SUBCOMMANDS:
        raise ConfigError(
            explain_removed(arguments[0])
            or f"{arguments[0]}: is neither key=value nor a subcommand"
            f"{nearest(arguments[0], SUBCOMMANDS)}; subcommands: {', '.join(SUBCOMMANDS)}"
        )
    return True


def call(name: str, arguments: Sequence[str]) -> int:
    """Run a subcommand, and return its exit code."""
    function = SUBCOMMANDS[name]
    parser = Parser(
        prog=f"fedexp {name}",
        description=getdoc(function),
        formatter_class=RawDescriptionHelpFormatter,
    )
    try:
        return function(parser, arguments)
    except StorageError as error:
        return say(str(error), FAILED)


def parse_arguments(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Parse the arguments, and stop delaying signals.

    Signals are delayed until the imports are done.
    """
    interrupts.release()
    return parser.parse_args(arguments)


def report(parser: ArgumentParser, arguments: Sequence[str]) -> int:
    """Write a sweep's tables, figures and index.html, or the tables of a run.

    A run in continual learning has a table of the accuracy on each task after each task. A run
    with evaluate=personal or evaluate=own has a table of the results of every client.
    `--out TABLE` writes all runs in the directories to one table (TABLE.csv and TABLE.md) with
    one row per run. `--metrics NAME,...` selects the values of a sweep's table, adds columns to
    the table of all runs, or shows values of a run: numbers of summary.json, and measures of
    forgetting between tasks, which are computed from the files of the runs.
    """
    from fedexp.analysis.means_table import add_layout_flags
    from fedexp.analysis.report import write_sweep_reports
    from fedexp.analysis.run_table import write_run_table
    from fedexp.figures.pictures import add_picture_flags

    add = parser.add_argument
    add(
        "directories",
        nargs="+",
        type=Path,
        help="sweeps, runs or, for one table, directories with runs",
    )
    add("--out", type=Path, help="path of the files TABLE.csv and TABLE.md, without a suffix")
    add("--no-figures", action="store_true", help="write no figures")
    add_picture_flags(parser)
    add_layout_flags(parser)
    options = parse_arguments(parser, arguments)
    if options.out is not None and not options.out.name:
        raise ConfigError(
            f"--out={options.out}: must be a path without a suffix, such as tables/all"
        )
    check_layout(options)
    if options.out is None:
        return write_sweep_reports(options)
    write_run_table(outermost(options.directories), options.out, options.metrics)
    return 0


def outermost(directories: Sequence[Path]) -> list[Path]:
    """Return each directory once, without those inside another one."""
    found = {path.resolve(): path for path in directories}
    return [path for real, path in found.items() if found.keys().isdisjoint(real.parents)]


def check_layout(options: Namespace) -> None:
    """Raise ConfigError for a flag of a sweep's table if no such table is written."""
    reasons = [f"{path} is a run" for path in options.directories if (path / files.CONFIG).exists()]
    if options.out is not None:
        reasons = ["--out writes one row per run"]
    for flag in ("sort", "transpose", "baseline", "latex", "appendix") if reasons else ():
        if getattr(options, flag):
            raise ConfigError(f"--{flag}: is for the table of a sweep, but {reasons[0]}")


def compare(parser: ArgumentParser, arguments: Sequence[str]) -> int:
    """Compare the results of two runs, such as a run and its repetition on another machine.

    The exit code is 0 if all tables are equal except for times, and 1 if not. The first line of
    different runs is the first differing round and column. Other lines are differing options,
    versions and machines.
    """
    from fedexp.analysis.compare import compare_runs

    parser.add_argument("runs", nargs=2, type=Path, metavar="run", help="a run directory")
    options = parse_arguments(parser, arguments)
    results, facts = compare_runs(*options.runs)
    print("different" if results else "equal", *results, sep="\n  ")
    if facts:
        print("options, versions and machines that differ", *facts, sep="\n  ")
    return 1 if results else 0


def evaluate(parser: ArgumentParser, arguments: Sequence[str]) -> int:
    """Test a run's saved model and show the accuracy of each class.

    By default, the model is tested on the run's test set. `dataset=` selects the test set of
    another data set with the same classes. Classes are matched by name.
    """
    from fedexp.cli.evaluate import format_table, read_dataset
    from fedexp.config.composition import trusted_classes
    from fedexp.core.console import log_to_console
    from fedexp.core.storage import display_path, write_atomically
    from fedexp.rundir.reader import require_run

    add = parser.add_argument
    add("run", type=Path, help="a run directory")
    overrides = "dataset=<option>, dataset.<key>=<value>, data_dir=<directory> (as for a run)"
    add("overrides", nargs="*", help=overrides)
    add("--round", type=int, help="round of the saved model (default: the last one)")
    add("--device", default="auto", help="device: auto, cpu, cuda or cuda:<number>")
    add("--out", type=Path, help="also write the table to this csv file")
    add("--config-dir", type=Path, help="a directory with your own config groups")
    add("--by-position", action="store_true", help="match classes by number, not by name")
    options = parse_arguments(parser, arguments)
    run = require_run(options.run)
    tested = read_dataset(options.overrides, options.config_dir, options.by_position)
    log_to_console()
    from fedexp.analysis.evaluation import evaluate_run

    with trusted_classes(options.config_dir):
        found = evaluate_run(run, tested, options.round, options.device)
    print(format_table(found))
    if options.out is not None:
        write_atomically(options.out, found.classes.to_csv(index=False).encode())
        print(f"  {display_path(options.out)}")
    return 0


def figures(parser: ArgumentParser, arguments: Sequence[str]) -> int:
    """Draw the figures of runs, even of interrupted ones, or of all jobs of a sweep.

    `--config-dir` also draws the figures of your own metrics.
    """
    from fedexp.analysis.run_report import draw_run
    from fedexp.config.composition import trusted_classes
    from fedexp.figures.pictures import add_picture_flags
    from fedexp.rundir.sweeps import find_runs

    parser.add_argument("directories", nargs="+", type=Path, help="runs or sweeps")
    parser.add_argument("--config-dir", type=Path, help="a directory with your own config groups")
    add_picture_flags(parser)
    options, code = parse_arguments(parser, arguments), 0
    with trusted_classes(options.config_dir):
        for run_dir in (run for each in options.directories for run in find_runs(each) or [each]):
            try:
                if not (paths := draw_run(run_dir, options)):
                    needed = "rounds.csv, class_accuracy.csv or partition.npz"
                    raise ConfigError(f"{run_dir}: contains no run to draw ({needed} is missing)")
                print(*paths, sep="\n")
            except ConfigError as error:
                code = say(str(error))
            except OSError as error:
                place = error.filename or run_dir
                code = say(f"{place}: cannot be read or written ({error.strerror})", FAILED)
    return code


def dashboard(parser: ArgumentParser, arguments: Sequence[str]) -> int:
    """Make a W&B workspace with panels for fedexp's runs.

    The workspace shows accuracy, classes, forgetting, local training, time and communication. It
    also shows bar charts of the results, and the figures. Runs that differ only in their seeds are
    grouped, so curves show means and standard deviations over seeds.

    `--print` shows the specification instead of saving it, and needs no network and no account. The
    required package is installed with the extra `dashboard`.
    """
    import json

    from fedexp.trackers.dashboard import save, specification, workspace

    where = "the W&B project that contains the runs, such as team/fedexp"
    parser.add_argument("project", metavar="ENTITY/PROJECT", help=where)
    parser.add_argument("--name", default="fedexp", help="name of the workspace (default: fedexp)")
    shown = "print the specification instead of saving it"
    parser.add_argument("--print", action="store_true", dest="show", help=shown)
    options = parse_arguments(parser, arguments)
    made = workspace(options.project, options.name)
    print(json.dumps(specification(made), indent=2) if options.show else save(made))
    return 0


SUBCOMMANDS = {
    "report": report,
    "compare": compare,
    "evaluate": evaluate,
    "figures": figures,
    "dashboard": dashboard,
}


def version_text() -> str:
    """Return the versions of fedexp, its main packages and Python, one per line."""
    lines = [f"fedexp {fedexp.__version__}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} (not installed)")
    return "\n".join([*lines, f"Python {platform.python_version()} ({platform.platform()})"])
