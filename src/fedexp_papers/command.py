"""The command `fedexp-papers`: compare sweeps with papers, analyse models, write the page."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from hydra.utils import get_method

from fedexp.core.console import Parser
from fedexp.core.errors import FAILED, INTERRUPTED, ConfigError, StorageError, say
from fedexp.figures.pictures import add_picture_flags
from fedexp_papers.posthoc.flags import add_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    arguments: by default, sys.argv
    """
    try:
        options = make_parser().parse_args(arguments)
        for line in get_method(options.function)(options):
            print(line)
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

    def add(function: str, text: str) -> ArgumentParser:
        name = function.rpartition(".")[2]
        each = commands.add_parser(name, help=text, description=text)
        each.set_defaults(function=f"fedexp_papers.{function}")
        return each

    each = add(
        "compare.compare", "write comparison.csv, comparison.md and the paper's figures of sweeps"
    )
    each.add_argument("directories", nargs="+", type=Path, help="directories of papers' sweeps")
    each.add_argument(
        "--with",
        dest="baselines",
        metavar="SWEEP",
        help="instead, compare any sweep with the committed runs of a paper's sweep that have the"
        " same values: write with_SWEEP.csv and with_SWEEP.md",
    )
    each.add_argument("--no-figures", action="store_true", help="write no figures")
    add_picture_flags(each)

    each = add("posthoc.flags.analyse", "analyse the loss, curvature and features of saved models")
    add_arguments(each)

    each = add("analyses.base.figures", "draw the figures of a run's analyses again")
    each.add_argument("directories", nargs="+", type=Path, help="run directories")
    add_picture_flags(each)

    each = add("page.page", "write the numbers of REPRODUCTION.md and its page of tables")
    each.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    root = "path of the git checkout (default: the working directory)"
    each.add_argument("--root", type=Path, default=Path(), help=root)
    return parser
