"""The directory and the log of a run before its first round."""

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
from fedexp.training.exchange import first_state
from fedexp.training.job import Job
from fedexp.training.prepare import Prepared
from fedexp.training.provenance import begin_span
from fedexp.training.simulation import Simulation, Stage
from fedexp.training.state import State

log = logging.getLogger("fedexp")
EARLY_LINES = 1000  # that run.log is expected to get when it is opened
NEVER = logging.CRITICAL + 1
# folders above a run directory that a command makes: outputs/<date>/<time>, multirun/<sweep>/<job>
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
    """Remove what an attempt that failed has left."""
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
    """Note in the directory and in its log what is run, with what, from where on."""
    simulation = prepared.simulation
    for sentence in foreign(container):
        log.warning("%s", sentence)
    log.info("hardware: %s", prepared.hardware.sentence())
    if slow := prepared.hardware.trouble():
        log.warning("hardware.precision=bf16: %s", slow)
    resumed = saved is not None and saved.state is not None
    begin_span(state, container, prepared.hardware, marks)
    place_states(simulation, state)
    (job.directory / files.SUMMARY).unlink(missing_ok=True)  # of a run that is given more rounds
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
    """While the block runs, a ConfigError is a failure of the run that has begun, and a complete
    run that is given more rounds is put back where it fails before one of them has been saved."""
    before = extension.contents(job.directory, container)
    try:
        yield
    except (BudgetSpent, StorageError):  # the run can go on
        raise
    except Exception as error:
        state = None if saved is None else saved.state
        if before and state is not None and checkpoint.kept(job.directory) == state["round"]:
            extension.put_back(job.directory, before, state["lengths"])
        if isinstance(error, ConfigError):
            raise RunFailed(str(error)) from error
        raise


def say_that_it_begins_anew(directory: Path, saved: checkpoint.Saved | None, built: Built) -> None:
    """Say that the run begins anew: a damaged table cannot be made again from a state, so it is
    kept, out of the way."""
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
    """Say where the run resumes, and what is lost: rounds that are in the tidy files and in no
    state to resume from."""
    last = csv_files.last_round(directory)
    lost = ""
    if last is not None and last > after:
        rounds = f"round {last} is" if last == after + 1 else f"rounds {after + 1} to {last} are"
        lost = f"; {rounds} run again"
    if problem is not None:
        log.warning("%s; the checkpoint before it is used", problem)
    log.info("resuming after round %d%s", after, lost)


def place_states(simulation: Simulation, state: State) -> None:
    """Decide where client states are kept, and say how large they are."""
    federation = simulation.stages[0].federation
    example = first_state(simulation, simulation.algorithm, federation)
    if each := tree.num_bytes(example):
        home, resident, sentence = choose_place(
            each, federation.num_clients, simulation.runtime.device
        )
        state.clients.place(home, resident)
        log.info("%s", sentence)


def write_options(job: Job, container: Mapping[str, Any]) -> None:
    """Write what the run was asked to do: config.yaml last, by which `extension.asked` tells that
    a run is still to be given more rounds."""
    typed = [override for override in job.overrides if key_of(override) not in OF_COMMAND]
    overrides = yaml.safe_dump(typed, allow_unicode=True).encode()
    storage.write_atomically(job.directory / files.OVERRIDES, overrides)
    text = yaml.safe_dump(dict(container), sort_keys=False, allow_unicode=True).encode()
    storage.write_atomically(job.directory / files.CONFIG, text)


def write_inputs(job: Job, container: Mapping[str, Any], simulation: Simulation) -> None:
    """Write what the run was asked to do and which data each client has."""
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
    """Return file name -> the task, or the change within a run, whose partition it holds."""
    names = [
        files.PARTITION,
        *(task_partition(number) for number in range(2, len(simulation.stages) + 1)),
    ]
    names += [changed_partition(first) for first, _ in simulation.changes]
    return dict(zip(names, simulation.all_stages, strict=True))


class RunLog(logging.FileHandler):
    """run.log, which a full disk cuts short: the console has its lines too, and files that matter
    say it."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback for every line."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def from_this_thread() -> Callable[[logging.LogRecord], bool]:
    """Return a filter for the lines of one of the runs of a process, each of which has a thread."""
    thread = threading.get_ident()
    return lambda record: record.thread == thread


@contextmanager
def early_lines() -> Iterator[MemoryHandler]:
    """While the block runs, keep the lines that this thread logs before the directory of its run is
    made, for its run.log."""
    early = MemoryHandler(EARLY_LINES, flushLevel=NEVER, flushOnClose=False)
    early.addFilter(from_this_thread())
    log.addHandler(early)
    try:
        yield early
    finally:
        log.removeHandler(early)


@contextmanager
def run_log(directory: Path, early: MemoryHandler) -> Iterator[None]:
    """While the block runs, run.log takes what is logged, and first of all what was logged
    before."""
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
        if console.problem is not None:  # there, and not on the console
            handler.handle(
                log.makeRecord(log.name, logging.WARNING, __file__, 0, console.problem, (), None)
            )
        log.removeHandler(handler)
        rounds.removeHandler(handler)
        handler.close()
