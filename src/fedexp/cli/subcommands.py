"""The subcommands of `fedexp` beside Hydra's command line: `fedexp report multirun/x`. Each has a
`--help`."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

from fedexp.core import interrupts
from fedexp.core.errors import ConfigError, nearest


class Subcommand(NamedTuple):
    """A program of its own: `main(arguments, prog)` of a module, which is imported when it is
    called."""

    module: str
    arguments: str
    description: str


SUBCOMMANDS = {
    "report": Subcommand("fedexp.analysis.report", "<dir>", "tables and pictures of a sweep"),
    "view": Subcommand(
        "fedexp.analysis.view.__main__", "<dir>", "a sweep, or runs, as one HTML page"
    ),
    "evaluate": Subcommand(
        "fedexp.cli.evaluate", "<dir>", "a kept model of a run on a test set, class by class"
    ),
    "analyse": Subcommand(
        "fedexp.cli.analyse", "<dir> <kind>", "loss, curvature and features of a run's kept models"
    ),
    "figures": Subcommand("fedexp.figures.__main__", "<dir>", "the pictures of a run, drawn again"),
    "push": Subcommand("fedexp.cli.push", "<dir>", "a finished run or sweep to W&B"),
    "dashboard": Subcommand(
        "fedexp.trackers.dashboard",
        "<entity>/<project>",
        "a W&B workspace with panels for fedexp's runs",
    ),
    "reproduction": Subcommand(
        "fedexp.analysis.reproduction", "", "REPRODUCTION.md from the committed tables"
    ),
    "requirements": Subcommand(
        "fedexp.analysis.algorithm_costs", "", "what each algorithm needs beyond FedAvg"
    ),
}
WORD = re.compile(r"[A-Za-z][\w-]*")


def subcommand_of(arguments: Sequence[str]) -> Callable[[Sequence[str]], int] | None:
    """Return what a command line calls with its other arguments, None for one of Hydra's. Raises
    ConfigError for a first word that is no subcommand."""
    if not arguments or not WORD.fullmatch(arguments[0]):
        return None
    name = arguments[0]
    if name not in SUBCOMMANDS:
        raise ConfigError(
            f"{name}: not of the form key=value, and no subcommand{nearest(name, SUBCOMMANDS)}; "
            f"subcommands: {', '.join(SUBCOMMANDS)}"
        )
    return partial(call, name, f"fedexp {name}")


def call(name: str, prog: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; its exit code. prog: as its usage calls it; arguments: None for those of
    the process."""
    main = import_module(SUBCOMMANDS[name].module).main
    interrupts.release()
    return int(main(arguments, prog))
