"""Decide which classes a configuration may name.

A `_target_` is imported and called, so a run directory from another person could run any code.
fedexp's classes are always allowed. Any other class must be named in a yaml file in a directory
that the user gives with --config-dir. The log reports such classes.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedexp.config.named import search_path
from fedexp.config.overrides import leaves
from fedexp.core import yaml_files
from fedexp.core.errors import ConfigError

OWN = "fedexp."  # prefix of the classes of fedexp
TARGET = "_target_"


def require_trusted(name: str, key: str) -> None:
    """Raise ConfigError if a class is outside fedexp and the user's yaml files do not name it."""
    if name.startswith(OWN) or find_naming_file(name):
        return
    raise ConfigError(
        f"{key}={name}: is not a fedexp class; name your own class in a yaml file, and pass the"
        " file's directory with --config-dir (in Python config_dir=), as in"
        " docs/guide/your_own_parts.md"
    )


def user_folders() -> list[Path]:
    """Return the directories that the user gave with --config-dir."""
    from fedexp.config.options import conf_directory

    return [each for each in search_path() if each.resolve() != conf_directory().resolve()]


def find_class(name: str, key: str) -> type:
    """Return the dataclass at a dotted path.

    Raises ConfigError if the class is not trusted, cannot be imported, or is not a dataclass.
    """
    require_trusted(str(name), key)
    module_name, _, class_name = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={name}: cannot be imported ({error})") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{key}={name}: must be a dataclass")
    return found


def describe_foreign_classes(values: Any) -> list[str]:
    """Return a sentence about each class outside fedexp that a checked configuration names.

    Each sentence gives the class's source file and the yaml file that names the class.
    """
    sentences = []
    for name in sorted({name for name in targets(values) if not name.startswith(OWN)}):
        try:
            source = inspect.getfile(find_class(name, "_target_"))
        except (TypeError, OSError):
            source = "an unknown file"
        sentences.append(
            f"class outside fedexp: {name} from {source}, named in {find_naming_file(name)}"
        )
    return sentences


def find_naming_file(name: str) -> Path | None:
    """Return the user's yaml file with a `_target_` that names a class, or None."""
    for path in (path for own in user_folders() for path in sorted(own.rglob("*.yaml"))):
        with suppress(OSError, ValueError):  # the error is reported if the option is used
            if name in targets(yaml_files.load(path.read_text(encoding="utf-8"))):
                return path
    return None


def targets(node: object) -> Iterator[str]:
    """Yield every `_target_` in nested dicts and lists."""
    return (text for key, text in leaves(node) if key.rpartition(".")[2] == TARGET)
