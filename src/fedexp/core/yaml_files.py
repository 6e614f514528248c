"""Read yaml files from untrusted sources as plain values, with limits on nesting and aliases.

A few lines with aliases of aliases can represent billions of values (the "billion laughs" attack).
Such a file loads at once, but code that visits all of its values never ends.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fedexp.core.errors import ConfigError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LIMIT = 10_000  # maximum number of values in a file after its aliases are expanded
DEEPEST = 200  # maximum depth of nested lists and mappings; deeper ones may crash the process


class TooManyAliases(ValueError):
    """The file's aliases expand to more than LIMIT values."""


def load(text: str) -> Any:
    """Parse a yaml text and return its plain values.

    Raises ValueError if the text is not valid yaml, is nested too deeply, or has aliases that
    expand to more than LIMIT values.
    """
    try:
        check(text)
        return yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def dump(value: Any) -> str:
    """Return a value as a yaml text, with keys in their order."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def check(text: str) -> None:
    """Raise ValueError if a text is nested too deeply or its aliases expand to too many values.

    Only the parser's events are read, so no values are built.
    """
    total = 0.0
    begun: list[tuple[str | None, float]] = []  # open nodes: (anchor, number of values before)
    sizes: dict[str | None, float] = {}  # anchor -> number of values; infinite while open
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            total += sizes.get(event.anchor, 0)
            if total > LIMIT:
                raise TooManyAliases(f"its aliases expand to more than {LIMIT:,} values")
        elif isinstance(event, yaml.NodeEvent):
            sizes[event.anchor] = 1
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, total))
                sizes[event.anchor] = math.inf
            total += 1
        if len(begun) > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def check_directories(folders: Iterable[Path]) -> None:
    """Raise ConfigError if one of the user's yaml files would make every command fail or hang."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.yaml")):
        if path.is_dir():
            continue
        if not path.is_file():
            raise ConfigError(f"{path}: is not a file (a broken link or a pipe)")
        try:
            load(path.read_text(encoding="utf-8"))
        except TooManyAliases as error:
            raise ConfigError(f"{path}: {error}") from error
        except (OSError, ValueError):
            continue  # the error is reported if the option is used
