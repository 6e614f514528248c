"""Yaml that somebody else may have written: plain values, and no more of them than the file has
room for.

A file of a few lines whose aliases refer to aliases stands for billions of values (a `billion
laughs` file). It loads at once and then keeps whoever walks through it busy for ever.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fedexp.core.errors import ConfigError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LIMIT = 10_000  # values that a file with aliases may stand for
DEEPEST = 200  # brackets within each other
BRACKET = re.compile(r"[][{}]")
DEEP = re.compile(r"^[-? \t]{200}", re.MULTILINE)


class TooManyAliases(ValueError):
    """Aliases stand for more than LIMIT values."""


def load(text: str) -> Any:
    """Return the values. Raises ValueError for a text that is no yaml, is nested so deeply that a
    parser may end the process, or whose aliases stand for more than LIMIT values."""
    if depth(text) > DEEPEST or DEEP.search(text):
        raise ValueError("it is nested too deeply")
    try:
        if "&" in text and "*" in text and size(yaml.compose(text, Loader=LOADER), {}) > LIMIT:
            raise TooManyAliases(f"its aliases stand for more than {LIMIT:,} values")
        return yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def depth(text: str) -> int:
    """Return how many brackets stand within each other at most; the parser needs seconds for
    thousands of them."""
    level = deepest = 0
    for found in BRACKET.finditer(text):
        level = level + 1 if found[0] in "[{" else max(level - 1, 0)
        deepest = max(deepest, level)
    return deepest


def size(node: yaml.Node | None, sizes: dict[int, float]) -> float:
    """Return the number of values once the aliases are written out; without limit for one that
    contains itself."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = float("inf")  # while it is being counted
        children = (
            [child for pair in node.value for child in pair]
            if isinstance(node, yaml.MappingNode)
            else node.value
        )
        sizes[id(node)] = 1 + sum(size(child, sizes) for child in children)
    return sizes[id(node)]


def check_directories(folders: Iterable[Path]) -> None:
    """Raise ConfigError for what would stop or hang everybody who reads the yaml files of a user's
    directories."""
    for path in sorted(path for folder in folders for path in folder.rglob("*.yaml")):
        if not path.is_file():
            if path.is_dir():
                continue
            raise ConfigError(f"{path}: is not a file (a link to nothing, or a pipe)")
        try:
            load(path.read_text(encoding="utf-8"))
        except TooManyAliases as error:
            raise ConfigError(f"{path}: {error}") from error
        except (OSError, ValueError):
            continue  # who chooses this option will be told
