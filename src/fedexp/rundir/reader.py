"""Read run directories, so that other modules need not know the names of files and columns.

    run = RunDirectory(Path("outputs/..."))
    run.status, run.summary["accuracy"], run.rounds["test_accuracy"], run.class_accuracy()
    run.problems  # file -> what is wrong with it

A file is read when it is first needed, and reading never raises an error: the value of a missing or
damaged file is empty, and `problems` says why. torch is not imported.
"""

from __future__ import annotations  # pandas takes long to import

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core.errors import ConfigError
from fedexp.data.views import PLAIN, VIEWS, configured_views, file_in_view
from fedexp.rundir import contents, files, schema
from fedexp.rundir.analyses import TABLES as ANALYSES
from fedexp.rundir.contents import Columns, Damaged
from fedexp.rundir.lock import is_occupied
from fedexp.rundir.schema import OVER

if TYPE_CHECKING:
    import pandas as pd

# a directory with one of these files is a run directory
MARKS = (files.CONFIG, files.SUMMARY, files.ROUNDS, files.ERROR)
DAMAGED = "damaged"
TABLES = {
    files.ROUNDS: Columns(("round",)),
    files.CLIENTS: Columns(("round", "client"), texts=("role",)),
    files.TASKS: Columns(("round", "task", "evaluated_task"), ("accuracy",)),
}
TABLES |= {
    file_in_view(files.CLASSES, view): Columns(("round", "class"), ("accuracy",)) for view in VIEWS
}
TABLES |= {name: Columns(t.keys, tuple(t.columns), t.texts) for name, t in ANALYSES.items()}


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, which may be finished, unfinished, failed or damaged."""

    directory: Path
    # what is wrong with the files that have been read so far, by name
    unreadable: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    _tables: dict[str, pd.DataFrame | None] = field(default_factory=dict, repr=False, compare=False)

    # --- files

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json, which is empty until the run has ended."""
        return self._read(files.SUMMARY, contents.read_mapping, schema.check_summary) or {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run's configuration (config.yaml) as nested dicts."""
        return self._read(files.CONFIG, contents.read_mapping, schema.check_config) or {}

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides that the run was started with."""
        return self._read(files.OVERRIDES, contents.read_overrides) or []

    @property
    def rounds(self) -> pd.DataFrame | None:
        """The table rounds.csv with one row per round, from round 0 on, or None if it is missing.

        All columns are numbers. Undefined values are nan.
        """
        return self._table(files.ROUNDS)

    @property
    def clients(self) -> pd.DataFrame | None:
        """The table clients.csv (one row per round and client), or None if it is missing."""
        return self._table(files.CLIENTS)

    @property
    def tasks(self) -> pd.DataFrame | None:
        """The table tasks.csv of a continual-learning run, or None if it is missing.

        Its columns are round, task (the task being learned), evaluated_task and accuracy.
        """
        return self._table(files.TASKS)

    def analysis(self, name: str) -> pd.DataFrame | None:
        """Return the table of an analysis, or None if its file is missing.

        name: the name of the file, such as weight_divergence.csv.
        """
        return self._table(name)

    def class_accuracy(self, view: str = PLAIN) -> pd.DataFrame | None:
        """Return the table of class accuracies in a test view, or None if its file is missing.

        Its columns are round, class and accuracy.
        """
        return self._table(file_in_view(files.CLASSES, view))

    @cached_property
    def class_names(self) -> list[str] | None:
        """The class names from partition.npz, indexed by label, or None if the file is missing."""
        from fedexp.core.npz import load_npz

        def read(path: Path) -> list[str]:
            try:
                return [str(name) for name in load_npz(path)["classes"]]
            except (ConfigError, KeyError, TypeError) as error:
                raise Damaged(contents.shorten(str(error).removeprefix(f"{path}: "))) from None

        return self._read(files.PARTITION, read)

    @property
    def views(self) -> tuple[str, ...]:
        """The kinds of test images of the run, such as plain and augmented. Plain comes first."""
        asked = configured_views(self.config)
        return tuple(
            view for view in VIEWS if view in asked or self.has(file_in_view(files.CLASSES, view))
        )

    def has(self, name: str) -> bool:
        """Return whether the directory has an entry with this name, of any type."""
        try:
            (self.directory / name).lstat()
        except OSError:
            return False
        return True

    def _read(
        self, name: str, read: Callable[[Path], Any], check: Callable[[Any], str] = lambda found: ""
    ) -> Any:
        """Return the content of a file, or None if it is missing or damaged. Record the damage."""
        if not self.has(name):
            return None
        try:
            content = read(self.directory / name)
            if reason := check(content):
                raise Damaged(reason)
        except Damaged as error:
            self.unreadable[name] = str(error)
            return None
        return content

    def _table(self, name: str) -> pd.DataFrame | None:
        if name not in self._tables:
            self._tables[name] = self._read(
                name, lambda path: contents.read_table(path, TABLES[name])
            )
        return self._tables[name]

    # --- state

    @cached_property
    def problems(self) -> dict[str, str]:
        """What is wrong with the run's files, by name.

        Missing files are included only if the run has ended.
        """
        _ = self.summary, self.config, self.overrides
        names = (files.ROUNDS, *(file_in_view(files.CLASSES, view) for view in VIEWS), files.TASKS)
        tables = {name: self._table(name) for name in names}
        found = dict(self.unreadable)
        if self.has(files.SUMMARY) and "status" not in self.summary:
            found.setdefault(files.SUMMARY, "has no status")
        if not self.has_ended:
            return found
        reasons = {files.SUMMARY: schema.check_results(self.summary)}
        if self.config:
            reasons[files.CONFIG] = schema.check_complete(self.config)
        reasons |= {name: "is missing" for name in self._expected() if not self.has(name)}
        for name, table in tables.items():
            if table is not None:
                reasons[name] = self._check(name, table)
        for name, reason in reasons.items():
            if reason:
                found.setdefault(name, reason)
        return found

    def _expected(self) -> list[str]:
        """Return the names of the files that the tables of a sweep need."""
        names = [files.CONFIG, files.ROUNDS, files.OVERRIDES]
        # runs that are rebuilt from rounds.csv may have no class accuracies
        if not self.summary.get("reconstructed"):
            names += [file_in_view(files.CLASSES, view) for view in self.views]
        if self.summary.get("tasks"):
            names.append(files.TASKS)
        return names

    def _check(self, name: str, table: pd.DataFrame) -> str:
        if name == files.ROUNDS:
            return schema.check_rounds(table, self.summary.get("rounds"))
        rounds = self.rounds
        if name == files.TASKS or rounds is None or self._check(files.ROUNDS, rounds):
            return schema.check_table(table)
        return schema.check_classes(table, rounds)

    @property
    def has_ended(self) -> bool:
        """Whether summary.json says that the run has ended. `finished` checks other files too."""
        return self.summary.get("status") in OVER

    @cached_property
    def status(self) -> str:
        """One of completed, stopped, diverged, failed, damaged, running and unfinished.

        A run counts as damaged if summary.json is damaged. A run that has ended also counts as
        damaged if a file that the tables need is missing or damaged.
        """
        if self.has(files.SUMMARY):
            is_valid = "status" in self.summary and not (self.has_ended and self.problems)
            return str(self.summary["status"]) if is_valid else DAMAGED
        if self.has(files.ERROR):
            return "failed"
        return "running" if is_occupied(self.directory) else "unfinished"

    @property
    def finished(self) -> bool:
        """Whether the run has ended and all files that the tables need are complete."""
        return self.status in OVER

    @property
    def diverged(self) -> bool:
        return self.status == "diverged"

    @property
    def damaged(self) -> bool:
        return self.status == DAMAGED

    def describe_damage(self) -> str:
        """Return all problems in one line."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.problems.items())

    # --- values of the tables

    @cached_property
    def table(self) -> pd.DataFrame:
        """The rows of rounds.csv from round 1 on. Without the file, the table is empty."""
        import pandas as pd

        found = self.rounds
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
        return schema.accuracy_column(self.table)

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


def finished_summary(directory: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None if the run is unfinished or damaged."""
    run = RunDirectory(directory)
    return run.summary if run.finished else None
