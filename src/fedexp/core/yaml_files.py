"""Yaml of any origin: plain values, and no more of them than the file has
room for.

A file of a few lines whose aliases refer to aliases can mean billions of values (a `billion laughs`
file). It loads at once and then keeps whoever walks through it busy for ever.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fedexp.core.errors import ConfigError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LIMIT = 10_000  # values of a file with aliases, once these are written out
DEEPEST = 200  # lists and mappings within each other; deeper ones may end the process


class TooManyAliases(ValueError):
    """Aliases stand for more than LIMIT values."""


def load(text: str) -> Any:
    """Return the values. Raises ValueError for a text that is not yaml, is nested too deeply, or
    has aliases for more than LIMIT values."""
    try:
        check(text)
        return yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def check(text: str) -> None:
    """Raise ValueError for values that are nested too deeply, or too many once aliases are written
    out. Nothing is built: the parser only tells where values begin and end."""
    total = 0.0
    begun: list[tuple[str | None, float]] = []  # anchor of each open node, values before it
    sizes: dict[str | None, float] = {}  # by anchor; without limit while its node is open
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            total += sizes.get(event.anchor, 0)
            if total > LIMIT:
                raise TooManyAliases(f"its aliases stand for more than {LIMIT:,} values")
        elif isinstance(event, yaml.NodeEvent):
            sizes[event.anchor] = 1
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, total))
                sizes[event.anchor] = math.inf
            total += 1
        if len(begun) > DEEPEST:
            raise ValueError("it is nested too deeply")


def check_directories(folders: Iterable[Path]) -> None:
    """Raise ConfigError for what would stop or hang everybody who reads the yaml files of a user's
    directories."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.yaml")):
        if path.is_dir():
            continue
        if not path.is_file():
            raise ConfigError(f"{path}: is not a file (a link to nothing, or a pipe)")
        try:
            load(path.read_text(encoding="utf-8"))
        except TooManyAliases as error:
            raise ConfigError(f"{path}: {error}") from error
        except (OSError, ValueError):
            continue  # who chooses this option will be told
