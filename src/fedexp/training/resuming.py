"""The start of a run, in a new directory or in one that already has the same run."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedexp.config.build import Built
from fedexp.config.cohorts import check_begun
from fedexp.config.overrides import key_of, typed_now
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import Partition
from fedexp.figures.pictures import picture_files
from fedexp.rundir import checkpoint, contents, elsewhere, files, origin
from fedexp.rundir.reader import finished_summary
from fedexp.rundir.repair import begin_again_where_damaged
from fedexp.trackers.progress import result_table
from fedexp.training import extension
from fedexp.training.job import Job
from fedexp.training.prepare import Prepared
from fedexp.training.results import draw_missing, result_files
from fedexp.training.run_setup import partition_files
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.stopping import is_over, why_stopped

log = logging.getLogger("fedexp")


def at_its_place(job: Job) -> Job:
    """Return a resumed job with data paths that are relative to where the run was started."""
    if job.sweep is not None or job.config.get("resume") is None:
        return job
    typed = [key_of(override) for override in typed_now(job.overrides)]
    return replace(job, config=origin.from_where_it_began(job.config, job.directory, typed))


def find_start(
    job: Job, built: Built, container: Mapping[str, Any]
) -> tuple[bool, dict[str, Any] | None]:
    """Return (whether the run can be resumed, the summary of a finished run or None)."""
    resumed = built.settings.resume is not None
    if job.sweep is None and not resumed:
        if built.settings.accept_changed_data:
            raise ConfigError(
                "accept_changed_data=true: goes with resume=<run directory> or with a sweep that"
                " has been begun"
            )
        check_new(job.directory)
        return False, None
    if not resumed:
        begin_again_where_damaged(job.directory, job.overrides)
    if not resumed and not checkpoint.exists(job.directory):
        # a sweep's job that is new, or that ended before its first checkpoint
        return False, None
    check_resume(job.directory, container, alone=job.sweep is None)
    summary = finished_summary(job.directory)
    if summary is not None or checkpoint.exists(job.directory):
        origin.check_data(job.directory, origin.marks_of(container, built.sources), container)
    if (
        summary is None
        or not is_over(summary, built.stop, resumed)
        or (job.sweep is None and extension.asked(job.directory, container))
    ):
        return True, None
    if built.figures.draw:
        draw_missing(job.directory, summary)
    if summary["status"] == "stopped":
        log.info("%s: %s; nothing to do", job.directory, why_stopped(summary))
    else:
        log.info("%s is complete (%d rounds); nothing to do", job.directory, summary["rounds"])
    if job.sweep is None:
        result_table(summary, result_files(job.directory, picture_files(job.directory / "figures")))
    return False, summary


def find_elsewhere(job: Job, built: Built, container: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the summary of the same run from another sweep, or None if no sweep has it.

    The other run's directory is recorded in this job's directory.
    """
    other = elsewhere.complete(
        job.directory, container, marks=lambda: origin.marks_of(container, built.sources)
    )
    if other is None:
        return None
    elsewhere.note(job.directory, other, job.overrides)
    log.info("%s is complete in %s; counted, not run again", job.directory.name, other)
    return finished_summary(other) or {}


def precision_before(directory: Path) -> str | None:
    """Return the precision that a run started with, or None if it was not recorded."""
    return origin.mapping_of(origin.read(directory), "way").get("precision")


def first_state(
    job: Job,
    container: Mapping[str, Any],
    prepared: Prepared,
    saved: checkpoint.Saved | None,
    marks: Mapping[str, str],
) -> State:
    """Return the state that the rounds start from: the saved state, or a new one.

    Raises ConfigError if there is a saved state, but the run's data or partitions have changed.
    """
    simulation = prepared.simulation
    if saved is None or saved.state is None:
        return simulation.initial_state()
    state = State.from_tree(saved.state, prepared.hardware.device, job.directory)
    origin.check_data(job.directory, marks, container, simulation.runtime.data)
    check_partition(job.directory, simulation)
    check_begun(job.directory, simulation.cohorts, state.round)
    if state.status in ("completed", "stopped") and state.round < simulation.rounds:
        state.status, state.stopped = "running", {}
    return state


def check_new(directory: Path) -> None:
    if (directory / files.ROUNDS).exists():
        raise ConfigError(
            f"{directory}: already holds a run; continue it with resume={directory} or choose"
            " another hydra.run.dir"
        )


def check_resume(directory: Path, container: Mapping[str, Any], alone: bool = False) -> None:
    """Raise ConfigError unless the run in the directory was started with this configuration.

    alone: whether the run is resumed by name, not as a job of a sweep. Such a run may be given more
    rounds. A job that was extended this way still counts as a job of its sweep.
    """
    differing = origin.differences(directory, read_config(directory), container)
    if differing and alone and extension.allows(differing):
        extension.check(directory, read_config(directory), container)
    elif extension.allows(differing) and finished_summary(directory) is not None:
        for line in differing:
            log.warning("%s: counts as it was resumed: %s", directory.name, line)
    elif differing:
        raise ConfigError(
            f"resume={directory}: the run there has another configuration:\n  "
            + "\n  ".join(differing)
        )


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / files.CONFIG
    if not path.exists():
        raise ConfigError(f"resume={directory}: not a run directory (no {files.CONFIG} there)")
    try:
        return contents.mapping(contents.read_yaml(path))
    except contents.Damaged as error:
        raise ConfigError(f"{path}: {error}") from error


def check_partition(directory: Path, simulation: Simulation) -> None:
    """Raise ConfigError unless the data give the partitions that the run started with."""
    for name, stage in partition_files(simulation).items():
        if Partition.load(directory / name).hash != stage.partition.hash:
            raise ConfigError(
                f"resume={directory}: the data now give another partition than this run began with"
            )
