"""Named sweeps, which the files in `conf/sweep` define.

A sweep is a list of blocks. Each block is a grid: its runs are all combinations of the values of
its axes. All runs of a block have the overrides in `with`. An axis is `experiment`, `algorithm` or
any other key of the configuration.

A sweep's file may also have these keys:

- `title`: what the sweep is for
- `also`: overrides of all runs, unless the command line sets the same key
- `finish`: the full name of a function to call with the sweep's directory after the report
- `choose: best`: the sweep is a search; its report names the best value of each key

All other keys, and the names below the value of an axis, are for other packages
(`NamedSweep.content`).
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser

from fedexp.config.options import read_sweeps
from fedexp.config.overrides import is_path, key_of
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.jobs import normalise, normalise_value
from fedexp.rundir.sweeps import sweep_name

Fields = Mapping[str, str]  # name -> value, such as {method: FedAvg}
Known = Mapping[tuple[str, str], Collection[str]]  # (method, key) -> values
METHOD = "algorithm"  # the axis of methods


@dataclass(frozen=True)
class Block:
    """A grid of runs: all combinations of the values of its axes."""

    axes: Mapping[str, Mapping[str, Fields]]  # key -> value -> fields
    fixed: tuple[str, ...]  # overrides that all runs have

    def combinations(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """Yield each run as (key, value) pairs, one per axis."""
        choices = [[(key, value) for value in values] for key, values in self.axes.items()]
        yield from itertools.product(*choices)

    def fields(self, combination: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return the fields of all values of a run."""
        found: dict[str, str] = {}
        for key, value in combination:
            found |= self.axes[key][value]
        return found

    def values_of(self, key: str) -> Collection[str]:
        """Return the values that the block sets for a key."""
        return self.axes.get(key) or [
            text for k, text in map(split_override, self.fixed) if k == key
        ]

    @property
    def methods(self) -> Collection[str]:
        """Return the block's algorithms, or an empty text if it does not set any."""
        return self.values_of(METHOD) or [""]

    def restricted(self, given: Mapping[str, Sequence[str]], known: Known) -> "Iterator[Block]":
        """Yield grids of the block's methods with the values that are given on the command line.

        A given value replaces those of an axis if the method has it in no block. given: key ->
        values. known: the values that the blocks of each method have.
        """
        found: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for method in self.methods:
            values = tuple(
                self.selected(key, wanted, known[method, key]) if key != METHOD else tuple(wanted)
                for key, wanted in given.items()
            )
            if all(values) and method in given.get(METHOD, self.methods):
                found.setdefault(values, []).append(method)
        for values, methods in found.items():
            axes = dict(self.axes)
            for key, kept in {**dict(zip(given, values, strict=True)), METHOD: methods}.items():
                if key in axes:
                    axes[key] = {value: axes[key].get(value, {}) for value in kept}
            yield Block(axes, self.fixed)

    def selected(self, key: str, wanted: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
        """Return the wanted values of a key that the block has, and new ones if it is an axis."""
        own = [value for value in self.values_of(key) if value in wanted]
        return (*own, *(value for value in wanted if key in self.axes and value not in known))

    def has_options(self, group: str) -> bool:
        """Return whether the block sets an option of a group, such as `algorithm.mu`."""
        keys = [*self.axes, *map(key_of, self.fixed)]
        return any(key.startswith(f"{group}.") for key in keys)

    def with_options(self, group: str, options: Sequence[str]) -> "Block":
        """Return the block with other options of a group, without the overrides of the former."""
        fixed = tuple(text for text in self.fixed if not key_of(text).startswith(f"{group}."))
        return Block({**self.axes, group: {option: {} for option in options}}, fixed)

    def arguments(self, others: Sequence[str] = ()) -> list[str]:
        """Return the overrides of a single `--multirun` command that starts the block's runs.

        others: the overrides of the user. If the user sets a key to a mapping, the block's own
        mapping for this key is left out, since Hydra would merge the two mappings.
        """
        keys = set(map(key_of, others))
        mappings = [text for text in self.fixed if split_override(text)[1].startswith("{")]
        kept = [text for text in self.fixed if text not in mappings or key_of(text) not in keys]
        every = [f"{key}={','.join(values)}" for key, values in self.axes.items()] + kept
        # Put groups first, since a key such as algorithm.beta belongs to the selected option.
        return [*sorted(every, key=lambda text: "." in split_override(text)[0]), *others]


def split_override(override: str) -> tuple[str, str]:
    """Return (key, value) of an override."""
    key, _, value = override.partition("=")
    return key, value


@dataclass(frozen=True, kw_only=True)
class NamedSweep:
    name: str
    title: str = ""
    blocks: tuple[Block, ...]
    also: tuple[str, ...] = ()  # see the description of the module
    choose: str = ""
    finish: str = ""
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of the sweep's file

    @property
    def keys(self) -> set[str]:
        """Return the keys of all axes."""
        return {key for block in self.blocks for key in block.axes}


SweepType = TypeVar("SweepType", bound=NamedSweep)


def read_sweep(name: str, content: Mapping[str, Any]) -> NamedSweep:
    """Read a sweep from the content of its file. Raises ValueError or the like if it is invalid."""
    return NamedSweep(
        name=name,
        title=str(content.get("title", "")),
        blocks=tuple(map(read_block, content["blocks"])),
        also=tuple(read_overrides(content, "also")),
        choose=str(content.get("choose", "")),
        finish=str(content.get("finish", "")),
        content=content,
    )


def load_named_sweep(
    name: str,
    folders: Sequence[Path],
    read: Callable[[str, Mapping[str, Any]], SweepType] = read_sweep,  # type: ignore[assignment]
) -> SweepType:
    """Load a named sweep.

    read: a function that makes the sweep from its name and the content of its file. Raises
    ConfigError if no sweep has this name, or if its file is invalid.
    """
    if is_path(name):
        raise ConfigError(f"sweep={name}: must be the name of a sweep, not a path")
    sweeps = read_sweeps(folders)
    if name not in sweeps:
        raise ConfigError(
            f"sweep={name}: no such sweep{nearest(name, sorted(sweeps))}; available:"
            f" {', '.join(sorted(sweeps))}"
        )
    path, content = sweeps[name]
    try:
        if isinstance(content, Exception):
            raise content
        return read(name, content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a valid sweep file ({error!r}); docs/guide/sweeps.md has an example"
        ) from error


def find_sweep(directory: Path, folders: Sequence[Path]) -> NamedSweep | None:
    """Return the named sweep that a directory belongs to, or None if it is in none of the folders.

    folders: directories with config groups.
    """
    try:
        name = sweep_name(directory)
        return None if name is None else load_named_sweep(name, folders)
    except ConfigError:
        return None


def read_block(node: Mapping[str, Any]) -> Block:
    """Read a block from a node of a sweep's file."""
    axes = {key: values for key, values in node.items() if key not in ("with", "measures")}
    return Block(
        {key: read_axis(values) for key, values in axes.items()},
        tuple(map(normalise, read_overrides(node, "with"))),
    )


def read_overrides(node: Mapping[str, Any], key: str) -> list[str]:
    """Return the overrides in a list of a sweep's file, which may be missing."""
    found = node.get(key, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{key}: must be a list of overrides, such as [algorithm=fedprox]")
    return found


def read_axis(values: Mapping[Any, Mapping[str, Any]]) -> dict[str, Fields]:
    """Return a dict that maps the values of an axis to their fields, as text in Hydra's form."""
    for value, fields in values.items():
        for name, text in fields.items():
            if isinstance(text, list | dict):
                raise ValueError(f"{value}: {name}: must be text or a number")
    return {
        normalise_value(str(value)): {name: str(text) for name, text in fields.items()}
        for value, fields in values.items()
    }


def launches(sweep: NamedSweep, overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each `--multirun` command that is needed to run the sweep.

    overrides: the overrides on the command line. If a key is an axis, its values select runs of the
    sweep, or replace the values of the axis, see `grids`. Any other key is set in all runs. Several
    commands may have the same run. Raises ConfigError if there is no run with one of the values.
    """
    keys = sweep.keys
    given = {key_of(text): values_of(text) for text in overrides if key_of(text) in keys}
    others = [text for text in overrides if split_override(text)[0] not in given]
    set_keys = set(map(key_of, others))
    others += [text for text in sweep.also if key_of(text) not in set_keys]
    blocks = list(grids(sweep.blocks, given))
    for key, values in given.items():
        if missing := [v for v in values if not any(v in b.values_of(key) for b in blocks)]:
            wanted = {key: missing} | {k: v for k, v in given.items() if k != key}
            texts = ", ".join(f"{key}={','.join(values)}" for key, values in wanted.items())
            raise ConfigError(f"sweep={sweep.name}: no run of this sweep has {texts}")
    return [block.arguments(others) for block in blocks]


def grids(blocks: Sequence[Block], given: Mapping[str, Sequence[str]]) -> Iterator[Block]:
    """Yield the grids of a sweep with the values that are given on the command line.

    A value that a method has in some block selects its runs in these blocks. So does a group's
    option, or a key without a dot, that any method has. Any other value replaces the values of the
    axis in all blocks of the method. A method that is in no block has the runs of the first method
    that has any, without the options of this method.

    given: key -> values.
    """
    new = {key: [v for v in given[key] if v not in all_values(blocks, key)] for key in given}
    for group, options in new.items():
        if group != METHOD and options and any(block.has_options(group) for block in blocks):
            like = [block for block in blocks if group in block.axes]
            blocks = [*blocks, *(block.with_options(group, options) for block in like)]
    known: dict[tuple[str, str], set[str]] = {}
    for block, key in itertools.product(blocks, given):
        values = block.values_of(key) if "." in key else all_values(blocks, key)
        for method in block.methods:
            known.setdefault((method, key), set()).update(values)
    for block in blocks:
        yield from block.restricted(given, known)
    for method in all_values(blocks, METHOD) if new.get(METHOD) else ():
        like = [block for block in blocks if method in block.axes.get(METHOD, ())]
        of_method = {**given, METHOD: [method]}
        found = [grid for block in like for grid in block.restricted(of_method, known)]
        yield from (grid.with_options(METHOD, new[METHOD]) for grid in found)
        if found:
            break


def all_values(blocks: Iterable[Block], key: str) -> list[str]:
    """Return the values that any block has for a key, in their order."""
    return list(dict.fromkeys(value for block in blocks for value in block.values_of(key)))


def values_of(override: str) -> list[str]:
    """Return the values that an override gives to its key in a multirun, such as `seed=0,1`."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    if not parsed.is_discrete_sweep():
        return [normalise_value(split_override(override)[1])]
    return [normalise_value(value) for value in parsed.sweep_string_iterator()]


def expand(overrides: Sequence[str]) -> Iterator[list[str]]:
    """Yield the overrides of each job in a multirun, as Hydra's basic sweeper does."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides=list(overrides)):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line or f"{key}={override.get_value_element_as_str()}"])
    for job in itertools.product(*choices):
        yield list(job)
