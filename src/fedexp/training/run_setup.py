"""Assemble, start and resume a run, and write and log its inputs."""

import csv
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedexp.config.build import Built
from fedexp.config.overrides import OF_COMMAND, key_of
from fedexp.core import storage, tree
from fedexp.core.errors import ConfigError, RunFailed, StorageError
from fedexp.data.changes import describe_change
from fedexp.data.partitioned import HELD_OUT
from fedexp.rundir import checkpoint, files, origin
from fedexp.rundir.checkpoint import choose_place
from fedexp.rundir.reader import RunDirectory
from fedexp.training import resuming
from fedexp.training.job import Job
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.summary import environment

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class Run:
    """A run that is ready to start or to resume."""

    job: Job
    built: Built
    config: dict[str, Any]  # the resolved configuration and, as `choices`, the chosen options
    values: dict[str, Any]  # all values that determine the results
    simulation: Simulation
    checksums: Mapping[str, str]  # of the data, see `data_checksums`
    saved: checkpoint.Saved | None
    state: State

    @property
    def directory(self) -> Path:
        return self.job.directory

    @property
    def resumed_state(self) -> Mapping[str, Any] | None:
        """Return the state from which the run resumes, or None if it starts with round 0."""
        return None if self.saved is None else self.saved.state


@contextmanager
def handle_failures(run: Run) -> Iterator[None]:
    """Convert a ConfigError raised in the block to RunFailed, because the run has started.

    If a complete run was given more rounds and fails before one of these rounds is saved, the
    files of the complete run are restored.
    """
    before = resuming.files_to_restore(run.directory, run.values)
    try:
        yield
    except StorageError:  # the run can be resumed
        raise
    except Exception as error:
        state = run.resumed_state
        if before and state is not None and checkpoint.saved_round(run.directory) == state["round"]:
            resuming.restore_files(run.directory, before, state["lengths"])
        if isinstance(error, ConfigError):
            raise RunFailed(str(error)) from error
        raise


def begin(run: Run) -> None:
    """Write the inputs of the run, and log its hardware and the round at which it starts."""
    hardware = run.simulation.hardware
    log.info("hardware: %s", hardware.sentence())
    if run.built.hardware.precision == "tf32" and hardware.precision == "fp32":
        log.warning("hardware.precision=tf32: this CPU continues the run in fp32")
    place_states(run.simulation, run.state)
    if run.resumed_state is None:
        begin_new(run)
    else:
        begin_resumed(run, run.resumed_state["round"])


def write_origin(run: Run) -> None:
    """Write what the next rounds are computed with to origin.json."""
    first = 0 if run.saved is None else run.state.round + 1
    made_with = environment(run.simulation.hardware)
    part = {"first_round": first, **made_with, "data": dict(run.checksums)}
    shape = run.simulation.runtime.data.x_train.shape[1:]
    origin.write(run.directory, run.values, shape, part, run.saved is not None)


def begin_new(run: Run) -> None:
    """Write the inputs of a run that starts with round 0."""
    if run.built.settings.resume is not None:
        log.info("no checkpoint was saved; the run starts again from round 0")
    write_origin(run)
    write_options(run)
    data, converted = run.simulation.runtime.data, run.built.dataset.conversion()
    told = f"{data.sentence()}{'; ' * bool(converted)}{converted}"
    log.info("dataset=%s: %s", run.job.choices["dataset"], told)
    write_partitions(run)
    remark = run.built.partition.remark()
    if remark and run.built.algorithm.paradigm != "centralized":
        log.warning("partition=%s: %s", run.job.choices["partition"], remark)


def begin_resumed(run: Run, after: int) -> None:
    """Log the round after which a run resumes and any changes of the data.

    after: the round of the checkpoint.
    """
    assert run.saved is not None
    if run.saved.problem is not None:
        log.warning("%s; the previous checkpoint is used", run.saved.problem)
        checkpoint.set_aside(run.directory)
    last = RunDirectory(run.directory).last_round or 0
    lost = f"; the later rounds, up to round {last}, are run again" if last > after else ""
    log.info("resuming after round %d%s", after, lost)
    before = origin.read(run.directory)["parts"][-1]["data"]
    if before != run.checksums:
        log.warning("the data have changed since the previous rounds: %s", run.checksums)
    is_extended = resuming.is_extended(run.directory, run.values)
    if is_extended:
        log.info("the run now has rounds=%s", run.config["rounds"])
        write_options(run)
    write_origin(run)  # last, because it says whether the run was extended


def place_states(simulation: Simulation, state: State) -> None:
    """Choose where the client states are stored, and log this place and their size."""
    federation = simulation.stages[0].federation
    example = simulation.first_client_state(simulation.algorithm, federation)
    if each := tree.num_bytes(example):
        clients, device = federation.num_clients, simulation.runtime.device
        home, resident, sentence = choose_place(each, clients, device)
        state.clients.place(home, resident)
        log.info("%s", sentence)


def write_options(run: Run) -> None:
    """Write the overrides and the configuration of the run.

    The file config.yaml is written last, because it makes the directory that of a run.
    """
    typed = [override for override in run.job.overrides if key_of(override) not in OF_COMMAND]
    for name, content in ((files.OVERRIDES, typed), (files.CONFIG, run.config)):
        storage.write_atomically(run.directory / name, storage.dump_yaml(content).encode())


def write_partitions(run: Run) -> None:
    """Write the partitions of the data and the names of the classes to files, and log them."""
    simulation = run.simulation
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows([("class", "name"), *enumerate(simulation.runtime.data.classes)])
    storage.write_atomically(run.directory / files.CLASSES, text.getvalue().encode())
    has_tasks = len(simulation.stages) > 1
    for name, stage in simulation.partition_files().items():
        partition, info, task = stage.partition, stage.partition.info, ""
        if has_tasks:
            info = info | {"rounds_per_task": simulation.rounds_per_task}
            task = f" of task {stage.federation.task + 1}"
        classes = simulation.runtime.data.classes
        replace(partition, info=info).save(run.directory / name, classes)
        if "from_round" in info:
            log.info(
                "schedule: from round %d on: %s", info["from_round"], describe_change(partition)
            )
        else:
            log.info("partition=%s%s: %s", run.job.choices["partition"], task, partition.sentence())
        if unused := info.get("unused"):
            used = partition.sizes.sum() + sum(len(getattr(partition, k)) for k in HELD_OUT)
            told = f"{unused:,} of {unused + used:,} training examples are unused"
            log.warning("partition=%s%s: %s", run.job.choices["partition"], task, told)
