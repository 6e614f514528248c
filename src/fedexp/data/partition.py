"""Partition schemes: rules that divide the training examples among the clients.

Sharding and LDA follow FedNTD (NeurIPS 2022), appendix B.5. Natural clients follow LEAF (arXiv
1812.01097). Each partitioner is configured by a file in `conf/partition`. Its method `deal`
depends only on its arguments and on the state of the random generator.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Checked, Count, Seed32

# each client's example indices, and information that is recorded with the partition
Assigned = tuple[list[np.ndarray], dict[str, Any]]
NO_EXAMPLES = np.zeros(0, np.int64)


class Dealt(NamedTuple):
    """What `Partitioner.deal` returns."""

    parts: list[np.ndarray]  # each client's examples, int64 [n_k], ascending
    test: list[np.ndarray]  # each client's examples that were held out for testing, int64
    info: dict[str, Any]  # scheme, settings, and what the scheme records


class Partitioner(Checked, prefix="partition."):
    """Base class of partition schemes (config group `partition`). Subclasses implement `assign`."""

    top: ClassVar = ("alpha", "min_size", "shards_per_client")
    has_global_indices: ClassVar[bool] = False
    """Whether indices refer to all training examples, including public and surrogate examples."""
    by_domain: ClassVar[bool] = False
    """Whether `assign` receives the domains of the examples in place of their natural clients."""

    def deal(
        self,
        labels: np.ndarray,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None = None,
        *,
        num_classes: int | None = None,
        test_fraction: float = 0.0,
    ) -> Dealt:
        """Divide examples among `num_clients` clients.

        labels: int [N], from 0 to C - 1.
        owners: int [N], each example's natural client, or None without natural clients.
        num_classes: the number of classes C. Defaults to the largest label + 1.
        test_fraction: the fraction of each client's examples to hold out for testing. A client with
            n examples keeps floor((1 - test_fraction) n) of them. They are drawn with the generator
            that drew the clients, client by client, as in PFLlib.

        Raises ConfigError if no partition is possible with these settings.
        """
        labels = np.asarray(labels)
        require(num_clients >= 1, "num_clients", num_clients, "at least 1")
        words = f"at most {len(labels)}, the number of training examples"
        require(num_clients <= len(labels), "num_clients", num_clients, words)
        classes = int(labels.max()) + 1 if num_classes is None else num_classes
        if (seed := getattr(self, "numpy_seed", None)) is not None:
            rng = np.random.RandomState(seed)  # type: ignore[assignment]
        given: Any = self.assign(labels, classes, num_clients, rng, owners)
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
            raise ConfigError(
                f"{self.source}: `assign` must return two things: a list of each client's example"
                " indices, and a dict of information to record, which may be empty"
            )
        parts = check_parts(given[0], len(labels), num_clients, self.source)
        parts, test = self.hold_out(parts, test_fraction, rng)
        try:
            noted = json.loads(json.dumps(dict(given[1]), default=lambda value: value.tolist()))
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self.source}: `assign` returns information that JSON cannot hold ({error})"
            ) from error
        info = {"scheme": type(self).__name__} | asdict(self) | noted
        return Dealt(list(map(np.sort, parts)), test, info)

    @property
    def gives_test(self) -> bool:
        """Return whether the partition itself gives clients test examples."""
        return False

    def hold_out(
        self, parts: list[np.ndarray], fraction: float, rng: np.random.Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the training examples and the test examples of each client.

        parts: each client's examples. fraction: the fraction to hold out; 0: none.
        """
        if not fraction:
            return parts, [NO_EXAMPLES] * len(parts)
        return hold_out_test(parts, fraction, rng)

    @property
    def source(self) -> str:
        """Return what the partition comes from, such as a file, for messages."""
        return f"partition: {type(self).__name__}"

    def choose_examples(
        self, num_clients: int, rng: np.random.Generator, owners: np.ndarray | None
    ) -> np.ndarray | None:
        """Return the indices of the examples that may be used, ascending, or None for all examples.

        Other examples are given neither to clients nor to a public set.
        """
        return None

    def remark(self) -> str:
        """Return a remark on the settings that is logged when a run starts, or an empty string."""
        return ""

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        """Return each client's example indices, and a dict of information to record.

        Every client must have at least one example, and no example may be given twice.

        rng: the generator from `deal`. If the scheme has a field `numpy_seed` that is not None, it
            is a legacy generator of numpy with this seed instead.
        """
        raise ConfigError(f"partition: {type(self).__name__} must have the method assign")


def hold_out_test(
    parts: Sequence[np.ndarray], fraction: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draw the test examples of each client, as scikit-learn's train_test_split does in PFLlib.

    parts: each client's example indices, in the order in which the clients got them.
    fraction: the fraction of the test examples, rounded up for each client.

    Returns the remaining examples and the test examples of each client.
    Raises ConfigError if a client would have no training examples.
    """
    kept, test = [], []
    for client, part in enumerate(parts):
        left = int((1 - fraction) * len(part) + 1e-9)
        if not left:
            raise ConfigError(
                f"test_per_client={fraction:g}: client {client} has"
                f" {plural(len(part), 'example')}, so it would have no training examples; use a"
                " smaller fraction, a larger min_size, or partition.choice=largest with"
                " partition=natural"
            )
        order = rng.permutation(len(part))
        test.append(part[order[: len(part) - left]])
        kept.append(part[order[len(part) - left :]])
    return kept, test


def check_parts(
    parts: Iterable[Any], examples: int, num_clients: int, source: str
) -> list[np.ndarray]:
    """Check each client's example indices, and return them as int64 arrays.

    parts: each client's example indices.
    examples: number of training examples.
    num_clients: number of clients.
    source: source of the parts, for messages.

    Raises ConfigError unless every client has at least one example, all indices are from 0 to
    `examples` - 1, and no example is given twice.
    """
    try:
        parts = list(parts)
        arrays = [np.asarray(part) for part in parts]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{source} must give a list of example indices for each client ({error})"
        ) from error
    if len(arrays) != num_clients:
        given = plural(len(arrays), "client")
        raise ConfigError(f"{source} gives {given}, but num_clients={num_clients}")
    for client, part in enumerate(arrays):
        if part.ndim != 1 or not len(part) or part.dtype.kind not in "iu":
            raise ConfigError(
                f"{source} gives client {client} an array of {part.dtype} with shape"
                f" {[*part.shape]}; must be a list of at least one example index (integers)"
            )
        given = parts[client]
        # numpy makes 1 of a True among integers
        if isinstance(given, list) and any(isinstance(each, bool) for each in given):
            raise ConfigError(
                f"{source} gives client {client} true or false; must be a list of example indices"
                " (integers)"
            )
    arrays = [part.astype(np.int64) for part in arrays]
    everything = np.concatenate(arrays)
    clients = np.repeat(np.arange(num_clients), [len(part) for part in arrays])
    outside = (everything < 0) | (everything >= examples)
    if outside.any():
        raise ConfigError(
            f"{source} gives client {clients[outside][0]} example {everything[outside][0]}; example"
            f" indices must be from 0 to {examples - 1}"
        )
    numbers, times = np.unique(everything, return_counts=True)
    if times.max() > 1:
        twice = numbers[times.argmax()]
        first, second = clients[everything == twice][:2]
        where = (
            f"to client {first} twice" if first == second else f"to clients {first} and {second}"
        )
        raise ConfigError(f"{source} gives example {twice} {where}; each example has one client")
    return arrays


class IID(Partitioner):
    """Shuffle the N examples, and give each of the K clients floor(N/K) of them.

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
    """Every client draws s shards of one class each (FedNTD, appendix B.5, and its released code).

    With K clients and C classes, each class is cut into m = s*K/C contiguous blocks (shards) in the
    order of the data set. If a class has n_c examples, the remaining n_c mod m examples are added
    to the first blocks, one each. The classes of the clients' shards are a shuffled table [K, s],
    in which each class occurs m times. A class may occur several times in a client's row, so a
    client has at most s classes.

    With `numpy_seed`, the clients get the same classes as in the released code after
    `np.random.seed(numpy_seed)` and `random.seed(numpy_seed)`. If the examples of the data set are
    also in the same order, the clients get the same examples.
    """

    shards_per_client: Count  # s
    numpy_seed: Seed32 | None = None  # seed as in the released code; None: use seeds.partition

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
                f"shards_per_client={per_client}: class {sizes.argmin()} has only {sizes.min()}"
                f" examples, but must be cut into {shards} shards (shards_per_client * num_clients"
                " / classes); use fewer shards or clients"
            )
        left = [_cut_blocks(np.flatnonzero(labels == c), shards) for c in range(num_classes)]
        if self.numpy_seed is None:
            table = rng.permutation(np.repeat(np.arange(num_classes), shards)).tolist()
            for blocks in left:
                blocks[:] = [blocks[i] for i in rng.permutation(shards)]
            drawn = [left[c].pop() for c in table]
        else:  # as in the released code: Python's generator and numpy's legacy generator
            table = list(range(num_classes)) * shards
            random.Random(self.numpy_seed).shuffle(table)
            drawn = [left[c].pop(rng.choice(len(left[c]), replace=False)) for c in table]
        return _join_shards(drawn, per_client), {}


class Shards(Partitioner):
    """Cut all examples into s*K shards of about equal size; each of the K clients draws s shards.

    The examples are shuffled before they are cut into shards. With `sort_by_label`, they are also
    sorted by label, so a shard usually has one or two classes (McMahan et al. 2017; CFeD, IJCAI
    2022, section 5.3).
    """

    shards_per_client: Count  # s
    sort_by_label: bool

    def remark(self) -> str:
        if self.sort_by_label:
            return ""
        return (
            "the shards are cut from shuffled examples, so all clients have nearly the same class"
            " distribution (IID); sort_by_label=true first sorts the examples by label (non-IID, as"
            " in McMahan et al. 2017)"
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
        words = (
            f"at most {len(labels) // num_clients}, so that each shard of the {num_clients} clients"
            f" has at least one of the {len(labels)} examples"
        )
        require(total <= len(labels), "shards_per_client", self.shards_per_client, words)
        order = rng.permutation(len(labels))
        if self.sort_by_label:
            order = order[np.argsort(labels[order], kind="stable")]
        shards = np.array_split(order, total)
        drawn = [shards[i] for i in rng.permutation(total)]
        return _join_shards(drawn, self.shards_per_client), {}


def _join_shards(shards: Sequence[np.ndarray], per_client: int) -> list[np.ndarray]:
    """Give each client the examples of `per_client` consecutive shards."""
    starts = range(0, len(shards), per_client)
    return [np.concatenate(shards[start : start + per_client]) for start in starts]


def _cut_blocks(indices: np.ndarray, number: int) -> list[np.ndarray]:
    """Cut indices into `number` contiguous blocks of equal size.

    The remaining indices at the end are appended to the first blocks, one each.
    """
    whole = len(indices) // number * number
    blocks = list(indices[:whole].reshape(number, -1))
    for i, extra in enumerate(indices[whole:]):
        blocks[i] = np.append(blocks[i], extra)
    return blocks


class Natural(Partitioner):
    """Use the natural clients of the data set (LEAF).

    If `num_clients` is smaller than the number of natural clients, `choice` determines which ones
    are used: `random` draws them uniformly, and `largest` selects the clients with the most
    examples, to avoid clients with very few examples. The examples of the remaining natural clients
    are not used, not even in a public set.
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
                "partition=natural: this data set has no natural clients; use a data set with"
                " natural clients, such as dataset=femnist (writers)"
            )
        total = len(np.unique(owners))
        words = f"at most {total}, the number of natural clients in the data set"
        require(num_clients <= total, "num_clients", num_clients, words)
        kept = self.choose_examples(num_clients, rng, owners)
        numbers = np.arange(len(owners)) if kept is None else kept
        _, sizes = np.unique(owners[numbers], return_counts=True)
        by_owner = numbers[np.argsort(owners[numbers], kind="stable")]
        return np.split(by_owner, np.cumsum(sizes)[:-1]), {"owners": total}
