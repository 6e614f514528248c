"""Decide which classes a configuration may name.

A `_target_` is imported and called, so a run directory from another person could run any code.
Classes of fedexp and its neighbours are always allowed. The package of any other class must be
named by a `_target_` in a yaml file of a directory that the command line gives with --config-dir.
"""

import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fedexp.config.named import search_path
from fedexp.config.options import conf_directories
from fedexp.config.overrides import leaves
from fedexp.core import yaml_files
from fedexp.core.errors import ConfigError

TARGET = "_target_"


def find_class(name: str, key: str) -> type:
    """Return the dataclass at a dotted path.

    Raises ConfigError if the class is not trusted, cannot be imported, or is not a dataclass.
    """
    if not is_trusted(name):
        raise ConfigError(
            f"{key}={name}: is not a fedexp class; name your own class in a yaml file, and pass"
            " the file's directory with --config-dir (in Python config_dir=), as in"
            " docs/guide/your_own_parts.md"
        )
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={name}: cannot be imported ({error}); PYTHONPATH=. finds packages in the"
            " current directory"
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{key}={name}: must be a dataclass")
    return found


def is_trusted(name: str) -> bool:
    """Return whether a class may be instantiated, which runs code of its package."""
    package = name.partition(".")[0]
    if package == "fedexp" or package.startswith("fedexp_"):
        return True
    files = (path for own in user_folders() for path in sorted(own.rglob("*.yaml")))
    return any(package == named.partition(".")[0] for path in files for named in targets_in(path))


def user_folders() -> list[Path]:
    """Return the directories that the user gave with --config-dir."""
    own = {each.resolve() for each in conf_directories()}
    return [each for each in search_path() if each.resolve() not in own]


def targets_in(path: Path) -> Iterator[str]:
    """Yield every `_target_` in a yaml file. Hydra reports a file that cannot be read."""
    with suppress(OSError, ValueError):
        for key, text in leaves(yaml_files.load(path.read_text(encoding="utf-8"))):
            if key.rpartition(".")[2] == TARGET:
                yield str(text)
