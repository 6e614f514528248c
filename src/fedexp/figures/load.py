"""Read the files of a run directory into arrays; every file may be missing or end early."""

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from yaml import YAMLError

from fedexp.core.errors import ConfigError
from fedexp.core.views import PLAIN, VIEWS, file_of, others, suffix
from fedexp.data.partition import Partition, load_npz
from fedexp.metrics.history import History, later_partitions, load_history


@dataclass(frozen=True)
class TaskFile:
    """The content of tasks.csv, of a run in continual learning."""

    rounds: np.ndarray  # int [E]: the evaluated ones, ascending
    learning: np.ndarray  # int [E]: the task being learned, from 1; 0 before the first round
    accuracy: np.ndarray  # float [E, T], nan where undefined

    def upto(self, round: int) -> "TaskFile":
        """Return the file's content as it was after a round."""
        size = int(np.searchsorted(self.rounds, round, side="right"))
        return TaskFile(self.rounds[:size], self.learning[:size], self.accuracy[:size])

    @property
    def ends(self) -> np.ndarray:
        """Return the indices of the last rounds of tasks that another one follows; these are always evaluated."""
        before, after = self.learning[:-1], self.learning[1:]
        return np.flatnonzero((before > 0) & (after > before))


@dataclass(frozen=True)
class RunFiles:
    """The data that the figures of a run need; nan marks an undefined value."""

    title: str  # the run in one line
    columns: dict[str, np.ndarray]  # rounds.csv: float [T] per column
    targets: tuple[float, ...]
    counts: np.ndarray | None  # int [K, C]: training examples of each client per class, in all tasks together
    classes: tuple[str, ...]  # names; index = label
    history: History | None  # class accuracies
    tasks: TaskFile | None
    others: dict[str, History] = field(default_factory=dict)  # class accuracies in each further view of the test set
    other_tasks: dict[str, TaskFile] = field(default_factory=dict)

    def has(self, column: str) -> bool:
        return self.points(column)[0].size > 0

    def points(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (rounds, values) where the column is finite: those without evaluation or after divergence drop out."""
        values = self.columns.get(column, np.empty(0))
        finite = np.isfinite(values)
        rounds = self.columns["round"][finite] if values.size else values
        return rounds, values[finite]


def load_run(
    run_dir: Path,
    history: History | None = None,
    summary: dict[str, Any] | None = None,
    further: Mapping[str, History] | None = None,
) -> RunFiles:
    """Read a run directory. Raises ConfigError naming a damaged file.

    history: class accuracies up to a round, in the place of those in the files: the run as it was after that round;
    further: the same in each further view of the test set.
    summary: what summary.json will be, where it is still to be written.
    """
    config, columns, tasks = (
        _read_yaml(run_dir / "config.yaml"),
        read_columns(run_dir / "rounds.csv"),
        read_tasks(run_dir / "tasks.csv"),
    )
    views = {view: read_tasks(run_dir / "tasks.csv", view) for view in others(VIEWS)}
    other_tasks = {view: each for view, each in views.items() if each is not None}
    partition = run_dir / "partition.npz"
    arrays = load_npz(partition) if partition.exists() else {}
    if history is not None:
        summary, last = {}, history.rounds[-1]  # not over yet
        columns = {name: values[columns["round"] <= last] for name, values in columns.items()}
        tasks = tasks and tasks.upto(last)
        other_tasks = {view: each.upto(last) for view, each in other_tasks.items()}
    else:
        summary = _read_json(run_dir / "summary.json") if summary is None else summary
        drawable = arrays and (run_dir / "class_accuracy.csv").exists()
        history = load_history(run_dir) if drawable else None
        there = [view for view in others(VIEWS) if (run_dir / file_of("class_accuracy.csv", view)).exists()]
        further = {view: load_history(run_dir, view) for view in there if drawable}
    return RunFiles(
        title=describe(config, summary, config.get("choices") or {}),
        columns=columns,
        targets=tuple(map(float, config.get("targets") or ())),
        counts=_counts(run_dir, arrays),
        classes=tuple(map(str, arrays["classes"])) if arrays else (),
        history=history if history and history.rounds else None,
        tasks=tasks,
        others={view: each for view, each in (further or {}).items() if each.rounds},
        other_tasks=other_tasks,
    )


def _counts(run_dir: Path, first: dict[str, np.ndarray]) -> np.ndarray | None:
    """int [K, C] of all tasks together; first: the arrays of partition.npz."""
    if "counts" not in first:
        return None
    return first["counts"] + sum(Partition.load(path).counts for path in later_partitions(run_dir))


def read_tasks(path: Path, view: str = PLAIN) -> TaskFile | None:
    """Read tasks.csv; None when it is missing, has no row or lacks this view of the test set. Raises ConfigError when
    it is not such a table."""
    columns = read_columns(path)
    name = f"accuracy{suffix(view)}"
    if not columns or (view != PLAIN and name not in columns):
        return None
    try:
        keys = np.stack([columns[key] for key in ("round", "task", "evaluated_task")])
        accuracy = columns[name]
    except KeyError as error:
        raise ConfigError(f"{path}: cannot be read (no column {error})") from None
    whole = np.isfinite(keys).all(0)  # the last row of a killed run may be cut short
    number, learning, evaluated = keys[:, whole].astype(int)
    rounds, first, row = np.unique(number, return_index=True, return_inverse=True)
    table = np.full((len(rounds), evaluated.max(initial=0)), np.nan)
    table[row, evaluated - 1] = accuracy[whole]
    return TaskFile(rounds, learning[first], table) if len(rounds) else None


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Read a csv file with a header as float columns; an empty, missing or non-numeric field is nan."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name] if rows else []
    return {name: np.array([_number(row[name]) for row in rows]) for name in names}


def describe(config: dict[str, Any], summary: dict[str, Any], choices: dict[str, Any]) -> str:
    """Return one line for titles: algorithm, data set, partition, clients, seed, and the status unless `completed`.

    Names come from the configuration (`name` of the group), else the choices that it notes, else the summary.
    """

    def name(group: str) -> str | None:
        node = config.get(group)
        if isinstance(node, dict):
            target = str(node.get("_target_", "")).rpartition(".")[2].lower()
            node = node.get("name") or choices.get(group) or summary.get(group) or target
        return node or choices.get(group) or summary.get(group)

    partition = name("partition")
    for key in ("alpha", "shards_per_client"):
        if partition and config.get(key) is not None:
            partition += f" {key}={config[key]}"
    clients, seed, status = config.get("num_clients"), config.get("seed"), summary.get("status")
    parts = [
        " on ".join(filter(None, (name("algorithm"), name("dataset")))),
        partition,
        f"{clients} clients" if clients else None,
        f"seed {seed}" if seed is not None else None,
        status if status != "completed" else None,
    ]
    return ", ".join(filter(None, parts))


def _number(text: str | None) -> float:
    try:
        return float(text) if text else np.nan
    except ValueError:
        return np.nan


def _read_yaml(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return _read(path, lambda: OmegaConf.to_container(OmegaConf.load(path), resolve=False))


def _read_json(path: Path) -> dict[str, Any]:
    return _read(path, lambda: json.loads(path.read_text(encoding="utf-8")))


def _read(path: Path, parse: Callable[[], Any]) -> dict[str, Any]:
    """Return what `parse` makes of a file, {} for a missing one. ConfigError when it is not a mapping."""
    if not path.exists():
        return {}
    try:
        content = parse()
        if not isinstance(content, dict):
            raise ValueError("not a mapping")
    except (ValueError, YAMLError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    return content
