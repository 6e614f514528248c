"""Named sweeps: the files in `conf/sweep` say which runs a published table or figure consists of.

A sweep is a list of blocks; a block is a grid: every combination of the values of its axes
(`experiment`, `algorithm` or any other key of the configuration), with the overrides `with`. Beside
each value stand the fields of the printed cells that belong to it (columns of
published/tables.csv), and `measures` says which of our numbers stands beside which printed metric.
`report` is the rule by which the paper reports accuracy and forgetting (fedexp.analysis.rules),
`readings` names sweeps that read cells of the same table differently (fedexp.papers.readings),
`claims` what the paper's text says of the table (fedexp.papers.readings), `pictures` which figures
of the paper its runs give (fedexp.papers.paper_figures), `choose: best` makes it a search
(fedexp.papers.aggregate), and `ranks` a benchmark (fedexp.analysis.benchmark), whose fields are
`method` and `setting`.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from fedexp.analysis.rules import Rule, read_rule
from fedexp.config.options import conf_directory, read_sweeps
from fedexp.config.overrides import is_path, key_of
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.sweeps import SweepDirectory

Fields = Mapping[str, str]  # column of tables.csv -> value
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A grid of runs."""

    axes: Mapping[str, Mapping[str, Fields]]  # key -> value -> fields of its cells
    fixed: tuple[str, ...]  # overrides of all its runs
    measures: tuple[Mapping[str, Any], ...]

    def combinations(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """Yield each run as (key, value) of every axis."""
        choices = [[(key, value) for value in values] for key, values in self.axes.items()]
        yield from itertools.product(*choices)

    def fields(self, combination: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Return the fields of the printed cells of a run."""
        found: dict[str, str] = {}
        for key, value in combination:
            found |= self.axes[key][value]
        return found

    def restricted(self, given: Mapping[str, Sequence[str]]) -> "Block | None":
        """Return the block with the values that the command line gives for axes: those of its own
        among them, None where there are none, or where a key is no axis of it and not fixed at one
        of them."""
        axes = dict(self.axes)
        if any(self.fixed_value(key) not in given[key] for key in given.keys() - axes.keys()):
            return None
        for key in axes.keys() & given.keys():
            axes[key] = {value: axes[key][value] for value in given[key] if value in axes[key]}
            if not axes[key]:
                return None
        return Block(axes, self.fixed, self.measures)

    def fixed_value(self, key: str) -> str | None:
        """Return the value that all its runs have for a key which is no axis; None: they say
        nothing of it."""
        return next((text.partition("=")[2] for text in self.fixed if key_of(text) == key), None)

    def has(self, key: str, value: str) -> bool:
        """Return whether it has runs with this value."""
        return value in self.axes.get(key, ()) or value == self.fixed_value(key)

    def arguments(self, others: Sequence[str] = ()) -> list[str]:
        """Return the overrides of one `--multirun`, less the mappings whose keys `others` set:
        Hydra would merge both mappings, and so the values of the command line would not win."""
        keys = set(map(key_of, others))
        kept = [text for text in self.fixed if not (is_mapping(text) and key_of(text) in keys)]
        # Groups first: the value of a key of an algorithm belongs to that algorithm.
        several = any(len(values) > 1 for key, values in self.axes.items() if "." not in key)
        grids = [grid(key, values, several) for key, values in self.axes.items()]
        groups = [text for text in [*grids, *kept] if "." not in text.split("=")[0]]
        return groups + [text for text in [*grids, *kept] if text not in groups]

    def fixed_in(
        self, given: set[str], shared: Collection[str] | None = None
    ) -> tuple[int, int] | None:
        """Return how many of its fixed overrides a run has (all, literally); None where one is
        missing.

        given: the overrides of the run. shared: those of all runs beside it, by which a fixed
        override may be replaced; a mapping may be replaced by any other one. None: all must be
        there literally.
        """
        missing = [text for text in self.fixed if text not in given]
        if missing and shared is None:
            return None
        others = {key_of(each) for each in given if each in (shared or ()) and not is_mapping(each)}
        mappings = {key_of(each) for each in given if is_mapping(each)}
        if any(key_of(text) not in (mappings if is_mapping(text) else others) for text in missing):
            return None
        return len(self.fixed), len(self.fixed) - len(missing)


def grid(key: str, values: Collection[str], several: bool) -> str:
    """Return the override of a key that is to have each of these values; several: a group has
    several options.

    Hydra composes once with all that has one value, before there are jobs: without the option to
    which a key may belong. So such a value is written as a choice of one.
    """
    text = ",".join(values)
    return (
        f"{key}=choice({text})" if several and "." in key and len(values) == 1 else f"{key}={text}"
    )


def is_mapping(override: str) -> bool:
    """Return whether an override has a mapping as its value."""
    return override.partition("=")[2].startswith("{")


@dataclass(frozen=True)
class Sweep:
    name: str
    title: str
    note: str
    paper: str  # as in tables.csv; empty: of none
    table: str
    blocks: tuple[Block, ...]
    rule: Rule = field(default_factory=Rule)
    # sweep with another reading of cells of the same table -> its label
    readings: Fields = field(default_factory=dict)
    claims: str = ""  # the table of tables.csv with what the paper's text says of this one
    pictures: tuple[Mapping[str, Any], ...] = ()  # of the paper: see fedexp.papers.paper_figures
    choose: str = ""  # "best": it is a search, and its report names the best value of each key
    ranks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Measure -> values of summary.json, of which the first that a run has counts: it is a
    benchmark, and its report ranks the methods (fedexp.analysis.benchmark)."""

    @property
    def common(self) -> list[str]:
        """Return the overrides of all its jobs that give the rule its view; a run without them is
        still one of the sweep."""
        return [] if self.rule.view == "plain" else [f"test_views=[plain,{self.rule.view}]"]


def load_sweep(name: str, folders: Sequence[Path]) -> Sweep:
    """Load a named sweep; raise ConfigError where there is none of this name, or its file is not
    one."""
    if is_path(name):
        raise ConfigError(f"sweep={name}: is a path; must be the name of a sweep")
    sweeps = read_sweeps(folders)
    if name not in sweeps:
        raise ConfigError(
            f"sweep={name}: no such sweep{nearest(name, sorted(sweeps))}; sweeps:"
            f" {', '.join(sorted(sweeps))}"
        )
    path, spec = sweeps[name]
    try:
        if isinstance(spec, Exception):
            raise spec
        measures = tuple(spec.get("measures", ()))
        readings = spec.get("readings", {}).items()
        return Sweep(
            name=name,
            title=str(spec.get("title", name)),
            note=str(spec.get("note", "")),
            paper=str(spec.get("paper", "")),
            table=str(spec.get("table", "")),
            blocks=tuple(read_block(block, measures) for block in spec["blocks"]),
            rule=read_rule(spec.get("report", {})),
            readings={str(other): str(label or "") for other, label in readings},
            claims=str(spec.get("claims", "")),
            pictures=tuple(dict(node) for node in spec.get("pictures", ())),
            choose=str(spec.get("choose", "")),
            ranks={str(k): tuple(map(str, names)) for k, names in spec.get("ranks", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a sweep ({error!r}); see conf/sweep/fedntd.yaml") from error


def sweep_of(directory: Path) -> Sweep | None:
    """The named sweep of a directory; None for another."""
    try:
        return load_sweep(SweepDirectory(directory).name, [conf_directory()])
    except ConfigError:
        return None


def read_block(node: Mapping[str, Any], measures: tuple[Mapping[str, Any], ...]) -> Block:
    """measures: where the block has none."""
    axes = {
        str(key): {
            plain(value): {k: str(v) for k, v in fields.items()} for value, fields in values.items()
        }
        for key, values in node.items()
        if key not in ("with", "measures")
    }
    fixed = (str(text).partition("=") for text in node.get("with", ()))
    return Block(
        axes,
        tuple(f"{key}{equals}{rewritten(value)}" for key, equals, value in fixed),
        tuple(node.get("measures", measures)),
    )


def plain(value: object) -> str:
    """Return a yaml scalar as Hydra's sweeper writes it."""
    return str(value).lower() if isinstance(value, bool) else rewritten(str(value))


def launches(sweep: Sweep, overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each `--multirun` that the sweep consists of.

    overrides: of the command line. For a key that is an axis, they restrict it to those of its
    values that are given; values that the paper does not have run on the other axes of the first
    block. Any other key is set in all runs.
    """
    keys = {key for block in sweep.blocks for key in block.axes}
    given = {
        key: [rewritten(each) for each in value.split(",")]
        for key, _, value in (o.partition("=") for o in overrides)
        if key in keys
    }
    others = [o for o in overrides if o.partition("=")[0] not in given]
    others += [
        o
        for o in sweep.common
        if not any(each.startswith(o.partition("[")[0]) for each in overrides)
    ]
    lists = [
        [*block.arguments(others), *others]
        for old in sweep.blocks
        if (block := old.restricted(given))
    ]
    for key, values in given.items():
        new = [v for v in values if not any(block.has(key, v) for block in sweep.blocks)]
        first = next(block for block in sweep.blocks if key in block.axes)
        others_given = {k: v for k, v in given.items() if k != key}
        rest = Block({k: v for k, v in first.axes.items() if k != key}, (), ()).restricted(
            others_given
        )
        if new and rest:
            lists.append([*rest.arguments(), f"{key}={','.join(new)}", *others])
    if not lists:
        raise ConfigError(
            f"sweep={sweep.name}: no run has all of"
            f" {', '.join(f'{k}={v}' for k, v in given.items())}"
        )
    return lists


def cell_of(
    sweep: Sweep, overrides: Sequence[str], shared: Collection[str] | None = None
) -> tuple[Block, dict[str, str]] | None:
    """Return (block, fields of the printed cells) of a run by the overrides it was started with;
    None: not a run of it. shared: where the overrides of all runs are given, a run counts too whose
    fixed overrides these replace: it is no reproduction, but has a place in a picture."""
    given = set(map(as_written, overrides))
    shared = None if shared is None else set(map(as_written, shared))
    best = most_specific(sweep, given, shared)
    for block in sweep.blocks:
        if (fixed := block.fixed_in(given, shared)) is None:
            continue
        values = [
            [value for value in axis if f"{key}={value}" in given]
            for key, axis in block.axes.items()
        ]
        if all(len(found) == 1 for found in values):
            combination = [(key, found[0]) for key, found in zip(block.axes, values, strict=True)]
            if (len(combination) + fixed[0], fixed[1]) >= best:
                return block, block.fields(combination)
    return None


def as_written(override: str) -> str:
    """Return an override that Hydra's sweeper has noted as it stands in a sweep's file, once that
    is read: without the backslashes of an interpolation, truth values in small letters, numbers as
    Python writes them."""
    key, equals, value = override.replace("\\{", "{").replace("\\}", "}").partition("=")
    return f"{key}{equals}{value.lower() if value in ('True', 'False') else rewritten(value)}"


def rewritten(value: str) -> str:
    """Return a number that is not whole as Python and Hydra's sweeper write it (1e-3 as 0.001), all
    else as it is."""
    return (
        str(float(value))
        if NUMBER.fullmatch(value) and not value.lstrip("+-").isdecimal()
        else value
    )


def most_specific(sweep: Sweep, given: set[str], shared: Collection[str] | None) -> tuple[int, int]:
    """Return the number of overrides that the most specific matching block accounts for: (all,
    those that the run has literally)."""
    sizes = [(0, 0)]
    for block in sweep.blocks:
        matches = all(
            any(f"{key}={value}" in given for value in axis) for key, axis in block.axes.items()
        )
        if matches and (fixed := block.fixed_in(given, shared)):
            sizes.append((len(block.axes) + fixed[0], fixed[1]))
    return max(sizes)


def protocol_of(sweep: Sweep, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change the protocol of the printed table, so that the run is no
    reproduction of it."""
    keys = {key for block in sweep.blocks for key in block.axes}
    fixed = {text for block in sweep.blocks for text in block.fixed}
    harmless = (
        "seed",
        "seeds.",
        "tracker",
        "hardware",
        "figures",
        "data_dir",
        "checkpoint_interval",
        "profile",
        "forgetting_metric",
        "targets",
        "target_fractions",
        "hydra",
        "dataset.url",
        "test_views",
        "evaluate",
        "keep_models",
        "keep_local_models",
        "objective",
    )
    return [
        text
        for text in map(as_written, overrides)
        if (key := text.partition("=")[0].lstrip("+~")) not in keys
        and text not in fixed
        and not key.startswith(harmless)
    ]


def expand(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Yield every job of a multirun, as Hydra's basic sweeper makes them."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides=list(overrides)):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line or f"{key}={override.get_value_element_as_str()}"])
    for job in itertools.product(*choices):
        yield list(job)
