"""Load a run directory into arrays for its pictures. Any file may be missing or incomplete."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz
from fedexp.data.partitioned import Partition, later_partitions
from fedexp.data.views import PLAIN, VIEWS, file_of, named
from fedexp.metrics.history import History, load_history
from fedexp.rundir import contents, files
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TaskFile:
    """The content of tasks.csv of a run in continual learning."""

    rounds: np.ndarray  # int [E]: evaluated rounds, ascending
    learning: np.ndarray  # int [E]: the task being learned, from 1; 0 before the first round
    accuracy: np.ndarray  # float [E, T], nan where undefined

    def upto(self, round: int) -> "TaskFile":
        """Return the file's content as it was after a round."""
        size = int(np.searchsorted(self.rounds, round, side="right"))
        return TaskFile(self.rounds[:size], self.learning[:size], self.accuracy[:size])

    @property
    def ends(self) -> np.ndarray:
        """Return the indices of the last rounds of all tasks that are followed by another task.

        These rounds are always evaluated.
        """
        before, after = self.learning[:-1], self.learning[1:]
        return np.flatnonzero((before > 0) & (after > before))


@dataclass(frozen=True)
class RunData:
    """The data that the figures of a run need. Undefined values are nan."""

    title: str  # the run in one line
    columns: dict[str, np.ndarray]  # rounds.csv: float [T] per column
    targets: tuple[float, ...]
    # int [K, C]: training examples of each client per class, in all tasks together
    counts: np.ndarray | None
    classes: tuple[str, ...]  # names; index = label
    # view of the test set -> class accuracies; view -> tasks.csv
    histories: dict[str, History]
    tasks_of: dict[str, TaskFile]
    # file name -> table of the group `analysis`
    analyses: "dict[str, pd.DataFrame]" = field(default_factory=dict)
    # (client, class) pairs whose examples `schedule.classes` reduces
    reduced: tuple[tuple[int, int], ...] = ()

    @property
    def history(self) -> History | None:
        return self.histories.get(PLAIN)

    @property
    def tasks(self) -> TaskFile | None:
        return self.tasks_of.get(PLAIN)

    def has(self, column: str) -> bool:
        return self.points(column)[0].size > 0

    def points(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (rounds, values) of a column for the rounds with a finite value.

        Rounds without evaluation, and rounds after divergence, are omitted.
        """
        values = self.columns.get(column, np.empty(0))
        finite = np.isfinite(values)
        rounds = self.columns["round"][finite] if values.size else values
        return rounds, values[finite]


def load_run(
    run_dir: Path,
    history: History | None = None,
    summary: dict[str, Any] | None = None,
    further: Mapping[str, History] | None = None,
) -> RunData:
    """Load a run directory. Raises ConfigError, which names the file, if a file is damaged.

    history: class accuracies up to a round, used instead of those in the files, to show the run as
    it was after that round. further: the same for each further view of the test set. summary: the
    content of summary.json, if it has not been written yet.
    """
    run = RunDirectory(run_dir)
    config, columns = run.config, columns_of(run)
    every = {view: read_tasks(run, view) for view in VIEWS}
    tasks = {view: found for view, found in every.items() if found is not None}
    partition = run_dir / files.PARTITION
    arrays = load_npz(partition) if run.has(files.PARTITION) else {}
    if history is not None:
        summary, last = {}, history.rounds[-1]  # shown as unfinished
        columns = {name: values[columns["round"] <= last] for name, values in columns.items()}
        tasks = {view: each.upto(last) for view, each in tasks.items()}
        histories = {PLAIN: history, **(further or {})}
    else:
        summary = run.summary if summary is None else summary
        there = [view for view in VIEWS if arrays and run.has(file_of(files.CLASSES, view))]
        histories = {view: load_history(run_dir, view) for view in there}
    tables = {name: run.analysis(name) for name in files.ANALYSES}
    shown = {name: table for name, table in tables.items() if table is not None and len(table)}
    require_readable(run)
    return RunData(
        title=describe(config, summary),
        columns=columns,
        targets=tuple(map(float, config.get("targets") or ())),
        counts=_counts(run_dir, arrays),
        classes=tuple(map(str, arrays["classes"])) if arrays else (),
        histories={view: each for view, each in histories.items() if each.rounds},
        tasks_of=tasks,
        analyses=shown,
        reduced=reduced_of(config, histories.get(PLAIN)),
    )


def reduced_of(config: Mapping[str, Any], history: History | None) -> tuple[tuple[int, int], ...]:
    """Return (client, class) pairs whose examples the schedule reduces.

    If the schedule names no clients, each class is paired with the client that held most of its
    examples initially.
    """
    schedule = config.get("schedule") or {}
    changes = schedule.get("classes")
    if not changes or history is None or not history.starts:
        return ()
    labels = sorted({int(label) for change in changes for label in change["shares"]})
    clients = schedule.get("clients")
    return tuple((k, c) for c in labels for k in clients or [int(history.counts[0][:, c].argmax())])


def _counts(run_dir: Path, first: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return int [K, C] of all tasks together. first: the arrays of partition.npz."""
    if "counts" not in first:
        return None
    return first["counts"] + sum(Partition.load(path).counts for path in later_partitions(run_dir))


def require_readable(run: RunDirectory) -> None:
    """Raise ConfigError, which names the file, if any file that was read is damaged.

    Empty tables are allowed: an interrupted run may have them.
    """
    for problem in run.unreadable:
        if not (problem.reason == contents.EMPTY and problem.file.endswith(".csv")):
            raise ConfigError(f"{run.directory / problem.file}: {problem.reason}")


def read_tasks(run: RunDirectory, view: str) -> TaskFile | None:
    """Return tasks.csv; None if it is missing, has no rows or lacks this view."""
    name = named("accuracy", view)
    if run.tasks is None or name not in run.tasks:
        return None
    keys = ("round", "task", "evaluated_task")
    number, learning, evaluated = (run.tasks[key].to_numpy().astype(int) for key in keys)
    rounds, first, row = np.unique(number, return_index=True, return_inverse=True)
    table = np.full((len(rounds), evaluated.max(initial=0)), np.nan)
    table[row, evaluated - 1] = run.tasks[name].to_numpy()
    return TaskFile(rounds, learning[first], table) if len(rounds) else None


def columns_of(run: RunDirectory) -> dict[str, np.ndarray]:
    """Return the columns of rounds.csv as float [T]. Empty and non-numeric fields are nan."""
    if run.rounds is None:
        return {}
    return {str(name): run.rounds[name].to_numpy(dtype=float) for name in run.rounds}


def describe(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return one line for titles: algorithm, data set, partition, clients and seed.

    The status is added unless it is `completed`.
    """
    chosen = {**summary, **(config.get("choices") or {})}
    data = [str(chosen["partition"])] if "partition" in chosen else []
    keys = [key for key in ("alpha", "shards_per_client") if data and config.get(key) is not None]
    data += [f"{key}={config[key]}" for key in keys]
    clients, seed, status = config.get("num_clients"), config.get("seed"), summary.get("status")
    parts = [
        " on ".join(str(chosen[group]) for group in ("algorithm", "dataset") if group in chosen),
        " ".join(data),
        f"{clients} clients" if clients else "",
        f"seed {seed}" if seed is not None else "",
        status if status != "completed" else "",
    ]
    return ", ".join(filter(None, parts))
