"""Trust: the code that a configuration may name, and where a run may be sent.

A `_target_` is imported and called, so a command line, a preset or a run directory of another
person could run anything. fedexp's own classes are always allowed; any other must stand in a
yaml file of a directory that the user has given with --config-dir, and is named in the log.

A run directory may name an account that is not the user's. A resumed run is sent there only where
the command that resumes it names it too.
"""

import dataclasses
import importlib
import inspect
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedexp.config.named import search_path
from fedexp.config.overrides import destinations, key_of, leaves, typed_now
from fedexp.core import yaml_files
from fedexp.core.errors import ConfigError
from fedexp.core.storage import display_path
from fedexp.trackers.base import TrackerConfig

OWN = "fedexp."
# keys whose value is imported: by Hydra's instantiate, and by logging's dictConfig
TARGET = "_target_"
NAMES = (TARGET, "()", "class")


def require_trusted(name: str, key: str) -> None:
    """Raise ConfigError for a class outside fedexp that no directory of the user's names."""
    if name.startswith(OWN) or named_by(name):
        return
    raise ConfigError(
        f"{key}={name}: lies outside fedexp; a class of your own is named in a yaml file of your"
        " own directory, which --config-dir (in Python config_dir=) gives, not on the command line"
        " (docs/guide/your_own_parts.md has an example)"
    )


def require_named(tracker: TrackerConfig, overrides: Sequence[str], directory: Path) -> None:
    """Raise ConfigError, with the command that allows it, where a resumed run would be sent or
    written to a place that its directory names and this command does not. overrides: of the job, as
    `typed_now` reads them."""
    typed = typed_now(overrides)
    stored = destinations(overrides[: len(overrides) - len(typed)])
    if not stored or tracker.stays:
        return
    folders = [f"--config-dir={folder}" for folder in own_folders()]
    resume = f"resume={display_path(directory)}"
    command = [*folders, resume, *typed, *stored]
    raise ConfigError(
        f"{resume}: its directory, and not this command, says where the run is tracked"
        f" ({', '.join(map(key_of, stored))}); if that is meant:  fedexp"
        f" {shlex.join(command)}"
    )


def own_folders(folders: Sequence[Path] | None = None) -> list[Path]:
    """Return those directories of groups that the user has given with --config-dir. folders: those
    that Hydra searches; None: of the configuration that is being worked on."""
    from fedexp.config.options import conf_directory

    given = search_path() if folders is None else folders
    return [each for each in given if each.resolve() != conf_directory().resolve()]


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
    text: str, folders: Sequence[Path] | None = None, anywhere: bool = False
) -> Path | None:
    """Return the yaml file in a directory of the user's that names this class; None where there
    is none. folders: as of `own_folders`; anywhere: as any value."""
    for path in (path for own in own_folders(folders) for path in sorted(own.rglob("*.yaml"))):
        with suppress(OSError, ValueError):  # who chooses this option will be told
            content = yaml_files.load(path.read_text(encoding="utf-8"))
            for key, value in leaves(content):
                if value == text and (anywhere or key.rpartition(".")[2] in NAMES):
                    return path
    return None


def targets(node: object) -> Iterator[str]:
    """Yield every `_target_` in nested dicts and lists."""
    return (text for key, text in leaves(node) if key.rpartition(".")[2] == TARGET)
