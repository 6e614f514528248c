"""Read a partition from a file: a file made by the user, or the partition.npz of an earlier run."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.storage import load_npz, read_values
from fedexp.data.partition import Assigned, Partitioner
from fedexp.data.partitioned import Partition


class File(Partitioner):
    """Read each client's example indices from the file `path`.

    - .npz: arrays named "0", ..., "K-1" for K clients, or the arrays that `Partition.save` writes
    - .json: `{"0": [indices], ...}` or a list of lists. In place of its list, each client may have
      `{"train": [indices], "test": [indices]}`; the latter then form the test set.

    Training examples are numbered from 0. Examples that are missing in the file are not used.
    """

    has_global_indices: ClassVar[bool] = True

    path: str | None

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("partition=file: set partition.path=<file.npz or file.json>")

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        if self.tests is None:
            return self.clients, {}
        return [each["train"] + each["test"] for each in self.clients], {}

    @cached_property
    def clients(self) -> list[Any]:
        """The examples of each client as they are in the file."""
        return read_clients(Path(str(self.path)))

    @cached_property
    def tests(self) -> list[Any] | None:
        """The test examples of each client, or None if the file has only training examples."""
        given = [each for each in self.clients if isinstance(each, dict)]
        if not given:
            return None
        fits = [each.keys() == {"train", "test"} for each in given]
        lists = [isinstance(value, list) for each in given for value in each.values()]
        if len(given) < len(self.clients) or not all(fits + lists):
            raise ConfigError(
                f"{self.path}: if a client has a JSON object, all clients must have one, with the"
                " keys train and test and a list of example indices for each"
            )
        return [each["test"] for each in given]

    @property
    def gives_test(self) -> bool:
        # a missing file may have them; it is named when it is read
        return not Path(str(self.path)).is_file() or self.tests is not None

    def hold_out(
        self, parts: list[np.ndarray], fraction: float, rng: np.random.Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        if self.tests is None:
            return super().hold_out(parts, fraction, rng)
        if fraction:
            raise ConfigError(
                f"test_per_client={fraction:g}: {self.path} already gives the clients test"
                " examples; set test_per_client=0"
            )
        test = [np.asarray(each, np.int64) for each in self.tests]
        kept = [np.setdiff1d(part, own) for part, own in zip(parts, test, strict=True)]
        for client, part in enumerate(kept):
            if not len(part):
                raise ConfigError(f"{self.path}: client {client} has no training examples")
        if not any(map(len, test)):
            raise ConfigError(f"{self.path}: no client has test examples")
        return kept, test

    @property
    def source(self) -> str:
        return str(self.path)


def read_clients(path: Path) -> list[Any]:
    """Return the example indices of the clients 0 to K - 1, without checking the indices.

    Raises ConfigError if the file is missing or damaged, or if its clients are not named 0 to
    K - 1.
    """
    if path.suffix not in (".npz", ".json"):
        raise ConfigError(f"partition.path={path}: must be a .npz or .json file")
    if not path.is_file():
        raise ConfigError(f"partition.path={path}: this file does not exist")
    table: Any = (load_npz if path.suffix == ".npz" else read_values)(path)
    if isinstance(table, list):
        return table
    if not isinstance(table, dict):
        raise ConfigError(
            f"{path}: must be a JSON object that maps each client to a list of example indices, or"
            " a list with one list of indices per client"
        )
    if "indices" in table:
        return list(Partition.load(path).parts)
    clients = [str(k) for k in range(len(table))]
    if set(clients) != table.keys():
        raise ConfigError(f"{path}: the clients must be named 0 to {len(table) - 1}")
    return [table[client] for client in clients]
