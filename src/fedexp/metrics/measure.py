"""Compute measures of forgetting for accuracies that any program measured."""

from typing import Any

import numpy as np
import torch

from fedexp.core.errors import ConfigError
from fedexp.metrics import forgetting
from fedexp.metrics.accuracy import class_mean
from fedexp.metrics.task_matrix import MEASURES
from fedexp.metrics.tasks import FORMULAS

ROUNDS, TASKS = ("round", "class"), ("task", "evaluated_task")


def measure(
    accuracy: Any, axes: tuple[str, str], initial: Any = None, zeros_are_measured: bool = False
) -> dict[str, float]:
    """Return the measures of forgetting for a matrix of test accuracies.

    accuracy: an array or tensor with two axes, or a list of lists. The values are in [0, 1]; nan,
    or a mask, means not tested. The rows start after the first round or task.

    axes: the names of the two axes, in order. ("round", "class"): the global model's accuracy on
    each class in each evaluated round. ("task", "evaluated_task"): its accuracy on each task after
    each task was learned. The reverse order stands for the transposed matrix.

    initial: the initial model's accuracies, one per class or evaluated task, or None if unknown.

    zeros_are_measured: whether zeros in a whole triangle of a matrix of tasks were measured.
    Otherwise, such a matrix is rejected, since some programs print 0 for "not tested".

    The names are those of a run's summary.json (`forgetting`, `round_forgetting`, `consistency`;
    `average_accuracy`, `new_task_accuracy`, `task_forgetting`) and of `fedexp report --metrics`. A
    measure is nan if it needs more rounds, tasks or accuracies than are given. Without `initial`,
    `consistency` begins with the second round.

    Raises ConfigError for anything else.
    """
    if tuple(axes) not in (ROUNDS, ROUNDS[::-1], TASKS, TASKS[::-1]):
        raise ConfigError(f"axes={axes!r}: must be {ROUNDS} or {TASKS}, or one of them reversed")
    matrix = read_accuracies(accuracy, "accuracy", 2)
    matrix = matrix.T if tuple(axes) in (ROUNDS[::-1], TASKS[::-1]) else matrix
    start = np.full(matrix.shape[1], np.nan)
    if initial is not None:
        start = read_accuracies(initial, "initial", 1)
    if start.shape != matrix.shape[1:]:
        raise ConfigError(f"initial: has {len(start)} values, but accuracy has {matrix.shape[1]}")
    if "class" in axes:
        return of_rounds(matrix, start)
    check_tasks(matrix, zeros_are_measured)
    found = {name: formula(matrix) for name, formula in FORMULAS.items()}
    return found | {name: formula(matrix, start) for name, formula in MEASURES.items()}


def read_accuracies(values: Any, name: str, axes: int) -> np.ndarray:
    """Return accuracies as a float64 array. Raises ConfigError if they are not in [0, 1] or nan.

    name: the name of the argument. axes: the number of axes.
    """
    if hasattr(values, "to_numpy"):  # of pandas, polars or xarray
        raise ConfigError(
            f"{name}: is a {type(values).__name__}, whose labels may hide accuracies or whose"
            " columns may hold numbers of rows; pass an array of the accuracies alone, such as"
            " table.to_numpy()"
        )
    try:
        masked = np.ma.asarray(without_tensors(values))
    except ValueError as error:
        raise ConfigError(f"{name}: the rows must have equal lengths ({error})") from None
    if masked.dtype.kind not in "fiu":
        raise ConfigError(
            f"{name}: must contain only numbers, with nan for accuracies that were not tested; got"
            f" {masked.dtype}"
        )
    if masked.ndim != axes or not masked.size:
        raise ConfigError(f"{name}: must have {axes} axes and not be empty; got {masked.shape}")
    array: np.ndarray = np.ma.filled(masked.astype(np.float64), np.nan)
    if np.isnan(array).all():
        raise ConfigError(f"{name}: is nan everywhere")
    for place in np.argwhere((array < 0) | (array > 1))[:1]:
        where = f"{name}{place.tolist()}={array[tuple(place)]:g}"
        raise ConfigError(
            f"{where}: must be in [0, 1]; divide percentages by 100, and leave out rows or columns"
            " with the numbers of rounds, tasks or classes"
        )
    return array


def without_tensors(values: Any) -> Any:
    """Replace tensors by arrays, also in lists. numpy cannot read all types and devices."""
    if isinstance(values, list | tuple):
        return [without_tensors(each) for each in values]
    if not isinstance(values, torch.Tensor):
        return values
    found = values.detach().cpu()
    return found.double().numpy() if found.is_floating_point() else found.numpy()


def of_rounds(matrix: np.ndarray, start: np.ndarray) -> dict[str, float]:
    """Return the measures of class accuracies [T, C]. start: the initial model's [C]."""
    missing = np.isnan(matrix)
    if (missing.any(0) != missing.all(0)).any():
        raise ConfigError(
            "accuracy: a class must be tested in every given round or in none; leave out the rounds"
            " that were not evaluated"
        )
    if matrix.shape[1] > 1 and matrix[:, 0].tolist() == [0, 1]:
        raise ConfigError(
            "accuracy: 0 and 1 may be the numbers of the two rounds, or accuracies on the first"
            " class. If they are numbers, leave them out; if they are accuracies, put this class in"
            " another place (the measures do not depend on the order of the classes)"
        )
    history = np.vstack([start, matrix])
    known = matrix if np.isnan(start[~missing[0]]).any() else history
    return {
        "forgetting": forgetting.forgetting_f(history),
        "round_forgetting": float(class_mean(forgetting.round_drop(history))),
        "consistency": float(class_mean(forgetting.consistency(known))),
    }


def check_tasks(matrix: np.ndarray, zeros_are_measured: bool) -> None:
    """Raise ConfigError for a matrix of tasks that could be read in two ways."""
    learned, columns = matrix.shape
    if columns < learned:
        raise ConfigError(
            f"accuracy: has {learned} tasks, but only {columns} evaluated tasks; each learned task"
            " needs its accuracies"
        )
    if learned < 2:
        return
    if (matrix[:, 0] == np.arange(learned)).all():
        raise ConfigError("accuracy: the accuracies on the first task look like numbers of rows")
    triangles = {
        "before a task was learned": matrix[:, :learned][np.triu_indices(learned, 1)],
        "after a later task was learned": matrix[:, :learned][np.tril_indices(learned, -1)],
    }
    for when, values in triangles.items():
        if (values == 0).all() and not zeros_are_measured:
            raise ConfigError(
                f"accuracy: all accuracies {when} are 0. If they were not tested, use nan, and if"
                f" the rows are the evaluated tasks, use axes={TASKS[::-1]}; if they were measured,"
                " pass zeros_are_measured=True"
            )
