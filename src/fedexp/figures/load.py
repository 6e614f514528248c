"""Load a run directory into arrays for its figures. Any file may be missing or incomplete."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.data.views import PLAIN, VIEWS, name_in_view
from fedexp.metrics.record import Record
from fedexp.rundir import files
from fedexp.rundir.identity import partition_numbers, value_of
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class TaskFile:
    """The content of tasks.csv for a run in continual learning."""

    rounds: np.ndarray  # int [E]: evaluated rounds, ascending
    learning: np.ndarray  # int [E]: the task being learned, from 1; 0 before the first round
    accuracy: np.ndarray  # float [E, T], nan where undefined
    shared_order: bool = True  # whether all clients learn the tasks in the order of the columns

    @property
    def last_rounds(self) -> np.ndarray:
        """Return the last round of each task that is followed by another task.

        These rounds are always evaluated.
        """
        before, after = self.learning[:-1], self.learning[1:]
        return self.rounds[:-1][(before > 0) & (after > before)]

    @property
    def matrix(self) -> np.ndarray:
        """Return the accuracies a[t, s] on task s after each completed task t, float [t, T].

        The matrix has no rows before a second task has begun. In a shared order, the values of
        tasks that have not been learned yet are nan.
        """
        ends = list(self.last_rounds)
        if ends and self.rounds[-1] == self.learning[-1] * ends[0]:
            ends.append(self.rounds[-1])
        found = self.accuracy[np.isin(self.rounds, ends)]
        learned = np.tril(np.ones(found.shape, bool)) if self.shared_order else True
        return np.where(learned, found, np.nan)


@dataclass(frozen=True)
class RunData:
    """The data that the figures of a run need. Undefined values are nan."""

    title: str  # one-line description of the run
    rounds: "pd.DataFrame"  # rounds.csv; empty if the file is missing
    targets: tuple[float, ...]
    # int [K, C]: training examples per client and class, in all tasks together
    counts: np.ndarray | None
    classes: tuple[str, ...]  # names; index = label
    # view of the test set -> class accuracies; view -> tasks.csv
    records: dict[str, Record]
    tasks_of: dict[str, TaskFile]
    domains: tuple[str, ...] = ()  # names; index = number
    # (client, class) pairs whose examples `schedule.classes` reduces
    reduced: tuple[tuple[int, int], ...] = ()

    @property
    def record(self) -> Record | None:
        return self.records.get(PLAIN)

    @property
    def tasks(self) -> TaskFile | None:
        return self.tasks_of.get(PLAIN)

    def has(self, column: str) -> bool:
        return self.points(column)[0].size > 0

    def points(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (rounds, values) of a column, for the rounds in which its value is finite.

        Rounds without evaluation and rounds after divergence are left out.
        """
        if column not in self.rounds:
            return np.empty(0), np.empty(0)
        rounds, values = self.rounds[["round", column]].to_numpy(dtype=float).T
        finite = np.isfinite(values)
        return rounds[finite], values[finite]


def load_run_data(
    run_dir: Path,
    summary: dict[str, Any] | None = None,
    records: Mapping[str, Record] | None = None,
) -> RunData:
    """Load a run directory. If a file is damaged, raises ConfigError with the file's name.

    summary: the content of summary.json, if this file has not been written yet.
    records: class accuracies up to a certain round by view of the test set. They replace the
        accuracies in the files, and the data then describe the run after that round.
    """
    import pandas as pd

    run = RunDirectory(run_dir)
    rounds = pd.DataFrame() if run.rounds is None else run.rounds
    is_divided, last = run.has(files.PARTITION), math.inf
    if not is_divided:
        missing = run_dir / files.PARTITION
        log.warning("%s: is missing; figures of classes and clients are left out", missing)
    if records is not None:
        summary = {}  # shown as unfinished
        last = max(record.rounds[-1] for record in records.values() if record.rounds)
        rounds = rounds[rounds["round"] <= last]
    else:
        there = [view for view in VIEWS if is_divided and run.class_accuracy(view) is not None]
        records = {view: run.record(view) for view in there}
    tasks = {view: read_tasks(run, view, last) for view in VIEWS}
    title = run_title(run.config, run.summary if summary is None else summary)
    return RunData(
        title=title,
        rounds=rounds,
        targets=tuple(map(float, run.config.get("targets") or ())),
        counts=count_examples(run) if is_divided else None,
        classes=tuple(run.class_names) if is_divided else (),
        domains=tuple(run.domain_names) if any(each.domains for each in records.values()) else (),
        records={view: each for view, each in records.items() if each.rounds},
        tasks_of={view: file for view, file in tasks.items() if file is not None},
        reduced=find_reduced_classes(run.config, records.get(PLAIN)),
    )


def find_reduced_classes(
    config: Mapping[str, Any], record: Record | None
) -> tuple[tuple[int, int], ...]:
    """Return the (client, class) pairs whose examples the schedule reduces.

    If the schedule does not name any clients, each class is paired with the client that initially
    had the most examples of it.
    """
    schedule = config.get("schedule") or {}
    changes = schedule.get("classes")
    if not changes or record is None or len(record.starts) == 1:
        return ()
    labels = sorted({int(label) for change in changes for label in change["shares"]})
    clients = schedule.get("clients")
    return tuple((k, c) for c in labels for k in clients or [int(record.counts[0][:, c].argmax())])


def count_examples(run: RunDirectory) -> np.ndarray:
    """Return the number of examples per client and class in all tasks, before the data change."""
    return np.sum([each.counts for each in run.partitions if not each.is_change], axis=0)


def read_tasks(run: RunDirectory, view: str, last: float) -> TaskFile | None:
    """Return tasks.csv up to the round `last`.

    Return None if the file is missing, has no rows or does not contain this view.
    """
    name = name_in_view("accuracy", view)
    if run.tasks is None or name not in run.tasks:
        return None
    known = run.tasks[run.tasks["round"] <= last]
    table = known.pivot(index=["round", "task"], columns="evaluated_task", values=name)
    rounds, learning = (table.index.get_level_values(i).to_numpy() for i in (0, 1))
    shared = (run.config.get("scenario") or {}).get("order") != "per_client"
    return TaskFile(rounds, learning, table.to_numpy(), shared) if len(rounds) else None


def run_title(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Describe a run in one line for titles: algorithm, data set, partition, clients and seed.

    A centralized run has neither partition nor clients. The status is added unless it is
    `completed`.
    """
    chosen = {**summary, **(config.get("choices") or {})}
    data = [str(chosen["partition"])] if "partition" in chosen else []
    data += [f"{key}={value}" for key, value in partition_numbers(config).items() if data]
    clients, seed, status = config.get("num_clients"), config.get("seed"), summary.get("status")
    division = [" ".join(data), f"{clients} clients" if clients else ""]
    if value_of(config, "algorithm.paradigm") == "centralized":
        division = ["all data on one client"]
    parts = [
        " on ".join(str(chosen[group]) for group in ("algorithm", "dataset") if group in chosen),
        *division,
        f"seed {seed}" if seed is not None else "",
        status if status != "completed" else "",
    ]
    return ", ".join(filter(None, parts))
