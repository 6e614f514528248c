"""Partitions: the examples of each client, their hash, and the files in which a run stores them."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp.core.storage import load_npz, save_npz

HELD_OUT = ("public", "validation", "test")  # fields with examples that no client trains on
CHANGED = "partition_from_round"  # prefix of the files of partitions that start during a run


def partition_hash(parts: Sequence[np.ndarray]) -> str:
    """Return the SHA-256 hash of a partition as a hexadecimal string.

    The hash covers the sizes [K] of the parts and their concatenated indices [N], both as
    little-endian int64.
    """
    sizes = np.array([len(part) for part in parts])
    return hashlib.sha256(
        b"".join(array.astype("<i8").tobytes() for array in (sizes, *parts))
    ).hexdigest()


@dataclass(frozen=True)
class Partition:
    """The indices of each client's training examples.

    Indices are sorted, so two partitions that give every client the same examples have the same
    `hash`.
    """

    parts: tuple[np.ndarray, ...]  # K arrays, int64 [n_k], ascending
    counts: np.ndarray  # int64 [K, C]: each client's number of training examples of each class
    hash: str
    # how the partition was made: scheme, settings, number of draws, client sizes
    info: dict[str, Any] = field(default_factory=dict)
    # indices of the server's examples, ascending
    public: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # indices of the validation set's examples, ascending
    validation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # indices of the test set's examples, ascending, if they were held out from the clients
    test: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # int64 [N]: the client that has each training example or holds it out, -1: none. It is not
    # saved, since a run saves the results of the clients' own tests.
    clients: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def sizes(self) -> np.ndarray:
        """Return each client's number of examples n_k, int64 [K]."""
        return self.counts.sum(1)

    @classmethod
    def build(
        cls,
        parts: Iterable[np.ndarray],
        labels: np.ndarray,
        num_classes: int,
        info: dict,
        **held_out: np.ndarray,
    ) -> "Partition":
        """Sort each client's indices, count each client's labels, and return the partition.

        parts: each client's example indices. Every client must have at least one example, and no
        example may be given twice. Indices and labels must be in range.
        labels: int [N], the labels of all training examples.
        info: how the partition was made.
        held_out: the indices of `public`, `validation` and `test`, ascending.
        """
        ordered = tuple(np.sort(np.asarray(part, dtype=np.int64)) for part in parts)
        everything = np.concatenate(ordered)
        assert all(len(part) for part in ordered), "a client has no examples"
        assert everything.min() >= 0, "an index is negative"
        assert len(np.unique(everything)) == len(everything), "an example is given twice"
        # counts all clients at once, which is faster than a loop if there are many clients
        clients = np.repeat(np.arange(len(ordered)), [len(part) for part in ordered])
        counts = np.zeros((len(ordered), num_classes), dtype=np.int64)
        np.add.at(counts, (clients, labels[everything]), 1)
        sizes = counts.sum(1)
        info = info | {
            "size_min": int(sizes.min()),
            "size_median": float(np.median(sizes)),
            "size_max": int(sizes.max()),
        }
        for name, numbers in held_out.items():
            if len(numbers):
                of_class = np.bincount(labels[numbers], minlength=num_classes)
                info[f"{name}_counts"] = of_class.tolist()
        return cls(ordered, counts, partition_hash(ordered), info, **held_out)

    def sentence(self) -> str:
        """Return a sentence that describes the partition.

        It gives the clients' numbers of examples and classes, the settings and the hash.
        """
        used = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in self.info.items()
            if isinstance(value, int | float | str) and not key.startswith(("scheme", "size_"))
        ]
        sizes, classes = format_range(self.sizes), format_range((self.counts > 0).sum(1))
        total = plural(int((self.counts.sum(0) > 0).sum()), "class")
        server = f"; the server has {len(self.public):,} more" if len(self.public) else ""
        if len(self.test):
            server += f"; {len(self.test):,} more are the test set"
        return (
            f"{plural(len(self.parts), 'client')} with {sizes} examples each, of {classes} of the"
            f" {total}{server} ({', '.join([*used, f'hash={self.hash[:12]}'])})"
        )

    @property
    def is_change(self) -> bool:
        """Return whether the partition starts during a run, in the round `info["from_round"]`."""
        return "from_round" in self.info

    def with_parts(
        self, parts: Iterable[np.ndarray], labels: np.ndarray, num_classes: int
    ) -> "Partition":
        """Return a copy of the partition in which the clients have different examples.

        parts: each client's new example indices.
        labels: int [N], the labels of all training examples.
        """
        held_out = {name: getattr(self, name) for name in HELD_OUT}
        return Partition.build(parts, labels, num_classes, self.info, **held_out)

    def save(self, path: Path, classes: Sequence[str]) -> None:
        """Write the partition to an npz file.

        The file has the arrays `indices` [N], `sizes` [K], `counts` [K, C], `hash`, `public` [M],
        `classes` [C] (class names), `info` (JSON) and, if there is a validation set, `validation`
        [V]. If the test set was held out from the clients, the file also has `test` [T].
        """
        others = {name: getattr(self, name) for name in HELD_OUT[1:]}
        save_npz(
            path,
            indices=np.concatenate(self.parts),
            sizes=self.sizes,
            counts=self.counts,
            hash=np.array(self.hash),
            public=self.public,
            classes=np.array(classes, dtype=str),
            info=np.array(json.dumps(self.info)),
            **{name: numbers for name, numbers in others.items() if len(numbers)},
        )

    @classmethod
    def load(cls, path: Path) -> "Partition":
        """Read a file written by `save`.

        Raises ConfigError if the file is missing, damaged or not a partition.
        """
        arrays = load_npz(path)
        missing = {"indices", "sizes", "counts", "hash", "info"} - arrays.keys()
        if missing:
            raise ConfigError(
                f"{path}: is not a partition written by fedexp; it does not contain"
                f" {', '.join(sorted(missing))}"
            )
        try:
            parts = tuple(np.split(arrays["indices"], np.cumsum(arrays["sizes"])[:-1]))
            info = json.loads(str(arrays["info"]))
            whole = partition_hash(parts) == str(arrays["hash"])
        except (ValueError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{path}: is damaged: its arrays do not fit together ({error})"
            ) from error
        if not whole:
            raise ConfigError(f"{path}: is damaged: its indices do not match its hash")
        others = [arrays.get(name, np.zeros(0, np.int64)) for name in HELD_OUT]
        return cls(parts, arrays["counts"], str(arrays["hash"]), info, *others)


def format_range(values: np.ndarray) -> str:
    """Return the range of the values as text, such as `4` or `1 to 7 (median 4)`."""
    low, middle, high = int(values.min()), float(np.median(values)), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,} (median {middle:g})"


def find_task_partitions(run_dir: Path) -> list[Path]:
    """Return the partition files of a run's second and later tasks, in the order of the tasks."""
    paths = (run_dir / task_partition_name(number) for number in itertools.count(2))
    return list(itertools.takewhile(Path.exists, paths))


def find_changed_partitions(run_dir: Path) -> list[Path]:
    """Return the files of the partitions that start during a run, in the order of their rounds."""
    found = {path.stem.removeprefix(CHANGED): path for path in run_dir.glob(f"{CHANGED}*.npz")}
    return [found[number] for number in sorted(filter(str.isdecimal, found), key=int)]


def changed_partition_name(number: int) -> str:
    """Return the file name of the partition that is used from round `number` on, at least 2."""
    return f"{CHANGED}{number}.npz"


def task_partition_name(number: int) -> str:
    """Return the file name of the partition for task `number`, at least 2."""
    return f"partition_task{number}.npz"
