"""A run's checkpoints: the latest one, and the previous one in case the latest is damaged.

Both checkpoints are written with `torch.save`, as zip archives with a CRC-32 checksum for each
record, which is checked before a run resumes. The other files that a checkpoint needs are checked
too: the client states, and that each csv file begins with the recorded rows. The rows of later
rounds are removed.

The states that clients keep between rounds are one tree for each client that has participated. If a
run has a directory, each state is saved in a separate file, which is written only if its state has
changed. The cost of a checkpoint then depends on the cohort size and not on the number of clients.
States that do not fit into memory are memory-mapped from their files.
"""

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedexp.core import storage, tree
from fedexp.core.errors import ConfigError
from fedexp.core.memory import free_memory, size_of
from fedexp.core.tree import Tree
from fedexp.rundir import csv_files, files
from fedexp.rundir.files import CHECKPOINT_FORMAT
from fedexp.rundir.reader import RunDirectory

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

    Raises ConfigError if both checkpoints are invalid, or if another program changed a table.
    """
    problems: list[str] = []
    for name in (files.CHECKPOINT, files.PREVIOUS):
        try:
            state = storage.load_tree(directory / name)
            check_form(directory / name, state)
            check_needed_files(directory, state)
            return Saved(state, problems[0] if problems else None)
        except csv_files.TableChanged:  # its rows cannot be cut at the earlier length, either
            raise
        except ConfigError as error:
            problems.append(str(error))
    if not RunDirectory(directory).resumable:
        return None
    raise ConfigError(
        "\n".join([*problems, f"no checkpoint can be read; remove {directory} to start again"])
    )


def check_needed_files(directory: Path, state: Mapping[str, Any]) -> None:
    """Raise ConfigError if a table or a client's state is missing or is not as it was saved."""
    sums = state.get("checksums", {})
    tables = {name: (length, sums.get(name)) for name, length in state["lengths"].items()}
    for name, kept in state.get("callbacks", {}).items():
        if name.endswith(".csv") and "length" in kept:  # an analysis (see `CsvFile.state`)
            tables[name] = (kept["length"], kept.get("checksum"))
    for name, (length, checksum) in tables.items():
        csv_files.check_table(directory / name, length, checksum, state["round"])
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
    except (ConfigError, OSError):
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


CPU = torch.device("cpu")
STATE = re.compile(r"\d+\.\d+\.pt")  # the names from `file_name`
SHARE_OF_MEMORY = 0.25  # the states of all clients may use at most this share of the free memory


class ClientStates(MutableMapping[int, Tree]):
    """A mapping from clients to states. The states are only in memory until `save` is called."""

    def __init__(self, folder: Path | None = None, versions: dict[int, int] | None = None):
        """Create a mapping. It is empty unless `versions` lists the files of a resumed run.

        folder: the folder of the files. versions: client -> round in which the client's file was
        written.
        """
        self.folder, self.versions = folder, dict(versions or {})
        self.home, self.resident = CPU, True
        self._memory: dict[int, Tree] = {}
        self._changed: set[int] = set()
        # versions in the last two checkpoints
        self._saved, self._before = dict(self.versions), dict(self.versions)

    def place(self, home: torch.device, resident: bool) -> None:
        """Choose where the states are stored between rounds.

        home: the device. resident: whether the states stay in memory. If False, they are removed
        from memory after each checkpoint.
        """
        self.home, self.resident = home, resident

    def __getitem__(self, client: int) -> Tree:
        if client in self._memory:
            return self._memory[client]
        if client not in self.versions:
            raise KeyError(client)
        assert self.folder is not None
        state = storage.load_tree(
            self.folder / file_name(client, self.versions[client]), mapped=True
        )
        if self.resident:
            state = self._memory[client] = tree.to(state, self.home)
        return state

    def __setitem__(self, client: int, state: Tree) -> None:
        self._memory[client] = tree.to(state, self.home)
        self._changed.add(client)

    def __delitem__(self, client: int) -> None:
        self._memory.pop(client, None)
        self.versions.pop(client, None)
        self._changed.discard(client)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._memory.keys() | self.versions.keys()))

    def __len__(self) -> int:
        return len(self._memory.keys() | self.versions.keys())

    def save(self, folder: Path, round: int) -> dict[int, int]:
        """Write the changed states and return the versions of all states for the checkpoint.

        round: the version of the changed states. Older files are kept until `tidy` is called.
        """
        for client in sorted(self._changed):
            storage.save_tree(
                folder / file_name(client, round), self._memory[client], sync_folder=False
            )
            self.versions[client] = round
        if self._changed:
            storage.sync(folder)
        self._before, self._saved = self._saved, dict(self.versions)
        self.folder = folder
        self._changed.clear()
        if not self.resident:
            self._memory.clear()
        return dict(self.versions)

    def tidy(self) -> None:
        """Remove files that the last two checkpoints do not use.

        Call this only after the checkpoint with the versions from `save` has been written.
        """
        current = {
            file_name(*state)
            for versions in (self._saved, self._before)
            for state in versions.items()
        }
        if self.folder is not None and self.folder.exists():
            for path in self.folder.iterdir():
                if STATE.fullmatch(path.name) and path.name not in current and path.is_file():
                    path.unlink()


def file_name(client: int, round: int) -> str:
    """Return the name of the file with a client's state."""
    return f"{client}.{round}.pt"


def choose_place(each: int, clients: int, device: torch.device) -> tuple[torch.device, bool, str]:
    """Choose where client states of `each` bytes are stored: (home, resident, message for the log).

    The states are stored in the first place with enough room: on the GPU, in memory, or in files.
    """
    total, free = each * clients, free_memory()
    size = f"client states: {size_of(each)} each, {size_of(total)} in total for {clients:,} clients"
    if device.type == "cuda" and total <= SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]:
        return device, True, f"{size}; on the GPU"
    if total <= SHARE_OF_MEMORY * free:
        return CPU, True, f"{size}; in memory"
    return (
        CPU,
        False,
        f"{size}; in memory-mapped files, since only {size_of(free)} of memory are free",
    )
