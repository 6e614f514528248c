"""Turns the results of rounds into tidy files, checkpoints, the summary and calls of the trackers."""

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedexp import checkpoint, files
from fedexp.engine.base import Cohort, Evaluation
from fedexp.experiment import Experiment, State
from fedexp.metrics.accuracy import class_accuracy, overall_accuracy
from fedexp.metrics.targets import rounds_to_target
from fedexp.metrics.tasks import TASK_COLUMNS, TaskHistory
from fedexp.trackers.base import RoundRecord, Tracker
from fedexp.tree import Tree

log = logging.getLogger("fedexp")

SAVING_SHARE = 0.05  # of the time, for checkpoints that are saved as often as they can be
# Of a round, in their order. "writing" is that of the round before: its own is not over when its row is written.
PHASES = ("sampling", "train", "aggregation", "refinement", "evaluation", "writing")
TAIL = (
    *("bytes_up", "bytes_down", "train_samples_per_second"),
    *(f"{phase}_seconds" for phase in PHASES),
    "seconds",
)


@dataclass(frozen=True)
class RoundResult:
    """Everything that one round has produced."""

    round: int
    server: Tree
    cohort: Cohort
    client_states: list[Tree]
    losses: list[float]  # [|S|]
    train_loss: float  # weighted like the aggregation
    not_finite: list[int] | None  # where loss or model are not finite: the clients whose own were not; else None
    lr: float
    evaluation: Evaluation | None  # None: not evaluated in this round
    local_class_correct: torch.Tensor | None  # int64 [|S|, C]
    alignment: list[dict[str, Any]]  # of neurons; empty where it is not measured
    examples: int  # trained on
    bytes_up: int
    bytes_down: int
    seconds: dict[str, float]  # phase -> wall time


class Recorder:
    """Writes one run directory. What it has recorded is in the files before the next round starts."""

    def __init__(
        self, directory: Path, experiment: Experiment, trackers: Sequence[Tracker], lengths: Mapping[str, int] | None
    ):
        """lengths: of the files at the checkpoint that the run resumes from; None for a new run."""
        self.directory, self.experiment, self.trackers = directory, experiment, trackers
        names = (files.ROUNDS, files.CLASSES, files.CLIENTS, *((files.TASKS,) if experiment.has_tasks else ()))
        self.files = files.RunFiles(directory, names, lengths)
        data = experiment.bench.data
        self.writing_seconds = 0.0  # since the last row
        self._saved_at, self._saving_seconds = time.perf_counter(), 0.0  # the last checkpoint: its end, what it took
        self.totals = torch.bincount(data.y_test, minlength=data.num_classes).cpu().numpy()
        tasks = torch.zeros_like(data.y_test) if data.test_tasks is None else data.test_tasks
        self.task_totals = torch.bincount(tasks, minlength=data.num_tasks).cpu().numpy()

    def record_initial(self, state: State, evaluation: Evaluation) -> None:
        """Round 0: the initial model."""
        with uninterrupted():
            self._add_evaluation(state, 0, evaluation)
            self._write_round(state, 0, evaluation, {})
            self.save_checkpoint(state)

    def record_round(self, state: State, result: RoundResult) -> None:
        """Moves the state on to the end of this round and writes it down; Ctrl+C waits until that is done."""
        with uninterrupted():
            state.server, state.round = result.server, result.round
            kept = zip(result.cohort.clients, result.client_states, strict=True)
            state.clients.update({client: kept_state for client, kept_state in kept if kept_state})
            state.examples += result.examples
            state.alignment = result.alignment
            phases = result.seconds | {"writing": self.writing_seconds}
            start, seconds = time.perf_counter(), sum(phases.values())
            state.train_seconds += phases["train"]
            state.seconds += seconds
            if result.evaluation is not None:
                self._add_evaluation(state, result.round, result.evaluation)
            if result.local_class_correct is not None:
                local = class_accuracy(result.local_class_correct.cpu().numpy(), self.totals)
                state.history.add_local(result.round, np.array(result.cohort.clients), local)
            self._update_status(state, result)
            values = {
                "train_loss": result.train_loss,
                "lr": result.lr,
                "bytes_up": result.bytes_up,
                "bytes_down": result.bytes_down,
                "train_samples_per_second": result.examples / phases["train"],
                **{f"{phase}_seconds": phases[phase] for phase in PHASES},
                "seconds": seconds,
            }
            self._write_round(state, result.round, result.evaluation, values)
            self._write_clients(state, result)
            if state.status != "running" or self._is_due(state.round):
                self.save_checkpoint(state)
            self.writing_seconds = time.perf_counter() - start

    def save_checkpoint(self, state: State) -> None:
        """The state together with the lengths of the files that belong to it."""
        if not state.accuracy:
            return  # nothing has been recorded yet
        start = time.perf_counter()
        lengths = self.files.lengths()  # first: a directory that was removed is not made again
        versions = state.clients.save(self.directory / files.CLIENT_STATES, state.round)
        checkpoint.save(self.directory, state.to_tree(versions) | {"lengths": lengths})
        state.clients.tidy()
        self._saved_at = time.perf_counter()
        self._saving_seconds = self._saved_at - start

    def _is_due(self, number: int) -> bool:
        """Whether to save the state after this round."""
        interval = self.experiment.settings.checkpoint_interval
        if interval is not None:
            return number % interval == 0
        return self._saving_seconds <= SAVING_SHARE * (time.perf_counter() - self._saved_at)

    def _update_status(self, state: State, result: RoundResult) -> None:
        if result.not_finite is not None:
            log.warning("round %d: %s; the run has diverged", result.round, what_is_not_finite(result.not_finite))
            state.status, state.not_finite = "diverged", result.not_finite
        elif result.round == self.experiment.rounds:
            state.status = "completed"

    def _add_evaluation(self, state: State, number: int, evaluation: Evaluation) -> None:
        correct = evaluation.class_correct.cpu().numpy()
        state.history.add(number, class_accuracy(correct, self.totals))
        state.accuracy.append((number, overall_accuracy(correct, self.totals)))
        if self.experiment.has_tasks:
            right = class_accuracy(evaluation.task_correct.cpu().numpy(), self.task_totals)
            state.tasks.append((number, right.tolist()))

    def learned(self, number: int) -> int:
        """How many tasks have been begun when round `number` is over; 0 before the first round."""
        return -(-number // self.experiment.rounds_per_task)

    def task_history(self, state: State) -> TaskHistory:
        return TaskHistory.of(state.tasks, self.experiment.rounds_per_task)

    def _write_round(
        self, state: State, number: int, evaluation: Evaluation | None, values: Mapping[str, float | int]
    ) -> None:
        """One row of rounds.csv; cells are empty where a value is undefined."""
        row: dict[str, Any] = {"round": number, "test_accuracy": None, "test_loss": None}
        row |= {"train_loss": values.get("train_loss"), "lr": values.get("lr")}
        if self.experiment.has_tasks:
            row |= self._write_tasks(state, number, evaluation)
        per_class = None
        forgetting: dict[str, Any] = dict(self.experiment.metrics.round_values(state.history))
        if evaluation is None:
            forgetting = dict.fromkeys(forgetting)
        else:
            per_class = state.history.class_accuracy[-1]
            row |= {"test_accuracy": state.accuracy[-1][1], "test_loss": float(evaluation.loss)}
            rows = ({"round": number, "class": c, "accuracy": a} for c, a in enumerate(per_class.tolist()))
            self.files.append(files.CLASSES, rows)
        row |= forgetting
        for name in TAIL:
            row[name] = values.get(name)
        self.files.append(files.ROUNDS, [row])
        record = RoundRecord(number, {k: plain(v) for k, v in row.items() if k != "round"}, per_class, state.history)
        for tracker in self.trackers:
            tracker.log_round(record)

    def _write_tasks(self, state: State, number: int, evaluation: Evaluation | None) -> dict[str, Any]:
        """Rows of tasks.csv; the columns of rounds.csv that stand for them."""
        task = self.learned(number)
        if evaluation is None:
            return {"task": task} | dict.fromkeys(TASK_COLUMNS)
        rows = enumerate(state.tasks[-1][1], 1)
        self.files.append(
            files.TASKS, ({"round": number, "task": task, "evaluated_task": s, "accuracy": a} for s, a in rows)
        )
        return {"task": task} | self.task_history(state).values()

    def _write_clients(self, state: State, result: RoundResult) -> None:
        local = self.experiment.metrics.client_values(state.history) if result.local_class_correct is not None else {}
        parts = self.experiment.stage_of(result.round).federation.parts
        rows = []
        for i, (client, schedule) in enumerate(zip(result.cohort.clients, result.cohort.schedules, strict=True)):
            row: dict[str, Any] = {"round": result.round, "client": client}
            if self.experiment.has_tasks:
                row["role"] = type(result.cohort.roles[i]).__name__.lower()
            row |= {"examples": len(parts[client]), "steps": schedule.steps}
            row |= {"train_loss": result.losses[i]} | {name: float(values[i]) for name, values in local.items()}
            rows.append(row)
        self.files.append(files.CLIENTS, rows)

    def summary(self, state: State) -> dict[str, Any]:
        """The result part of summary.json."""
        settings, accuracy = self.experiment.settings, [value for _, value in state.accuracy]
        trained = [(number, value) for number, value in state.accuracy if number >= 1]
        rounds, values = [number for number, _ in trained], [value for _, value in trained]
        speed = state.examples / state.train_seconds if state.train_seconds else None
        return {
            "accuracy": accuracy[-1],
            "best_accuracy": max(values, default=accuracy[-1]),
            **{k: plain(v) for k, v in self.experiment.metrics.summary(state.history).items()},
            **(self.task_history(state).summary() if self.experiment.has_tasks else {}),
            **({"alignment": state.alignment} if state.alignment else {}),
            "rounds_to_target": rounds_to_target(rounds, values, settings.targets, settings.target_fractions),
            "rounds": state.round,
            **({"left_out": self.experiment.left_out} if self.experiment.left_out else {}),
            **({"not_finite": state.not_finite} if state.status == "diverged" else {}),
            "seconds": state.seconds,
            "train_samples_per_second": speed,
        }

    def close(self) -> None:
        self.files.close()


def what_is_not_finite(clients: Sequence[int]) -> str:
    """clients: whose loss or model is not."""
    if not clients:
        return "the model is not finite after aggregation, though what every client sent is"
    named = ", ".join(map(str, clients[:10])) + (" and others" if len(clients) > 10 else "")
    return f"the loss or the model of {'client' if len(clients) == 1 else 'clients'} {named} is not finite"


def plain(value: Any) -> Any:
    """NaN and Inf as None (json and W&B have no place for them), numpy scalars as Python's."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds back SIGINT and SIGTERM while a round is written down, and delivers them afterwards."""
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
