"""Task streams with replay, blurred boundaries, or a different task order for each client."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedexp.core.errors import require
from fedexp.core.limits import CountFrom0, ShareBelow1
from fedexp.core.rng import generator_for
from fedexp.data.tasks import ClassIncremental, DomainIncremental, MultiTask
from fedexp.data.types import Task
from fedexp_continual.algorithms.exemplars import Exemplars
from fedexp_continual.data.replay import fill_buffers


class Stream(MultiTask):
    """Base class of scenarios whose clients may see examples of several tasks at a time."""

    # size of a client's replay buffer, in examples of earlier tasks (see replay.py)
    replay: CountFrom0 = 0
    replay_policy: Literal["reservoir", "class_balanced"] = "reservoir"
    # per_client: clients learn the tasks in different orders
    order: Literal["shared", "per_client"] = "shared"
    # fraction of each task's training examples that moves to other tasks
    blur: ShareBelow1 = 0.0

    def problems(self, algorithm: Any) -> Iterator[str]:
        if not algorithm.separate_tasks:
            return
        mixing: dict[str, Any] = {"scenario.blur": self.blur}
        mixing |= {"scenario.order": self.order} if self.order != "shared" else {}
        # the losses of methods that choose exemplars themselves include the earlier classes
        mixing |= {} if isinstance(algorithm, Exemplars) else {"scenario.replay": self.replay}
        for key, value in mixing.items():
            if value:
                yield (
                    f"{key}={value}: {type(algorithm).__name__} is defined only if all clients"
                    " train on one task at a time"
                )

    def mix(self, tasks: Sequence[Task], seed: int) -> Sequence[Task]:
        return blur_tasks(tasks, self.blur, generator_for(seed, "blur")) if self.blur else tasks

    def orders(self, clients: int, tasks: int, seed: int) -> np.ndarray | None:
        if self.order == "shared":
            return None
        return draw_orders(clients, tasks, generator_for(seed, "task orders"))

    def replayed(
        self, parts: Sequence[Sequence[np.ndarray]], labels: np.ndarray, seed: int
    ) -> Sequence[Sequence[np.ndarray]]:
        if not self.replay:
            return parts
        clients = []
        for client, own in enumerate(zip(*parts, strict=True)):
            rng = generator_for(seed, "replay", client)
            held = fill_buffers(own, labels, self.replay, self.replay_policy, rng)
            clients.append([np.sort(np.concatenate(pair)) for pair in zip(own, held, strict=True)])
        return list(zip(*clients, strict=True))


class ClassStream(Stream, ClassIncremental):
    """`scenario=class_stream`: class-incremental tasks with the options of `Stream`."""

    name = "class_stream"
    kind = "class_incremental"


class DomainStream(Stream, DomainIncremental):
    """`scenario=domain_stream`: domain-incremental tasks with the options of `Stream`."""

    name = "domain_stream"
    kind = "domain_incremental"


def blur_tasks(tasks: Sequence[Task], share: float, rng: np.random.Generator) -> tuple[Task, ...]:
    """Return the tasks after a share of each task's training examples has moved to other tasks.

    From each task with n training examples, round(share * n) examples are drawn at random and
    distributed evenly among the other tasks. If all tasks have the same size, their sizes do not
    change, except for rounding, and the fraction `share` of each task's examples comes from other
    tasks. Names, classes and test examples do not change.

    Raises ConfigError if there is only one task.
    """
    require(len(tasks) > 1, "scenario.blur", share, "0 if there is only one task")
    kept, arrived = [], [[np.zeros(0, np.int64)] for _ in tasks]
    for number, task in enumerate(tasks):
        drawn = rng.permutation(task.train)
        leaving = round(share * len(drawn))
        kept.append(drawn[leaving:])
        others = rng.permutation([other for other in range(len(tasks)) if other != number])
        for place, other in enumerate(others):
            arrived[other].append(drawn[:leaving][place :: len(others)])
    trains = [np.sort(np.concatenate([own, *new])) for own, new in zip(kept, arrived, strict=True)]
    return tuple(replace(task, train=train) for task, train in zip(tasks, trains, strict=True))


def draw_orders(clients: int, tasks: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the order in which each client learns the tasks, int [K, T].

    Row k contains the tasks of client k, numbered from 0, in the order in which it learns them. In
    every stage, the numbers of clients per task differ by at most one, because each group of T
    clients gets the T rotations of one random order. The clients of a group are chosen at random.
    """
    rows = []
    for client in range(clients):
        if client % tasks == 0:
            base = rng.permutation(tasks)
        rows.append(np.roll(base, client % tasks))
    return np.array(rows, dtype=np.int64)[rng.permutation(clients)]
