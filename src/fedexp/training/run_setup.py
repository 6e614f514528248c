"""A run's directory and log before its first round."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import yaml

from fedexp.config.build import Built
from fedexp.config.overrides import OF_COMMAND, key_of
from fedexp.config.trust import foreign
from fedexp.core import console, storage, tree
from fedexp.core.errors import BudgetSpent, ConfigError, RunFailed, StorageError
from fedexp.data.changes import in_words
from fedexp.data.partitioned import changed_partition, task_partition
from fedexp.rundir import checkpoint, csv_files, files, origin
from fedexp.rundir.client_states import choose_place
from fedexp.rundir.repair import remove_attempt
from fedexp.training import extension
from fedexp.training.job import Job
from fedexp.training.prepare import Prepared
from fedexp.training.provenance import begin_span
from fedexp.training.simulation import Simulation, Stage
from fedexp.training.state import State

log = logging.getLogger("fedexp")
EARLY_LINES = 1000  # the largest number of lines kept until run.log is opened
# number of directories that a command may create: outputs/<date>/<time>, multirun/<sweep>/<job>
NEW_LEVELS = 3


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".hydra").mkdir(exist_ok=True)
        storage.sync(directory)
        storage.sync_above(directory, NEW_LEVELS)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from error


def clear_failed_attempt(directory: Path) -> None:
    """Remove the files of a failed attempt."""
    with storage.storing(directory):
        remove_attempt(directory)
        files.remove_temporaries(directory)


def note_beginning(
    job: Job,
    built: Built,
    container: dict[str, Any],
    prepared: Prepared,
    state: State,
    saved: checkpoint.Saved | None,
    marks: Mapping[str, str],
) -> None:
    """Record in the run's directory and log what runs, on which hardware and from which round."""
    simulation = prepared.simulation
    for sentence in foreign(container):
        log.warning("%s", sentence)
    log.info("hardware: %s", prepared.hardware.sentence())
    if slow := prepared.hardware.trouble():
        log.warning("hardware.precision=bf16: %s", slow)
    resumed = saved is not None and saved.state is not None
    begin_span(state, container, prepared.hardware, marks)
    place_states(simulation, state)
    (job.directory / files.SUMMARY).unlink(missing_ok=True)  # left by a run that is extended
    if saved is None or saved.state is None:
        say_that_it_begins_anew(job.directory, saved, built)
        write_inputs(job, container, simulation)
        if built.algorithm.paradigm != "centralized" and (remark := built.partition.remark()):
            log.warning("partition=%s: %s", job.choices["partition"], remark)
    else:
        say_where_it_goes_on(job.directory, saved.state["round"], saved.problem)
        origin.say_what_changed(job.directory, marks, container)
        if extension.asked(job.directory, container):
            for words in extension.notes(job.directory, container, state):
                log.info("%s", words)
            write_options(job, container)
        if saved.problem is not None:
            checkpoint.set_aside(job.directory)
    way = {"precision": prepared.hardware.precision}
    origin.note(job.directory, container, simulation.runtime.data, marks, way, resumed)


@contextmanager
def failing(
    job: Job, container: Mapping[str, Any], saved: checkpoint.Saved | None
) -> Iterator[None]:
    """Turn a ConfigError in the block into RunFailed, because the run has begun.

    If a complete run was given more rounds and fails before it saved one of them, its files are
    restored.
    """
    before = extension.contents(job.directory, container)
    try:
        yield
    except (BudgetSpent, StorageError):  # the run can be resumed
        raise
    except Exception as error:
        state = None if saved is None else saved.state
        if before and state is not None and checkpoint.kept(job.directory) == state["round"]:
            extension.put_back(job.directory, before, state["lengths"])
        if isinstance(error, ConfigError):
            raise RunFailed(str(error)) from error
        raise


def say_that_it_begins_anew(directory: Path, saved: checkpoint.Saved | None, built: Built) -> None:
    """Log that the run begins again.

    Damaged tables cannot be rebuilt from a state, so they are moved to another directory.
    """
    if saved is not None:
        checkpoint.set_tables_aside(directory)
        log.warning(
            "%s; the run begins again, and what was there is kept in %s",
            saved.problem,
            directory / "damaged",
        )
    elif built.settings.resume is not None:
        log.info("no round was saved: the run begins anew")


def say_where_it_goes_on(directory: Path, after: int, problem: str | None) -> None:
    """Log the round after which the run resumes, and the rounds that are lost.

    Lost rounds are in the tables, but not in a state that the run can resume from.
    """
    last = csv_files.last_round(directory)
    lost = ""
    if last is not None and last > after:
        rounds = f"round {last} is" if last == after + 1 else f"rounds {after + 1} to {last} are"
        lost = f"; {rounds} run again"
    if problem is not None:
        log.warning("%s; the checkpoint before it is used", problem)
    log.info("resuming after round %d%s", after, lost)


def place_states(simulation: Simulation, state: State) -> None:
    """Choose where client states are stored, and log their size."""
    federation = simulation.stages[0].federation
    example = simulation.first_client_state(simulation.algorithm, federation)
    if each := tree.num_bytes(example):
        home, resident, sentence = choose_place(
            each, federation.num_clients, simulation.runtime.device
        )
        state.clients.place(home, resident)
        log.info("%s", sentence)


def write_options(job: Job, container: Mapping[str, Any]) -> None:
    """Write the run's configuration.

    config.yaml is written last, because `extension.asked` compares it with the requested options:
    until then, the run counts as not extended.
    """
    typed = [override for override in job.overrides if key_of(override) not in OF_COMMAND]
    overrides = yaml.safe_dump(typed, allow_unicode=True).encode()
    storage.write_atomically(job.directory / files.OVERRIDES, overrides)
    text = yaml.safe_dump(dict(container), sort_keys=False, allow_unicode=True).encode()
    storage.write_atomically(job.directory / files.CONFIG, text)


def write_inputs(job: Job, container: Mapping[str, Any], simulation: Simulation) -> None:
    """Write the run's configuration and the partitions of its data."""
    write_options(job, container)
    for name, stage in partition_files(simulation).items():
        partition = stage.partition
        if len(simulation.stages) > 1:
            partition = replace(
                partition, info=partition.info | {"rounds_per_task": simulation.rounds_per_task}
            )
        partition.save(job.directory / name, simulation.runtime.data.classes)
        task = f" of task {stage.federation.task + 1}" if len(simulation.stages) > 1 else ""
        if "from_round" in partition.info:
            log.info(
                "schedule: from round %d on %s", partition.info["from_round"], in_words(partition)
            )
        else:
            log.info("partition=%s%s: %s", job.choices["partition"], task, partition.sentence())


def partition_files(simulation: Simulation) -> dict[str, Stage]:
    """Return file name -> the stage whose partition the file holds.

    A stage is a task, or the part of a run after a change of the clients' data.
    """
    names = [
        files.PARTITION,
        *(task_partition(number) for number in range(2, len(simulation.stages) + 1)),
    ]
    names += [changed_partition(first) for first, _ in simulation.changes]
    return dict(zip(names, simulation.all_stages, strict=True))


class RunLog(logging.FileHandler):
    """Handler for run.log that ignores write errors, e.g. when the disk is full.

    The console shows the same lines, and errors in important files are reported when they are
    written.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error, so that no traceback is printed for every line."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def from_this_thread() -> Callable[[logging.LogRecord], bool]:
    """Return a filter for the log lines of this thread; each run of a process has one thread."""
    thread = threading.get_ident()
    return lambda record: record.thread == thread


class EarlyLines(MemoryHandler):
    """Keep the first lines of a run for run.log, which does not exist yet."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line as it reads now; drop it if there are EARLY_LINES already."""
        if len(self.buffer) < self.capacity:
            record.msg, record.args = record.getMessage(), None
            self.buffer.append(record)


@contextmanager
def early_lines() -> Iterator[EarlyLines]:
    """Keep this thread's first log lines for run.log."""
    early = EarlyLines(EARLY_LINES, flushOnClose=False)
    early.addFilter(from_this_thread())
    log.addHandler(early)
    try:
        yield early
    finally:
        log.removeHandler(early)


@contextmanager
def run_log(directory: Path, early: EarlyLines) -> Iterator[None]:
    """Write the log to run.log while the block runs, starting with the early lines."""
    path = directory / "run.log"
    with storage.storing(path):
        handler = RunLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(from_this_thread())
    log.removeHandler(early)
    early.setTarget(handler)
    early.flush()
    log.addHandler(handler)
    rounds = logging.getLogger(console.ROUNDS_LOG)
    rounds.propagate = False  # not to the console
    rounds.setLevel(logging.INFO)
    rounds.addHandler(handler)
    try:
        yield
    finally:
        if console.problem is not None:  # only in run.log, since the console failed
            handler.handle(
                log.makeRecord(log.name, logging.WARNING, __file__, 0, console.problem, (), None)
            )
        log.removeHandler(handler)
        rounds.removeHandler(handler)
        handler.close()
