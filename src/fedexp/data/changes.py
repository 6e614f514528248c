"""Changes to the clients' data during a run (config node `schedule`).

A change either sets a new partition or reduces the number of examples of some classes. Each change
applies from its round on. All random numbers are derived from the partition's seed, so a resumed
run has the same data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Checked, Limit
from fedexp.core.rng import generator_for
from fedexp.data.partition import Partitioner
from fedexp.data.partitioned import Partition


@dataclass(frozen=True, kw_only=True)
class NewPartition:
    """A partition that is used from a given round on."""

    round: int
    partition: Partitioner


@dataclass(frozen=True, kw_only=True)
class NewShares:
    """A change after which clients keep only a fraction of their examples of some classes.

    round: the first round of the change. shares: class -> fraction.
    """

    round: int
    shares: dict[int, float]


ClientNumbers = Annotated[
    list[int],
    Limit(
        "a list of distinct client numbers, counted from 0",
        lambda v: len(set(v)) == len(v) > 0 and min(v) >= 0,
    ),
]


class DataSchedule(Checked, prefix="schedule."):
    """All changes to the data of a run."""

    partition: list[NewPartition]
    classes: list[NewShares]
    clients: ClientNumbers | None  # clients that `classes` applies to; None: all clients

    def __post_init__(self) -> None:
        super().__post_init__()
        words = "null without schedule.classes"
        unused = not self.classes and self.clients and min(self.clients) >= 0
        require(not unused, "schedule.clients", self.clients, words)

    @property
    def rounds(self) -> list[int]:
        """Return the rounds in which the data change, ascending."""
        changes: list[NewPartition | NewShares] = [*self.partition, *self.classes]
        return sorted({each.round for each in changes})

    def check_rounds(self, last: int) -> None:
        """Raise ConfigError if a change is scheduled after the last round."""
        for name, changes in (("partition", self.partition), ("classes", self.classes)):
            latest = max((each.round for each in changes), default=0)
            if latest > last:
                raise ConfigError(
                    f"schedule.{name}: a change is scheduled for round {latest}, but the run has"
                    f" only {plural(last, 'round')} (rounds={last})"
                )

    def partition_at(self, round: int) -> NewPartition | None:
        """Return the latest change of the partition up to `round`, or None if there is none."""
        begun = [each for each in self.partition if each.round <= round]
        return max(begun, key=lambda each: each.round, default=None)

    def shares_at(self, round: int) -> dict[int, float]:
        """Return the shares that apply in `round`, as a dict {class: share}.

        If several changes set the share of a class, the latest one applies.
        """
        found: dict[int, float] = {}
        for each in sorted(self.classes, key=lambda each: each.round):
            found |= each.shares if each.round <= round else {}
        return found


def reduce_classes(
    partition: Partition,
    shares: Mapping[int, float],
    clients: Sequence[int] | None,
    labels: np.ndarray,
    num_classes: int,
    seed: int,
) -> Partition:
    """Return the partition with fewer examples of some classes.

    A client with n examples of a class keeps share * n of them, rounded half up. With a larger
    share, a client keeps the same examples and additional ones.

    shares: class -> share.
    clients: the clients that lose examples. None: all clients.
    labels: int [N], the labels of all training examples.

    Raises ConfigError if a class or client does not exist, or if a client would have no examples
    left.
    """
    top = max(shares)
    require(top < num_classes, "schedule.classes", top, f"classes from 0 to {num_classes - 1}")
    last, words = len(partition.parts) - 1, "clients from 0 to"
    require(max(clients or [0]) <= last, "schedule.clients", clients, f"{words} {last}")
    parts = list(partition.parts)
    for client in range(len(parts)) if clients is None else clients:
        part = parts[client]
        kept = [part[~np.isin(labels[part], list(shares))]]
        for c, share in shares.items():
            own = part[labels[part] == c]
            order = generator_for(seed, "share of a class", client, c).permutation(own)
            kept.append(order[: int(np.floor(share * len(own) + 0.5))])
        parts[client] = np.concatenate(kept)
        if not len(parts[client]):
            raise ConfigError(
                f"schedule.classes: client {client} would have no examples left; use a larger share"
            )
    info = partition.info | {"shares": {str(c): share for c, share in shares.items()}}
    return replace(partition, info=info).with_parts(parts, labels, num_classes)


def describe_change(partition: Partition) -> str:
    """Return a text that describes the clients' data after a change, including reduced shares."""
    shares = [
        f"{share:g} of class {label}" for label, share in partition.info.get("shares", {}).items()
    ]
    return partition.sentence() + (f"; share kept: {', '.join(shares)}" if shares else "")
