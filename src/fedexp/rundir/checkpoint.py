"""A run's checkpoints: the latest one, and the previous one in case the latest is damaged.

Both checkpoints are written with `torch.save`, as zip archives with a CRC-32 checksum for each
record, which is checked before a run resumes. The other files that a checkpoint needs are checked
too: the client states, and that each csv file has at least the recorded length. The rows of later
rounds are removed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedexp.core import storage
from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.tree import Tree
from fedexp.rundir import csv_files, files
from fedexp.rundir.client_states import file_name
from fedexp.rundir.files import CHECKPOINT_FORMAT

DAMAGED = "checkpoint/damaged.pt"


@dataclass(frozen=True)
class Saved:
    """The state from which a run resumes, and any problem with the latest checkpoint."""

    state: Mapping[str, Any]
    # why the latest checkpoint is not used; None if it is used
    problem: str | None


def save(directory: Path, state: Tree) -> None:
    """Save a state so that a complete checkpoint always exists, even after a power failure.

    The files that the state refers to must have been synced before.
    """
    latest, previous = directory / files.CHECKPOINT, directory / files.PREVIOUS
    if latest.exists():
        with storage.storing(previous), storage.temporary_path(previous) as temporary:
            try:
                os.link(latest, temporary)
            except OSError:  # some file systems have no links
                temporary.write_bytes(latest.read_bytes())
            os.replace(temporary, previous)
    storage.save_tree(latest, state)


def load(directory: Path) -> Saved | None:
    """Return the latest valid state, or None if no state was saved.

    Raises ConfigError if both checkpoints are invalid.
    """
    problems: list[str] = []
    for name in (files.CHECKPOINT, files.PREVIOUS):
        try:
            state = storage.load_tree(directory / name)
            check_form(directory / name, state)
            check_needed_files(directory, state)
            return Saved(state, problems[0] if problems else None)
        except ConfigError as error:
            problems.append(str(error))
    if not exists(directory):
        return None
    raise ConfigError(
        "\n".join([*problems, f"no checkpoint can be read; remove {directory} to start again"])
    )


def exists(directory: Path) -> bool:
    """Return whether a state was ever saved."""
    return any((directory / name).exists() for name in (files.CHECKPOINT, files.PREVIOUS))


def check_needed_files(directory: Path, state: Mapping[str, Any]) -> None:
    for file, length in state["lengths"].items():
        csv_files.check_length(directory / file, length)
    for client, version in state.get("clients", {}).items():
        storage.check_tree(directory / files.CLIENT_STATES / file_name(client, version))


def set_aside(directory: Path) -> None:
    """Rename the latest checkpoint. Call this only if it is damaged.

    Otherwise the next `save` would replace the valid previous checkpoint with the damaged one.
    """
    latest = directory / files.CHECKPOINT
    if latest.exists():
        with storage.storing(latest):
            os.replace(latest, directory / DAMAGED)


def saved_round(directory: Path) -> int | None:
    """Return the round of the saved state, or None if no state was saved."""
    try:
        saved = load(directory)
    except (ConfigError, OSError, StorageError):
        return None
    return None if saved is None else saved.state["round"]


def check_form(path: Path, state: object) -> None:
    """Raise ConfigError unless the content of a file is a checkpoint of this format."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if not isinstance(state, dict) or found != CHECKPOINT_FORMAT:
        raise ConfigError(
            f"{path}: is not a checkpoint for this version of fedexp (format {found}, expected"
            f" {CHECKPOINT_FORMAT})"
        )
