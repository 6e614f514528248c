"""States that clients keep between rounds: one tree for each client that has participated.

If a run has a directory, each state is saved in a separate file. A file is written only if its
state has changed. The cost of a checkpoint then depends on the cohort size and not on the number of
clients. States that do not fit into memory are memory-mapped from their files.
"""

import logging
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch

from fedexp.core import storage, tree
from fedexp.core.memory import free_memory, size_of
from fedexp.core.tree import Tree

log = logging.getLogger("fedexp")
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


def to(state: Tree, device: torch.device) -> Tree:
    """Move a state's tensors to a device."""
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, state)


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
