"""Check the names and values in overrides.

An option of a group must be given by name, since a path could lead to any file on the machine. The
overrides stored in a run directory may come from another person, so they must not make Hydra run
code.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError

# ${a.key} refers to a configuration key; ${name:...} calls a resolver, which may read the
# environment
REFERENCE = re.compile(r"\$\{[\w.]+\}")
# last parts of the keys that choose where a tracker sends or writes a run
DESTINATIONS = {"entity", "project", "store", "logdir"}
OF_COMMAND = ("resume", "accept_changed_data")  # keys that apply to one command only


def check_names(overrides: Sequence[str], groups: Collection[str]) -> None:
    """Raise ConfigError for an override that leads outside the configuration directories.

    An override that would put a group's option into the node `hydra` is also rejected, because
    Hydra would instantiate the option there.
    """
    for text in overrides:
        override = parse_override(text)
        if override is None:
            continue  # Hydra reports the error
        if override.package is not None and re.split(r"[.:]", override.package)[0].strip() in (
            "hydra",
            "_global_",
            "",
        ):
            raise ConfigError(
                f"{text}: the package after @ is not allowed; give only the group and the name of"
                " one of its options"
            )
        names = chosen_options(override) if is_group(override.key_or_group, groups) else []
        if wrong := [name for name in names if is_path(name)]:
            raise ConfigError(
                f"{text}: {wrong[0]} is a path; give the name of one of the group's options"
            )


def read_stored(path: Path, groups: Collection[str], typed: Collection[str]) -> list[str]:
    """Read the overrides that a run was started with, except for the keys in `typed`.

    The file may come from another person. So the overrides may choose what to run, but not where
    Hydra finds code and configuration. An interpolation `${...}` may refer to a configuration key,
    but may not call a resolver. Raises ConfigError for any other override, or if the file cannot be
    read.
    """
    from fedexp.rundir import contents  # imported late, since it imports numpy

    stored = contents.read_overrides(path)
    kept = [text for text in stored if key_of(text) not in (*OF_COMMAND, *typed)]
    if "tracker" in typed:  # the keys of another tracker differ
        kept = [text for text in kept if not key_of(text).startswith("tracker.")]
    for text in kept:
        if not is_of_a_run(text, groups):
            raise ConfigError(f"{path}: {text} is not an override for a single run")
        if any("${" in REFERENCE.sub("", f"{key}={value}") for key, value in assigned_values(text)):
            raise ConfigError(
                f"{path}: {text} calls a resolver, so it could read the environment; to allow"
                f" this, give {key_of(text)} on the command line"
            )
    return kept


def is_of_a_run(text: str, groups: Collection[str]) -> bool:
    """Return whether an override only sets values or selects options for a single run."""
    override = parse_override(text)
    if override is None or override.package is not None or override.is_sweep_override():
        return False
    key = override.key_or_group
    names = chosen_options(override) if is_group(key, groups) else []
    outside = text.startswith("-") or key.startswith("hydra")
    return not outside and not any(is_path(name) or "${" in name for name in names)


def typed_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that the user typed, without those read from a run directory.

    overrides: all overrides. Those from the run directory come before `resume=`.
    """
    places = [number for number, text in enumerate(overrides) if key_of(text) == "resume"]
    return list(overrides[places[-1] + 1 :] if places else overrides)


def destinations(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that choose where a tracker sends or writes a run."""

    def names_one(text: str) -> bool:
        return any(key.rpartition(".")[2] in DESTINATIONS for key, _ in assigned_values(text))

    return [text for text in overrides if names_one(text)]


def assigned_values(text: str) -> list[tuple[str, str]]:
    """Return (key, value) for each value that an override sets.

    Mappings are flattened: `local={lr: 1}` gives the key `local.lr`. The list is empty for a sweep
    and for an override that Hydra cannot parse.
    """
    override = parse_override(text)
    if override is None or override.is_sweep_override():
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


def parse_override(text: str) -> Any:
    """Parse an override with Hydra's parser. Return None if the parser fails."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def is_sweep(text: str) -> bool:
    """Return whether an override gives several values, such as seed=0,1."""
    override = parse_override(text)
    return override is not None and bool(override.is_sweep_override())


def is_group(key: str, groups: Collection[str]) -> bool:
    return "/" in key or key in groups


def chosen_options(override: Any) -> list[str]:
    """Return the options that a group's override chooses, including those of a sweep or list."""
    from hydra.core.override_parser.types import Glob

    if override.is_delete() or isinstance(
        override._value, Glob
    ):  # a glob only finds options that exist
        return []
    if override.is_sweep_override():
        return [name.strip("'\"") for name in override.sweep_string_iterator()]
    return [str(value) for _, value in leaves(override.value())]


def is_path(name: str) -> bool:
    """Return whether a name may lead outside the directory of its group."""
    return (
        name.startswith(("/", "\\", "~"))
        or ".." in re.split(r"[/\\]", name)
        or "@" in name
        or "://" in name
    )


def key_of(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")
