"""Metrics of continual learning over a sequence of tasks (CFeD, IJCAI 2022, section 5.2).

a[t, s] is the test accuracy of the global model on task s after task t was learned. If clients
learn the tasks in different orders (`scenario.order=per_client`), client k has a matrix a_k[t, s]:
the accuracy after stage t on the task that client k learns in stage s. Each metric is then computed
for each client and averaged over the clients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedexp.metrics.quantity import Quantity
from fedexp.metrics.task_matrix import forgetting_from_learning, last_accuracy


def new_task_accuracy(matrix: np.ndarray) -> float:
    """Return the accuracy a_{t,t} on the task that was learned last.

    matrix: accuracies a, [t, T]. The value is nan before the first task.

    """
    learned = len(matrix)
    return float(matrix[-1, learned - 1]) if learned else float("nan")


FORMULAS: dict[str, Callable[[np.ndarray], float]] = {
    "average_accuracy": last_accuracy,
    "new_task_accuracy": new_task_accuracy,
    "task_forgetting": forgetting_from_learning,
}
AVERAGE_ACCURACY = Quantity(
    "average_accuracy",
    "max",
    "test/average_accuracy",
    label="average accuracy of the tasks",
    main=True,
)
NEW_TASK_ACCURACY = Quantity("new_task_accuracy", "max", "test/new_task_accuracy", main=True)
TASK_FORGETTING = Quantity("task_forgetting", "min", main=True)
QUANTITIES = (AVERAGE_ACCURACY, NEW_TASK_ACCURACY, TASK_FORGETTING)


def over_clients(
    formula: Callable[..., float], orders: np.ndarray | None, *accuracies: np.ndarray
) -> float:
    """Return the mean over clients of a formula for each client's sequence of tasks.

    accuracies: the arguments of the formula, arrays [..., T]. For each client, their columns are
    sorted in the client's order of tasks. orders: int [K, T], the index (from 0) of the task that
    each client learns in each stage; None: all clients learn the tasks in the order of the columns.
    """
    if orders is None:
        return formula(*accuracies)
    different, counts = np.unique(orders, axis=0, return_counts=True)
    values = []
    for order in different:
        values.append(formula(*(array[..., order] for array in accuracies)))
    return float(np.average(values, weights=counts))


@dataclass(frozen=True)
class TaskHistory:
    """The accuracies on all T tasks in the E evaluated rounds of a run."""

    rounds: np.ndarray  # int [E], from 0
    accuracy: np.ndarray  # [E, T]
    rounds_per_task: int
    orders: np.ndarray | None = None  # int [K, T]; see `over_clients`

    @classmethod
    def of(
        cls,
        records: Sequence[tuple[int, Sequence[float]]],
        rounds_per_task: int,
        orders: np.ndarray | None = None,
    ) -> "TaskHistory":
        """Build the record from (round, accuracies) pairs in ascending order of rounds."""
        rounds = np.array([number for number, _ in records], dtype=np.int64)
        accuracy = np.array([list(values) for _, values in records], dtype=np.float64)
        return cls(rounds, accuracy, rounds_per_task, orders)

    @property
    def task(self) -> int:
        """Return the number of the last round's task, from 1, or 0 before the first round."""
        return -(-int(self.rounds[-1]) // self.rounds_per_task)

    def matrix(self) -> np.ndarray:
        """Return the accuracies after each completed task, [t, T].

        The last round of a task is always evaluated.

        """
        ends = (self.rounds > 0) & (self.rounds % self.rounds_per_task == 0)
        return self.accuracy[ends]

    def values(self) -> dict[str, float]:
        """Return the metrics for the last round."""
        before = self.matrix()[: max(self.task - 1, 0)]
        return self.values_of(np.vstack([before, self.accuracy[-1:]])[: self.task])

    def values_of(self, matrix: np.ndarray) -> dict[str, float]:
        """Return the metrics for accuracies [t, T]. The last task may be unfinished."""
        return {name: over_clients(f, self.orders, matrix) for name, f in FORMULAS.items()}

    def summary(self) -> dict[str, Any]:
        """Return the metrics for the last round and the accuracies at the end of each task."""

        def known(value: float) -> float | None:
            return None if np.isnan(value) else value

        values: dict[str, Any] = {k: known(v) for k, v in self.values().items()}
        matrix = self.matrix()
        ends = []
        for t, row in enumerate(matrix, 1):
            found = self.values_of(matrix[:t])
            both = {name: known(found[name]) for name in ("average_accuracy", "new_task_accuracy")}
            accuracies = list(map(known, row.tolist()))
            ends.append({"task": t, **both, "accuracies": accuracies})
        orders = {} if self.orders is None else {"task_orders": (self.orders + 1).tolist()}
        return values | {"tasks": ends} | orders
