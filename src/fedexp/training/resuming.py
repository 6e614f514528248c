"""Resume a run, possibly with more rounds (`fedexp resume=<directory> rounds=300`).

An extended run computes the same results as a run that was started with 300 rounds, because no
algorithm depends on the number of rounds. If `local.schedule=cosine`, the learning rates depend on
this number, so such a run cannot be extended.
"""

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.algorithms.local_training import SCHEDULES_OVER_ALL_ROUNDS
from fedexp.config.build import Built
from fedexp.config.cohorts import Rounds
from fedexp.config.composition import path_override
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import Partition, find_task_partitions
from fedexp.figures.pictures import picture_files
from fedexp.rundir import checkpoint, files, origin
from fedexp.rundir.files import require_replaceable
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.progress import result_table
from fedexp.training.callbacks import is_finished, stop_reason
from fedexp.training.division import load_checksum
from fedexp.training.job import Job
from fedexp.training.simulation import Simulation
from fedexp.training.state import State

log = logging.getLogger("fedexp")

# options that may change when a run is extended
LENGTH = ("rounds", "scenario.rounds_per_task")
EXTENDABLE = (*LENGTH, "stop.patience", "stop.metric")


def check_start(job: Job, built: Built, values: Mapping[str, Any]) -> bool:
    """Return whether the job must continue a run in its directory. values: see `essential`.

    Raises ConfigError if the directory contains a run that the job may neither continue nor
    replace.
    """
    is_resumed = built.settings.resume is not None
    if job.sweep is None and not is_resumed:
        if built.settings.accept_changed_data:
            raise ConfigError(
                "accept_changed_data=true: can only be used with resume=<run directory>, or to"
                " continue a sweep"
            )
        require_new(job)
        return False
    if not is_resumed and not checkpoint.exists(job.directory):
        return False  # a new run, or no checkpoint was saved
    check_resume(job.directory, values, alone=job.sweep is None)
    return True


def find_finished(job: Job, built: Built, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the summary if the run that this job continues has already finished, or None.

    values: see `essential`.

    Raises ConfigError if the data have changed since.
    """
    run = RunDirectory(job.directory)
    summary = run.summary
    is_resumed = built.settings.resume is not None
    if not run.finished or not is_finished(summary, built.stop, is_resumed):
        return None
    if job.sweep is None and is_extended(job.directory, values):
        return None
    data = data_checksums(built, load_checksum(built))
    origin.check_data(job.directory, data, built.settings.accept_changed_data)
    reason = f"is complete ({summary['rounds']} rounds)"
    if summary["status"] == "stopped":
        reason = stop_reason(summary)
    log.info("%s %s; nothing to do", job.directory, reason)
    if job.sweep is None:
        result_table(summary, job.directory, picture_files(job.directory / "figures"))
    return summary


def data_checksums(built: Built, arrays: str) -> dict[str, str]:
    """Return the checksums of the data that determine a run's results, by name.

    arrays: the checksum of the loaded data sets.
    """
    found = {"arrays": arrays}
    named = {
        "partition.path": getattr(built.partition, "path", None),
        "cohorts.path": getattr(built.cohorts, "path", None),
        "model.weights": getattr(built.model, "weights", None),
    }
    for key, name in named.items():
        if isinstance(name, str) and Path(name).is_file():
            with storage.reading(Path(name)):
                found[key] = f"{storage.crc_of(Path(name), Path(name).stat().st_size):08x}"
    return found


def recorded_precision(directory: Path) -> str:
    """Return the precision that a run started with."""
    return str(origin.read(directory)["parts"][0]["hardware"]["precision"])


def read_state(directory: Path, saved: Mapping[str, Any], simulation: Simulation) -> State:
    """Return the state in a checkpoint, with the results up to its round from the tables."""
    run, records = RunDirectory(directory), simulation.initial_state().records
    for view, empty in records.items():
        run.restore(empty, view, saved["round"])
    return State.from_tree(saved, records, simulation.runtime.device, directory)


def restore_state(
    directory: Path, saved: Mapping[str, Any], simulation: Simulation, checksums: Mapping[str, str]
) -> State:
    """Return the state from which a run resumes.

    saved: the state in the checkpoint. checksums: of the data.

    Raises ConfigError if the data, the partitions or the cohorts of completed rounds have changed.
    """
    origin.check_data(directory, checksums, simulation.settings.accept_changed_data)
    state = read_state(directory, saved, simulation)
    for name, stage in simulation.partition_files().items():
        before, now = Partition.load(directory / name), stage.partition
        if before.hash != now.hash or not np.array_equal(before.counts, now.counts):
            raise ConfigError(
                f"resume={directory}: the data have changed: their partition differs from"
                f" the saved partition ({name}); restore the original data or start a new run"
            )
    check_cohorts(directory, simulation.cohorts or {}, state.record.cohorts)
    if state.status in ("completed", "stopped") and state.round < simulation.rounds:
        state.status, state.stopped = "running", {}
    return state


def check_cohorts(directory: Path, planned: Rounds, before: Mapping[int, Sequence[int]]) -> None:
    """Raise ConfigError if other clients are planned for a round than took part in it before."""
    for number, clients in before.items():
        if planned.get(number, clients) != clients:
            raise ConfigError(
                f"resume={directory}: other clients than before would take part in round {number}."
                " Restore the file cohorts.path or, with cohorts=windows, the number of rounds, on"
                " which its windows depend; or start a new run"
            )


def require_new(job: Job) -> None:
    """Raise ConfigError if the directory contains a run that the job may not replace."""
    if job.overwrite:
        require_replaceable(job.directory)
    elif (job.directory / files.ROUNDS).exists():
        raise ConfigError(
            f"{job.directory}: this directory already contains a run; continue it with"
            f" {shlex.quote(path_override('resume', job.directory))}, or choose another"
            " hydra.run.dir"
        )


def check_resume(directory: Path, values: Mapping[str, Any], alone: bool) -> None:
    """Check that the run in a directory was started with these values (see `essential`).

    alone: whether the run is resumed by name (`resume=<directory>`), not as a job of a sweep. Only
        a run that is resumed by name may be given more rounds. If a job of a sweep was given more
        rounds and finished, the sweep accepts it and logs a warning.

    Raises ConfigError if a value differs.
    """
    differing = origin.differences(directory, values)
    extends = differing.keys() <= set(EXTENDABLE)
    if differing and alone and extends:
        check_extension(directory, values)
    elif extends and RunDirectory(directory).finished:
        for line in differing.values():
            log.warning(
                "%s: the run was extended, but still counts as a job of this sweep: %s",
                directory.name,
                line,
            )
    elif differing:
        raise ConfigError(
            f"resume={directory}: the run was started with another configuration:\n  "
            + "\n  ".join(differing.values())
        )


def is_extended(directory: Path, values: Mapping[str, Any]) -> bool:
    """Return whether values change the number of rounds or a `stop` option of a run."""
    before = origin.read(directory)["values"]
    return any(before.get(key) != values.get(key) for key in EXTENDABLE)


def check_extension(directory: Path, values: Mapping[str, Any]) -> None:
    """Raise ConfigError if the run cannot be extended.

    values: the values of the command, with the new number of rounds or `stop` options.
    """
    before = origin.read(directory)["values"]
    run, rounds = RunDirectory(directory), values.get("rounds")
    problem = ""
    if any(before.get(key) != values.get(key) for key in LENGTH):
        schedule = before.get("local.schedule")
        if find_task_partitions(directory):
            problem = "a run with several tasks cannot be given more rounds"
        elif run.last_round is not None and isinstance(rounds, int) and rounds <= run.last_round:
            problem = f"must be greater than {run.last_round}, the last completed round"
        elif schedule in SCHEDULES_OVER_ALL_ROUNDS:
            problem = (
                f"with local.schedule={schedule}, all learning rates depend on the number of"
                f" rounds ({before.get('rounds')}); start a new run"
            )
    if run.diverged:
        problem = "the run has diverged"
    if problem:
        raise ConfigError(f"resume={directory}: rounds={rounds}: {problem}")


def remove_attempt(directory: Path) -> None:
    """Remove the report, the summary and the temporary files of an earlier attempt."""
    with storage.storing(directory):
        for left in (files.ERROR, files.SUMMARY):
            (directory / left).unlink(missing_ok=True)
        files.remove_temporaries(directory)
