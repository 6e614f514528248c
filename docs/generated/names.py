"""The names that several pages use: methods, and the sweeps in which they are run."""

from functools import cache
from pathlib import Path

from fedexp.analysis.sweep import NamedSweep, load_named_sweep
from fedexp.config.options import list_options

from .text import CONFS, conf_file, description


def algorithm_file(name: str) -> Path:
    return conf_file(f"algorithm/{name}")


def title(name: str) -> str:
    """The method's name as papers write it."""
    return description(algorithm_file(name)).partition(":")[0]


@cache
def sweeps() -> tuple[NamedSweep, ...]:
    return tuple(load_named_sweep(name, CONFS) for name in list_options("sweep", CONFS))


def methods(sweep: NamedSweep) -> set[str]:
    fixed = {
        text.partition("=")[2]
        for b in sweep.blocks
        for text in b.fixed
        if text.startswith("algorithm=")
    }
    return fixed.union(*(block.axes.get("algorithm", ()) for block in sweep.blocks))
