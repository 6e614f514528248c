"""The data of the clients after each change that the node `schedule` asks for."""

from collections.abc import Callable
from dataclasses import replace

from fedexp.algorithms.interfaces import Federation
from fedexp.config.build import Built
from fedexp.core.errors import ConfigError
from fedexp.data.changes import Schedule, reduced
from fedexp.data.partition import Natural, Partitioner
from fedexp.data.partition_file import File
from fedexp.data.partitioned import Partition


def check_schedule(built: Built) -> None:
    """Raise ConfigError where the run cannot have such changes, whatever its data are."""
    schedule, first = built.schedule, built.partition
    if not schedule.rounds:
        return
    schedule.check_rounds(built.settings.rounds)
    why = ""
    if built.scenario.name != "none":
        why = (
            "goes with scenario=none, whose tasks change the data already"
            f" (scenario={built.scenario.name})"
        )
    elif schedule.partition and built.algorithm.paradigm == "centralized":
        why = "goes with clients; algorithm.paradigm=centralized has one"
    elif schedule.partition and isinstance(first, File | Natural):
        why = (
            "goes with partition=iid, lda, sharding or equal_shards, which divide all training"
            " examples"
        )
    elif schedule.partition and built.validation.fraction and built.validation.per_client:
        why = (
            "goes with validation.per_client=false: another partition would give clients what"
            " others hold out"
        )
    if why:
        raise ConfigError(f"schedule: {why}")


def changed(
    schedule: Schedule,
    first: Partition,
    federation: Federation,
    seed: int,
    draw: Callable[[Partitioner, str], Partition],
) -> list[tuple[int, Partition, Federation]]:
    """Return, for each round in which something changes, that round, the partition from then on,
    and what the server knows. draw: the partition by a partitioner; its second argument
    names the random numbers."""
    found = []
    drawn: dict[int, Partition] = {0: first}
    for number in schedule.rounds:
        new = schedule.partition_at(number)
        since = new.round if new else 0
        if new and since not in drawn:
            drawn[since] = draw(new.partition, f" from round {since}")
        shares = schedule.shares_at(number)
        partition = drawn[since]
        if shares:
            clients = schedule.clients
            partition = reduced(
                partition, shares, clients, federation.labels, federation.num_classes, seed
            )
        partition = replace(partition, info=partition.info | {"from_round": number})
        found.append(
            (number, partition, replace(federation, parts=partition.parts, counts=partition.counts))
        )
    return found
