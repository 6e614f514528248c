"""The state of a run on disk: the latest and, should that be damaged, the one before it.

Both are files of `torch.save`, a zip archive that holds a CRC-32 of each of its records. It is
checked before a run resumes from them, as is everything else that a state needs: the states of
clients, and tidy files of the length that it says.
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
    # what is wrong with the latest checkpoint, where this is the one before it or none
    problem: str | None


def save(directory: Path, state: Tree) -> None:
    """Save a state so that a whole one is there at any moment, also after a loss of power. What it
    names must have been synced."""
    latest, previous = directory / files.CHECKPOINT, directory / files.PREVIOUS
    if latest.exists():
        with storage.storing(previous), storage.temporary_of(previous) as temporary:
            try:
                os.link(latest, temporary)
            except OSError:  # not every file system has links
                temporary.write_bytes(latest.read_bytes())
            os.replace(temporary, previous)
    storage.save_tree(latest, state)


def load(directory: Path, check: Callable[[Any], None] = lambda state: None) -> Saved | None:
    """Return the latest state that is whole, None where none was saved. Raises ConfigError where
    all are damaged, unless the damage is in the csv files: these belong to the states, so that no
    state could be resumed.

    check: raises ConfigError for a state that is not of this run.
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
    """Move a damaged latest checkpoint away, since the next one would put it in the place of the
    whole one."""
    latest = directory / files.CHECKPOINT
    if latest.exists():
        with storage.storing(latest):
            os.replace(latest, directory / DAMAGED)


def set_tables_aside(directory: Path) -> None:
    """Moves damaged csv files and the states that belong to them to damaged/, since the run begins
    again."""
    files.set_aside(directory, (*files.TABLES, files.CHECKPOINT, files.PREVIOUS))


def kept(directory: Path) -> int | None:
    """Return the round after which the state is saved; None where there is none to resume from."""
    try:
        saved = load(directory)
    except (ConfigError, OSError, StorageError):
        return None
    return None if saved is None or saved.state is None else saved.state["round"]
