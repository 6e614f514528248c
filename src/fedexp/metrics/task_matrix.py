"""Published measures of forgetting and transfer between tasks, from a matrix of accuracies.

a[t, s], in [0, 1], is the test accuracy of the global model on task s after t tasks have been
learned. T tasks have been learned so far. The argument `matrix` [T, T'] contains a[t, s] in row t -
1 and column s - 1. Columns of tasks that have not been learned yet (T' > T) are ignored. The
argument `initial` [T'] contains the initial model's accuracies. Accuracies that were not measured
are nan; a maximum ignores them. A measure is nan if it needs such an accuracy, or more tasks than
have been learned.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fedexp.metrics.quantity import Quantity


def _learned(matrix: np.ndarray) -> np.ndarray:
    """Return the columns of the learned tasks, [T, T]."""
    return matrix[:, : len(matrix)]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def forgetting_from_best(matrix: np.ndarray, initial: np.ndarray) -> float:
    """Return the mean drop from a task's best earlier accuracy, max_{t < T} a[t, s] - a[T, s].

    The mean is over the tasks s < T. A drop is negative if learning the last task improved the
    accuracy on the earlier tasks (Chaudhry et al., "Riemannian Walk", ECCV 2018).
    """
    a = _learned(matrix)
    return _mean([np.fmax.reduce(a[:-1, s]) - a[-1, s] for s in range(len(a) - 1)])


def forgetting_from_any(matrix: np.ndarray, initial: np.ndarray) -> float:
    """Return the mean drop from a task's best accuracy ever, max_{t <= T} a[t, s] - a[T, s].

    The mean is over the tasks s < T. Unlike in `forgetting_from_best`, the maximum includes the
    last model, so the value is never negative (Boschini et al., "Class-Incremental Continual
    Learning Into the eXtended DER-Verse", 2022). The maximum also includes the accuracies on a task
    before it was learned. Mammoth's code (`forgetting` in utils/metrics.py) uses 0 for accuracies
    that were not measured, so its value can be smaller.
    """
    a = _learned(matrix)
    return _mean([np.fmax.reduce(a[:, s]) - a[-1, s] for s in range(len(a) - 1)])


def forgetting_from_learning(matrix: np.ndarray, initial: np.ndarray | None = None) -> float:
    """Return the mean drop since a task was learned, a[s, s] - a[T, s], over the tasks s < T.

    The value is the negative of backward transfer. A run logs it as `task_forgetting` (CFeD, IJCAI
    2022, section 5.2).
    """
    a = _learned(matrix)
    return _mean([a[s, s] - a[-1, s] for s in range(len(a) - 1)])


def forgetting_over_tasks(matrix: np.ndarray, initial: np.ndarray) -> float:
    """Return the forgetting of LANDER's code: mean over t <= T of max_{s <= t} a[t, s] - a[T, t].

    The source is forgetting_calculator/forgetting_cal.py in LANDER's code (CVPR 2024). The maximum
    is over the tasks s <= t after task t, not over the accuracies on one task, and the mean
    includes the last task. The measure mixes accuracies on different tasks; use it only to compare
    with LANDER's values.
    """
    lower = np.tril(_learned(matrix))
    tasks = range(len(lower)) if len(lower) > 1 else ()
    return _mean([lower[t].max() - lower[-1, t] for t in tasks])


def backward_transfer(matrix: np.ndarray, initial: np.ndarray) -> float:
    """Return the backward transfer, the mean over s < T of a[T, s] - a[s, s].

    This is the change of the accuracy on a task since it was learned (Lopez-Paz and Ranzato,
    NeurIPS 2017).

    """
    a = _learned(matrix)
    return _mean([a[-1, s] - a[s, s] for s in range(len(a) - 1)])


def forward_transfer(matrix: np.ndarray, initial: np.ndarray) -> float:
    """Return the forward transfer, the mean over s = 2..T of a[s - 1, s] - b[s].

    b are the initial accuracies. The value measures how much earlier tasks help a task before it is
    learned (Lopez-Paz and Ranzato, NeurIPS 2017).
    """
    a = _learned(matrix)
    return _mean([a[s - 1, s] - initial[s] for s in range(1, len(a))])


def average_incremental_accuracy(matrix: np.ndarray, initial: np.ndarray) -> float:
    """Return the mean 1/T sum_t A_t of the average accuracies A_t = 1/t sum_{s <= t} a[t, s].

    A_t is the average accuracy after task t (Rebuffi et al., "iCaRL", CVPR 2017, in which A_t is an
    average over classes).
    """
    return _mean([row[: t + 1].mean() for t, row in enumerate(_learned(matrix))])


def last_accuracy(matrix: np.ndarray, initial: np.ndarray | None = None) -> float:
    """Return A_T = 1/T sum_s a[T, s], the average accuracy after the last task, as in CFeD."""
    return _mean(_learned(matrix)[-1:].ravel())


FORGETTING = (
    forgetting_from_best,
    forgetting_from_any,
    forgetting_from_learning,
    forgetting_over_tasks,
)
TRANSFER = (
    backward_transfer,
    forward_transfer,
    average_incremental_accuracy,
    last_accuracy,
)
MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    function.__name__: function for function in (*FORGETTING, *TRANSFER)
}
QUANTITIES = tuple(
    Quantity(function.__name__, better)
    for better, functions in (("min", FORGETTING), ("max", TRANSFER))
    for function in functions
)
