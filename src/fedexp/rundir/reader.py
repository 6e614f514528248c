"""Read run directories, so that other modules need not know the names of files and columns.

    run = RunDirectory(Path("outputs/..."))
    run.status, run.summary["accuracy"], run.rounds["test_accuracy"], run.class_accuracy()

A file is read when it is first needed. The value of a missing file is empty, and ConfigError names
a file that cannot be read, or that was changed after the run. torch is not imported.
"""

from __future__ import annotations  # pandas takes long to import

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.storage import load_npz
from fedexp.data.partitioned import Partition, find_changed_partitions, find_task_partitions
from fedexp.data.views import (
    CLASSES,
    PLAIN,
    VALIDATION,
    VIEW_TABLES,
    VIEWS,
    configured_views,
    file_in_view,
    name_in_view,
)
from fedexp.metrics.quantity import ACCURACY, LOSS, Column
from fedexp.metrics.record import Record, by_round
from fedexp.rundir import checksums, files, origin
from fedexp.rundir.lock import is_occupied

if TYPE_CHECKING:
    import pandas as pd

# a directory with one of these files is a run directory
MARKS = (files.CONFIG, files.SUMMARY, files.ROUNDS, files.ERROR)
# statuses of a run that has ended, including runs that ended early
OVER = ("completed", "diverged", "stopped")
# rounds.csv has at least one of these columns
ACCURACIES = tuple(column.name for column in ACCURACY.columns((PLAIN, VALIDATION)))


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, which may be finished, unfinished or failed."""

    directory: Path
    _tables: dict[str, pd.DataFrame | None] = field(default_factory=dict, repr=False, compare=False)

    # --- files

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json, which is empty until the run has ended."""
        return self._read(files.SUMMARY, storage.read_mapping) or {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's configuration (config.yaml) as nested dicts."""
        return self._read(files.CONFIG, storage.read_mapping) or {}

    @cached_property
    def identity(self) -> dict[str, Any] | None:
        """The values of origin.json that determine the results, by dotted key.

        None for runs without this file, such as runs of fedexp 0.1.
        """
        return origin.read(self.directory)["values"] if self.has(origin.NAME) else None

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides that the run was started with."""
        return self._read(files.OVERRIDES, storage.read_overrides) or []

    @property
    def rounds(self) -> pd.DataFrame | None:
        """The table rounds.csv with one row per round, from round 0 on, or None if it is missing.

        All columns are numbers. Undefined values are nan. Raises ConfigError if a run that has
        ended lacks its last round, which checksums do not tell for runs of earlier versions.
        """
        table, last = self.read_table(files.ROUNDS), self.summary.get("rounds")
        if table is not None and last is not None and not (table["round"] == last).any():
            raise ConfigError(
                f"{self.directory / files.ROUNDS}: has no whole row of round {last}, with which the"
                f" run ended ({files.SUMMARY}); put the original file back, or run it again"
            )
        return table

    @property
    def clients(self) -> pd.DataFrame | None:
        """The table clients.csv (one row per round and client), or None if it is missing."""
        return self.read_table(files.CLIENTS)

    @property
    def tasks(self) -> pd.DataFrame | None:
        """The table tasks.csv of a continual-learning run, or None if it is missing.

        Its columns are round, task (the task being learned), evaluated_task and accuracy.
        """
        return self.read_table(files.TASKS)

    def class_accuracy(self, view: str = PLAIN) -> pd.DataFrame | None:
        """Return the table of class accuracies in a test view, or None if its file is missing.

        Its columns are round, class and accuracy.
        """
        return self.read_table(file_in_view(CLASSES, view))

    @cached_property
    def class_names(self) -> list[str]:
        """The class names from partition.npz, indexed by label."""
        return [str(name) for name in load_npz(self.directory / files.PARTITION)["classes"]]

    @cached_property
    def domain_names(self) -> list[str]:
        """The names of the data set's domains from partition.npz, by number; empty without any."""
        return list(self.partitions[0].info.get("domain_names", ()))

    @property
    def views(self) -> tuple[str, ...]:
        """The kinds of test images of the run, such as plain and augmented. Plain comes first."""
        asked = configured_views(self.config)
        return tuple(
            view for view in VIEWS if view in asked or self.has(file_in_view(CLASSES, view))
        )

    def has(self, name: str) -> bool:
        return (self.directory / name).exists()

    def read_table(self, name: str) -> pd.DataFrame | None:
        """Return a table, or None if the file does not exist. name: the name of the .csv file."""
        if name not in self._tables:
            self._tables[name] = self._read(name, storage.read_table)
        return self._tables[name]

    def _read(self, name: str, read: Callable[[Path], Any]) -> Any:
        if not self.has(name):
            return None
        checksums.check(self.directory, name)
        return read(self.directory / name)

    @cached_property
    def partitions(self) -> list[Partition]:
        """The partitions of all tasks, then those after each change of the clients' data."""
        later = [*find_task_partitions(self.directory), *find_changed_partitions(self.directory)]
        return [Partition.load(path) for path in (self.directory / files.PARTITION, *later)]

    def record(self, view: str = PLAIN) -> Record:
        """Return the results of the run in a view, from which any metric can be computed."""
        counts = [each.counts for each in self.partitions]
        per_task = int(self.partitions[0].info.get("rounds_per_task", 0))
        empty = Record(
            counts=np.stack(counts) if len(counts) > 1 else counts[0],
            starts=tuple(
                each.info["from_round"] if each.is_change else 1 + number * per_task
                for number, each in enumerate(self.partitions)
            ),
            adds_up=per_task > 0,
        )
        return self.restore(empty, view)

    def restore(self, empty: Record, view: str, last: int | None = None) -> Record:
        """Return a record with the results of this run in a view.

        empty: a record without results, which is changed. last: the last round to read; None: the
        last round in rounds.csv.
        """
        if last is None:
            last = self.last_round
        classes = self.directory / file_in_view(CLASSES, view)
        if not classes.exists():
            raise ConfigError(f"{classes}: is missing")
        tables = {}
        for name in VIEW_TABLES:
            if (table := self.read_table(file_in_view(name, view))) is not None:
                tables[name] = table if last is None else table[table["round"] <= last]
        names = [Column(each, view).name for each in (ACCURACY, LOSS)]
        overall = {}
        if self.rounds is not None and names[0] in self.rounds:
            pairs = self.rounds.reindex(columns=names).itertuples(index=False, name=None)
            overall = dict(zip(self.rounds["round"], pairs, strict=True))
        tasks = {}
        if self.tasks is not None:
            column = name_in_view("accuracy", view)
            tasks = {n: rows[column].tolist() for n, rows in by_round(self.tasks).items()}
        with storage.reading(classes):
            empty.restore(tables, overall, tasks)
        for number, rows in by_round(self.clients).items():
            if last is None or number <= last:
                arrived = rows[rows[files.HAS_ARRIVED] == 1] if files.HAS_ARRIVED in rows else rows
                empty.add_cohort(number, arrived["client"].tolist())
        return empty

    # --- state

    @cached_property
    def status(self) -> str:
        """One of completed, stopped, diverged, failed, running and unfinished."""
        if "status" in self.summary:
            return str(self.summary["status"])
        if self.has(files.ERROR):
            return "failed"
        return "running" if self.occupied else "unfinished"

    @property
    def finished(self) -> bool:
        """Whether the run has ended, perhaps early."""
        return self.status in OVER

    @property
    def has_result(self) -> bool:
        """Whether the directory has a summary that does not record a failure."""
        try:
            return self.has(files.SUMMARY) and self.summary.get("status") != "failed"
        except ConfigError:
            return True  # an unreadable file; do not replace it

    @property
    def begun(self) -> bool:
        """Whether a run has begun in the directory. If so, a rejected job must not change it."""
        return self.has(files.CONFIG) or self.has(files.ROUNDS) or self.has_result

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint was ever saved."""
        return self.has(files.CHECKPOINT) or self.has(files.PREVIOUS)

    @property
    def occupied(self) -> bool:
        """Whether a running process uses the directory."""
        return is_occupied(self.directory)

    @property
    def diverged(self) -> bool:
        return self.status == "diverged"

    # --- values of the tables

    @cached_property
    def table(self) -> pd.DataFrame:
        """The rows of rounds.csv from round 1 on. Without the file, the table is empty.

        Raises ConfigError if the run has ended but the file is missing.
        """
        import pandas as pd

        found = self.rounds
        if found is None and self.finished:
            raise ConfigError(f"{self.directory / files.ROUNDS}: is missing")
        return pd.DataFrame({"round": []}) if found is None else found[found["round"] >= 1]

    @cached_property
    def curve(self) -> pd.DataFrame:
        """The rows of `table` that have an accuracy. These are the evaluated rounds."""
        name = self.accuracy_name
        return self.table.dropna(subset=name) if name else self.table.iloc[:0]

    @property
    def accuracy_name(self) -> str | None:
        """The name of the accuracy column of `table`, or None if `table` has no such column.

        The column contains the test accuracy, or the validation accuracy if the run was only
        evaluated on the validation set.
        """
        return next((name for name in ACCURACIES if name in self.table), None)

    def values(self, column: str) -> list[float]:
        """Return the defined values of a column of rounds.csv from round 1 on.

        The list is empty if the column does not exist.
        """
        return self.table[column].dropna().tolist() if column in self.table else []

    @property
    def last_round(self) -> int | None:
        """The number of the last round in rounds.csv, or None if the table is empty."""
        rounds = self.rounds
        return None if rounds is None or rounds.empty else int(rounds["round"].max())


def require_run(directory: Path) -> RunDirectory:
    """Return the run in a directory. Raises ConfigError if the directory contains no run."""
    if not any((directory / name).exists() for name in MARKS):
        raise ConfigError(
            f"{directory}: is not a run directory (it contains none of {', '.join(MARKS)})"
        )
    return RunDirectory(directory)
