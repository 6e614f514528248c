"""Check a partition."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedexp.config.build import Built, build
from fedexp.config.composition import composed, without_hydra
from fedexp.core.console import plural
from fedexp.data.partition import Partitioner
from fedexp.data.partitioned import Partition
from fedexp.testing.federation import require
from fedexp.training.division import divide


def check_partition(
    partition: Partitioner,
    clients: Sequence[int] = (2, 5, 10),
    left_out: int = 0,
    deterministic: bool = False,
    overrides: Sequence[str] = (),
) -> None:
    """Check a partition of the training examples of a data set, by default the 1,437 digits.

    For each number of clients, the checks are:

    - Every client has an example, and at least `min_size` if the partition has this field. No
      example has two clients, and at most `left_out` examples have none.
    - The same seed (`seeds.partition`) gives the same clients, whatever was drawn or divided
      before, and another seed gives others, unless the partition is `deterministic`.
    - `assign` does not change the labels that it receives.

    clients: the numbers of clients. overrides: such as ["dataset=femnist"].
    """
    with composed(overrides) as composition:
        built = build(without_hydra(composition))
    for number in clients:
        check_division(partition, number, left_out, deterministic, built)


def check_division(
    partition: Partitioner,
    clients: int,
    left_out: int,
    deterministic: bool,
    built: Built,
) -> None:
    """Check a partition for a number of clients."""
    where = f"{partition.source}: with {plural(clients, 'client')}"
    first = divided(built, copy.deepcopy(partition), clients, 0)
    missing = first.info.get("unused", 0)
    require(
        missing <= left_out,
        f"{where}, {plural(missing, 'example')} have no client, more than left_out={left_out}",
    )
    smallest, least = int(first.sizes.min()), getattr(partition, "min_size", 1)
    require(
        smallest >= least,
        f"{where}, the smallest client has {plural(smallest, 'example')}, but min_size={least}",
    )
    used = copy.deepcopy(partition)
    same = divided(built, used, clients, 1).hash == first.hash
    for each in (used, copy.deepcopy(partition)):
        require(
            divided(built, each, clients, 0).hash == first.hash,
            f"{where}, dividing again with the same seed gives other clients; draw only from the"
            " argument rng, and keep nothing from one call to the next",
        )
    advice = "draw from the argument rng, or pass deterministic=True to this check"
    require(deterministic or not same, f"{where}, another seed gives the same clients; {advice}")
    require(
        same or not deterministic,
        f"{where}, another seed gives other clients, but the check has deterministic=True",
    )
    data = built.dataset.load()
    labels = data.y_train.numpy().copy()
    copy.deepcopy(partition).deal(labels, clients, np.random.default_rng(0), data.owners)
    require(
        np.array_equal(labels, data.y_train.numpy()),
        f"{where}, assign changes the labels that it receives; copy them first",
    )


def divided(built: Built, partition: Partitioner, clients: int, seed: int) -> Partition:
    """Return the first division of a run with this partition, number of clients and seed."""
    changed = replace(
        built,
        partition=partition,
        settings=replace(built.settings, num_clients=clients),
        seeds=replace(built.seeds, partition=seed),
    )
    return divide(changed)[1][0].partition
