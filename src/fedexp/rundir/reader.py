"""The one reader of run directories: it alone knows their files and columns.

    run = RunDirectory(Path("outputs/..."))
    run.status, run.summary["accuracy"], run.rounds["test_accuracy"], run.class_accuracy()
    run.problems  # what is wrong with its files, one line each

Nothing is read before it is asked for, and nothing raises: a file that is missing or damaged gives
an empty value, and `problems` says why. Torch is not needed.
"""

from __future__ import annotations  # pandas takes long to import

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core.errors import ConfigError
from fedexp.data.views import PLAIN, VIEWS, file_of, views_of
from fedexp.rundir import contents, files, schema
from fedexp.rundir.analyses import TABLES
from fedexp.rundir.contents import Damaged
from fedexp.rundir.lock import is_occupied
from fedexp.rundir.schema import OVER

if TYPE_CHECKING:
    import pandas as pd

# one of them makes a directory a run
MARKS = (files.CONFIG, files.SUMMARY, files.ROUNDS, files.ERROR)
DAMAGED = "damaged"


@dataclass(frozen=True)
class Problem:
    """A file of a run and, in a few words, what is wrong with it."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, whatever has become of it."""

    directory: Path
    # overrides of the job that a run of another sweep stands for
    stands_for: tuple[str, ...] | None = None
    _found: dict[str, Problem] = field(default_factory=dict, repr=False, compare=False)

    # --- files

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; {} before the run's end."""
        return self._read(files.SUMMARY, contents.read_json, schema.check_summary) or {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the run (config.yaml), nested dicts."""

        def read(path: Path) -> dict[str, Any]:
            return contents.mapping(contents.read_yaml(path))

        def check(found: dict[str, Any]) -> str:
            return schema.check_values(found, schema.CONFIG)

        return self._read(files.CONFIG, read, check) or {}

    @cached_property
    def overrides(self) -> list[str]:
        """Return what was typed to start the run."""
        if self.stands_for is not None:
            return list(self.stands_for)
        return self._read(files.OVERRIDES, contents.read_overrides) or []

    @cached_property
    def rounds(self) -> pd.DataFrame | None:
        """rounds.csv: a row for each round from 0 on, all columns numbers, nan where undefined;
        None without one."""
        return self._table(files.ROUNDS, ["round"])

    @cached_property
    def clients(self) -> pd.DataFrame | None:
        """clients.csv: a row for each round and client that took part in it; None without one."""
        return self._table(files.CLIENTS, ["round", "client"], texts=["role"])

    @cached_property
    def tasks(self) -> pd.DataFrame | None:
        """tasks.csv of continual learning: round, task (being learned), evaluated_task, accuracy;
        None without one."""
        return self._table(files.TASKS, ["round", "task", "evaluated_task"], ["accuracy"])

    @cached_property
    def _analyses(self) -> dict[str, pd.DataFrame | None]:
        found = {name: TABLES[name] for name in files.ANALYSES}
        return {name: self._table(name, t.keys, t.columns, t.texts) for name, t in found.items()}

    def analysis(self, name: str) -> pd.DataFrame | None:
        """Return the table of an analysis by the name of its file, such as weight_divergence.csv;
        None without one."""
        return self._analyses[name]

    @cached_property
    def _classes(self) -> dict[str, pd.DataFrame | None]:
        names = {view: file_of(files.CLASSES, view) for view in VIEWS}
        return {v: self._table(name, ["round", "class"], ["accuracy"]) for v, name in names.items()}

    def class_accuracy(self, view: str = PLAIN) -> pd.DataFrame | None:
        """Return round, class, accuracy of a view of the test set (class_accuracy.csv); None
        without one."""
        return self._classes[view]

    @cached_property
    def class_names(self) -> list[str] | None:
        """The names of the classes, index = label, from partition.npz; None without one."""
        from fedexp.core.npz import load_npz

        def read(path: Path) -> list[str]:
            try:
                return [str(name) for name in load_npz(path)["classes"]]
            except (ConfigError, KeyError, TypeError) as error:
                raise Damaged(contents.shown(str(error).removeprefix(f"{path}: "))) from None

        return self._read(files.PARTITION, read)

    @property
    def views(self) -> tuple[str, ...]:
        """Return the views that the run was evaluated in, the plain one of the test set first."""
        asked = views_of(self.config)
        return tuple(
            view for view in VIEWS if view in asked or self.has(file_of(files.CLASSES, view))
        )

    def has(self, name: str) -> bool:
        """Tell whether there is something of this name, whatever it is."""
        try:
            (self.directory / name).lstat()
        except OSError:
            return False
        return True

    def _read(
        self, name: str, read: Callable[[Path], Any], check: Callable[[Any], str] = lambda found: ""
    ) -> Any:
        """Read a file; None for a missing one, and for a damaged one, which is noted."""
        if not self.has(name):
            return None
        try:
            content = read(self.directory / name)
            if reason := check(content):
                raise Damaged(reason)
        except Damaged as error:
            self._found[name] = Problem(name, str(error))
            return None
        return content

    def _table(self, name: str, *arguments: Any, **options: Any) -> pd.DataFrame | None:
        return self._read(name, lambda path: contents.read_table(path, *arguments, **options))

    @property
    def unreadable(self) -> list[Problem]:
        """Return what is wrong with the files that have been read so far."""
        return list(self._found.values())

    # --- state

    @cached_property
    def problems(self) -> list[Problem]:
        """Return what is wrong with the files; of a run that is over, also which are missing or not
        whole."""
        tables = {files.ROUNDS: self.rounds} | {
            file_of(files.CLASSES, view): self._classes[view] for view in VIEWS
        }
        tables[files.TASKS] = self.tasks
        _ = self.summary, self.config, self.overrides
        found = dict(self._found)
        if self.has(files.SUMMARY) and "status" not in self.summary:
            found.setdefault(files.SUMMARY, Problem(files.SUMMARY, "has no status"))
        if self.over:
            if reason := schema.check_results(self.summary):
                found[files.SUMMARY] = Problem(files.SUMMARY, reason)
            if self.config and (reason := schema.check_config(self.config)):
                found.setdefault(files.CONFIG, Problem(files.CONFIG, reason))
            for name in self._expected():
                if not self.has(name):
                    found.setdefault(name, Problem(name, "is missing"))
            for name, table in tables.items():
                if table is not None and (reason := self._check(name, table)):
                    found.setdefault(name, Problem(name, reason))
        return list(found.values())

    def _expected(self) -> list[str]:
        """The files that the tables of a sweep need."""
        own = [] if self.stands_for is not None else [files.OVERRIDES]
        tasks = [files.TASKS] if self.summary.get("tasks") else []
        # of a run whose files were rebuilt from its table of rounds, class accuracies are not known
        views = () if self.summary.get("reconstructed") else self.views
        return [
            files.CONFIG,
            *own,
            files.ROUNDS,
            *(file_of(files.CLASSES, view) for view in views),
            *tasks,
        ]

    def _check(self, name: str, table: pd.DataFrame) -> str:
        if name == files.ROUNDS:
            return schema.check_rounds(table, self.summary.get("rounds"))
        sound = self.rounds is not None and not self._check(files.ROUNDS, self.rounds)
        if name == files.TASKS or self.rounds is None or not sound:
            return schema.check_table(table)
        return schema.check_classes(table, self.rounds)

    @property
    def over(self) -> bool:
        """Return whether summary.json says that the run has come to its end; `finished` looks at
        other files too."""
        return self.summary.get("status") in OVER

    @cached_property
    def status(self) -> str:
        """completed | stopped | diverged | failed | damaged | running | unfinished. A run that is
        over is damaged where a file that the tables need is not whole, and any where summary.json
        is not."""
        if self.has(files.SUMMARY):
            whole = "status" in self.summary and not (self.over and self.problems)
            return str(self.summary["status"]) if whole else DAMAGED
        if self.has(files.ERROR):
            return "failed"
        return "running" if is_occupied(self.directory) else "unfinished"

    @property
    def finished(self) -> bool:
        """Return whether the run has come to its end and all files are whole that tables need."""
        return self.status in OVER

    @property
    def diverged(self) -> bool:
        return self.status == "diverged"

    @property
    def damaged(self) -> bool:
        return self.status == DAMAGED

    def describe_damage(self) -> str:
        """Return the problems in one line."""
        _ = self.problems
        return "; ".join(map(str, self.problems))

    # --- what the tables say

    @cached_property
    def table(self) -> pd.DataFrame:
        """rounds.csv from round 1 on; empty without one."""
        import pandas as pd

        found = self.rounds
        return pd.DataFrame({"round": []}) if found is None else found[found["round"] >= 1]

    @cached_property
    def curve(self) -> pd.DataFrame:
        """The rows of `table` whose round was evaluated."""
        name = self.accuracy_name
        return self.table.dropna(subset=name) if name else self.table.iloc[:0]

    @property
    def accuracy_name(self) -> str | None:
        """Return the column of `table` with the accuracy: on the test set, or on the validation set
        where the run was evaluated on it alone; None where there is none."""
        return schema.accuracy_column(self.table)

    def values(self, column: str) -> list[float]:
        """Return a column of rounds.csv, from round 1 on where it is defined; [] where there is no
        such column."""
        return self.table[column].dropna().tolist() if column in self.table else []

    def accuracy_at(self, round: int) -> float | None:
        """Return the accuracy after a round; None where it was not evaluated."""
        found = self.curve.loc[self.curve["round"] == round]
        return float(found[self.accuracy_name].iloc[0]) if len(found) else None

    @property
    def last_round(self) -> int | None:
        """The number of the last round in rounds.csv; None without one."""
        rounds = self.rounds
        return None if rounds is None or rounds.empty else int(rounds["round"].max())


def require_run(directory: Path) -> RunDirectory:
    """Return the run of a directory. Raises ConfigError where there is none."""
    if not any((directory / name).exists() for name in MARKS):
        raise ConfigError(f"{directory}: no run is there (none of {', '.join(MARKS)})")
    return RunDirectory(directory)


def finished_summary(directory: Path) -> dict[str, Any] | None:
    """Return the summary of a run that has come to its end and is whole; None where there is more
    to do."""
    run = RunDirectory(directory)
    return run.summary if run.finished else None
