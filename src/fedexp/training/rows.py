"""Make the rows that each round adds to the tables of a run."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.data.views import name_in_view, rename_for_view
from fedexp.metrics.record import Record, Row
from fedexp.metrics.tasks import TaskHistory
from fedexp.rundir import files
from fedexp.training.simulation import Simulation
from fedexp.training.state import RoundResult, Scores, State

# The phases of a round, in order. The row of a round contains the time that writing the previous
# round took, because the time for writing the row itself is not yet known.
PHASES = ("sampling", "train", "aggregation", "refinement", "evaluation", "writing")
TAIL = (
    "bytes_up",
    "bytes_down",
    "train_samples_per_second",
    *(f"{phase}_seconds" for phase in PHASES),
    "seconds",
)


def round_row(
    simulation: Simulation,
    state: State,
    scores: Mapping[str, Scores],
    result: RoundResult | None,
) -> Row:
    """Return the row that a round adds to rounds.csv, with None for undefined values.

    scores: the scores of the global model in each view. Empty if the round is not evaluated.
    result: the result of the round. None for the initial model.
    """
    of_views = {}
    for view, record in state.records.items():
        values = test_values(simulation, record)
        if view in scores:
            of_views[view] = values | {"test_loss": scores[view].loss}
        else:
            of_views[view] = dict.fromkeys(values)
    view, first = next(iter(of_views.items()))
    overall = {name_in_view(name, view): first.pop(name) for name in ("test_accuracy", "test_loss")}
    trained = {} if result is None else training_values(result)
    return merge_values(
        files.ROUNDS,
        {"round": state.round},
        overall,
        {name: trained.get(name) for name in ("train_loss", "lr")},
        {"task": simulation.tasks_begun(state.round)} if simulation.has_tasks else {},
        *(rename_for_view(values, view) for view, values in of_views.items()),
        {name: trained.get(name) for name in TAIL},
    )


def test_values(simulation: Simulation, record: Record) -> Row:
    """Return the values in rounds.csv that describe the last test of the model in one view."""
    values: Row = {"test_accuracy": record.accuracy[-1], "test_loss": None}
    if simulation.has_tasks:
        values |= task_history(simulation, record).values()
    return merge_values(files.ROUNDS, values, simulation.metrics.round_values(record))


def training_values(result: RoundResult) -> Row:
    """Return the values in rounds.csv that describe the training in a round."""
    return {
        "train_loss": result.train_loss,
        "lr": result.lr,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "train_samples_per_second": result.examples / result.seconds["train"],
        **{f"{phase}_seconds": result.seconds.get(phase, 0.0) for phase in PHASES},
        "seconds": sum(result.seconds.values()),
    }


def task_history(simulation: Simulation, record: Record) -> TaskHistory:
    """Return the history from which all task metrics are computed.

    The history contains the accuracies after the last round of each earlier task and after the last
    evaluated round.
    """
    length = simulation.rounds_per_task
    known = list(zip(record.rounds, record.task_accuracy, strict=True))
    ends = [each for each in known[:-1] if each[0] % length == 0]
    return TaskHistory.of([*ends, *known[-1:]], length, simulation.task_orders)


def task_rows(simulation: Simulation, state: State) -> Iterator[Row]:
    """Yield the rows of tasks.csv."""
    task = simulation.tasks_begun(state.round)
    for evaluated in range(len(simulation.stages)):
        row: Row = {"round": state.round, "task": task, "evaluated_task": evaluated + 1}
        for view, record in state.records.items():
            row[name_in_view("accuracy", view)] = record.task_accuracy[-1][evaluated]
        yield row


def client_rows(simulation: Simulation, state: State, result: RoundResult) -> Iterator[Row]:
    """Yield the rows of clients.csv, one per client of the cohort."""
    measured: dict[str, np.ndarray] = {}
    for view, record in state.records.items():
        if result.local_accuracy:
            values = simulation.metrics.client_values(record)
        else:
            not_tested = np.full(len(result.cohort.clients), np.nan)
            values = dict.fromkeys(simulation.local_columns, not_tested)
        measured = merge_values(files.CLIENTS, measured, rename_for_view(values, view))
    cohort = result.cohort
    for i, client in enumerate(cohort.clients):
        row: Row = {"round": result.round, "client": client}
        if simulation.has_tasks:
            row["role"] = type(cohort.roles[i]).__name__.lower()
        row["examples"] = len(result.federation.parts[client])
        row["steps"] = cohort.schedules[i].steps
        row["train_loss"] = result.losses[i]
        local = {name: float(values[i]) for name, values in measured.items()}
        yield merge_values(files.CLIENTS, row, local)


def merge_values(file: str, *parts: Mapping[str, Any]) -> Row:
    """Return a row with the values of all parts.

    file: the name of the file, for the error message.

    Raises ConfigError if two parts use the same name, because a metric would then overwrite
    another value in the file.
    """
    row: Row = {}
    for part in parts:
        for name in part:
            if name in row:
                raise ConfigError(
                    f"forgetting_metric: {file} already has a value named {name}; rename the value"
                    " of the metric"
                )
        row |= part
    return row


def json_value(value: object) -> Any:
    """Convert a value for JSON and W&B.

    NaN and infinity become None, and NumPy scalars become Python numbers.
    """
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
