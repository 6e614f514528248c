"""Recorder: turns the results of rounds into tidy files, checkpoints, the summary and calls of the
trackers."""

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

from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.core.views import PLAIN, VALIDATION, all_named, choosing, file_of, named, others
from fedexp.engine.base import Cohort, Evaluation
from fedexp.metrics.accuracy import class_accuracy, overall_accuracy
from fedexp.metrics.targets import rounds_to_target
from fedexp.metrics.tasks import TaskHistory
from fedexp.rundir import checkpoint, csv_files, files, kept_models
from fedexp.rundir.analyses import round_means
from fedexp.trackers.base import RoundRecord, Tracker
from fedexp.training.exchange import facts
from fedexp.training.simulation import Simulation, State, Tested

log = logging.getLogger("fedexp")

SAVING_SHARE = 0.05  # of the time, for checkpoints that are saved as often as they can be
# Of a round, in their order. "writing" is that of the round before: its own is not over when its
# row is written.
PHASES = ("sampling", "train", "aggregation", "refinement", "evaluation", "writing")
# What summary.json says of a run beside the results of its rounds.
TAKEN = (
    *(
        "status",
        "algorithm",
        "dataset",
        "scenario",
        "partition",
        "model",
        "seed",
        "seeds",
        "sweep",
        "fingerprint",
    ),
    *("versions", "commit", "hardware", "determinism", "data", "peak_memory"),
)
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
    # where loss or model are not finite: the clients whose own were not; else None
    not_finite: list[int] | None
    lr: float
    evaluations: dict[str, Evaluation]  # of each test view; empty: not evaluated in this round
    local_class_correct: dict[str, torch.Tensor] | None  # of each test view, int64 [|S|, C]
    # of each test view, float64 [K, C]: clients' own models; empty: not evaluated
    personal: dict[str, np.ndarray]
    alignment: list[dict[str, Any]]  # of neurons; empty where it is not measured
    # rows of the files of the group `analysis`; empty: not measured
    analyses: dict[str, list[dict[str, Any]]]
    # of the cohort: `params` and `buffers`; empty where they are not kept
    local_models: list[dict[str, Params]]
    examples: int  # trained on
    bytes_up: int
    bytes_down: int
    seconds: dict[str, float]  # phase -> wall time

    @property
    def evaluation(self) -> Evaluation | None:
        """Return the evaluation in the first view; None where the round was not evaluated."""
        return next(iter(self.evaluations.values()), None)


class Recorder:
    """Writes one run directory. What it has recorded is in the files before the next round
    starts."""

    def __init__(
        self,
        directory: Path,
        simulation: Simulation,
        trackers: Sequence[Tracker],
        lengths: Mapping[str, int] | None,
    ):
        """Open the files. lengths: of the files at the checkpoint that the run resumes from; None
        for a new run."""
        self.directory, self.simulation, self.trackers = directory, simulation, trackers
        self.views = simulation.bench.views
        classes = [file_of(files.CLASSES, view) for view in self.views]
        names = (
            files.ROUNDS,
            *classes,
            files.CLIENTS,
            *((files.TASKS,) if simulation.has_tasks else ()),
        )
        names = (*names, *(part.file for part in simulation.analysis.parts))
        self.files = csv_files.RunFiles(directory, names, lengths)
        self.writing_seconds = 0.0  # since the last row
        # the last checkpoint: its end, what it took
        self._saved_at, self._saving_seconds = time.perf_counter(), 0.0
        # of each view: examples of each class and of each task
        self.totals, self.task_totals = {}, {}
        for view in self.views:
            data = simulation.bench.tested_on(view).data
            self.totals[view] = (
                torch.bincount(data.y_test, minlength=data.num_classes).cpu().numpy()
            )
            tasks = torch.zeros_like(data.y_test) if data.test_tasks is None else data.test_tasks
            self.task_totals[view] = torch.bincount(tasks, minlength=data.num_tasks).cpu().numpy()

    def record_initial(self, state: State, evaluations: Mapping[str, Evaluation]) -> None:
        """Record round 0: the initial model, in each test view."""
        with uninterrupted():
            self._add_evaluations(state, 0, evaluations)
            if self.simulation.metrics.needs_personal:  # nobody has another model yet
                clients = self.simulation.settings.num_clients
                for tested in state.tested.values():
                    tested.history.add_personal(
                        0, np.tile(tested.history.class_accuracy[-1], (clients, 1))
                    )
            for tested in state.tested.values():  # most metrics have the same values in the summary
                joined(
                    files.SUMMARY,
                    dict.fromkeys(TAKEN),
                    self.simulation.metrics.round_values(tested.history),
                )
            self._write_round(state, 0, evaluations, {})
            self._keep_models(state)
            self.save_checkpoint(state)

    def record_round(self, state: State, result: RoundResult) -> None:
        """Move the state on to the end of this round and write it down; Ctrl+C waits until that is
        done."""
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
            self._add_evaluations(state, result.round, result.evaluations)
            for view, accuracy in result.personal.items():
                state.tested[view].history.add_personal(result.round, accuracy)
            for view, correct in (result.local_class_correct or {}).items():
                local = class_accuracy(correct.cpu().numpy(), self.totals[view])
                state.tested[view].history.add_local(
                    result.round, np.array(result.cohort.clients), local
                )
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
            for name, rows in result.analyses.items():
                self.files.append(name, rows)
            analysed = {
                k: v
                for name, rows in result.analyses.items()
                for k, v in round_means(name, rows).items()
            }
            if result.evaluations and len(state.accuracy) == 2:
                # fails after the first tested round, not the last, where a metric's name is taken
                self.summary(state)
            self._write_round(state, result.round, result.evaluations, values, analysed)
            self._write_clients(state, result)
            self._keep_models(state, result)
            if state.status != "running" or self._is_due(state.round):
                self.save_checkpoint(state)
            self.writing_seconds = time.perf_counter() - start

    def _keep_models(self, state: State, result: RoundResult | None = None) -> None:
        """Keep the models of this round for which `keep_models` and `keep_local_models` ask.
        result: None before the first round."""
        settings = self.simulation.settings
        if settings.keeps_model(state.round):
            kept_models.save(self.directory, state.round, state.server)
        if result is None or not settings.keeps_local_models(state.round):
            return
        if not result.local_models:
            log.warning(
                "keep_local_models: the clients of round %d sent no whole model; none is kept",
                state.round,
            )
        for client, model in zip(result.cohort.clients, result.local_models, strict=False):
            kept_models.save_local(self.directory, state.round, client, model)

    def stop(self, state: State, why: Mapping[str, Any]) -> None:
        """End the run after a round that has been recorded. why: see `State.stopped`."""
        with uninterrupted():
            state.status, state.stopped = "stopped", dict(why)
            self.save_checkpoint(state)

    def save_checkpoint(self, state: State) -> None:
        """Save the state together with the lengths and checksums of the files that belong to it."""
        if not state.accuracy:
            return  # nothing has been recorded yet
        start = time.perf_counter()
        # First, since a directory that was removed is not made again.
        tables = {"lengths": self.files.lengths(), "checksums": self.files.checksums()}
        versions = state.clients.save(self.directory / files.CLIENT_STATES, state.round)
        checkpoint.save(self.directory, state.to_tree(versions) | tables)
        state.clients.tidy()
        self._saved_at = time.perf_counter()
        self._saving_seconds = self._saved_at - start

    @property
    def saving_seconds(self) -> float:
        """Return the seconds that the last checkpoint took."""
        return self._saving_seconds

    def _is_due(self, number: int) -> bool:
        """Return whether to save the state after this round."""
        interval = self.simulation.settings.checkpoint_interval
        if interval is not None:
            return number % interval == 0
        return self._saving_seconds <= SAVING_SHARE * (time.perf_counter() - self._saved_at)

    def _update_status(self, state: State, result: RoundResult) -> None:
        if result.not_finite is not None:
            log.warning(
                "round %d: %s; the run has diverged",
                result.round,
                what_is_not_finite(result.not_finite),
            )
            state.status, state.not_finite = "diverged", result.not_finite
        elif result.round == self.simulation.rounds:
            state.status = "completed"

    def _add_evaluations(
        self, state: State, number: int, evaluations: Mapping[str, Evaluation]
    ) -> None:
        for view, evaluation in evaluations.items():
            tested, correct = state.tested[view], evaluation.class_correct.cpu().numpy()
            tested.history.add(number, class_accuracy(correct, self.totals[view]))
            tested.accuracy.append((number, overall_accuracy(correct, self.totals[view])))
            if self.simulation.has_tasks:
                right = class_accuracy(
                    evaluation.task_correct.cpu().numpy(), self.task_totals[view]
                )
                tested.tasks.append((number, right.tolist()))

    def learned(self, number: int) -> int:
        """Return the number of tasks begun when round `number` is over; 0 before the first
        round."""
        return -(-number // self.simulation.rounds_per_task)

    def task_history(self, tested: Tested) -> TaskHistory:
        """Return the history of the last round and the ends of the tasks before it: all that its
        values are made of."""
        ends = [
            each for each in tested.tasks[:-1] if each[0] % self.simulation.rounds_per_task == 0
        ]
        simulation = self.simulation
        return TaskHistory.of(
            [*ends, *tested.tasks[-1:]], simulation.rounds_per_task, simulation.task_orders
        )

    def _write_round(
        self,
        state: State,
        number: int,
        evaluations: Mapping[str, Evaluation],
        values: Mapping[str, float | int],
        analysed: Mapping[str, float] | None = None,
    ) -> None:
        """Write one row of rounds.csv; cells are empty where a value is undefined."""
        if evaluations:
            self._write_classes(state, number)
            self._write_tasks(state, number)
        tested = {
            view: self._view_values(state.tested[view], evaluations.get(view))
            for view in self.views
        }
        view, first = self.views[0], tested[self.views[0]]
        row = joined(
            files.ROUNDS,
            {"round": number},
            {named(name, view): first.pop(name) for name in ("test_accuracy", "test_loss")},
            {"train_loss": values.get("train_loss"), "lr": values.get("lr")},
            {"task": self.learned(number)} if self.simulation.has_tasks else {},
            *(all_named(columns, view) for view, columns in tested.items()),
            {name: values.get(name) for name in TAIL},
        )
        self.files.append(files.ROUNDS, [row])
        tests = state.tested[PLAIN].history if PLAIN in state.tested else None
        per_class = tests.class_accuracy[-1] if evaluations and tests is not None else None
        shown = {name: plain(value) for name, value in row.items() if name != "round"}
        further = {view: state.tested[view].history for view in others(self.views)}
        record = RoundRecord(number, shown, per_class, tests, further, analysed or {})
        for tracker in self.trackers:
            tracker.log_round(record)

    def _view_values(self, tested: Tested, evaluation: Evaluation | None) -> dict[str, Any]:
        """Return the columns of rounds.csv that a view has; all None where the round was not
        evaluated."""
        values: dict[str, Any] = {"test_accuracy": tested.accuracy[-1][1], "test_loss": None}
        if self.simulation.has_tasks:
            values |= self.task_history(tested).values()
        values = joined(files.ROUNDS, values, self.simulation.metrics.round_values(tested.history))
        return (
            dict.fromkeys(values)
            if evaluation is None
            else values | {"test_loss": float(evaluation.loss)}
        )

    def _write_classes(self, state: State, number: int) -> None:
        """Write the rows of class_accuracy.csv, and of the file of each further view."""
        for view in self.views:
            per_class = state.tested[view].history.class_accuracy[-1].tolist()
            rows = ({"round": number, "class": c, "accuracy": a} for c, a in enumerate(per_class))
            self.files.append(file_of(files.CLASSES, view), rows)

    def _write_tasks(self, state: State, number: int) -> None:
        """Write the rows of tasks.csv, where there are tasks."""
        if not self.simulation.has_tasks:
            return
        row = {"round": number, "task": self.learned(number)}
        found = [
            all_named({"accuracy": state.tested[view].tasks[-1][1]}, view) for view in self.views
        ]
        columns = {name: values for each in found for name, values in each.items()}
        rows = (
            {name: values[s] for name, values in columns.items()}
            for s in range(len(self.simulation.stages))
        )
        self.files.append(
            files.TASKS, (row | {"evaluated_task": s} | each for s, each in enumerate(rows, 1))
        )

    def _write_clients(self, state: State, result: RoundResult) -> None:
        local: dict[str, np.ndarray] = {}
        for view in result.local_class_correct or ():
            values = self.simulation.metrics.client_values(state.tested[view].history)
            local = joined(files.CLIENTS, local, all_named(values, view))
        parts = facts(self.simulation, result.server, result.round).parts
        rows = []
        for i, (client, schedule) in enumerate(
            zip(result.cohort.clients, result.cohort.schedules, strict=True)
        ):
            row: dict[str, Any] = {"round": result.round, "client": client}
            if self.simulation.has_tasks:
                row["role"] = type(result.cohort.roles[i]).__name__.lower()
            row |= {"examples": len(parts[client]), "steps": schedule.steps}
            row |= {"train_loss": result.losses[i]}
            rows.append(
                joined(
                    files.CLIENTS, row, {name: float(values[i]) for name, values in local.items()}
                )
            )
        self.files.append(files.CLIENTS, rows)

    def summary(self, state: State) -> dict[str, Any]:
        """Return the result part of summary.json."""
        speed = state.examples / state.train_seconds if state.train_seconds else None
        validated = VALIDATION in self.views
        best = state.best[0] if validated and state.best is not None else None
        views = {view: self._view_summary(state.tested[view], best) for view in self.views}
        targets = {view: values.pop("rounds_to_target") for view, values in views.items()}
        reached = targets.pop(choosing(self.views))
        first, *further = (all_named(values, view) for view, values in views.items())
        found = joined(
            files.SUMMARY,
            dict.fromkeys(TAKEN),
            first,
            {"best_round": best} if validated else {},
            {"alignment": state.alignment} if state.alignment else {},
            {"rounds_to_target": reached},
            *further,
            {
                named("rounds_to_target", view): each
                for view, each in targets.items()
                if not validated
            },
            {"rounds": state.round},
            {"left_out": self.simulation.left_out} if self.simulation.left_out else {},
            {"schedule": self.changes()} if self.simulation.changes else {},
            {"stopped": state.stopped} if state.status == "stopped" else {},
            {"not_finite": state.not_finite} if state.status == "diverged" else {},
            {"hint": hint} if (hint := self.hint(state)) else {},
            {"seconds": state.seconds, "train_samples_per_second": speed},
        )
        return {name: value for name, value in found.items() if name not in TAKEN}

    def changes(self) -> list[dict[str, Any]]:
        """Return for each change of the clients' data its first round and how the partition was
        made."""
        names = ("scheme", "alpha", "shards_per_client", "shares")
        stages = [(first, stage.partition) for first, stage in self.simulation.changes]
        return [
            {
                "round": first,
                **{k: each.info[k] for k in names if k in each.info},
                "hash": each.hash,
            }
            for first, each in stages
        ]

    def _view_summary(self, tested: Tested, best: int | None) -> dict[str, Any]:
        """Return what summary.json says of a view. best: the round that the validation set has
        chosen; None: the best of this view is its highest accuracy."""
        settings, last = self.simulation.settings, tested.accuracy[-1][1]
        trained = [(number, value) for number, value in tested.accuracy if number >= 1]
        rounds, values = [number for number, _ in trained], [value for _, value in trained]
        return joined(
            files.SUMMARY,
            {"accuracy": last},
            {"best_accuracy": max(values, default=last) if best is None else dict(trained)[best]},
            {k: plain(v) for k, v in self.simulation.metrics.summary(tested.history).items()},
            self.task_history(tested).summary() if self.simulation.has_tasks else {},
            {
                "rounds_to_target": rounds_to_target(
                    rounds, values, settings.targets, settings.target_fractions
                )
            },
        )

    def hint(self, state: State) -> str:
        """Return what the algorithm says of a run that diverged or never was twice as good as
        chance."""
        best = max((value for number, value in state.accuracy if number >= 1), default=1.0)
        failed = state.status == "diverged" or best * self.simulation.bench.data.num_classes < 2
        return self.simulation.algorithm.hint if failed else ""

    def close(self) -> None:
        self.files.close()


def check_names(simulation: Simulation) -> None:
    """Raise ConfigError where a metric gives a name that is taken, before anything of a new run is
    written: asked for an initial model that knows all classes alike. What else is wrong with the
    metric, the run itself will show."""
    history, classes = simulation.new_history(), simulation.bench.data.num_classes
    history.add(0, np.full(classes, 1 / classes))
    if simulation.metrics.needs_personal:
        history.add_personal(0, np.full((simulation.settings.num_clients, classes), 1 / classes))
    try:
        values = simulation.metrics.round_values(history)
    except Exception:
        return
    joined(
        files.ROUNDS,
        dict.fromkeys(("round", "test_accuracy", "test_loss", "train_loss", "lr", *TAIL)),
        values,
    )
    joined(files.SUMMARY, dict.fromkeys(TAKEN), values)


def what_is_not_finite(clients: Sequence[int]) -> str:
    """Say what is not finite. clients: those whose loss or model is not."""
    if not clients:
        return "the model is not finite after aggregation, though what every client sent is"
    named = ", ".join(map(str, clients[:10])) + (" and others" if len(clients) > 10 else "")
    return (
        f"the loss or the model of {'client' if len(clients) == 1 else 'clients'} {named} is not"
        " finite"
    )


def joined(file: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all parts. Raises ConfigError for a name in two of them: a metric would
    replace what the file has under it."""
    row: dict[str, Any] = {}
    for part in parts:
        if taken := next((name for name in part if name in row), None):
            raise ConfigError(
                f"forgetting_metric: a value is called {taken}, as another one of {file}; rename it"
            )
        row |= part
    return row


def plain(value: object) -> Any:
    """Return plain values: NaN and Inf as None (json and W&B have no place for them), numpy scalars
    as Python's."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM while a round is written down, and deliver them afterwards."""
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
