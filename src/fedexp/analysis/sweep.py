"""Named sweeps. A file in `conf/sweep` defines the runs that reproduce a published table or figure.

A sweep is a list of blocks, and each block is a grid. Its runs are all combinations of its axes'
values, with the overrides `with`. An axis is `experiment`, `algorithm` or any other key of the
configuration.

Each value lists the fields of the published cells that it belongs to (columns of
published/tables.csv). `measures` maps the published metrics to the measured values that are
compared with them. Further keys of the file:

- `report`: the rule by which the paper reports accuracy and forgetting (fedexp.analysis.rules)
- `readings`: sweeps that interpret cells of the same table differently (fedexp.papers.readings)
- `claims`: the statements of the paper's text about the table (fedexp.papers.readings)
- `pictures`: the paper's figures that can be drawn from the runs (fedexp.papers.paper_figures)
- `choose: best`: the sweep is a search (fedexp.papers.aggregate)
- `ranks`: the sweep is a benchmark (fedexp.analysis.benchmark) with the fields `method` and
  `setting`
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

    axes: Mapping[str, Mapping[str, Fields]]  # key -> value -> fields of the published cells
    fixed: tuple[str, ...]  # overrides of all runs
    measures: tuple[Mapping[str, Any], ...]

    def combinations(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """Yield each run as (key, value) pairs, one per axis."""
        choices = [[(key, value) for value in values] for key, values in self.axes.items()]
        yield from itertools.product(*choices)

    def fields(self, combination: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Return the fields of the published cells that a run belongs to."""
        found: dict[str, str] = {}
        for key, value in combination:
            found |= self.axes[key][value]
        return found

    def restricted(self, given: Mapping[str, Sequence[str]]) -> "Block | None":
        """Return the block restricted to the values that the command line gives.

        given: key -> values. An axis keeps its values that are in `given`. Return None if an axis
        keeps no value, or if a key is neither an axis nor fixed to one of its given values.
        """
        axes = dict(self.axes)
        if any(self.fixed_value(key) not in given[key] for key in given.keys() - axes.keys()):
            return None
        for key in axes.keys() & given.keys():
            axes[key] = {value: axes[key][value] for value in given[key] if value in axes[key]}
            if not axes[key]:
                return None
        return Block(axes, self.fixed, self.measures)

    def fixed_value(self, key: str) -> str | None:
        """Return the value that the fixed overrides set for a key; None if they do not set it."""
        return next((text.partition("=")[2] for text in self.fixed if key_of(text) == key), None)

    def has(self, key: str, value: str) -> bool:
        """Return whether any of the block's runs has this value for the key."""
        return value in self.axes.get(key, ()) or value == self.fixed_value(key)

    def arguments(self, others: Sequence[str] = ()) -> list[str]:
        """Return the overrides of one `--multirun` command that starts the block's runs.

        Fixed mappings whose keys are in `others` are omitted: Hydra would merge both mappings, and
        the command line's values would not win.
        """
        keys = set(map(key_of, others))
        kept = [text for text in self.fixed if not (is_mapping(text) and key_of(text) in keys)]
        # Groups first: a key such as algorithm.beta belongs to the option of its group.
        several = any(len(values) > 1 for key, values in self.axes.items() if "." not in key)
        grids = [grid(key, values, several) for key, values in self.axes.items()]
        groups = [text for text in [*grids, *kept] if "." not in text.split("=")[0]]
        return groups + [text for text in [*grids, *kept] if text not in groups]

    def fixed_in(
        self, given: set[str], shared: Collection[str] | None = None
    ) -> tuple[int, int] | None:
        """Return (number of fixed overrides, number that the run has literally).

        Return None if a fixed override is missing from the run.

        given: the run's overrides. shared: overrides that all compared runs share; a fixed override
        may be replaced by one of them with the same key, and a fixed mapping by any other mapping
        for the same key. None: the run must have every fixed override literally.
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
    """Return the override that sweeps a key over these values.

    several: whether any group has several options. Hydra composes single values once for all jobs,
    before any job's option of a group is known, and the key may not exist in that composition. A
    single value is therefore written as a choice with one member.
    """
    text = ",".join(values)
    return (
        f"{key}=choice({text})" if several and "." in key and len(values) == 1 else f"{key}={text}"
    )


def is_mapping(override: str) -> bool:
    """Return whether the value of an override is a mapping."""
    return override.partition("=")[2].startswith("{")


@dataclass(frozen=True)
class Sweep:
    name: str
    title: str
    note: str
    paper: str  # as in tables.csv; empty if the sweep reproduces no paper
    table: str
    blocks: tuple[Block, ...]
    rule: Rule = field(default_factory=Rule)
    # name of a sweep that interprets cells of the same table differently -> its label
    readings: Fields = field(default_factory=dict)
    claims: str = ""  # table of tables.csv with the statements of the paper's text about this one
    pictures: tuple[Mapping[str, Any], ...] = ()  # of the paper, see fedexp.papers.paper_figures
    choose: str = ""  # "best" for a search, whose report names the best value of each key
    ranks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Measure -> keys of summary.json, for a benchmark (fedexp.analysis.benchmark). Its report
    ranks the methods by the first of these values that a run has."""

    @property
    def common(self) -> list[str]:
        """Return the overrides that test the view of the reporting rule, for all jobs.

        A run without them still belongs to the sweep.
        """
        return [] if self.rule.view == "plain" else [f"test_views=[plain,{self.rule.view}]"]


def load_sweep(name: str, folders: Sequence[Path]) -> Sweep:
    """Load a named sweep. Raises ConfigError if no sweep has this name, or if its file is
    invalid."""
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
    """Return the named sweep that a directory belongs to; None for any other directory."""
    try:
        return load_sweep(SweepDirectory(directory).name, [conf_directory()])
    except ConfigError:
        return None


def read_block(node: Mapping[str, Any], measures: tuple[Mapping[str, Any], ...]) -> Block:
    """Return a block from its node of a sweep file. measures: the default if the block sets
    none."""
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
    """Return a YAML scalar as Hydra's sweeper writes it."""
    return str(value).lower() if isinstance(value, bool) else rewritten(str(value))


def launches(sweep: Sweep, overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each `--multirun` command that runs the sweep.

    overrides: from the command line. A key that is an axis restricts the axis to the given values;
    given values that no block has are run with the other axes of the first block that has the key.
    Any other key is set in all runs. Raises ConfigError if no run matches.
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
    """Return (block, fields of the published cells) of a run; None if the run is not in the sweep.

    overrides: the overrides that the run was started with. shared: the overrides that all runs
    share; if given, they may replace a block's fixed overrides. A run with such replacements does
    not reproduce the cell, but is shown in pictures.
    """
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
    """Return an override of a run in the form that sweep files have.

    Hydra's sweeper escapes braces, capitalises truth values and rewrites numbers. This function
    removes the backslashes, lowercases truth values and formats numbers as Python does.
    """
    key, equals, value = override.replace("\\{", "{").replace("\\}", "}").partition("=")
    return f"{key}{equals}{value.lower() if value in ('True', 'False') else rewritten(value)}"


def rewritten(value: str) -> str:
    """Return a decimal number as Python and Hydra's sweeper format it, such as 1e-3 as 0.001.

    Any other text is returned unchanged.
    """
    return (
        str(float(value))
        if NUMBER.fullmatch(value) and not value.lstrip("+-").isdecimal()
        else value
    )


def most_specific(sweep: Sweep, given: set[str], shared: Collection[str] | None) -> tuple[int, int]:
    """Return (all, literal) overrides that the most specific matching block accounts for.

    Both are counts; `literal` counts the fixed overrides that the run has literally.
    """
    sizes = [(0, 0)]
    for block in sweep.blocks:
        matches = all(
            any(f"{key}={value}" in given for value in axis) for key, axis in block.axes.items()
        )
        if matches and (fixed := block.fixed_in(given, shared)):
            sizes.append((len(block.axes) + fixed[0], fixed[1]))
    return max(sizes)


def protocol_of(sweep: Sweep, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change the published protocol. A run with any of them is not a
    reproduction."""
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
    """Yield the overrides of each job of a multirun, as Hydra's basic sweeper does."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides=list(overrides)):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line or f"{key}={override.get_value_element_as_str()}"])
    for job in itertools.product(*choices):
        yield list(job)
