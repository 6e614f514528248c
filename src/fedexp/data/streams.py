"""Task streams with blurred task boundaries or with a different task order for each client."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedexp.core.errors import require
from fedexp.data.types import Task


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


def reorder_parts(
    parts: Sequence[Sequence[np.ndarray]], orders: np.ndarray
) -> list[list[np.ndarray]]:
    """Return each client's examples for each stage, [T][K].

    parts: [T][K], each client's examples for each task.
    orders: int [K, T], the order of the tasks for each client (see `draw_orders`).
    """
    stages = []
    for tasks in orders.T:  # each client's task in this stage
        stages.append([parts[task][client] for client, task in enumerate(tasks)])
    return stages
