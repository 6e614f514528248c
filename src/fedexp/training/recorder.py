"""Write the results of each round to tables and checkpoints, and pass them to the callbacks."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedexp.core.errors import ConfigError
from fedexp.core.tree import Tree
from fedexp.core.unchanged import Unchanged
from fedexp.data.views import LOCAL, file_in_view, name_in_view, rename_for_view
from fedexp.metrics.quantity import (
    ACCURACY,
    ARRIVED,
    COSTS,
    LOSS,
    LR,
    PHASES,
    TASK,
    TRAIN_LOSS,
)
from fedexp.metrics.record import BEFORE, COLUMNS, Record, Row
from fedexp.metrics.tasks import FORMULAS, TaskHistory
from fedexp.rundir import checkpoint, files
from fedexp.rundir.csv_files import CsvFile
from fedexp.rundir.files import HAS_ARRIVED
from fedexp.trackers.base import Callbacks, RoundRecord
from fedexp.training.callbacks import CALLBACK
from fedexp.training.simulation import Simulation
from fedexp.training.state import RoundResult, State

SAVING_SHARE = 0.05  # largest share of the time for checkpoints if checkpoint_interval is null


class Recorder:
    """Shows each round to all that observe a run, before the next round starts.

    These are, in this order, the tables, the callbacks in their order, and the checkpoint. So a
    checkpoint contains only rounds that all of them have seen.
    """

    def __init__(
        self,
        directory: Path,
        simulation: Simulation,
        callbacks: Callbacks,
        lengths: Mapping[str, int] | None,
        begin: Callable[[], None] = lambda: None,
    ):
        """Open the files.

        lengths: the lengths of the files as recorded in the checkpoint, so that rows written after
            it are removed. None for a new run.
        begin: called before a round is written.
        """
        self.directory, self.simulation, self.begin = directory, simulation, begin
        self.callbacks, known = callbacks, lengths or {}
        self.files = {
            name: CsvFile(directory / name, columns, known.get(name))
            for name, columns in table_columns(simulation).items()
        }
        self.writing_seconds = 0.0  # time for the last round
        self.saving_seconds = 0.0  # time for the last checkpoint
        self._saved_at = time.perf_counter()
        self._seen: int | None = None  # the last round that all observers have seen

    def write(self, state: State, result: RoundResult | None = None) -> None:
        """Write a round to the tables, pass it to the callbacks, and save a checkpoint if due.

        state: the state of the run after the round.
        result: the result of the round. None for the initial model.
        """
        start = time.perf_counter()
        row = round_row(self.simulation, state, result)
        clients = [] if result is None else list(client_rows(self.simulation, state, result))
        self.begin()
        self._append_tests(state)
        self.files[files.ROUNDS].append([row])
        self.files[files.CLIENTS].append(clients)
        self._call_back(state, row, result)
        self._seen = state.round
        if result is None or state.status != "running" or self._is_due(state.round):
            self.save_checkpoint(state)
        self.writing_seconds = time.perf_counter() - start

    def wants_epochs(self, number: int) -> bool:
        """Return whether a callback reads the models after each local epoch of a round."""
        return any(wants for _, wants in self.callbacks.call("wants_epochs", number))

    def _append_tests(self, state: State) -> None:
        for view, each in state.records.items():
            for name, new in each.new_rows(state.round).items():
                self.files[file_in_view(name, view)].append(new)
        if self.simulation.has_tasks and state.record.rounds[-1] == state.round:
            self.files[files.TASKS].append(task_rows(self.simulation, state))

    def _call_back(self, state: State, row: Row, result: RoundResult | None) -> None:
        """Call the callbacks, and stop the run if one of them asks for it."""
        record = RoundRecord(
            state.round,
            {name: json_value(row.get(name)) for name in self.files[files.ROUNDS].columns[1:]},
            state.records,
            model={part: state.server[part] for part in ("params", "buffers")},
            result=result,
        )
        read = Unchanged(what_callbacks_read(record, self.simulation))
        for each, reason in self.callbacks.call("after_round", record, read=read):
            if not reason:
                continue
            if not isinstance(reason, str | Mapping):
                raise ConfigError(
                    f"callback: after_round returned {reason!r}; must be a text, which is a reason"
                    " to end the run, or None"
                )
            if not each.ends_runs:
                raise ConfigError(
                    f"callback: {each.key} ended the run ({reason}), but the class of its options"
                    " does not declare ends_runs = True, by which sweeps know that it may"
                )
            if state.status == "running" and not state.stopped:
                state.stop(
                    {"by": CALLBACK, "reason": reason} if isinstance(reason, str) else reason
                )
        if self.simulation.has_tasks and state.round and self.simulation.ends_task(state.round):
            self.callbacks.call("after_task", record, read=read)

    def save_checkpoint(self, state: State) -> None:
        """Save a checkpoint with the state, and the lengths and checksums of the tables.

        Nothing is saved unless all observers have seen the last round, in particular before the
        first one. An extended run that is interrupted before its first new round thus stays
        complete, and a round in which a callback is interrupted is run again.
        """
        if self._seen != state.round:
            return
        start = time.perf_counter()
        # Sync the tables first, so that the checkpoint never records rows that are not yet on the
        # disk. If the directory was removed, this fails, so no file is created.
        for table in self.files.values():
            table.sync()
        lengths = {name: table.length for name, table in self.files.items()}
        sums = {name: table.checksum for name, table in self.files.items()}
        kept = self.callbacks.states()
        versions = state.clients.save(self.directory / files.CLIENT_STATES, state.round)
        saved = state.to_tree(versions) | {"lengths": lengths, "checksums": sums, **kept}
        checkpoint.save(self.directory, saved)
        state.clients.tidy()
        self._saved_at = time.perf_counter()
        self.saving_seconds = self._saved_at - start

    def _is_due(self, number: int) -> bool:
        """Return whether to save a checkpoint after this round."""
        interval = self.simulation.settings.checkpoint_interval
        if interval is not None:
            return number % interval == 0
        return self.saving_seconds <= SAVING_SHARE * (time.perf_counter() - self._saved_at)


def what_callbacks_read(record: RoundRecord, simulation: Simulation) -> dict[str, Tree]:
    """Return what callbacks read of a round and its run, by the names for messages."""
    parts: dict[str, Tree] = {
        "record.model": record.model,
        "record.values": record.values,
        "record.records": record.records,
        "simulation.runtime.data": tensors_of(simulation.runtime.data),
        "simulation.initial": simulation.initial,
    }
    if (result := record.result) is not None:
        parts |= {"record.result.server": result.server, "record.result.before": result.before}
        for i, state in enumerate(result.client_states):
            parts[f"record.result.client_states[{i}]"] = state
        for i, each in enumerate(result.exchanges):
            parts[f"record.result.exchanges[{i}].trained"] = tensors_of(each.trained)
    return parts


def tensors_of(owner: Any) -> dict[str, Tree]:
    """Return the attributes of an object that are tensors or dicts."""
    return {k: v for k, v in vars(owner).items() if isinstance(v, torch.Tensor | dict)}


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the block ends, e.g. while a round is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, frame: held.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def table_columns(simulation: Simulation) -> dict[str, Sequence[str]]:
    """Return the columns of each table of a run.

    Raises ConfigError if a metric declares a name that the table already has.
    """
    views, has_tasks = simulation.runtime.views, simulation.has_tasks
    tested = [ACCURACY.name, LOSS.name, *(FORMULAS if has_tasks else ())]
    tested += simulation.metrics.names()
    first, *others = [[name_in_view(name, view) for name in tested] for view in views]
    rounds = ["round", *first[:2], TRAIN_LOSS.name, LR.name, *([TASK.name] if has_tasks else [])]
    rounds += [*first[2:], *chain(*others), *(each.name for each in COSTS)]
    clients = ["round", "client", *(["role"] if has_tasks else []), "examples", "steps"]
    clients += ["train_loss"]
    if simulation.drops_out:
        rounds.append(ARRIVED.name)
        clients.append(HAS_ARRIVED)
    for view in views:
        clients += [name_in_view(name, view) for name in simulation.metrics.client_names()]
    tasks = ["round", "task", "evaluated_task", *(name_in_view("accuracy", v) for v in views)]
    found: dict[str, Sequence[str]] = {}
    for name, columns in COLUMNS.items():
        before = (BEFORE,) if name == LOCAL and simulation.settings.eval_interval != 1 else ()
        found |= {file_in_view(name, view): (*columns, *before) for view in views}
    found |= {files.ROUNDS: rounds, files.CLIENTS: clients, files.TASKS: tasks}
    for name, names in found.items():
        require_distinct(name, names)
    return found


def require_distinct(file: str, names: Sequence[str]) -> None:
    """Raise ConfigError if a name occurs twice, because a metric would overwrite another value.

    file: the name of the file, for the message.
    """
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"forgetting_metric: {file} already has a value named {twice[0]}; rename the value"
            " of the metric"
        )


def round_row(simulation: Simulation, state: State, result: RoundResult | None) -> Row:
    """Return the values that a round adds to rounds.csv. Undefined values are left out.

    result: the result of the round. None for the initial model.
    """
    row: Row = {"round": state.round}
    if simulation.has_tasks:
        row["task"] = simulation.tasks_begun(state.round)
    for view, record in state.records.items():
        if record.rounds[-1] == state.round:
            row |= rename_for_view(test_values(simulation, record), view)
    if result is None:
        return row
    arrived = {ARRIVED.name: len(result.arrived)} if simulation.drops_out else {}
    return row | training_values(result) | arrived


def test_values(simulation: Simulation, record: Record) -> Row:
    """Return the values in rounds.csv that describe the last test on one test set."""
    values: Row = {"test_accuracy": record.accuracy[-1], "test_loss": record.loss[-1]}
    if simulation.has_tasks:
        values |= task_history(simulation, record).values()
    return values | simulation.metrics.round_values(record)


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
    for evaluated in range(simulation.num_tasks):
        row: Row = {"round": state.round, "task": task, "evaluated_task": evaluated + 1}
        for view, record in state.records.items():
            row[name_in_view("accuracy", view)] = record.task_accuracy[-1][evaluated]
        yield row


def client_rows(simulation: Simulation, state: State, result: RoundResult) -> Iterator[Row]:
    """Yield the rows of clients.csv, one per sampled client, also if it never started."""
    measured: dict[str, np.ndarray] = {}
    for view, record in state.records.items():
        if record.local_rounds[-1:] == (result.round,):
            measured |= rename_for_view(simulation.metrics.client_values(record), view)
    cohort = result.cohort
    positions = {client: i for i, client in enumerate(cohort.clients)}
    for client in result.sampled:
        row: Row = {"round": result.round, "client": client, "steps": 0}
        row["examples"] = len(result.federation.parts[client])
        if simulation.drops_out:
            row[HAS_ARRIVED] = int(client in result.arrived)
        if (i := positions.get(client)) is not None:
            if simulation.has_tasks:
                row["role"] = type(cohort.roles[i]).__name__.lower()
            row["steps"] = cohort.schedules[i].steps
            row["train_loss"] = result.losses[i] if row["steps"] else None
            row |= {name: float(values[i]) for name, values in measured.items()}
        yield row


def json_value(value: object) -> Any:
    """Convert a value for JSON and W&B.

    NaN and infinity become None, and NumPy scalars become Python numbers.
    """
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
