"""Read the keys and values of overrides, which have the form `key=value`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

# last parts of the keys of paths that a run reads or writes outside its directory
FILES = ("data_dir", "root", "path", "weights", "style", "logdir")
DIRECTORIES = ("hydra.run.dir", "hydra.sweep.dir", "resume")  # keys of directories of runs
OF_COMMAND = ("resume", "accept_changed_data")  # keys that apply to one command only
# texts that Hydra's grammar reads without quotes; NAME: the same with letters of any alphabet
UNQUOTED = re.compile(r"[\w./:~+-]+", re.ASCII)
NAME = re.compile(UNQUOTED.pattern)
FORCED = "++"  # begins an override of a key that the composed configuration need not have


def key_of(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def quoted(text: str) -> str:
    """Quote a value for Hydra's grammar. Interpolations in the value are still resolved."""
    return QuotedString(text, Quote.single).with_quotes()


def with_quoted_names(override: str) -> str:
    """Quote a name that Hydra's grammar rejects or reads as another one.

    These are names with letters such as é or 数, as in `resume=été`, and names of files that are
    also numbers: `data_dir=2024_05` would be the directory 202405.
    """
    key, _, value = override.partition("=")
    has_letters = NAME.fullmatch(value) and not UNQUOTED.fullmatch(value)
    return f"{key}={quoted(value)}" if has_letters or is_numeric_path(override) else override


def is_numeric_path(override: str) -> bool:
    """Return whether an override gives a path as a number that is written in another form."""
    key = key_of(override)
    if key not in DIRECTORIES and key.rpartition(".")[2] not in FILES:
        return False
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    value = None if parsed.is_sweep_override() else parsed.value()
    return type(value) in (int, float) and str(value) != override.partition("=")[2]


def typed_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that the user typed, without those read from a run directory.

    overrides: all overrides. Those from the run directory come before `resume=`.
    """
    places = [number for number, text in enumerate(overrides) if key_of(text) == "resume"]
    return list(overrides[places[-1] + 1 :] if places else overrides)


def assigned_values(text: str) -> list[tuple[str, str]]:
    """Return (key, value) for each value that an override sets.

    Mappings are flattened: `local={lr: 1}` gives the key `local.lr`. The list is empty for a sweep
    and for an override that Hydra cannot parse.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return []
    if override.is_sweep_override():
        return []
    found = leaves(override.value(), override.key_or_group)
    return [(key, str(value)) for key, value in found]


def leaves(node: object, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for nested mappings and lists.

    All values in a list have the key of the list.
    """
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from leaves(value, key)
    else:
        yield key, node


def is_path(name: str) -> bool:
    """Return whether a name may lead outside the directory of its group."""
    return (
        name.startswith(("/", "\\", "~"))
        or ".." in re.split(r"[/\\]", name)
        or "@" in name
        or "://" in name
    )


def with_new_paths(node: Any, change: Callable[[str], str], key: str = "") -> Any:
    """Return a node in which paths to data are replaced by the results of `change`."""
    if isinstance(node, list):
        return [with_new_paths(each, change, key) for each in node]
    if isinstance(node, Mapping):
        return {name: with_new_paths(value, change, name) for name, value in node.items()}
    return change(node) if key in FILES and isinstance(node, str) else node


def with_new_folder(node: Any, old: str, new: str) -> Any:
    """Return a node in which paths to data that begin with `old` begin with `new`.

    With old=".", other relative names, such as weights=DEFAULT, stay as they are.
    """
    old = old.rstrip("/")

    def move(path: str) -> str:
        inside = f"{path}/".startswith(f"{old}/")
        return str(Path(new) / path[len(old) :].lstrip("/")) if inside else path

    return with_new_paths(node, move)
