"""The command `fedexp-papers`: compare sweeps with papers, analyse models, write the page."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedexp.core.console import Parser
from fedexp.core.errors import FAILED, INTERRUPTED, ConfigError, StorageError, say
from fedexp.core.storage import display_path
from fedexp.figures.pictures import add_picture_flags
from fedexp_papers.posthoc.flags import add_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    arguments: by default, sys.argv
    """
    try:
        options = make_parser().parse_args(arguments)
        print("\n".join(options.run_command(options)))
    except ConfigError as error:
        return say(str(error))
    except StorageError as error:
        return say(str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def make_parser() -> ArgumentParser:
    parser = Parser(prog="fedexp-papers", description=__doc__)
    commands = parser.add_subparsers(metavar="compare|analyse|figures|page", required=True)

    def add(name: str, text: str) -> ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    each = add("compare", "write comparison.csv, comparison.md and the paper's figures of sweeps")
    each.add_argument("directories", nargs="+", type=Path, help="directories of papers' sweeps")
    each.add_argument("--no-figures", action="store_true", help="write no figures")
    add_picture_flags(each)
    each.set_defaults(run_command=compare)

    each = add("analyse", "analyse the loss, curvature and features of a run's saved models")
    add_arguments(each)
    each.set_defaults(run_command=analyse)

    each = add("figures", "draw the figures of a run's analyses again")
    each.add_argument("directories", nargs="+", type=Path, help="run directories")
    add_picture_flags(each)
    each.set_defaults(run_command=figures)

    each = add("page", "write the measured tables of REPRODUCTION.md")
    each.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    root = "path of the git checkout (default: the working directory)"
    each.add_argument("--root", type=Path, default=Path(), help=root)
    each.set_defaults(run_command=page)
    return parser


def compare(options: Namespace) -> list[str]:
    from fedexp_papers.compare import compare_sweeps

    return [f"  {display_path(path)}" for path in compare_sweeps(options)]


def analyse(options: Namespace) -> list[str]:
    from fedexp_papers.posthoc.flags import analyse

    return analyse(options)


def figures(options: Namespace) -> list[str]:
    from fedexp.figures import read_settings
    from fedexp.rundir.files import ANALYSES
    from fedexp.rundir.reader import require_run
    from fedexp_papers.analyses.base import draw_tables

    paths = []
    for each in options.directories:
        directory = require_run(each).directory
        look = replace(read_settings(directory).changed(options), draw=True)
        paths += draw_tables(directory, look, None, ANALYSES)
    return [f"  {display_path(path)}" for path in paths]


def page(options: Namespace) -> list[str]:
    from fedexp_papers.page import update

    update(options.root, options.check)
    return []
