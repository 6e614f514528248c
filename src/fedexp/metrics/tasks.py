"""Metrics of continual learning over a sequence of tasks (CFeD, IJCAI 2022, section 5.2).

a[t, s] is the test accuracy on task s of the global model after task t has been learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TASK_COLUMNS = ("average_accuracy", "new_task_accuracy", "task_forgetting")


def average_accuracy(accuracies: np.ndarray, learned: int) -> float:
    """1/t sum_{s <= t} a_{t,s} of accuracies [T], unweighted over the tasks; nan before the first."""
    return float(np.mean(accuracies[:learned])) if learned else float("nan")


def new_task_accuracy(accuracies: np.ndarray, learned: int) -> float:
    """a_{t,t}; nan before the first task."""
    return float(accuracies[learned - 1]) if learned else float("nan")


def task_forgetting(matrix: np.ndarray, accuracies: np.ndarray) -> float:
    """Loss on the earlier tasks: mean over s < t of a_{s,s} - a_{t,s}, the negative of backward transfer
    (Lopez-Paz and Ranzato, NeurIPS 2017). matrix [t - 1, T]: a after each task before; accuracies [T]: now; nan for
    the first task."""
    before = len(matrix)
    return float(np.mean(np.diag(matrix[:, :before]) - accuracies[:before])) if before else float("nan")


@dataclass(frozen=True)
class TaskHistory:
    """Accuracies on all tasks in the rounds that were evaluated."""

    rounds: np.ndarray  # int [E], from 0
    accuracy: np.ndarray  # [E, T]
    rounds_per_task: int

    @classmethod
    def of(cls, records: Sequence[tuple[int, Sequence[float]]], rounds_per_task: int) -> "TaskHistory":
        """Build the history from (round, accuracies) in order."""
        rounds = np.array([number for number, _ in records], dtype=np.int64)
        return cls(rounds, np.array([list(values) for _, values in records], dtype=np.float64), rounds_per_task)

    @property
    def task(self) -> int:
        """Return the task of the last round, from 1; 0 before the first round."""
        return -(-int(self.rounds[-1]) // self.rounds_per_task)

    def matrix(self) -> np.ndarray:
        """a [t, T]: rows of the tasks that are over (their last rounds are always evaluated)."""
        ends = (self.rounds > 0) & (self.rounds % self.rounds_per_task == 0)
        return self.accuracy[ends]

    def values(self) -> dict[str, float]:
        """Return the values of the last round."""
        now, learned = self.accuracy[-1], self.task
        before = self.matrix()[: max(learned - 1, 0)]
        return {
            "average_accuracy": average_accuracy(now, learned),
            "new_task_accuracy": new_task_accuracy(now, learned),
            "task_forgetting": task_forgetting(before, now),
        }

    def summary(self) -> dict[str, Any]:
        """Return the values of the last round, and those at the end of each task."""
        values: dict[str, Any] = {k: None if np.isnan(v) else v for k, v in self.values().items()}
        matrix = self.matrix()
        ends = [
            {
                "task": t,
                "average_accuracy": average_accuracy(row, t),
                "new_task_accuracy": new_task_accuracy(row, t),
                "accuracies": row.tolist(),
            }
            for t, row in enumerate(matrix, 1)
        ]
        return values | {"tasks": ends}
