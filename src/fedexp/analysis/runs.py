"""Load the tables and models of run directories and sweep directories."""

from __future__ import annotations  # avoids importing pandas and torch, which is slow

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.analysis.varying import varying_options
from fedexp.core.console import plural
from fedexp.core.errors import ConfigError, nearest, require_choice
from fedexp.core.storage import display_path
from fedexp.data.views import CLASSES, EXAMPLES
from fedexp.rundir import files
from fedexp.rundir.identity import flatten
from fedexp.rundir.reader import RunDirectory, require_run
from fedexp.rundir.sweeps import all_jobs, find_runs, job_directories, replaced_jobs

if TYPE_CHECKING:
    import pandas as pd

    from fedexp.analysis.networks import Classifier
    from fedexp.data.partitioned import Partition

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class Run:
    """A finished or unfinished run. Each attribute reads a file in the run directory on access.

    If the file is missing or cannot be read, the attribute raises ConfigError with its name.
    """

    directory: Path
    # directory with your own config groups (`--config-dir`); needed if the run uses your own
    # classes
    config_dir: Path | None = None
    _reader: RunDirectory = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reader", RunDirectory(self.directory))

    def __repr__(self) -> str:
        return f"Run('{display_path(self.directory)}')"

    def __fspath__(self) -> str:
        return str(self.directory)

    @property
    def status(self) -> str:
        """Return the state of the run as a word.

        `completed`, `stopped` (before the last round) and `diverged` runs have ended. A `failed`
        run raised an error. All other runs are `running` or `unfinished`.
        """
        return self._reader.status

    @property
    def config(self) -> dict[str, Any]:
        """Return the run's configuration as nested dicts.

        The key `choices` maps each group to its chosen option.
        """
        return self._need(files.CONFIG, self._reader.config)

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the command that started the run."""
        return self._reader.overrides

    @property
    def summary(self) -> dict[str, Any]:
        """Return the results (summary.json), or an empty dict if the run has not ended."""
        return self._reader.summary

    @property
    def rounds(self) -> pd.DataFrame:
        """Return rounds.csv, with one row per round. Round 0 is the initial model.

        Undefined values are nan.
        """
        return self._need(files.ROUNDS, self._reader.rounds).copy()

    @property
    def clients(self) -> pd.DataFrame:
        """Return clients.csv, with one row per round and participating client."""
        return self._need(files.CLIENTS, self._reader.clients).copy()

    @property
    def tasks(self) -> pd.DataFrame:
        """Return tasks.csv. Only runs in continual learning have this file.

        Columns: round, task, evaluated_task, accuracy.
        """
        return self._need(files.TASKS, self._reader.tasks).copy()

    @property
    def class_accuracy(self) -> pd.DataFrame:
        """Return the global model's test accuracy on each class after each evaluated round.

        Columns: round, class, name, accuracy. The column `name` is missing if the class names are
        unknown.
        """
        table = self._need(CLASSES, self._reader.class_accuracy()).copy()
        if self._reader.has(files.PARTITION):
            names = dict(enumerate(self._reader.class_names))
            table.insert(2, "name", table["class"].map(names).fillna(""))
        return table

    @property
    def examples(self) -> pd.DataFrame:
        """Return when each test example was learned and how often it was forgotten.

        Only runs with `forgetting_metric=events` have these data. Each row is an example, in the
        order of the test set. Columns: label; learned, the first evaluated round with a correct
        prediction, or nan; forgotten, the number of forgetting events, or nan before the second
        evaluated round; correct, whether the last prediction is correct. The initial model is not
        included.
        """
        import numpy as np
        import pandas as pd

        from fedexp.metrics.examples import forgetting_events

        record = self._reader.record()
        self._need(EXAMPLES, record.labels)
        right, rounds = record.correct(), np.array([*record.rounds[1:], np.nan])
        first = np.where(right.any(0), right.argmax(0), len(right))
        table = pd.DataFrame({"label": record.labels, "learned": rounds[first]})
        correct = np.asarray(right[-1:].any(0))
        forgotten = forgetting_events(right) if len(right) > 1 else np.nan
        return table.assign(forgotten=forgotten, correct=correct)

    def analysis(self, name: str) -> pd.DataFrame:
        """Return the table that an analysis wrote.

        name: the name of the analysis, such as `weight_divergence`. Raises ConfigError if no
        analysis has this name, or if the run does not have this table.
        """
        require_choice("analysis", name, [Path(file).stem for file in files.ANALYSES])
        return self._need(f"{name}.csv", self._reader.read_table(f"{name}.csv")).copy()

    @property
    def partition(self) -> Partition:
        """Return the partition: the training examples that each client holds.

        Its attributes are `parts`, `counts` [clients, classes] and `sizes`. In continual learning,
        the partition of the first task is returned.
        """
        return self.partitions[0]

    @property
    def partitions(self) -> list[Partition]:
        """Return all partitions of the run in order.

        In continual learning, there is one partition per task. If the clients' data change during
        the run, the initial partition is followed by one partition per change, whose
        `info["from_round"]` is the round of the change. All other runs have one partition.
        """
        return self._reader.partitions

    @property
    def kept_rounds(self) -> list[int]:
        """Return the rounds whose global model can be loaded, in ascending order.

        These are the last two saved rounds and the rounds that `keep_models` and
        `keep_local_models` select.
        """
        from fedexp.rundir import kept_models

        return kept_models.kept_rounds(self.directory)

    def kept_clients(self, round: int) -> list[int]:
        """Return the clients whose local model from a round can be loaded, in ascending order.

        The option `keep_local_models` selects the rounds in which local models are saved.
        """
        from fedexp.rundir import kept_models

        return kept_models.kept_clients(self.directory, round)

    def model(self, round: int | None = None, client: int | None = None) -> Classifier:
        """Load the global model after a round, or a client's local model from that round.

        round: the number of the round, or None for the last of `kept_rounds`. client: the number of
        the client, or None for the global model.

        The model is a `torch.nn.Module` on the CPU, in eval mode. It maps inputs, prepared as in
        training, to logits [B, C]. Its attribute `network` is fedexp's module, whose output also
        contains `features` and whose parameters have the same names as in the run.
        """
        from fedexp.analysis.networks import Classifier, load_network
        from fedexp.config.composition import trusted_classes

        with trusted_classes(self.config_dir):
            return Classifier(load_network(self._reader, round, client=client)[0]).eval()

    @property
    def _options(self) -> dict[str, Any]:
        """Return the chosen option of each group, and all configuration values by dotted key."""
        config = self._reader.config
        return flatten(config) | (config.get("choices") or {})

    def _need(self, name: str, content: Any) -> Any:
        """Return the content of a file. Raises ConfigError if the file is missing."""
        if content is None or (isinstance(content, dict) and not content):
            raise ConfigError(f"{self.directory / name}: is missing")
        return content


@dataclass(frozen=True)
class Sweep:
    """The runs in a directory.

    Iterating over a sweep yields each `Run`. `sweep[name]` returns a run by its name in `names`,
    `sweep[0]` the first one. A run is not current if a later command of the sweep has another run
    for the same overrides, because a file of options or the version of a class has changed.
    """

    directory: Path
    members: tuple[Run, ...]
    replaced: frozenset[Path] = frozenset()  # directories of the runs that are not current

    def __repr__(self) -> str:
        return f"Sweep('{display_path(self.directory)}', {plural(len(self), 'run')})"

    def __iter__(self) -> Iterator[Run]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, name: str | int) -> Run:
        if isinstance(name, int):
            return self.members[name]
        names = self.names
        if name not in names:
            raise ConfigError(f"{self.directory}: has no run {name}{nearest(name, names)}")
        return self.members[names.index(name)]

    def select(self, options: Mapping[str, Any] | None = None, **more: Any) -> Sweep:
        """Return the runs that have all of the given option values.

        For example, select(algorithm="fedntd", seed=0), or select(current=True) without replaced
        runs. Keys with a dot must be given in a dict, as in select({"local.lr": 0.1}). Raises
        ConfigError if no run matches.
        """
        found = list(self.members)
        every = {run.directory: run._options | self._marks(run) for run in found}
        for key, value in {**(options or {}), **more}.items():
            there = {run.directory: every[run.directory].get(key) for run in found}
            found = [run for run in found if there[run.directory] == value]
            if not found:
                known = {name for each in every.values() for name in each}
                values = ", ".join(sorted({str(each) for each in there.values()}))
                hint = f"; existing values: {values}" if key in known else nearest(key, known)
                raise ConfigError(f"{self.directory}: no run has {key}={value}{hint}")
        return Sweep(self.directory, tuple(found), self.replaced)

    def _marks(self, run: Run) -> dict[str, Any]:
        return {"current": run.directory not in self.replaced}

    @cached_property
    def names(self) -> list[str]:
        """Return the name of each run: its path relative to the sweep directory."""
        return [os.path.relpath(run.directory, self.directory) for run in self.members]

    @cached_property
    def options(self) -> pd.DataFrame:
        """Return the options that differ between the runs.

        The table has one row per run and is indexed by the runs' names.
        """
        import pandas as pd

        rows = varying_options([run._reader.config for run in self.members])
        return pd.DataFrame(rows, index=pd.Index(self.names, name="run"))

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Return a table with one row per run, indexed by the runs' names.

        Columns: the options that differ between the runs, the status, whether the run is current,
        and the scalar values in summary.json. Values from summary.json are nan for a run that has
        not ended.
        """
        import pandas as pd

        rows = []
        for run in self.members:
            single: dict[str, Any] = {
                k: v for k, v in run._reader.summary.items() if isinstance(v, str | int | float)
            }
            rows.append(single | {"status": run.status} | self._marks(run))
        table = pd.DataFrame(rows, index=self.options.index)
        first = ["status", "current"]
        others = [name for name in table if name not in (*self.options, *first)]
        return self.options.join(table[[*first, *others]])

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """Return the rounds.csv tables of all runs as one table.

        Each row also contains the name of the run, whether it is current, and the options that
        differ between the runs.
        """
        import pandas as pd

        parts = []
        for name, run in zip(self.names, self.members, strict=True):
            if (table := run._reader.rounds) is not None:
                given = {k: v for k, v in self.options.loc[name].items() if k not in table}
                row = {"run": name} | self._marks(run) | given
                head = pd.DataFrame([row] * len(table), index=table.index)
                parts.append(pd.concat([head, table], axis=1))
        return pd.concat(parts or [pd.DataFrame(columns=["run", "round"])], ignore_index=True)


def load_run(
    directory: str | os.PathLike[str], config_dir: str | os.PathLike[str] | None = None
) -> Run:
    """Load a run from its directory. The run may be unfinished.

    config_dir: a directory with your own config groups. It is needed if the run uses your own
    classes.

    Code in the run directory is never executed. Raises ConfigError if the directory contains no
    run.
    """
    path = Path(directory).expanduser()
    runs = find_runs(path)
    if runs and runs != [path]:
        hint = f"load its {plural(len(runs), 'run')} with load_sweep"
        raise ConfigError(f"{path}: is not a run directory; {hint}")
    require_run(path)
    return Run(path, None if config_dir is None else Path(config_dir))


def load_sweep(
    directory: str | os.PathLike[str], config_dir: str | os.PathLike[str] | None = None
) -> Sweep:
    """Load the runs of a sweep, or all runs in the subdirectories of another directory.

    Runs that the sweep did not make, copies, and runs deeper inside a directory that contains runs
    itself are left out, and the log names them. It also names the runs that are not current; the
    column `current` marks them. config_dir: see `load_run`. Raises ConfigError if the directory
    contains no run.
    """
    path = Path(directory).expanduser()
    is_sweep = bool(job_directories(path))
    jobs = [job.directory for job in all_jobs(path)] if is_sweep else find_runs(path)
    if not jobs:
        reason = "contains no run" if path.is_dir() else "is not a directory"
        raise ConfigError(f"{path}: {reason}")
    replaced = {old.directory: new for old, new in replaced_jobs(path).items()} if is_sweep else {}
    for old, new in replaced.items():
        log.warning("%s: not current: %s has its overrides now", old, new.directory.name)
    own = None if config_dir is None else Path(config_dir)
    return Sweep(path, tuple(Run(job, own) for job in jobs), frozenset(replaced))
