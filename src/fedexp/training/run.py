"""Run a job from its configuration to its finished directory.

This module is imported late, because importing torch is slow.
"""

import csv
import io
import logging
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedexp.config.build import Built, build
from fedexp.config.overrides import OF_COMMAND, key_of, typed_overrides
from fedexp.core import storage, tree
from fedexp.core.errors import ConfigError, RunFailed
from fedexp.data.changes import describe_change
from fedexp.data.partitioned import HELD_OUT
from fedexp.engine.network import default_torch
from fedexp.figures import interim_pictures
from fedexp.rundir import checkpoint, files, origin
from fedexp.rundir.checkpoint import choose_place
from fedexp.rundir.identity import digest, essential, group_name, setting
from fedexp.rundir.lock import occupied
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.base import (
    Callback,
    Callbacks,
    RoundRecord,
    RunInfo,
    Tracker,
    final_tables,
    name_states,
    past_rounds,
)
from fedexp.trackers.progress import Progress
from fedexp.training.callbacks import callbacks_of, create_all, draw_all
from fedexp.training.checks import check_used
from fedexp.training.job import Job
from fedexp.training.prepare import prepare
from fedexp.training.recorder import Recorder
from fedexp.training.resuming import (
    check_start,
    data_checksums,
    find_finished,
    is_extended,
    recorded_precision,
    remove_attempt,
    require_new,
    restore_state,
)
from fedexp.training.rounds import run_rounds
from fedexp.training.run_log import early_lines, run_log
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.summary import check_result_names, environment, peak_memory, summary_of

log = logging.getLogger("fedexp")


@default_torch()
def train_run(job: Job) -> dict[str, Any]:
    """Run a job to its end and return its summary.

    If a user error is found before the run starts, ConfigError is raised, and the run writes no
    files. If a user error is found later, RunFailed is raised.
    """
    built = build(job.config)
    for each in (*built.analysis, *built.tracker, *built.callback):
        each.check()
    config, values = built.values | {"choices": dict(job.choices)}, essential(built)
    with ExitStack() as held:
        early = held.enter_context(early_lines())
        is_locked = job.sweep is not None or (job.directory / files.CONFIG).exists()
        if is_locked:
            held.enter_context(occupied(job.directory))
        continues = check_start(job, built, values)
        if continues and (summary := find_finished(job, built, values)) is not None:
            return summary
        # Options without effect are allowed in a search and if a sweep continues a job.
        if not job.in_search and (not continues or job.sweep is None):
            check_used(config, typed_overrides(job.overrides))
        built = at_place(built, job)
        if job.sweep is not None:
            log.info("%s: %s", job.name, " ".join(job.overrides))
        before = recorded_precision(job.directory) if continues else None
        simulation = prepare(built, job.place.cores, before)
        built.figures.check_classes(len(simulation.runtime.data.classes))
        if not continues:
            check_result_names(simulation)
        if not is_locked:
            held.enter_context(occupied(job.directory))
            require_new(job)  # another process may have started a run there
        checksums = data_checksums(built, simulation.runtime.data.checksum)
        saved = checkpoint.load(job.directory) if continues else None
        state = simulation.initial_state()
        if saved is not None:
            state = restore_state(job.directory, saved.state, simulation, checksums)
        run = Run(job, built, config, values, simulation, checksums, saved, state)
        log_start(run)
        held.enter_context(started_engine(run))  # before files change: a rank may lack the data
        if job.overwrite:
            files.remove_run(job.directory)
        held.enter_context(as_failure())
        held.enter_context(run_log(run.directory, early))
        recorder = held.enter_context(recording(run))
        run_rounds(run.simulation, run.state, recorder)
        recorder.begin_once()  # if no round was left, such as with another stop.patience
        return finish(run, recorder.callbacks)


def at_place(built: Built, job: Job) -> Built:
    """Return the configuration with the GPU of a sweep's job, and without figures if none is shown.

    `fedexp figures <sweep>` draws them later.
    """
    if job.place.number is not None:
        built = replace(built, hardware=built.hardware.for_job(job.place.number))
    if job.sweep is not None and not built.tracker:
        built = replace(built, figures=replace(built.figures, draw=False))
    return built


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


@contextmanager
def started_engine(run: Run) -> Iterator[None]:
    """Start the engine if rounds are left, and close it at the end of the block."""
    engine = run.simulation.engine
    try:
        if run.state.status == "running":
            engine.start(run.simulation.runtime)
        yield
    finally:
        engine.close()


@contextmanager
def as_failure() -> Iterator[None]:
    """Convert a ConfigError raised in the block to RunFailed, because the run has started."""
    try:
        yield
    except ConfigError as error:
        raise RunFailed(str(error)) from error


def log_start(run: Run) -> None:
    """Log the hardware, the place of the client states, and what a run resumes from."""
    hardware, saved = run.simulation.hardware, run.saved
    log.info("hardware: %s", hardware.sentence())
    if run.built.hardware.precision == "tf32" and hardware.precision == "fp32":
        log.warning("hardware.precision=tf32: this CPU continues the run in fp32")
    place_states(run.simulation, run.state)
    if saved is None:
        return
    if saved.problem is not None:
        log.warning("%s; the previous checkpoint is used", saved.problem)
    last, after = RunDirectory(run.directory).last_round or 0, run.state.round
    lost = f"; the later rounds, up to round {last}, are run again" if last > after else ""
    log.info("resuming after round %d%s", after, lost)
    if origin.read(run.directory)["parts"][-1]["data"] != run.checksums:
        log.warning("the data have changed since the previous rounds: %s", run.checksums)
    if is_extended(run.directory, run.values):
        log.info("the run now has rounds=%s", run.config["rounds"])


def begin(run: Run) -> None:
    """Write the inputs of the run, after removing what an earlier attempt or the end has left."""
    remove_attempt(run.directory)
    if run.saved is None:
        begin_new(run)
        return
    if run.saved.problem is not None:
        checkpoint.set_aside(run.directory)
    if is_extended(run.directory, run.values):
        write_options(run)
    write_origin(run)  # last, because it says whether the run was extended


def write_origin(run: Run) -> None:
    """Write what the next rounds are computed with to origin.json."""
    first = 0 if run.saved is None else run.saved.state["round"] + 1
    made_with = environment(run.simulation.hardware)
    part = {"first_round": first, **made_with, "data": dict(run.checksums)}
    shape = run.simulation.runtime.data.x_train.shape[1:]
    origin.write(run.directory, run.values, shape, part, run.saved is not None, sweep_name(run))


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
        if partition.is_change:
            log.info(
                "schedule: from round %d on: %s", info["from_round"], describe_change(partition)
            )
        else:
            log.info("partition=%s%s: %s", run.job.choices["partition"], task, partition.sentence())
        if unused := info.get("unused"):
            used = partition.sizes.sum() + sum(len(getattr(partition, k)) for k in HELD_OUT)
            told = f"{unused:,} of {unused + used:,} training examples are unused"
            log.warning("partition=%s%s: %s", run.job.choices["partition"], task, told)


@contextmanager
def recording(run: Run) -> Iterator[Recorder]:
    """Open the recorder and the callbacks of a run while the block runs.

    The callbacks are closed even if the block raises an exception. The files of a finished run that
    is extended do not change before the first of the new rounds is recorded.
    """
    trackers = create_all(run.built.tracker, Tracker)
    own = create_all(run.built.callback, Callback)
    job = "" if run.job.sweep is None else run.job.name
    progress = Progress(None, not run.job.place.alone, job)
    callbacks: list[Callback] = [*callbacks_of(run.built), *own, *trackers, progress]
    info = run_info(run, callbacks)
    saved = run.saved.state if run.saved else {"lengths": None, "callbacks": {}}
    for name, each in name_states(callbacks).items():
        if name in saved["callbacks"]:
            each.load_state_dict(saved["callbacks"][name])
    recorder = Recorder(run.directory, run.simulation, callbacks, saved["lengths"])
    recorder.begin = partial(begin, run)
    if not RunDirectory(run.directory).finished:
        recorder.begin_once()
    try:
        recorder.callbacks.call("start", info)
        run.state.wandb_id = next((each.run_id for each in trackers if each.run_id), None)
        yield recorder
    except BaseException:
        recorder.callbacks.call("abort")
        raise


def run_info(run: Run, callbacks: Sequence[Callback]) -> RunInfo:
    """Return the facts about a run, with labels derived from its configuration."""
    state, config, sweep = run.state, run.config, sweep_name(run)
    choices = config["choices"]
    tags = [choices[group] for group in ("dataset", "partition", "algorithm", "model")]
    return RunInfo(
        directory=run.directory,
        config=config,
        name=f"{setting(config)}_seed{config['seed']}",
        group=group_name(config),
        job_type=choices["algorithm"],
        tags=(*tags, *([sweep] if sweep else [])),
        total_rounds=run.simulation.rounds,
        first_round=state.round,
        classes=run.simulation.runtime.data.classes,
        wandb_id=state.wandb_id,
        best_accuracy=None if state.best is None else state.best[1],
        resumed=run.saved is not None,
        past=partial(past_records, run, state.round, callbacks) if run.saved else tuple,
        pictures=partial(interim_pictures, run.directory),
        simulation=run.simulation,
    )


def past_records(run: Run, last: int, callbacks: Sequence[Callback]) -> Iterator[RoundRecord]:
    """Yield the records of a resumed run's rounds up to its checkpoint, that of round `last`."""
    for record in past_rounds(RunDirectory(run.directory), run.state.records, last):
        for each in callbacks:
            each.recall(record)
        yield record


def finish(run: Run, callbacks: Callbacks) -> dict[str, Any]:
    """Write the results, pass them to the callbacks, and return the summary.

    The file summary.json is written after the figures, so a run directory that contains it is
    complete.
    """
    summary = summarise(run, callbacks)
    if "hint" in summary:
        log.warning("algorithm=%s: %s", run.job.choices["algorithm"], summary["hint"])
    pictures = draw_all(run.directory, callbacks, summary)
    storage.write_json(run.directory / files.SUMMARY, summary)
    callbacks.call("finish", summary, pictures, final_tables(run.directory))
    return summary


def summarise(run: Run, callbacks: Callbacks) -> dict[str, Any]:
    """Return the contents of summary.json."""
    added = callbacks.call("summary")
    groups = ("algorithm", "dataset", "scenario", "partition", "model")
    parts = origin.read(run.directory)["parts"]
    identity: dict[str, Any] = {name: run.job.choices[name] for name in groups}
    identity |= {"seed": run.built.settings.seed, "seeds": vars(run.built.seeds)}
    return {
        "status": run.state.status,
        **identity,
        "sweep": sweep_name(run),
        "identity": digest(run.values),
        **summary_of(run.simulation, run.state),
        **dict(ChainMap(*added)),
        **environment(run.simulation.hardware),
        "checksums": run.checksums,
        **({"parts": parts} if len(parts) > 1 else {}),
        "data": data_sizes(run.simulation),
        "peak_memory": peak_memory(run.simulation.hardware.device),
    }


def data_sizes(simulation: Simulation) -> dict[str, int]:
    """Return the sizes of the data sets. Reports compare them with the sizes in the papers."""
    data, federation = simulation.runtime.data, simulation.stages[0].federation
    learned = torch.tensor(sorted(set().union(*federation.tasks)), device=data.y_train.device)
    held_out = len(simulation.stages[0].partition.test)
    sizes = {
        "train": int(torch.isin(data.y_train, learned).sum()) - held_out,
        "test": int(torch.isin(data.y_test, learned).sum()),
    }
    if data.validation is not None:
        sizes["validation"] = len(data.validation)
    return sizes | {"classes": len(learned), "clients": federation.num_clients}


def sweep_name(run: Run) -> str | None:
    """Return the name of the sweep that a run belongs to, or None, also if it is resumed."""
    if run.built.settings.resume is None:
        return run.job.sweep
    return origin.read(run.directory)["sweep"]
