"""A partition from a file: the user's file, or the partition.npz of an earlier run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz
from fedexp.data.partition import Assigned, Partitioner
from fedexp.data.partitioned import NOT_KEPT


class File(Partitioner):
    """Read client -> indices from `path`. Examples that no client holds are unused.

    - .npz: arrays named "0".."K-1", or the arrays that `Partition.save` writes.
    - .json: `{"0": [indices], ...}` or a list of lists.

    Indices count the training examples from 0. ConfigErrors name the file, the client and the
    index.
    """

    numbers_all: ClassVar[bool] = True

    path: str | None

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "partition=file: say which file with partition.path=<file.npz or file.json>"
            )

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


def read_clients(path: Path) -> list[np.ndarray]:
    """Return the indices of clients 0..K-1, int64 [n_k] each."""
    if not path.is_file():
        raise ConfigError(f"partition.path={path}: no such file")
    if path.suffix == ".npz":
        table: Any = load_npz(path)
        if {"indices", "sizes"} <= table.keys():
            table = _from_saved(path, table)
    elif path.suffix == ".json":
        table = _read_json(path)
    else:
        raise ConfigError(f"partition.path={path}: must be a .npz or .json file")
    if isinstance(table, list):
        table = {str(k): indices for k, indices in enumerate(table)}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: must be an object of client -> indices or a list of lists")
    return [_client_indices(path, k, table) for k in range(len(table))]


def _from_saved(path: Path, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    sizes, indices = arrays["sizes"], arrays["indices"]
    whole = sizes.ndim == indices.ndim == 1 and sizes.dtype.kind in "iu" and not (sizes < 0).any()
    if not whole or sum(sizes.tolist()) != len(indices):
        raise ConfigError(f"{path}: damaged, sizes and indices do not belong together")
    if _has_counts_alone(arrays):
        raise ConfigError(
            f"partition.path={path}: has the counts of a run that was restored, and no indices"
        )
    return np.split(indices, np.cumsum(sizes)[:-1])


def _has_counts_alone(arrays: Mapping[str, np.ndarray]) -> bool:
    """Return whether a partition.npz has only the counts of a run, with placeholders as indices."""
    try:
        info = json.loads(str(arrays["info"])) if "info" in arrays else {}
    except ValueError:
        return False
    return isinstance(info, dict) and info.get("indices") == NOT_KEPT


def _read_json(path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"{path}: client {repeated} appears twice")
        return result

    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None


def _client_indices(path: Path, client: int, table: Mapping[str, Any]) -> np.ndarray:
    """Return one client's indices in the table, int64 [n_k].

    Raises ConfigError unless every entry is an integer.
    """
    if str(client) not in table:
        raise ConfigError(
            f"{path}: client {client} is missing; clients must be named 0 to {len(table) - 1}"
        )
    values = table[str(client)]
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return values.astype(np.int64)
    if not isinstance(values, list):
        raise ConfigError(f"{path}: client {client}: must be a flat list of integers")
    if wrong := [value for value in values if type(value) is not int or abs(value) >= 2**63]:
        raise ConfigError(
            f"{path}: client {client}: {json.dumps(wrong[0])} is no number of an example"
        )
    return np.array(values, dtype=np.int64)
