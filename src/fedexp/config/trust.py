"""Trust: the code that a configuration may name.

A `_target_` is imported and called, so a command line, a preset or a run directory that somebody
else wrote could run anything. fedexp's own classes are always allowed; any other must stand in a
yaml file of a directory that the user has given with --config-dir, and is named in the log.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedexp.config.named import search_path
from fedexp.core import yaml_files
from fedexp.core.errors import ConfigError

OWN = "fedexp."


def require_trusted(name: str, key: str) -> None:
    """Raise ConfigError for a class outside fedexp that no directory of the user's names."""
    if name.startswith(OWN) or named_by(name):
        return
    raise ConfigError(
        f"{key}={name}: lies outside fedexp; a class of your own is named in a yaml file of your"
        " own directory, which --config-dir gives, and not on the command line"
        " (docs/guide/your_own_parts.md has an example)"
    )


def find_class(name: str, key: str) -> type:
    """Return the dataclass at a dotted path. Raises ConfigError where it is not to be trusted or is
    none."""
    require_trusted(str(name), key)
    module_name, _, class_name = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={name}: cannot be imported ({error})") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{key}={name}: must be a dataclass")
    return found


def foreign(values: Any) -> list[str]:
    """Return a sentence about each class outside fedexp that a checked configuration names: its
    source, and who names it."""
    sentences = []
    for name in sorted({name for name in targets(values) if not name.startswith(OWN)}):
        try:
            source = inspect.getfile(find_class(name, "_target_"))
        except (TypeError, OSError):
            source = "an unknown file"
        sentences.append(f"not fedexp's own code: {name} from {source}, named in {named_by(name)}")
    return sentences


def named_by(
    name: str, folders: Sequence[Path] | None = None, keys: Collection[str] = ("_target_",)
) -> Path | None:
    """Return the yaml file in a directory of the user's that has this `_target_`; None where there
    is none.

    folders: those that Hydra searches; None: of the configuration that is being worked on.
    """
    from fedexp.config.options import conf_directory

    for folder in search_path() if folders is None else folders:
        if folder.resolve() == conf_directory().resolve() or not folder.is_dir():
            continue
        for path in sorted(folder.rglob("*.yaml")):
            try:
                if name in targets(yaml_files.load(path.read_text(encoding="utf-8")), keys):
                    return path
            except (OSError, ValueError, RecursionError, yaml.YAMLError):
                continue  # who chooses this option will be told
    return None


def targets(node: object, keys: Collection[str] = ("_target_",)) -> Iterator[str]:
    """Yield every `_target_` in nested dicts and lists."""
    if isinstance(node, dict):
        yield from (node[key] for key in keys if isinstance(node.get(key), str))
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from targets(each, keys)
