"""A partition from a file: the user's file, or the partition.npz of an earlier run."""

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz
from fedexp.data.partition import Assigned, Partitioner
from fedexp.data.partitioned import NOT_KEPT, Partition


class File(Partitioner):
    """Read client -> indices from `path`. Examples that are given to no client are unused.

    - .npz: arrays named "0".."K-1", or the arrays that `Partition.save` writes.
    - .json: `{"0": [indices], ...}` or a list of lists.

    Indices count the training examples from 0.
    """

    has_global_indices: ClassVar[bool] = True

    path: str | None

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("partition=file: needs partition.path=<file.npz or file.json>")

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        return read_clients(Path(str(self.path))), {}

    @property
    def source(self) -> str:
        return str(self.path)


def read_clients(path: Path) -> list[Any]:
    """Return the indices of clients 0..K-1. Their values are not checked.

    Raises ConfigError if the file is missing, damaged, or does not name the clients 0..K-1.
    """
    if path.suffix not in (".npz", ".json"):
        raise ConfigError(f"partition.path={path}: must be a .npz or .json file")
    if not path.is_file():
        raise ConfigError(f"partition.path={path}: no such file")
    table: Any = load_npz(path) if path.suffix == ".npz" else _read_json(path)
    if isinstance(table, list):
        return table
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: must be an object of client -> indices or a list of lists")
    if "indices" in table:
        partition = Partition.load(path)
        if partition.info.get("indices") == NOT_KEPT:
            raise ConfigError(
                f"partition.path={path}: has only the counts of a restored run, no indices"
            )
        return list(partition.parts)
    clients = [str(k) for k in range(len(table))]
    if set(clients) != table.keys():
        raise ConfigError(f"{path}: the clients must be named 0 to {len(table) - 1}")
    return [table[client] for client in clients]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
