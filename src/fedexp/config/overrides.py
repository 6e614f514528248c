"""The names in overrides: an option of a group is a name, not a path to a file anywhere on the
machine."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError


def check_names(overrides: Sequence[str], groups: Collection[str]) -> None:
    """Raise ConfigError for an override that leads out of the configuration directories, or puts an
    option of a group into a node of Hydra's, where it would be called."""
    from hydra.errors import HydraException

    for text in overrides:
        try:
            override = parsed(text)
        except HydraException:
            continue  # Hydra will say what is wrong with it
        if override.package is not None and re.split(r"[.:]", override.package)[0].strip() in (
            "hydra",
            "_global_",
            "",
        ):
            raise ConfigError(
                f"{text}: an option cannot be put there; a group takes the name of one of its"
                " options"
            )
        if is_group(override.key_or_group, groups) and (
            wrong := [n for n in names_in(override) if is_path(n)]
        ):
            raise ConfigError(
                f"{text}: {wrong[0]} is a path; a group takes the name of one of its options"
            )


def check_stored(overrides: Sequence[str], groups: Collection[str], source: object) -> None:
    """Check the overrides of a directory that may be somebody else's like `check_names`: Hydra's
    own settings, flags, packages and interpolations of names are refused too. Raises
    ConfigError."""
    from hydra.errors import HydraException

    for text in overrides:
        try:
            override = parsed(text)
        except HydraException as error:
            raise ConfigError(f"{source}: {text} is not the override of a run") from error
        key = override.key_or_group
        names = names_in(override) if is_group(key, groups) else []
        outside = any(is_path(name) or "${" in name for name in names)
        if (
            text.startswith("-")
            or key.startswith("hydra")
            or override.package is not None
            or outside
        ):
            raise ConfigError(f"{source}: {text} is not the override of a run")


def parsed(text: str) -> Any:
    """Parse overrides as Hydra will read them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


def is_group(key: str, groups: Collection[str]) -> bool:
    return "/" in key or key in groups


def names_in(override: Any) -> list[str]:
    """Return the options that an override of a group asks for, those of a sweep and of a list
    too."""
    from hydra.core.override_parser.types import Glob

    if override.is_delete() or isinstance(override._value, Glob):  # a glob only finds what is there
        return []
    if override.is_sweep_override():
        return [name.strip("'\"") for name in override.sweep_string_iterator()]
    return list(texts(override.value()))


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from texts(each)
    else:
        yield str(value)


def is_path(name: str) -> bool:
    """Return whether a name may lead out of the directory of its group."""
    return (
        name.startswith(("/", "\\", "~"))
        or ".." in re.split(r"[/\\]", name)
        or "@" in name
        or "://" in name
    )


def read_overrides(stored: Path, groups: Collection[str]) -> list[str]:
    """Read the overrides that a run was started with. The directory may be somebody else's: it says
    what to run, not where Hydra finds code and configuration."""
    import yaml

    from fedexp.config.overrides import check_stored
    from fedexp.core import yaml_files

    try:
        before = yaml_files.load(stored.read_text(encoding="utf-8")) or []
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{stored}: cannot be read ({error})") from error
    if not isinstance(before, list) or not all(isinstance(override, str) for override in before):
        raise ConfigError(f"{stored}: must be a list of overrides")
    check_stored(before, groups, stored)
    return before


def key_of(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")
