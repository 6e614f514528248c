"""Load a run directory into arrays for its figures. Any file may be missing or incomplete."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz
from fedexp.core.storage import check_size
from fedexp.data.partitioned import Partition, find_changed_partitions, find_task_partitions
from fedexp.data.views import PLAIN, VIEWS, file_in_view, name_in_view
from fedexp.metrics.history import LOCAL, History
from fedexp.rundir import contents, files, schema
from fedexp.rundir.reader import RunDirectory

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TaskFile:
    """The content of tasks.csv for a run in continual learning."""

    rounds: np.ndarray  # int [E]: evaluated rounds, ascending
    learning: np.ndarray  # int [E]: the task being learned, from 1; 0 before the first round
    accuracy: np.ndarray  # float [E, T], nan where undefined

    @property
    def last_rounds(self) -> np.ndarray:
        """Return the last round of each task that is followed by another task.

        These rounds are always evaluated.
        """
        before, after = self.learning[:-1], self.learning[1:]
        return self.rounds[:-1][(before > 0) & (after > before)]


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
    histories: Mapping[str, History] | None = None,
) -> RunData:
    """Load a run directory. If a file is damaged, raises ConfigError with the file's name.

    summary: the content of summary.json, if this file has not been written yet.
    histories: class accuracies up to a certain round by view of the test set, including the plain
        view. They replace the accuracies in the files, and the data then describe the run after
        that round.
    """
    import pandas as pd

    run = RunDirectory(run_dir)
    rounds = pd.DataFrame() if run.rounds is None else run.rounds
    arrays = load_npz(run_dir / files.PARTITION) if run.has(files.PARTITION) else {}
    last = math.inf
    if histories is not None:
        summary, last = {}, histories[PLAIN].rounds[-1]  # shown as unfinished
        rounds = rounds[rounds["round"] <= last]
    else:
        there = [view for view in VIEWS if arrays and run.class_accuracy(view) is not None]
        histories = {view: load_history(run, view) for view in there}
    tasks = {view: read_tasks(run, view, last) for view in VIEWS}
    tables = [(name, run.analysis(name)) for name in files.ANALYSES]
    title = run_title(run.config, run.summary if summary is None else summary)
    require_readable(run)
    return RunData(
        title=title,
        rounds=rounds,
        targets=tuple(map(float, run.config.get("targets") or ())),
        counts=_counts(run_dir, arrays),
        classes=tuple(map(str, arrays["classes"])) if arrays else (),
        histories={view: each for view, each in histories.items() if each.rounds},
        tasks_of={view: file for view, file in tasks.items() if file is not None},
        analyses={name: table for name, table in tables if table is not None and len(table)},
        reduced=find_reduced_classes(run.config, histories.get(PLAIN)),
    )


def load_history(run: RunDirectory, view: str = PLAIN) -> History:
    """Load the history of a run, so that any metric can be computed after the run.

    The function reads the class accuracies, the partitions and, if they were saved, the class
    accuracies of local models. view: the view of the test set. Raises ConfigError that names the
    file if a file is missing or damaged.
    """
    folder, table = run.directory, run.class_accuracy(view)
    changes = find_changed_partitions(folder)
    paths = [folder / files.PARTITION, *find_task_partitions(folder), *changes.values()]
    tasks = [Partition.load(path) for path in paths]
    classes, name = tasks[0].counts.shape[1], file_in_view(files.CLASSES, view)
    if table is None:
        raise ConfigError(f"{folder / name}: {run.unreadable.get(name, 'is missing')}")
    try:
        check_size(8 * table["round"].nunique() * classes, 8 * len(table))
        problem = schema.check_table(table)
        if problem and (run.has_ended or problem != contents.HALF_ROW):
            raise ValueError(problem)
        if table["class"].max() >= classes:
            raise ValueError(f"has a class above {classes - 1}")
    except ValueError as error:
        raise ConfigError(f"{folder / name}: {error}") from None
    matrix = class_matrix(table, classes)
    history = History(
        counts=np.stack([task.counts for task in tasks]) if len(tasks) > 1 else tasks[0].counts,
        rounds_per_task=int(tasks[0].info.get("rounds_per_task", 0)),
        rounds=matrix.index.astype(int).tolist(),
        class_accuracy=list(matrix.to_numpy(dtype=np.float64)),
        starts=(1, *changes) if changes else (),
    )
    load_examples(history, folder / file_in_view(files.EXAMPLES, view), run.has_ended)
    local = folder / file_in_view(files.LOCAL, view)
    if not local.exists():
        return history
    saved = load_npz(local)
    missing = LOCAL.keys() - {"distributed"} - saved.keys()
    if missing:
        raise ConfigError(f"{local}: the file lacks the arrays {', '.join(sorted(missing))}")
    try:
        check_size(8 * int(saved["rounds"].max(initial=0)), 8 * len(matrix))
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{local}: the file contains invalid round numbers ({error})") from None
    history.local_rounds = saved["rounds"].tolist()
    for name in LOCAL.keys() & saved.keys() - {"rounds"}:
        setattr(history, LOCAL[name], list(saved[name]))
    return history


def load_examples(history: History, path: Path, has_ended: bool = True) -> None:
    """Add the predictions for single test examples in a file (`History.save_examples`).

    Nothing is added if the file does not exist, or if it ends before the last round of a run that
    has not ended. The latter happens if a complete run was given more rounds, since the file is
    written at the end. Raises ConfigError if the file does not fit the history.
    """
    if not path.exists():
        return
    saved = load_npz(path)
    try:
        labels, right, rounds = saved["labels"], saved["right"], saved["rounds"]
        if not has_ended and rounds.size < len(history.rounds):
            return
        good = (
            np.array_equal(rounds, history.rounds)
            and (labels.ndim, labels.dtype, right.dtype) == (1, np.int64, np.uint8)
            and right.shape == (len(history.rounds), -(-len(labels) // 8))
            and len(labels) > 0
            and 0 <= labels.min() <= labels.max() < history.counts.shape[-1]
        )
    except KeyError as error:
        raise ConfigError(f"{path}: the file lacks the array {error}") from None
    if not good:
        raise ConfigError(f"{path}: the arrays do not fit the class accuracies of the run")
    history.labels, history.right = labels, list(right)


def class_matrix(table: "pd.DataFrame", classes: int) -> "pd.DataFrame":
    """Return the accuracies of all classes in a table of class accuracies, one row per round."""
    last = table.drop_duplicates(["round", "class"], keep="last")
    wide = last.pivot(index="round", columns="class", values="accuracy")
    return wide.reindex(columns=range(classes))


def find_reduced_classes(
    config: Mapping[str, Any], history: History | None
) -> tuple[tuple[int, int], ...]:
    """Return the (client, class) pairs whose examples the schedule reduces.

    If the schedule does not name any clients, each class is paired with the client that initially
    had the most examples of it.
    """
    schedule = config.get("schedule") or {}
    changes = schedule.get("classes")
    if not changes or history is None or not history.starts:
        return ()
    labels = sorted({int(label) for change in changes for label in change["shares"]})
    clients = schedule.get("clients")
    return tuple((k, c) for c in labels for k in clients or [int(history.counts[0][:, c].argmax())])


def _counts(run_dir: Path, first: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return the number of training examples per client and class in all tasks, int [K, C].

    first: the arrays in partition.npz.
    """
    if "counts" not in first:
        return None
    return first["counts"] + sum(
        Partition.load(path).counts for path in find_task_partitions(run_dir)
    )


def require_readable(run: RunDirectory) -> None:
    """Raise ConfigError with the file's name if a file that was read is damaged.

    Empty tables are allowed, since an interrupted run may have them.
    """
    for name, reason in run.unreadable.items():
        if not (reason == contents.EMPTY and name.endswith(".csv")):
            raise ConfigError(f"{run.directory / name}: {reason}")


def read_tasks(run: RunDirectory, view: str, last: float) -> TaskFile | None:
    """Return tasks.csv up to the round `last`.

    Return None if the file is missing, has no rows or does not contain this view.
    """
    name = name_in_view("accuracy", view)
    if run.tasks is None or name not in run.tasks:
        return None
    known = run.tasks[run.tasks["round"] <= last]
    keys = ("round", "task", "evaluated_task")
    number, learning, evaluated = (known[key].to_numpy().astype(int) for key in keys)
    rounds, first, row = np.unique(number, return_index=True, return_inverse=True)
    table = np.full((len(rounds), evaluated.max(initial=0)), np.nan)
    table[row, evaluated - 1] = known[name].to_numpy()
    return TaskFile(rounds, learning[first], table) if len(rounds) else None


def run_title(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Describe a run in one line for titles: algorithm, data set, partition, clients and seed.

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
