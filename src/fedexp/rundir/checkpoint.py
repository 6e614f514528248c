"""A run's checkpoints: the latest, and the previous one in case the latest is damaged.

Both are written with `torch.save`, as zip archives with a CRC-32 checksum of each record. The
checksums are checked before a run resumes. So are the other files that a checkpoint needs: the
client states and the csv files, which must have at least the recorded lengths.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedexp.core import storage
from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.tree import Tree
from fedexp.rundir import csv_files, files
from fedexp.rundir.checkpoint_form import check_form
from fedexp.rundir.client_states import file_name

DAMAGED = "checkpoint/damaged.pt"


@dataclass(frozen=True)
class Saved:
    """The state that a run resumes from."""

    state: Mapping[str, Any] | None  # None: the csv files are damaged, and the run begins again
    # what is wrong with the latest checkpoint, if it is not used
    problem: str | None


def save(directory: Path, state: Tree) -> None:
    """Save a state so that a complete checkpoint always exists, even after a power failure.

    The files that the state names must have been synced.
    """
    latest, previous = directory / files.CHECKPOINT, directory / files.PREVIOUS
    if latest.exists():
        with storage.storing(previous), storage.temporary_of(previous) as temporary:
            try:
                os.link(latest, temporary)
            except OSError:  # some file systems have no links
                temporary.write_bytes(latest.read_bytes())
            os.replace(temporary, previous)
    storage.save_tree(latest, state)


def load(directory: Path, check: Callable[[Any], None] = lambda state: None) -> Saved | None:
    """Return the latest valid state, or None if no state was saved.

    If the csv files are damaged, no state can be resumed, and the result has the state None. Raises
    ConfigError if all checkpoints are damaged for another reason.

    check: a function that raises ConfigError if a state does not belong to this run.
    """
    found, problems, tables = [], [], False
    for name in (files.CHECKPOINT, files.PREVIOUS):
        try:
            state = storage.load_tree(directory / name)
            check_form(directory / name, state)
            check(state)
            check_what_it_needs(directory, state)
            found.append(state)
            break
        except ConfigError as error:
            problems.append(str(error))
            tables |= isinstance(error, csv_files.TableDamaged)
    if found:
        return Saved(found[0], problems[0] if problems else None)
    if not exists(directory):
        return None
    if tables:
        return Saved(None, problems[0])
    raise ConfigError(
        "\n".join([*problems, f"no checkpoint is whole; remove {directory} to begin again"])
    )


def exists(directory: Path) -> bool:
    """Return whether a state was ever saved."""
    return any((directory / name).exists() for name in (files.CHECKPOINT, files.PREVIOUS))


def check_what_it_needs(directory: Path, state: Mapping[str, Any]) -> None:
    checksums = state.get("checksums", {})  # older checkpoints have none
    for file, length in state.get("lengths", {}).items():
        if Path(file).name != file:
            raise ConfigError(
                f"{directory}: a checkpoint names {file!r}, which is not a file of the run"
            )
        csv_files.check_beginning(directory / file, length, checksums.get(file))
    for client, version in state.get("clients", {}).items():
        storage.check_tree(directory / files.CLIENT_STATES / file_name(client, version))


def set_aside(directory: Path) -> None:
    """Move a damaged latest checkpoint away.

    Otherwise the next `save` would replace the valid previous checkpoint with it.
    """
    latest = directory / files.CHECKPOINT
    if latest.exists():
        with storage.storing(latest):
            os.replace(latest, directory / DAMAGED)


def set_tables_aside(directory: Path) -> None:
    """Move damaged csv files and their checkpoints to damaged/, since the run begins again."""
    files.set_aside(directory, (*files.TABLES, files.CHECKPOINT, files.PREVIOUS))


def kept(directory: Path) -> int | None:
    """Return the round of the saved state, or None if there is no state to resume from."""
    try:
        saved = load(directory)
    except (ConfigError, OSError, StorageError):
        return None
    return None if saved is None or saved.state is None else saved.state["round"]
