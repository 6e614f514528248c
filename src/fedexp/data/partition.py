"""Partition schemes, which divide the training examples among the clients.

Sources: FedNTD (NeurIPS 2022) appendix B.5 for sharding and LDA, LEAF (arXiv 1812.01097) for
natural clients. A partitioner is built from `conf/partition/*.yaml`; `split` is a pure function of
the labels and a random generator.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import numpy as np

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Checked, Count, Seed32
from fedexp.data.partitioned import Partition

# each client's example indices, and further information for the record
Assigned = tuple[list[np.ndarray], dict[str, Any]]


class Partitioner(Checked, prefix="partition."):
    """Base class of the `partition` group. A scheme implements `assign`."""

    top: ClassVar = ("alpha", "min_size", "shards_per_client")
    has_global_indices: ClassVar[bool] = False
    """Whether the indices refer to all training examples, including public and surrogate ones."""

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

        labels: int [N], from 0 to C - 1, or -1 for a surrogate example, which no client may
        get (see `has_global_indices`).
        owners: int [N], each example's natural client, or None.
        num_classes: C. Defaults to the largest label + 1.

        Raises ConfigError if the settings cannot be met.
        """
        labels = np.asarray(labels)
        require(num_clients >= 1, "num_clients", num_clients, "at least 1")
        words = f"at most {len(labels)}, the number of training examples"
        require(num_clients <= len(labels), "num_clients", num_clients, words)
        classes = int(labels.max()) + 1 if num_classes is None else num_classes
        given: Any = self.assign(labels, classes, num_clients, rng, owners)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
            raise ConfigError(
                f"{self.source}: `assign` must return two things: a list of each client's example"
                " indices, and a dict of information to record, which may be empty"
            )
        parts = check_parts(given[0], len(labels), num_clients, self.source)
        refuse_examples([part[labels[part] < 0] for part in parts], "a surrogate example")
        info = {"scheme": type(self).__name__} | asdict(self) | dict(given[1])
        return Partition.build(parts, labels, classes, info)

    @property
    def source(self) -> str:
        """Return what the partition comes from, for use in messages."""
        return f"partition: {type(self).__name__}"

    def choose_examples(
        self, num_clients: int, rng: np.random.Generator, owners: np.ndarray | None
    ) -> np.ndarray | None:
        """Return the indices of the examples that may be given to clients or to a public set,
        ascending.

        None means all examples.
        """
        return None

    def remark(self) -> str:
        """Return a remark on these settings to log when a run starts, or an empty string."""
        return ""

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        """Return each client's example indices (disjoint, none empty) and a dict of further
        information.
        """
        raise NotImplementedError


def check_parts(
    parts: Iterable[Any], examples: int, num_clients: int, source: str
) -> list[np.ndarray]:
    """Return the parts as int64 arrays.

    Raises ConfigError unless every client has at least one example, all indices are from 0 to
    `examples` - 1, and no example is given twice.
    """
    try:
        arrays = [np.asarray(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source} gives no list of indices for each client ({error})") from error
    if len(arrays) != num_clients:
        given = plural(len(arrays), "client")
        raise ConfigError(f"{source} gives {given}, but num_clients={num_clients}")
    for client, part in enumerate(arrays):
        if part.ndim != 1 or not len(part) or part.dtype.kind not in "iu":
            raise ConfigError(
                f"{source} gives client {client} {part.dtype} of shape {[*part.shape]}; must be"
                " example indices, int [n], n >= 1"
            )
    arrays = [part.astype(np.int64) for part in arrays]
    everything = np.concatenate(arrays)
    clients = np.repeat(np.arange(num_clients), [len(part) for part in arrays])
    outside = (everything < 0) | (everything >= examples)
    if outside.any():
        raise ConfigError(
            f"{source} gives client {clients[outside][0]} example {everything[outside][0]}; must"
            f" be from 0 to {examples - 1}"
        )
    numbers, times = np.unique(everything, return_counts=True)
    if times.max() > 1:
        twice = numbers[times.argmax()]
        first, second = clients[everything == twice][:2]
        raise ConfigError(f"{source} gives example {twice} twice, to clients {first} and {second}")
    return arrays


def refuse_examples(parts: Iterable[np.ndarray], what: str) -> None:
    """Raise ConfigError if a client has any of these examples."""
    for client, part in enumerate(parts):
        if part.size:
            raise ConfigError(f"partition: client {client} has example {part[0]}, which is {what}")


def make_partition(
    partitioner: Partitioner,
    labels: np.ndarray,
    num_classes: int,
    num_clients: int,
    rng: np.random.Generator,
    owners: np.ndarray | None,
    public: np.ndarray,
) -> Partition:
    """Return `partitioner.split` of the examples that are not public, as indices into `labels`.

    labels: int [N].
    num_classes: number of classes of the data set; `labels` may lack some of them.
    public: int [M], indices of the public examples, may be empty.
    """
    if not len(public):
        return partitioner.split(labels, num_clients, rng, owners, num_classes=num_classes)
    if partitioner.has_global_indices:
        partition = partitioner.split(labels, num_clients, rng, owners, num_classes=num_classes)
        parts = list(partition.parts)
        refuse_examples([np.intersect1d(part, public) for part in parts], "in the public set")
    else:
        rest = np.setdiff1d(np.arange(len(labels)), public)
        kept = None if owners is None else owners[rest]
        partition = partitioner.split(labels[rest], num_clients, rng, kept, num_classes=num_classes)
        parts = [rest[part] for part in partition.parts]
    return partition.with_parts(parts, labels, num_classes, public=public)


class IID(Partitioner):
    """Shuffle, then cut into equal consecutive parts of floor(N/K) examples.

    The remaining N mod K examples are unused.
    """

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        size = len(labels) // num_clients
        used = rng.permutation(len(labels))[: size * num_clients]
        return list(used.reshape(num_clients, size)), {}


class Sharding(Partitioner):
    """Every client draws s shards of one class each (FedNTD appendix B.5 and its released code).

    A class with n_c examples is cut into m = s*K/C contiguous blocks in the order of the data set.
    The remaining n_c mod m examples are added to the first blocks, one each. A shuffled table [K,
    s], in which each class appears m times, gives the classes that each client draws from. A client
    has at most s classes, because a class may appear in its row more than once.

    With `numpy_seed`, the draw is the same as in the released code after
    `np.random.seed(numpy_seed)` and `random.seed(numpy_seed)`: each client gets the same classes
    and, if the data set has the same order, the same examples.
    """

    shards_per_client: Count  # s
    numpy_seed: Seed32 | None = None  # seed of the released code's draw; None: use seeds.partition

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        per_client = self.shards_per_client
        shards, remainder = divmod(per_client * num_clients, num_classes)
        words = (
            f"such that its product with num_clients={num_clients} is a multiple of the"
            f" {num_classes} classes"
        )
        require(not remainder, "shards_per_client", per_client, words)
        sizes = np.bincount(labels, minlength=num_classes)
        if sizes.min() < shards:
            raise ConfigError(
                f"shards_per_client={per_client}: class {sizes.argmin()} has {sizes.min()}"
                f" examples, but must give {shards} shards (shards_per_client * num_clients /"
                " classes); use fewer shards or clients"
            )
        left = [_cut_blocks(np.flatnonzero(labels == c), shards) for c in range(num_classes)]
        if self.numpy_seed is None:
            table = rng.permutation(np.repeat(np.arange(num_classes), shards)).tolist()
            for blocks in left:
                blocks[:] = [blocks[i] for i in rng.permutation(shards)]
            drawn = [left[c].pop() for c in table]
        else:  # Python's generator and one of numpy's legacy generators
            table = list(range(num_classes)) * shards
            random.Random(self.numpy_seed).shuffle(table)
            legacy = np.random.RandomState(self.numpy_seed)
            drawn = [left[c].pop(legacy.choice(len(left[c]), replace=False)) for c in table]
        return _join_shards(drawn, per_client), {}


class Shards(Partitioner):
    """Cut all examples into s*K shards of about equal size; every client draws s of them.

    The shards are cut from a random order, or from the examples sorted by label, in which case a
    shard has one or two classes (McMahan et al. 2017; CFeD, IJCAI 2022, section 5.3).
    """

    shards_per_client: Count  # s
    sort_by_label: bool

    def remark(self) -> str:
        if self.sort_by_label:
            return ""
        return (
            "the shards are cut from a random order, so that all clients have nearly the same"
            " distribution (IID); sort_by_label=true sorts by label first (non-IID, as McMahan et"
            " al. 2017)"
        )

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        total = self.shards_per_client * num_clients
        words = f"such that {num_clients} clients have at most {len(labels)} shards (examples)"
        require(total <= len(labels), "shards_per_client", self.shards_per_client, words)
        order = rng.permutation(len(labels))
        if self.sort_by_label:
            order = order[np.argsort(labels[order], kind="stable")]
        shards = np.array_split(order, total)
        drawn = [shards[i] for i in rng.permutation(total)]
        return _join_shards(drawn, self.shards_per_client), {}


def _join_shards(shards: Sequence[np.ndarray], per_client: int) -> list[np.ndarray]:
    """Return each client's examples, which are those of `per_client` consecutive shards."""
    starts = range(0, len(shards), per_client)
    return [np.concatenate(shards[start : start + per_client]) for start in starts]


def _cut_blocks(indices: np.ndarray, number: int) -> list[np.ndarray]:
    """Return contiguous blocks of equal size.

    The last `len % number` indices are appended to the first blocks.
    """
    whole = len(indices) // number * number
    blocks = list(indices[:whole].reshape(number, -1))
    for i, extra in enumerate(indices[whole:]):
        blocks[i] = np.append(blocks[i], extra)
    return blocks


class Natural(Partitioner):
    """The data set's natural clients (LEAF).

    If there are fewer clients than owners, `choice` selects the owners that take part: `random`
    draws them uniformly, and `largest` takes those with the most examples, which bounds the
    smallest number of examples from below. The other owners' examples are unused, also in a public
    set.
    """

    choice: Literal["random", "largest"] = "random"

    def choose_examples(
        self, num_clients: int, rng: np.random.Generator, owners: np.ndarray | None
    ) -> np.ndarray | None:
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
    ) -> Assigned:
        if owners is None:
            raise ConfigError(
                "partition=natural: this data set has no natural clients; use one that has them,"
                " such as dataset=femnist (writers)"
            )
        total = len(np.unique(owners))
        words = f"at most {total}, the number of natural clients in the data set"
        require(num_clients <= total, "num_clients", num_clients, words)
        kept = self.choose_examples(num_clients, rng, owners)
        numbers = np.arange(len(owners)) if kept is None else kept
        _, sizes = np.unique(owners[numbers], return_counts=True)
        by_owner = numbers[np.argsort(owners[numbers], kind="stable")]
        return np.split(by_owner, np.cumsum(sizes)[:-1]), {"owners": total}
