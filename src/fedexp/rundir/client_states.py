"""States that clients keep between rounds: a tree for each client that has ever taken part.

Where a run has a directory, each state is a file of its own, written again only when it has
changed: a checkpoint costs what the cohort changes, not what all clients hold. States that do not
fit into memory are read from there, memory-mapped.
"""

import logging
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch

from fedexp.core import storage, tree
from fedexp.core.errors import ConfigError
from fedexp.core.memory import free_memory, size_of
from fedexp.core.tree import Tree

log = logging.getLogger("fedexp")
CPU = torch.device("cpu")
STATE = re.compile(r"\d+\.\d+\.pt")  # what `file_name` gives
SHARE_OF_MEMORY = 0.25  # of what is free, that the states of all clients may take


class ClientStates(MutableMapping[int, Tree]):
    """Client -> state. In memory only, until `save` says where the files are."""

    def __init__(self, folder: Path | None = None, versions: dict[int, int] | None = None):
        """Set up the states. versions: client -> round after which its file was written (of a run
        that is resumed)."""
        self.folder, self.versions = folder, dict(versions or {})
        self.home, self.resident = CPU, True
        self._memory: dict[int, Tree] = {}
        self._changed: set[int] = set()
        # of the last two checkpoints
        self._saved, self._before = dict(self.versions), dict(self.versions)

    def place(self, home: torch.device, resident: bool) -> None:
        """Choose the place of the states. home: where they are kept; resident: in memory, else in
        their files between checkpoints."""
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
            state = self._memory[client] = to(state, self.home)
        return state

    def __setitem__(self, client: int, state: Tree) -> None:
        self._memory[client] = to(state, self.home)
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
        """Write what has changed; return the versions, for the checkpoint. Older files stay until
        `tidy`."""
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
        """Remove files that neither the checkpoint that has been written since `save` nor the one
        before it names."""
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
    """Return the name of a state's file; raise ConfigError for what is no number: a name from a
    checkpoint must not lead elsewhere."""
    if type(client) is not int or type(round) is not int:
        raise ConfigError(f"client {client!r}, round {round!r}: do not name the state of a client")
    return f"{client}.{round}.pt"


def to(state: Tree, device: torch.device) -> Tree:
    """Return the state on the device."""
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, state)


def choose_place(each: int, clients: int, device: torch.device) -> tuple[torch.device, bool, str]:
    """Return (home, resident, sentence) for states of `each` bytes: on the device, in memory or in
    files, as they fit."""
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
