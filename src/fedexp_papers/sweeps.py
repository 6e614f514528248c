"""The papers' sweeps: the published values that their runs reproduce, and how they are judged.

Besides the keys that fedexp reads (fedexp.analysis.sweep), a sweep's file has these keys:

- `paper`, `table`: the published table, as in published/tables.csv
- the fields below the value of an axis: the published cells that the runs with this value
  reproduce, by columns of tables.csv, such as `method: FedAvg`
- `measures`: for each published metric, the measured value that is compared with it
- `report`: the rule by which the paper reports accuracy and forgetting (fedexp_papers.rules)
- `inferred_from`: columns of the paper from which `report` or other settings were inferred, by
  columns of tables.csv; all other columns are held out
- `protocol`: values that the configuration of a run must have
- `earlier`: blocks of runs that were made with another protocol; they are not started again
- `readings`, `claims`: see fedexp_papers.readings
- `pictures`: the paper's figures that can be drawn from the runs (fedexp_papers.figures)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedexp.analysis.sweep import (
    Block,
    Fields,
    NamedSweep,
    load_named_sweep,
    read_block,
    read_sweep,
    split_override,
)
from fedexp.config.options import conf_directories, list_options
from fedexp.core.errors import ConfigError
from fedexp.rundir.jobs import normalise
from fedexp.rundir.sweeps import sweep_name
from fedexp_papers.rules import Rule, read_rule

# Prefixes of overrides that do not change a published protocol.
HARMLESS = (
    *("seed", "seeds.", "tracker", "hardware", "figures", "data_dir", "dataset.url"),
    *("checkpoint_interval", "keep_models", "keep_local_models", "test_views", "evaluate"),
    *("forgetting_metric", "targets", "target_fractions", "hydra", "objective"),
)


@dataclass(frozen=True)
class PaperBlock(Block):
    """A grid of runs, with the measured values to compare with published ones."""

    measures: tuple[Mapping[str, Any], ...] = ()

    def match(self, given: Fields, shared: Fields | None) -> tuple[int, int] | None:
        """Return how specifically the block describes a run, or None for a run outside the block.

        The first number counts the block's conditions. The second number counts the fixed overrides
        that the run has unchanged. See `find_cell` for the arguments.
        """
        if any(given.get(key) not in values for key, values in self.axes.items()):
            return None
        replaced = [
            (key, text) for key, text in map(split_override, self.fixed) if given.get(key) != text
        ]
        for key, value in replaced:
            mine = given.get(key, "")
            of_user = mine == (shared or {}).get(key) and not mine.startswith("{")
            if shared is None or not (mine.startswith("{") if value.startswith("{") else of_user):
                return None
        return len(self.axes) + len(self.fixed), len(self.fixed) - len(replaced)


@dataclass(frozen=True, kw_only=True)
class PaperSweep(NamedSweep):
    blocks: tuple[PaperBlock, ...]
    paper: str
    table: str
    rule: Rule
    # name of a sweep that interprets cells of the same table differently -> its label
    readings: Fields = field(default_factory=dict)
    inferred_from: tuple[Fields, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)
    earlier: tuple[PaperBlock, ...] = ()
    claims: str = ""  # table in tables.csv that lists the claims in the paper's text
    pictures: tuple[Mapping[str, Any], ...] = ()

    @property
    def fixed(self) -> set[str]:
        """Return the overrides that are fixed in some block."""
        return {text for block in self.blocks for text in block.fixed}


def read_paper_sweep(name: str, content: Mapping[str, Any]) -> PaperSweep:
    """Read a sweep from the content of its file. Raises ValueError or the like if it is invalid."""
    read = partial(read_paper_block, measures=content.get("measures", ()))
    base = vars(read_sweep(name, content))
    readings = content.get("readings", {})
    return PaperSweep(
        **base | {"blocks": tuple(map(read, content["blocks"]))},
        paper=str(content["paper"]),
        table=str(content["table"]),
        rule=read_rule(content.get("report", {})),
        inferred_from=tuple(map(read_fields, content.get("inferred_from", ()))),
        required=dict(content.get("protocol", {})),
        earlier=tuple(map(read, content.get("earlier", ()))),
        readings={str(other): str(label or "") for other, label in readings.items()},
        claims=str(content.get("claims", "")),
        pictures=tuple(map(dict, content.get("pictures", ()))),
    )


def read_paper_block(node: Mapping[str, Any], measures: Sequence[Mapping[str, Any]]) -> PaperBlock:
    """Read a block. measures: the measures to use if the block does not set any."""
    block = read_block(node)
    return PaperBlock(block.axes, block.fixed, tuple(node.get("measures", measures)))


def read_fields(node: Mapping[str, Any]) -> Fields:
    """Read columns of tables.csv and their values."""
    return {str(name): str(value) for name, value in node.items()}


def load_paper_sweep(name: str) -> PaperSweep:
    """Load a sweep of a paper. Raises ConfigError if there is none of this name."""
    return load_named_sweep(name, conf_directories(), read_paper_sweep)


def all_paper_sweeps() -> list[PaperSweep]:
    """Return all sweeps that reproduce a table or figure of a paper, sorted by name."""
    conf = conf_directories()
    named: list[NamedSweep] = [load_named_sweep(name, conf) for name in list_options("sweep", conf)]
    return [load_paper_sweep(sweep.name) for sweep in named if "paper" in sweep.content]


def find_paper_sweep(directory: Path) -> PaperSweep:
    """Return the sweep of a paper that a directory belongs to. Raises ConfigError for another."""
    name = sweep_name(directory.absolute())
    known = [sweep.name for sweep in all_paper_sweeps()]
    if name is None or name not in known:
        raise ConfigError(
            f"{directory}: {name or 'this'} is not a sweep of a paper; `fedexp report {directory}`"
            " writes the tables of any sweep"
        )
    return load_paper_sweep(name)


def find_cell(
    sweep: PaperSweep, overrides: Iterable[str], shared: Iterable[str] | None = None
) -> tuple[PaperBlock, dict[str, str]] | None:
    """Return a run's block and the fields of its published cells, or None if no block matches.

    If several blocks match, the most specific one is used.

    overrides: the overrides that the run was started with. shared: the overrides that all compared
        runs share. Shared overrides may replace fixed overrides of the block that have the same
        key. A run with such replacements does not reproduce the cell, but is shown in figures. If
        `shared` is None, nothing may be replaced.
    """
    given = dict(split_override(normalise(text)) for text in overrides)
    same = None if shared is None else dict(split_override(normalise(text)) for text in shared)
    blocks = [*sweep.blocks, *sweep.earlier]
    scores = [block.match(given, same) for block in blocks]
    best = max((score for score in scores if score), default=None)
    if best is None:
        return None
    block = blocks[scores.index(best)]
    return block, block.fields((key, given[key]) for key in block.axes)


def find_protocol_changes(sweep: PaperSweep, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change the published protocol.

    A run with any of these overrides is not a reproduction. Overrides of another block than the
    run's are among them.
    """
    block, _ = find_cell(sweep, overrides) or (None, {})
    keys, fixed = sweep.keys, sweep.fixed
    if block is not None and block in sweep.blocks:
        keys, fixed = set(block.axes), set(block.fixed)
    changes = [text for text in map(normalise, overrides) if text not in fixed]
    named = [(split_override(text)[0].lstrip("+~"), text) for text in changes]
    return [text for key, text in named if key not in keys and not key.startswith(HARMLESS)]
