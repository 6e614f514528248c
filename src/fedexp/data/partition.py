"""Partitions: which training examples each client holds.

Sources: FedNTD (NeurIPS 2022) appendix B.5 for sharding and LDA, LEAF (arXiv 1812.01097) for natural clients.
A partitioner is built from `conf/partition/*.yaml`; `split` is a pure function of the labels and a generator.
"""

import hashlib
import io
import itertools
import json
import math
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedexp.core.errors import ConfigError, require, require_choice
from fedexp.core.storage import regular, write_atomically

RATIO = 200  # bytes of an array for one that is packed; fedexp packs none, and numbers seldom pack by more than 20
CHANGED = "partition_from_round"  # begin of the file names of partitions that a run changes to
SMALL = 2**26  # bytes that are harmless whatever their ratio


def save_npz(path: Path, **arrays: Any) -> None:
    """Write an .npz file atomically: readers see the old file or the complete new one."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(Path(path), buffer.getvalue())


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an .npz file, nothing unpickled. Raises ConfigError when it is missing or unreadable."""
    try:
        with open(regular(path), "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an .npz archive")
            assert archive.zip is not None  # it has just been opened
            check_size(archive.zip.infolist())
            return {key: archive[key] for key in archive.files}
    except Exception as error:  # numpy, zipfile and zlib raise many types for a damaged file
        raise ConfigError(
            f"{path}: cannot be read as an .npz file ({getattr(error, 'strerror', None) or error})"
        ) from None


def check_size(members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise ValueError where a few bytes stand for more than the memory may hold. zipfile reads no more of a member
    than the size that it claims."""
    size, packed = (sum(getattr(member, name) for member in members) for name in ("file_size", "compress_size"))
    if size > SMALL and size > RATIO * packed:
        raise ValueError(f"{packed:,} bytes stand for {size:,}, more than {RATIO} times as many")


def partition_hash(parts: Sequence[np.ndarray]) -> str:
    """Return SHA-256 (hex) of the sizes [K] followed by the concatenated indices [N], all as little-endian int64."""
    sizes = np.array([len(part) for part in parts])
    return hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in (sizes, *parts))).hexdigest()


@dataclass(frozen=True)
class Partition:
    """Client -> indices into the training set.

    Two partitions that give every client the same examples have the same `hash`, because indices are kept sorted.
    """

    parts: tuple[np.ndarray, ...]  # K arrays, int64 [n_k], ascending
    counts: np.ndarray  # int64 [K, C]: training examples of each class
    hash: str
    info: dict[str, Any] = field(default_factory=dict)  # how it was made: scheme, settings, draws, sizes
    public: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # examples of the server, ascending
    validation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # examples of nobody, ascending

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of examples n_k of each client, int64 [K]."""
        return self.counts.sum(1)

    @classmethod
    def build(cls, parts: Iterable[np.ndarray], labels: np.ndarray, num_classes: int, info: dict) -> "Partition":
        """Sort the indices, check that clients are disjoint, in range and not empty, count the classes."""
        ordered = tuple(np.sort(np.asarray(part, dtype=np.int64)) for part in parts)
        everything = np.concatenate(ordered)
        assert all(len(part) for part in ordered), "a client without examples"
        assert 0 <= everything.min() <= everything.max() < len(labels), "an index out of range"
        assert len(np.unique(everything)) == len(everything), "an example with two owners"
        owners = np.repeat(np.arange(len(ordered)), [len(part) for part in ordered])
        own = labels[everything]
        assert 0 <= own.min() <= own.max() < num_classes, "a label out of range"
        cells = np.bincount(owners * num_classes + own, minlength=len(ordered) * num_classes)
        counts = cells.reshape(len(ordered), num_classes).astype(np.int64)  # of all clients at once: there may be many
        sizes = counts.sum(1)
        info = info | {
            "size_min": int(sizes.min()),
            "size_median": float(np.median(sizes)),
            "size_max": int(sizes.max()),
        }
        return cls(ordered, counts, partition_hash(ordered), info)

    def sentence(self) -> str:
        """Return in words what the clients hold: how many examples each, of how many classes; with the settings that
        were used and the hash."""
        numbers = {key: value for key, value in self.info.items() if isinstance(value, int | float | str)}
        used = [f"{key} {value}" for key, value in numbers.items() if key != "scheme" and not key.startswith("size_")]
        sizes, classes = self.sizes, (self.counts > 0).sum(1)
        total = int((self.counts.sum(0) > 0).sum())
        text = f"{plural(len(sizes), 'client')} with {spread_of(sizes)} examples each, of {spread_of(classes)} of the "
        text += plural(total, "class") + (f"; the server has {len(self.public):,} more" if len(self.public) else "")
        return f"{text} ({', '.join([*used, f'hash {self.hash[:12]}'])})"

    def among(self, numbers: np.ndarray, labels: np.ndarray, num_classes: int) -> "Partition":
        """Return the same partition where example i of it is example numbers[i] of labels [N]."""
        info, parts = dict(self.info), [numbers[part] for part in self.parts]
        public = numbers[self.public]
        if len(public):
            info["public_counts"] = np.bincount(labels[public], minlength=num_classes).tolist()
        return replace(Partition.build(parts, labels, num_classes, info), public=public)

    def holding(self, parts: Sequence[np.ndarray], labels: np.ndarray, num_classes: int) -> "Partition":
        """Return the partition with other examples (numbers in labels [N]) for each client; those of the server and of
        the validation set stay."""
        rest = Partition.build(parts, labels, num_classes, self.info)
        return replace(rest, public=self.public, validation=self.validation)

    def holding_out(self, validation: np.ndarray, labels: np.ndarray, num_classes: int) -> "Partition":
        """Return the partition with a validation set (numbers in labels [N]), which the clients do not hold."""
        parts = [np.setdiff1d(part, validation) for part in self.parts]
        info = self.info | {"validation_counts": np.bincount(labels[validation], minlength=num_classes).tolist()}
        rest = Partition.build(parts, labels, num_classes, info)
        return replace(rest, public=self.public, validation=np.sort(validation))

    def save(self, path: Path, classes: Sequence[str]) -> None:
        """Write partition.npz: indices [N], sizes [K], counts [K, C], hash, public [M], classes [C] (names), info
        (JSON), and validation [V] where there is such a set."""
        save_npz(
            path,
            indices=np.concatenate(self.parts),
            sizes=self.sizes,
            counts=self.counts,
            hash=np.array(self.hash),
            public=self.public,
            classes=np.array(classes, dtype=str),
            info=np.array(json.dumps(self.info)),
            **({"validation": self.validation} if len(self.validation) else {}),
        )

    @classmethod
    def load(cls, path: Path) -> "Partition":
        """Read what `save` wrote; ConfigError when the file is missing, damaged or not a partition."""
        arrays = load_npz(path)
        missing = {"indices", "sizes", "counts", "hash", "info"} - arrays.keys()
        if missing:
            raise ConfigError(f"{path}: not a partition written by fedexp (no {', '.join(sorted(missing))})")
        try:
            parts = tuple(np.split(arrays["indices"], np.cumsum(arrays["sizes"])[:-1]))
            info = json.loads(str(arrays["info"]))
            whole = partition_hash(parts) == str(arrays["hash"])
        except (ValueError, TypeError, IndexError) as error:
            raise ConfigError(f"{path}: damaged, its arrays do not belong together ({error})") from error
        if not whole:
            raise ConfigError(f"{path}: damaged, its indices do not match its hash")
        others = [arrays.get(name, np.zeros(0, np.int64)) for name in ("public", "validation")]
        return cls(parts, arrays["counts"], str(arrays["hash"]), info, *others)


@dataclass(frozen=True, kw_only=True)
class Partitioner:
    """Base of the `partition` group. A scheme implements `assign`."""

    numbers_all: ClassVar[bool] = False  # its indices count all training examples, those of a public set included

    def split(
        self,
        labels: np.ndarray,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None = None,
        *,
        num_classes: int | None = None,
    ) -> Partition:
        """Split the training set among `num_clients` clients.

        labels int [N] in 0..C-1; owners int [N] (natural client of each example) or None; C = `num_classes`, by default
        the largest label + 1. Raises ConfigError when the settings cannot be met.
        """
        labels = np.asarray(labels)
        require(num_clients >= 1, "num_clients", num_clients, "at least 1")
        if num_clients > len(labels):
            raise ConfigError(f"num_clients={num_clients}: more clients than training examples ({len(labels)})")
        classes = int(labels.max()) + 1 if num_classes is None else num_classes
        parts, info = self.assign(labels, classes, num_clients, rng, owners)
        assert len(parts) == num_clients
        return Partition.build(parts, labels, classes, {"scheme": type(self).__name__} | asdict(self) | info)

    def eligible(self, num_clients: int, rng: np.random.Generator, owners: np.ndarray | None) -> np.ndarray | None:
        """Return the numbers of the examples, ascending, of which a public set and the clients are made; None: of
        all."""
        return None

    def remark(self) -> str:
        """Return what is easily overlooked about these settings, to be said when a run begins; empty: nothing."""
        return ""

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Return the indices of each client (disjoint, none empty) and what else is worth recording."""
        raise NotImplementedError


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


def spread_of(values: np.ndarray) -> str:
    """Return `4`, or `1 to 7 (median 4)`."""
    low, middle, high = int(values.min()), float(np.median(values)), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,} (median {middle:g})"


def make_partition(
    partitioner: Partitioner,
    labels: np.ndarray,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    owners: np.ndarray | None,
    public: np.ndarray,
) -> Partition:
    """Return `partitioner.split` of the examples that are not `public` (int [M], may be empty), by their numbers in
    labels [N].

    num_classes: of the data set; `labels` may lack some.
    """
    if not len(public):
        return partitioner.split(labels, num_clients, rng, owners, num_classes=num_classes)
    if partitioner.numbers_all:
        partition = partitioner.split(labels, num_clients, rng, owners, num_classes=num_classes)
        for client, part in enumerate(partition.parts):
            if (both := np.intersect1d(part, public)).size:
                raise ConfigError(f"partition: client {client} holds example {both[0]}, which is in the public set")
    else:
        rest = np.setdiff1d(np.arange(len(labels)), public)
        kept = None if owners is None else owners[rest]
        partition = partitioner.split(labels[rest], num_clients, rng, kept, num_classes=num_classes)
        parts = [rest[part] for part in partition.parts]
        partition = Partition.build(parts, labels, num_classes, partition.info)
    held = np.bincount(labels[public], minlength=num_classes).tolist()
    return replace(partition, public=public, info=partition.info | {"public_counts": held})


@dataclass(frozen=True, kw_only=True)
class IID(Partitioner):
    """Shuffle, then equal consecutive parts of floor(N/K) examples; the N mod K left-over examples are unused."""

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        size = len(labels) // num_clients
        return list(rng.permutation(len(labels))[: size * num_clients].reshape(num_clients, size)), {}


@dataclass(frozen=True, kw_only=True)
class Sharding(Partitioner):
    """Every client draws s shards of one class each (FedNTD appendix B.5 and its released code).

    A class of n_c examples is cut into m = s*K/C contiguous blocks in the order of the data set; n_c mod m left-over
    examples go one each to the first blocks. A shuffled table [K, s], in which each class stands m times, says the
    classes a client draws from, so that a client holds at most s classes (the same class may come twice).
    """

    shards_per_client: int  # s

    def __post_init__(self) -> None:
        require(self.shards_per_client >= 1, "shards_per_client", self.shards_per_client, "at least 1")

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        shards, remainder = divmod(self.shards_per_client * num_clients, num_classes)
        if remainder:
            raise ConfigError(self._indivisible(num_classes, num_clients))
        sizes = np.bincount(labels, minlength=num_classes)
        if sizes.min() < shards:
            raise ConfigError(
                f"shards_per_client={self.shards_per_client}: class {sizes.argmin()} has {sizes.min()} examples, fewer "
                f"than its {shards} shards (= shards_per_client * num_clients / classes); fewer shards or clients work"
            )
        table = rng.permutation(np.repeat(np.arange(num_classes), shards)).reshape(num_clients, self.shards_per_client)
        remaining = [_shuffled_blocks(np.flatnonzero(labels == c), shards, rng) for c in range(num_classes)]
        return [np.concatenate([remaining[c].pop() for c in row]) for row in table], {}

    def _indivisible(self, num_classes: int, num_clients: int) -> str:
        s, clients = (num_classes // math.gcd(num_classes, n) for n in (num_clients, self.shards_per_client))
        return (
            f"shards_per_client={self.shards_per_client} with num_clients={num_clients}: their product must be a "
            f"multiple of the {num_classes} classes; valid: shards_per_client={s}, {2 * s}, {3 * s}, ... or "
            f"num_clients={clients}, {2 * clients}, {3 * clients}, ..."
        )


@dataclass(frozen=True, kw_only=True)
class Shards(Partitioner):
    """All examples are cut into s*K shards of about equal size, of which every client draws s (McMahan et al. 2017;
    CFeD, IJCAI 2022, section 5.3): from a random order, or sorted by label (then a shard holds one or two classes)."""

    shards_per_client: int  # s
    sort_by_label: bool

    def __post_init__(self) -> None:
        require(self.shards_per_client >= 1, "shards_per_client", self.shards_per_client, "at least 1")

    def remark(self) -> str:
        if self.sort_by_label:
            return ""
        return (
            "the shards are cut from a random order, so that all clients have nearly the same distribution (IID); "
            "sort_by_label=true sorts by label first (non-IID, as McMahan et al. 2017)"
        )

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        total = self.shards_per_client * num_clients
        if total > len(labels):
            raise ConfigError(
                f"shards_per_client={self.shards_per_client} with num_clients={num_clients}: {len(labels)} examples "
                f"cannot be cut into {total} shards; fewer shards or clients work"
            )
        order = rng.permutation(len(labels))
        if self.sort_by_label:
            order = order[np.argsort(labels[order], kind="stable")]
        shards = np.array_split(order, total)
        table = rng.permutation(total).reshape(num_clients, self.shards_per_client)
        return [np.concatenate([shards[i] for i in row]) for row in table], {}


def _shuffled_blocks(indices: np.ndarray, number: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return contiguous equal blocks in random order; the last `len % number` indices are appended to the first
    blocks."""
    whole = len(indices) // number * number
    blocks = list(indices[:whole].reshape(number, -1))
    for i, extra in enumerate(indices[whole:]):
        blocks[i] = np.append(blocks[i], extra)
    return [blocks[i] for i in rng.permutation(number)]


@dataclass(frozen=True, kw_only=True)
class Natural(Partitioner):
    """The data set's own clients (LEAF). With fewer clients than owners, `choice` says which take part: `random`, drawn
    uniformly, or `largest`, those with the most examples, which is a bound on the smallest number of samples.

    The examples of the others are unused; a public set has none of them either.
    """

    choice: str = "random"

    def __post_init__(self) -> None:
        require_choice("partition.choice", self.choice, ("random", "largest"))

    def eligible(self, num_clients: int, rng: np.random.Generator, owners: np.ndarray | None) -> np.ndarray | None:
        if owners is None:
            return None
        names, sizes = np.unique(owners, return_counts=True)
        if num_clients >= len(names):
            return None
        if self.choice == "largest":
            chosen = names[np.argsort(-sizes, kind="stable")[:num_clients]]
        else:
            chosen = names[rng.choice(len(names), num_clients, replace=False)]
        return np.flatnonzero(np.isin(owners, chosen))

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        if owners is None:
            raise ConfigError(
                "partition=natural: this data set has no natural clients; dataset=femnist has them (writers)"
            )
        names, owner = np.unique(owners, return_inverse=True)
        if num_clients > len(names):
            raise ConfigError(
                f"num_clients={num_clients}: the data set has {len(names)} natural clients; use at most that"
            )
        by_owner = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
        kept = self.eligible(num_clients, rng, owners)
        chosen = range(len(names)) if kept is None else np.unique(owner[kept])
        return [by_owner[i] for i in chosen], {"owners": len(names)}


def later_partitions(run_dir: Path) -> list[Path]:
    """Return the files of the partitions of the tasks after the first, in their order."""
    paths = (run_dir / task_partition(number) for number in itertools.count(2))
    return list(itertools.takewhile(Path.exists, paths))


def changed_partitions(run_dir: Path) -> dict[int, Path]:
    """Return first round -> the file of the partition from then on, of a run whose partition changes, ascending."""
    found = {path.stem.removeprefix(CHANGED): path for path in run_dir.glob(f"{CHANGED}*.npz")}
    return {int(number): found[number] for number in sorted(filter(str.isdecimal, found), key=int)}


def changed_partition(number: int) -> str:
    """Return the file name of the partition from round 2, 3, ... on."""
    return f"{CHANGED}{number}.npz"


def task_partition(number: int) -> str:
    """Return the file name of the partition of task 2, 3, ..."""
    return f"partition_task{number}.npz"
