"""What a job does in its directory: start a run, resume it, extend it, or nothing.

`fedexp resume=<directory> rounds=300` gives a run more rounds. It computes the same results as a
run that was started with 300 rounds, because no algorithm depends on the number of rounds. If
`local.schedule=cosine`, the learning rates depend on this number, so such a run cannot be extended.
"""

import csv
import io
import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedexp.algorithms.local_training import SCHEDULES_OVER_ALL_ROUNDS
from fedexp.config.build import Built
from fedexp.config.cohorts import Rounds
from fedexp.config.composition import path_override
from fedexp.config.overrides import OF_COMMAND, key_of
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.core.provenance import packages, source
from fedexp.data.changes import describe_change
from fedexp.data.partitioned import HELD_OUT, Partition, find_task_partitions
from fedexp.figures.pictures import picture_files
from fedexp.rundir import checkpoint, files, origin
from fedexp.rundir.identity import DATASETS, digest, essential, flatten, is_free
from fedexp.rundir.lock import occupied
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.progress import result_table
from fedexp.training import own_files
from fedexp.training.callbacks import (
    PATIENCE,
    end_of_patience,
    is_finished,
    patience_view,
    stays_stopped,
    stop_reason,
)
from fedexp.training.division import load_checksum
from fedexp.training.job import Job
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.summary import environment

log = logging.getLogger("fedexp")

NAMED_BY = re.compile("_seed([0-9]+)_([0-9a-f]{8})$")  # end of the name of a sweep's job
# options that may change when a run is extended, and the start of the keys of others
LENGTH = ("rounds", "scenario.rounds_per_task")
STOPS = ("stop.", "callback.")


class RunFolder:
    """The directory of a job, and what the job does there.

    Entering it decides this and raises ConfigError if the directory contains a run that the job may
    neither continue nor replace. Until it is left, no other process can use the directory. If it
    contains no run, it is only created and locked when `restore` is called, after all checks.
    """

    def __init__(self, job: Job, built: Built):
        self.job, self.built, self.directory = job, built, job.directory
        # the resolved configuration and, as `choices`, the chosen options
        self.config: dict[str, Any] = built.values | {"choices": dict(job.choices)}
        self.values = essential(built)  # all values that determine the results
        self.run = RunDirectory(job.directory)  # before this job
        self.by_name = built.settings.resume is not None
        self.continues = False  # whether the job continues the run in the directory
        self.extends = False  # whether it changes the run's number of rounds or limits
        self.has_length = True  # whether the run has this job's number of rounds
        self.origin: dict[str, Any] = {}  # of the run that continues, later of this job
        self.saved: checkpoint.Saved | None = None  # from which the run continues
        self.checksums: dict[str, str] = {}  # of the data, see `data_checksums`
        # a new run's directory is locked late, because that creates it
        self.is_locked = job.sweep is not None or self.run.has(files.CONFIG)
        self._held, self._begun = ExitStack(), False

    def __enter__(self) -> Self:
        with self._held:
            if self.is_locked:
                self._held.enter_context(occupied(self.directory))
            self._decide()
            self._held = self._held.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    # --- decisions

    def _decide(self) -> None:
        """Find out whether the job starts, continues or extends a run."""
        alone = self.job.sweep is None
        self.continues = self.by_name or (not alone and (self.run.resumable or self.run.finished))
        if self.continues:
            self.origin = origin.read(self.directory)
            self._check_values(origin.differences(self.origin, self.values))
            self.values = origin.with_names_of(self.origin, self.values)
        elif alone and self.built.settings.accept_changed_data:
            raise ConfigError(
                "accept_changed_data=true: can only be used with resume=<run directory>, or to"
                " continue a sweep"
            )
        elif alone:
            self._require_new()
        else:
            self._require_planned()

    def _check_values(self, differing: Mapping[str, str]) -> None:
        """Check that the run was started with the values of this job.

        Only a run that is resumed by name may be given more rounds. If a job of a sweep was given
        more rounds and ended, the sweep leaves it as it is and logs a warning.

        differing: a description of each value that differs, by its key.
        """
        changed = [key for key in differing if key in LENGTH or key.startswith(STOPS)]
        self.extends, self.has_length = bool(changed), {*changed}.isdisjoint(LENGTH)
        extends_only = len(changed) == len(differing)
        if self.extends and self.job.sweep is None and extends_only:
            self._check_extension(changed)
        elif extends_only and self.run.finished:
            for line in differing.values():
                log.warning(
                    "%s: the run was extended, but still counts as a job of this sweep: %s",
                    self.directory.name,
                    line,
                )
        elif differing:
            raise ConfigError(
                f"resume={self.directory}: the run was started with another configuration:\n  "
                + "\n  ".join(differing.values())
            )

    def _check_extension(self, changed: Sequence[str]) -> None:
        """Raise ConfigError if the run cannot be extended. changed: the keys that differ."""
        before, rounds, last = self.origin["values"], self.values.get("rounds"), self.run.last_round
        played = self.built.scenario.rounds_per_task  # the number of rounds of a run with one task
        problem = ""
        if not self.has_length:
            schedule = before.get("local.schedule")
            if find_task_partitions(self.directory):
                problem = "a run with several tasks cannot be given more rounds"
            elif "rounds" in changed and played != rounds:
                problem = (
                    f"has no effect, because scenario.rounds_per_task={played} is the run's number"
                    " of rounds; give this key instead"
                )
            elif last is not None and played <= last:
                problem = f"must be greater than {last}, the last completed round"
            elif schedule in SCHEDULES_OVER_ALL_ROUNDS:
                problem = (
                    f"with local.schedule={schedule}, all learning rates depend on the number of"
                    f" rounds ({before.get('rounds')}); start a new run"
                )
        if self.run.diverged:
            problem = "the run has diverged"
        if problem:
            given = rounds if "rounds" in changed else played
            raise ConfigError(f"resume={self.directory}: rounds={given}: {problem}")

    def _require_planned(self) -> None:
        """Raise ConfigError if a job has other values than those by which its sweep named it.

        Launched processes compose the configuration of a job when it starts.
        """
        name, seed = self.directory.name, self.built.settings.seed
        found = NAMED_BY.search(name)
        if found and found[1] == str(seed) and not digest(self.values).startswith(found[2]):
            raise ConfigError(
                f"{name}: the options of this job have changed since the command was started, for"
                " example in an edited yaml file; run the command again"
            )

    def _require_new(self) -> None:
        """Raise ConfigError if the directory contains a run that the job may not replace."""
        if self.job.overwrite:
            files.require_replaceable(self.directory)
        elif self.run.has(files.ROUNDS):
            raise ConfigError(
                f"{self.directory}: this directory already contains a run; continue it with"
                f" {shlex.quote(path_override('resume', self.directory))}, or choose another"
                " hydra.run.dir"
            )

    @property
    def reopens(self) -> bool:
        """Whether a finished run continues. Its files stay until a new round is recorded."""
        return self.continues and self.run.finished

    @property
    def lost_rounds(self) -> bool:
        """Whether the latest checkpoint is damaged, so that its rounds are run again."""
        return self.saved is not None and self.saved.problem is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do for this job."""
        if not self.reopens or (self.job.sweep is None and self.extends):
            return False
        if not self.has_length:
            return True
        built = self.built
        return is_finished(self.run, built.stop, built.values["callback"], self.by_name)

    def show_result(self) -> dict[str, Any]:
        """Say that nothing is left to do, and return the summary of the run.

        Raises ConfigError if the data have changed since.
        """
        summary = self.run.summary
        self._check_data(data_checksums(self.built, load_checksum(self.built)))
        reason = f"is complete ({summary['rounds']} rounds)"
        if summary["status"] == "stopped":
            reason = stop_reason(summary)
        log.info("%s %s; nothing to do", self.directory, reason)
        if self.job.sweep is None:
            pictures = picture_files(self.directory / "figures")
            result_table(summary, self.directory, pictures)
        return summary

    @property
    def precision(self) -> str | None:
        """The precision that the run started with. None for a new run."""
        return self.origin["parts"][0]["hardware"]["precision"] if self.continues else None

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that the run belongs to, or None, also if it is resumed."""
        return self.origin["sweep"] if self.by_name else self.job.sweep

    # --- the state

    def restore(self, simulation: Simulation) -> State:
        """Return the state from which the run continues or starts.

        Raises ConfigError if the data, the partitions or the cohorts of completed rounds have
        changed.
        """
        if not self.is_locked:
            self._held.enter_context(occupied(self.directory))
            self.is_locked = True
            self._require_new()  # another process may have started a run there
        self.checksums = data_checksums(self.built, simulation.runtime.data.checksum)
        self.saved = checkpoint.load(self.directory) if self.continues else None
        if self.saved is None and self.reopens:
            raise ConfigError(
                f"{self.directory}: the run has ended, but it cannot be continued, because its"
                " checkpoints were removed; start a new run in another directory"
            )
        if self.saved is None:
            return simulation.initial_state()
        self._check_data(self.checksums)
        state = read_state(self.directory, self.saved.state, simulation)
        check_partitions(self.directory, simulation)
        planned = {
            number: simulation.arriving(number, clients)
            for number, clients in (simulation.cohorts or {}).items()
            if number in state.record.cohorts
        }
        check_cohorts(self.directory, planned, state.record.cohorts)
        has_rounds = state.status != "diverged" and state.round < simulation.rounds
        if has_rounds and not self._stays_stopped(state):
            state.status, state.stopped = "running", {}
        self._apply_patience(state)
        return state

    def _apply_patience(self, state: State) -> None:
        """Stop the run if its patience has ended, which may be shorter than before.

        Raises ConfigError if an uninterrupted run would have fewer rounds.
        """
        stop = self.built.stop
        if stop.patience is None:
            return
        last = end_of_patience(state.records[patience_view(stop)].curve, stop.patience)
        if last is not None and last < state.round:
            raise ConfigError(
                f"resume={self.directory}: stop.patience={stop.patience} would have ended the run"
                f" after round {last}, but it has {state.round} rounds; give a larger one, or start"
                " a new run"
            )
        if last is not None and state.status == "running":
            state.stop({"by": PATIENCE, "patience": stop.patience})

    def _stays_stopped(self, state: State) -> bool:
        """Return whether a run was interrupted between the decision to stop it and its results."""
        if self.run.finished or self.extends or not state.stopped:
            return False
        return stays_stopped(
            state.stopped, self.run, self.built.stop, self.built.values["callback"]
        )

    def _check_data(self, checksums: Mapping[str, str]) -> None:
        accepts = self.built.settings.accept_changed_data
        origin.check_data(self.directory, self.origin, checksums, accepts)

    # --- the inputs

    def begin(self, simulation: Simulation) -> None:
        """Write the inputs of the run, and remove what an earlier attempt or the end has left.

        Only the first call does so.
        """
        if self._begun:
            return
        self._begun = True
        with storage.storing(self.directory):
            for left in (files.ERROR, files.CHECKSUMS, files.SUMMARY):
                (self.directory / left).unlink(missing_ok=True)
            files.remove_temporaries(self.directory)
        if self.saved is None:
            self._begin_new(simulation)
            return
        if self.lost_rounds:
            checkpoint.set_aside(self.directory)
        before = storage.read_overrides(self.directory / files.OVERRIDES)
        if self.extends or (self.by_name and self._typed() != before):
            self._write_options()
        self._write_origin(simulation)  # last, because it says whether the run was extended

    def _begin_new(self, simulation: Simulation) -> None:
        """Write the inputs of a run that starts with round 0."""
        if self.by_name:
            log.info("no checkpoint was saved; the run starts again from round 0")
        self._remove_attempt()
        self._write_origin(simulation)
        self._write_options()
        data, converted = simulation.runtime.data, self.built.dataset.conversion()
        told = f"{data.sentence()}{'; ' * bool(converted)}{converted}"
        log.info("dataset=%s: %s", self.job.choices["dataset"], told)
        write_partitions(self.directory, simulation, self.job.choices["partition"])
        remark = self.built.partition.remark()
        if remark and self.built.algorithm.paradigm != "centralized":
            log.warning("partition=%s: %s", self.job.choices["partition"], remark)

    def _remove_attempt(self) -> None:
        """Remove what a start without a checkpoint has left, which may have had other options.

        A start with the same options continues in the same W&B run.
        """
        if not self.run.has(origin.NAME):
            return
        files.remove(self.directory, (*files.TABLES, *files.LATER_PARTITIONS))
        try:
            is_same = origin.read(self.directory)["identity"] == digest(self.values)
        except ConfigError:  # of another version, or half written
            is_same = False
        if not is_same:
            files.remove(self.directory, (files.WANDB,))

    def _write_origin(self, simulation: Simulation) -> None:
        """Write what the next rounds are computed with to origin.json."""
        first = 0 if self.saved is None else self.saved.state["round"] + 1
        before = None if self.saved is None else self.origin
        part = {
            "first_round": first,
            **environment(simulation.hardware),
            "source": source(),
            "packages": packages(),
            "data": dict(self.checksums),
            **own_files.keep(self.built, self.directory, first, before),
        }
        module = simulation.runtime.net.module
        sizes = {"all": sum(each.numel() for each in module.parameters())}
        sizes["trained"] = sum(each.numel() for each in simulation.initial.values())
        self.origin = origin.write(
            self.directory,
            self.values,
            simulation.runtime.data.x_train.shape[1:],
            part,
            before,
            self.sweep,
            sizes,
            {
                "argv": list(self.job.command),
                "directory": str(Path.cwd()),
                "PYTHONPATH": os.environ.get("PYTHONPATH"),
            },
        )

    def _write_options(self) -> None:
        """Write the overrides and the configuration of the run.

        The file config.yaml is written last, because it makes the directory that of a run. What
        applies to one command only is left out.
        """
        config = {**self.config, "resume": None, "accept_changed_data": False}
        for name, content in ((files.OVERRIDES, self._typed()), (files.CONFIG, config)):
            storage.write_atomically(self.directory / name, storage.dump_yaml(content).encode())

    def _typed(self) -> list[str]:
        """Return the overrides of the run, without those that apply to one command only."""
        return [text for text in self.job.overrides if key_of(text) not in OF_COMMAND]


def data_checksums(built: Built, arrays: str) -> dict[str, str]:
    """Return the checksums of the data that determine a run's results, by name.

    arrays: the checksum of the loaded data sets. The other names are the keys of files.
    """
    found = {"arrays": arrays}
    for key, name in flatten(built.values).items():
        if is_free(key) or key.startswith((*DATASETS, "analysis.")):  # or an output of an analysis
            continue
        if origin.PATH.fullmatch(key) and isinstance(name, str) and Path(name).is_file():
            with storage.reading(Path(name)):
                found[key] = f"{storage.crc_of(Path(name), Path(name).stat().st_size):08x}"
    return found


def read_state(directory: Path, saved: Mapping[str, Any], simulation: Simulation) -> State:
    """Return the state in a checkpoint, with the results up to its round from the tables."""
    run, records = RunDirectory(directory), simulation.initial_state().records
    for view, empty in records.items():
        run.restore(empty, view, saved["round"])
    return State.from_tree(saved, records, simulation.runtime.device, directory)


def check_partitions(directory: Path, simulation: Simulation) -> None:
    """Raise ConfigError if the clients have other examples or classes than the run began with."""
    for name, stage in simulation.partition_files().items():
        before, now = Partition.load(directory / name), stage.partition
        if before.hash != now.hash or not np.array_equal(before.counts, now.counts):
            raise ConfigError(
                f"resume={directory}: the data have changed: their partition differs from the"
                f" saved partition ({name}); restore the original data or start a new run"
            )


def check_cohorts(directory: Path, planned: Rounds, before: Mapping[int, Sequence[int]]) -> None:
    """Raise ConfigError if other clients are planned for a round than took part in it before."""
    for number, clients in before.items():
        if list(planned.get(number, clients)) != list(clients):
            raise ConfigError(
                f"resume={directory}: other clients than before would take part in round {number}."
                " Restore the file cohorts.path or, with cohorts=windows, the number of rounds, on"
                " which its windows depend; or start a new run"
            )


def write_partitions(directory: Path, simulation: Simulation, option: str) -> None:
    """Write the partitions of the data and the names of the classes to files, and log them.

    option: the option of the group `partition`, for the log.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows([("class", "name"), *enumerate(simulation.runtime.data.classes)])
    storage.write_atomically(directory / files.CLASSES, text.getvalue().encode())
    has_tasks = simulation.num_tasks > 1
    for name, stage in simulation.partition_files().items():
        partition, info, task = stage.partition, stage.partition.info, ""
        if has_tasks:
            info = info | {"rounds_per_task": simulation.rounds_per_task}
            task = f" of task {stage.federation.task + 1}"
        classes = simulation.runtime.data.classes
        replace(partition, info=info).save(directory / name, classes)
        if partition.is_change:
            log.info(
                "schedule: from round %d on: %s", info["from_round"], describe_change(partition)
            )
        else:
            log.info("partition=%s%s: %s", option, task, partition.sentence())
        if unused := info.get("unused"):
            used = partition.sizes.sum() + sum(len(getattr(partition, k)) for k in HELD_OUT)
            told = f"{unused:,} of {unused + used:,} training examples are unused"
            log.warning("partition=%s%s: %s", option, task, told)
