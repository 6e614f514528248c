"""Resume a run, possibly with more rounds (`fedexp resume=<directory> rounds=300`).

An extended run computes the same results as a run that was started with 300 rounds, because no
algorithm depends on the number of rounds. If `local.schedule=cosine`, the learning rates depend on
this number, so such a run cannot be extended.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedexp.algorithms.local_training import SCHEDULES_OVER_ALL_ROUNDS
from fedexp.config.build import Built
from fedexp.config.cohorts import check_completed_rounds
from fedexp.config.overrides import key_of, typed_overrides
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import Partition, find_task_partitions
from fedexp.figures.pictures import picture_files
from fedexp.rundir import checkpoint, contents, csv_files, files, origin
from fedexp.rundir.files import require_replaceable
from fedexp.rundir.reader import RunDirectory, finished_summary
from fedexp.rundir.repair import repair_job
from fedexp.rundir.revisions import value_of
from fedexp.trackers.progress import result_table
from fedexp.training.job import Job
from fedexp.training.results import result_files
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.stopping import is_finished, stop_reason

log = logging.getLogger("fedexp")

# options that may change when a run is extended
LENGTH = ("rounds", "scenario.rounds_per_task")
EXTENDABLE = (*LENGTH, "stop.patience", "stop.metric")


def with_original_paths(job: Job) -> Job:
    """Return a resumed job whose data paths refer to the same files as when the run was started.

    Relative paths are resolved from the directory in which the run was started. Other jobs are
    returned unchanged.
    """
    if job.sweep is not None or job.config.get("resume") is None:
        return job
    typed = [key_of(override) for override in typed_overrides(job.overrides)]
    return replace(job, config=origin.with_original_paths(job.config, job.directory, typed))


def check_start(job: Job, built: Built, config: Mapping[str, Any]) -> bool:
    """Return whether the job must continue a run in its directory.

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
    if not is_resumed:
        repair_job(job.directory, job.overrides)
        if not checkpoint.exists(job.directory):  # a new run, or no checkpoint was saved
            return False
    check_resume(job.directory, config, alone=job.sweep is None)
    if checkpoint.exists(job.directory) or finished_summary(job.directory) is not None:
        origin.check_data(job.directory, origin.current_marks(config, built.sources), config)
    return True


def find_finished(
    job: Job, built: Built, config: Mapping[str, Any], continues: bool
) -> dict[str, Any] | None:
    """Return the summary if the run of this job has already finished, or None.

    continues: the result of `check_start`.
    """
    if not continues:
        return None
    summary = finished_summary(job.directory)
    if summary is None or not is_finished(summary, built.stop, built.settings.resume is not None):
        return None
    if job.sweep is None and is_extended(job.directory, config):
        return None
    reason = f"is complete ({summary['rounds']} rounds)"
    if summary["status"] == "stopped":
        reason = stop_reason(summary)
    log.info("%s %s; nothing to do", job.directory, reason)
    if job.sweep is None:
        result_table(summary, result_files(job.directory, picture_files(job.directory / "figures")))
    return summary


def recorded_precision(directory: Path) -> str | None:
    """Return the precision that a run started with, or None if it was not recorded."""
    return origin.get_mapping(origin.read(directory), "way").get("precision")


def read_state(
    directory: Path, saved: Mapping[str, Any], simulation: Simulation, device: torch.device
) -> State:
    """Return the state in a checkpoint, with the results up to its round from the tables."""
    run, records = RunDirectory(directory), simulation.initial_state().records
    for view, empty in records.items():
        run.restore(empty, view, saved["round"])
    return State.from_tree(saved, records, device, directory)


def restore_state(
    directory: Path, saved: Mapping[str, Any], simulation: Simulation, device: torch.device
) -> State:
    """Return the state from which a run resumes.

    saved: the state in the checkpoint.

    Raises ConfigError if the partitions or the cohorts of completed rounds have changed.
    """
    state = read_state(directory, saved, simulation, device)
    for name, stage in simulation.partition_files().items():
        if Partition.load(directory / name).hash != stage.partition.hash:
            raise ConfigError(
                f"resume={directory}: the data have changed: their partition differs from"
                f" the saved partition ({name}); restore the original data or start a new run"
            )
    check_completed_rounds(directory, simulation.cohorts, state.round)
    if state.status in ("completed", "stopped") and state.round < simulation.rounds:
        state.status, state.stopped = "running", {}
    return state


def require_new(job: Job) -> None:
    """Raise ConfigError if the directory contains a run that the job may not replace."""
    if job.overwrite:
        require_replaceable(job.directory)
    elif (job.directory / files.ROUNDS).exists():
        raise ConfigError(
            f"{job.directory}: this directory already contains a run; continue it with"
            f" resume={job.directory}, or choose another hydra.run.dir"
        )


def check_resume(directory: Path, config: Mapping[str, Any], alone: bool = False) -> None:
    """Check that the run in a directory was started with this configuration.

    alone: whether the run is resumed by name (`resume=<directory>`), not as a job of a sweep. Only
        a run that is resumed by name may be given more rounds. If a job of a sweep was given more
        rounds and finished, the sweep accepts it and logs a warning.

    Raises ConfigError if the configuration differs.
    """
    path = directory / files.CONFIG
    if not path.exists():
        raise ConfigError(f"resume={directory}: not a run directory ({files.CONFIG} is missing)")
    before = contents.read_mapping(path)
    differing = origin.differences(directory, before, config)
    extends = {line.partition(":")[0] for line in differing} <= set(EXTENDABLE)
    if differing and alone and extends:
        check_extension(directory, before, config)
    elif extends and finished_summary(directory) is not None:
        for line in differing:
            log.warning(
                "%s: the run was extended, but still counts as a job of this sweep: %s",
                directory.name,
                line,
            )
    elif differing:
        raise ConfigError(
            f"resume={directory}: the run was started with another configuration:\n  "
            + "\n  ".join(differing)
        )


def is_extended(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a configuration changes the number of rounds or a `stop` option of a run."""
    before = RunDirectory(directory).config
    return any(value_of(before, key) != value_of(config, key) for key in EXTENDABLE)


def check_extension(directory: Path, before: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the run cannot be extended.

    before: the configuration that the run was started with.
    config: the configuration with the new number of rounds or `stop` options.
    """
    run, rounds = RunDirectory(directory), config.get("rounds")
    problem = ""
    if any(value_of(before, key) != value_of(config, key) for key in LENGTH):
        schedule = value_of(before, "local.schedule")
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


def files_to_restore(directory: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of the files that are rewritten when a complete run is extended.

    The summary comes last. The dict is empty if the run is not complete or is not extended.
    """
    if finished_summary(directory) is None or not is_extended(directory, config):
        return {}
    names = (files.CONFIG, files.OVERRIDES, origin.NAME, files.SUMMARY)
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def restore_files(directory: Path, before: Mapping[str, bytes], lengths: Mapping[str, int]) -> None:
    """Restore a complete run after its extension failed.

    before: the result of `files_to_restore`.
    lengths: the lengths of the tables of the complete run.
    """
    with suppress(OSError, ConfigError):  # if it cannot be restored, the run keeps the new options
        csv_files.RunFiles(directory, lengths, lengths).close()
        for name, content in before.items():
            storage.write_atomically(directory / name, content)
