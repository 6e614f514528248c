"""Task streams with blurred boundaries, or with a different task order for each client."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedexp.core.errors import require
from fedexp.data.types import Task


def blur_tasks(tasks: Sequence[Task], share: float, rng: np.random.Generator) -> tuple[Task, ...]:
    """Return the tasks after a share of each task's training examples has moved to the other tasks.

    From each task with n examples, round(share * n) are drawn at random and moved in turn to the
    other tasks. Tasks of equal size keep their size up to rounding, so `share` of a task's examples
    come from other tasks. Names, classes and test examples do not change.

    Raises ConfigError if there is only one task.
    """
    require(len(tasks) > 1, "scenario.blur", share, "0 with only one task")
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
    """Return the task that each client learns at each stage, int [K, T], numbered from 0.

    The orders are random, but at every stage the numbers of clients per task differ by at most one.
    Each group of T clients has the T rotations of one random order.
    """
    rows = []
    for client in range(clients):
        if client % tasks == 0:
            base = rng.permutation(tasks)
        rows.append(np.roll(base, client % tasks))
    return np.array(rows, dtype=np.int64)[rng.permutation(clients)]


def reorder_parts(
    parts: Sequence[Sequence[np.ndarray]], orders: np.ndarray
) -> list[list[np.ndarray]]:
    """Return each client's examples at each stage, [T][K].

    parts: each client's examples of each task, [T][K].
    orders: int [K, T], see `draw_orders`.
    """
    stages = []
    for tasks in orders.T:  # each client's task
        stages.append([parts[task][client] for client, task in enumerate(tasks)])
    return stages
