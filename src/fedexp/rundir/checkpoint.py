"""A run's checkpoints: the latest one, and the previous one in case the latest is damaged.

Both checkpoints are written with `torch.save`, as zip archives with a CRC-32 checksum for each
record. Before a run resumes, the checksums are checked. The other files that a checkpoint needs are
checked too: the client states and the csv files. Each csv file must have at least the recorded
length.

A file that can be loaded may still have invalid content, for example after it was edited. Such a
file is treated like a file with an invalid checksum, and the previous checkpoint is used.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedexp.core import storage
from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.tree import Tree
from fedexp.data.views import PLAIN, VIEWS
from fedexp.rundir import csv_files, files
from fedexp.rundir.client_states import file_name
from fedexp.rundir.files import CHECKPOINT_FORMAT
from fedexp.rundir.schema import fits, misfit

DAMAGED = "checkpoint/damaged.pt"
ARRAYS = {
    "counts",
    "rounds_per_task",
    "rounds",
    "class_accuracy",
    "local_rounds",
    "sampled",
    "local_class_accuracy",
}
STATUSES = ("running", "completed", "diverged", "stopped")


def is_natural_number(value: object) -> bool:
    """Return whether a value is an int from 0 to 2^63 - 1."""
    return type(value) is int and 0 <= value < 2**63


def is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def is_accuracy(value: object) -> bool:
    """Return whether a value is an accuracy, or nan (the class or task has no test examples)."""
    return type(value) is float and (0 <= value <= 1 or math.isnan(value))


def is_table(name: object) -> bool:
    return name in files.TABLES


def pair(form: Any) -> Callable[[object], bool]:
    """Return a condition that accepts pairs (round, value) whose value has the given form."""
    return lambda node: (
        isinstance(node, tuple | list)
        and len(node) == 2
        and is_natural_number(node[0])
        and fits(node[1], form)
    )


def is_history(value: object) -> bool:
    return fits(value, {str: torch.Tensor}) and value.keys() >= ARRAYS  # type: ignore[attr-defined]


# The forms of values (see `schema`) by key: TESTED for one view's test results, FORM for a
# checkpoint.
TESTED: dict[str, Any] = {
    "accuracy": [pair(is_accuracy)],
    "tasks": [pair([is_accuracy])],
    "history": is_history,
}
FORM: dict[str, Any] = {
    **TESTED,
    "round": is_natural_number,
    "examples": is_natural_number,
    "train_seconds": is_seconds,
    "seconds": is_seconds,
    "status": lambda value: value in STATUSES,
    "not_finite": [is_natural_number],
    "wandb_id": (None, str),
    "server": {"params": dict, "buffers": dict},
    "clients": {is_natural_number: is_natural_number},
    "alignment": [dict],
    "lengths": {is_table: is_natural_number},
}
OPTIONAL: dict[str, Any] = {  # keys that older checkpoints do not have
    "checksums": {is_table: is_natural_number},
    "first_view": lambda value: value in VIEWS,
    "views": {lambda view: view in VIEWS and view != PLAIN: TESTED},
    "spans": [{"first": is_natural_number}],
}


@dataclass(frozen=True)
class Saved:
    """The state from which a run resumes, and any problem with the latest checkpoint."""

    state: Mapping[str, Any] | None  # None: the csv files are damaged, and the run starts again
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


def load(directory: Path, check: Callable[[Any], None] = lambda state: None) -> Saved | None:
    """Return the latest valid state, or None if no state was saved.

    If the csv files are damaged, the run cannot resume, and the result has `state=None`. Raises
    ConfigError if all checkpoints are invalid for a different reason.

    check: a function that raises ConfigError if a state does not belong to this run.
    """
    found, problems, tables = [], [], False
    for name in (files.CHECKPOINT, files.PREVIOUS):
        try:
            state = storage.load_tree(directory / name)
            check_form(directory / name, state)
            check(state)
            check_needed_files(directory, state)
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
        "\n".join([*problems, f"no checkpoint can be read; remove {directory} to start again"])
    )


def exists(directory: Path) -> bool:
    """Return whether a state was ever saved."""
    return any((directory / name).exists() for name in (files.CHECKPOINT, files.PREVIOUS))


def check_needed_files(directory: Path, state: Mapping[str, Any]) -> None:
    checksums = state.get("checksums", {})  # older checkpoints have none
    for file, length in state.get("lengths", {}).items():
        if Path(file).name != file:
            raise ConfigError(
                f"{directory}: a checkpoint refers to {file!r}, which is not a file of the run"
            )
        csv_files.check_prefix(directory / file, length, checksums.get(file))
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
    return None if saved is None or saved.state is None else saved.state["round"]


def check_form(path: Path, state: object) -> None:
    """Raise ConfigError unless the content of a file has the keys and types of a checkpoint."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if not isinstance(state, dict) or found != CHECKPOINT_FORMAT:
        raise ConfigError(
            f"{path}: is not a checkpoint for this version of fedexp (format {found}, expected"
            f" {CHECKPOINT_FORMAT})"
        )
    unknown = state.keys() - {*FORM, *OPTIONAL, "format"}
    for word, keys in (("missing", FORM.keys() - state.keys()), ("unexpected", unknown)):
        if keys:
            names = ", ".join(sorted(map(str, keys)))
            raise ConfigError(f"{path}: not a checkpoint of a run ({word} entries: {names})")
    wrong = misfit(state, FORM | OPTIONAL)
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong} is not valid in a checkpoint")


def by_view(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a checkpoint's test results as a dict that maps views to results.

    The results of the first view are on the top level of the checkpoint. Older checkpoints only
    have the plain view.
    """
    return {state.get("first_view", PLAIN): state} | state.get("views", {})
