"""Decide which classes a configuration may name and where a tracker may send a run.

A `_target_` is imported and called, so a command line, preset or run directory from another person
could run any code. fedexp's classes are always allowed. Any other class must be named in a yaml
file in a directory that the user gives with --config-dir. The log reports such classes.

A run directory may name another person's account. A resumed run is sent to that account only if the
command that resumes the run also names the account.
"""

import dataclasses
import importlib
import inspect
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedexp.config.named import search_path
from fedexp.config.overrides import destinations, key_of, leaves, typed_overrides
from fedexp.core import yaml_files
from fedexp.core.errors import ConfigError
from fedexp.core.storage import display_path
from fedexp.rundir.fingerprint import OWN, TARGET
from fedexp.trackers.base import TrackerConfig

# keys whose values are imported by Hydra's `instantiate` or by logging's `dictConfig`
NAMES = (TARGET, "()", "class")


def require_trusted(name: str, key: str) -> None:
    """Raise ConfigError if a class is outside fedexp and the user's yaml files do not name it."""
    if name.startswith(OWN) or find_naming_file(name):
        return
    raise ConfigError(
        f"{key}={name}: is not a fedexp class; name your own class in a yaml file, and pass the"
        " file's directory with --config-dir (in Python config_dir=), as in"
        " docs/guide/your_own_parts.md"
    )


def require_typed_destination(
    tracker: TrackerConfig, overrides: Sequence[str], directory: Path
) -> None:
    """Raise ConfigError if a resumed run would be sent to an account that the user did not type.

    This is the case if only overrides from the run directory choose the account or server. The
    message shows a command that includes these overrides.

    overrides: all overrides of the job. Those from the run directory come before `resume=`.
    """
    typed = typed_overrides(overrides)
    stored = destinations(overrides[: len(overrides) - len(typed)])
    if not stored or tracker.is_local:
        return
    folders = [f"--config-dir={folder}" for folder in user_folders()]
    resume = f"resume={display_path(directory)}"
    command = [*folders, resume, *typed, *stored]
    raise ConfigError(
        f"{resume}: the run directory says where the run is tracked"
        f" ({', '.join(map(key_of, stored))}), but this command does not; to track it there: "
        f" fedexp {shlex.join(command)}"
    )


def user_folders(folders: Sequence[Path] | None = None) -> list[Path]:
    """Return the directories that the user gave with --config-dir.

    folders: the directories that Hydra searches, or None for the directories of the current
        configuration.
    """
    from fedexp.config.options import conf_directory

    given = search_path() if folders is None else folders
    return [each for each in given if each.resolve() != conf_directory().resolve()]


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


def find_naming_file(
    text: str, folders: Sequence[Path] | None = None, keys: Collection[str] | None = (TARGET,)
) -> Path | None:
    """Return the user's yaml file that names a class, or None if no file names it.

    text: the dotted path of the class. folders: see `user_folders`. keys: the last parts of the
        keys that may name the class, or None for any key.
    """
    for path in (path for own in user_folders(folders) for path in sorted(own.rglob("*.yaml"))):
        with suppress(OSError, ValueError):  # the error is reported if the option is used
            content = yaml_files.load(path.read_text(encoding="utf-8"))
            for key, value in leaves(content):
                if value == text and (keys is None or key.rpartition(".")[2] in keys):
                    return path
    return None


def targets(node: object) -> Iterator[str]:
    """Yield every `_target_` in nested dicts and lists."""
    return (text for key, text in leaves(node) if key.rpartition(".")[2] == TARGET)
