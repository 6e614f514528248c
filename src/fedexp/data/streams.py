"""Streams in which tasks are mixed: blurred boundaries, and clients that meet the tasks in
different orders."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedexp.core.errors import require
from fedexp.data.types import Task


def blurred(tasks: Sequence[Task], share: float, rng: np.random.Generator) -> tuple[Task, ...]:
    """Return the tasks after round(share * n) training examples of each, drawn at random, have been
    dealt in turn to the other tasks. Tasks of equal size keep it, but for rounding, and so `share`
    of a task's examples come from others. Names, classes and test examples stay those of before.
    Raises ConfigError for a single task, whose examples have nowhere to go."""
    require(len(tasks) > 1, "scenario.blur", share, "0 where there is only one task")
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


def task_orders(clients: int, tasks: int, rng: np.random.Generator) -> np.ndarray:
    """Return which task each client meets at which stage, int [K, T] from 0: random orders, dealt
    so that at every stage all tasks are met by equally many clients, but for one. Of each T clients
    in turn, the orders are the T rotations of one random order."""
    rows = []
    for client in range(clients):
        if client % tasks == 0:
            base = rng.permutation(tasks)
        rows.append(np.roll(base, client % tasks))
    return np.array(rows, dtype=np.int64)[rng.permutation(clients)]


def reordered(parts: Sequence[Sequence[np.ndarray]], orders: np.ndarray) -> list[list[np.ndarray]]:
    """Return what each client holds at each stage, [T][K]. parts: what it holds of each task,
    [T][K]; orders [K, T]."""
    stages = range(len(parts))
    return [
        [parts[order[stage]][client] for client, order in enumerate(orders)] for stage in stages
    ]
