"""Run a job from its configuration to its finished directory.

This module is imported late, because importing torch is slow.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedexp.config.build import Built, build
from fedexp.config.overrides import typed_overrides
from fedexp.core import storage, tree
from fedexp.core.errors import ConfigError, RunFailed
from fedexp.engine.network import default_torch
from fedexp.figures import interim_pictures
from fedexp.rundir import checksums, files, origin
from fedexp.rundir.checkpoint import choose_place
from fedexp.rundir.identity import digest, group_name, setting
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.base import (
    Callback,
    Callbacks,
    RoundRecord,
    RunInfo,
    final_tables,
    past_rounds,
)
from fedexp.trackers.progress import Progress
from fedexp.training.callbacks import callbacks_of, draw_all, own_callbacks
from fedexp.training.checks import check_used
from fedexp.training.folder import RunFolder
from fedexp.training.job import Job
from fedexp.training.prepare import prepare
from fedexp.training.recorder import Recorder
from fedexp.training.rounds import run_rounds
from fedexp.training.run_log import early_lines, run_log
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.summary import (
    check_result_names,
    environment,
    peak_memory,
    summary_of,
    values_of_callbacks,
)
from fedexp.training.trial import check_padding

log = logging.getLogger("fedexp")


@default_torch()
def train_run(job: Job) -> dict[str, Any]:
    """Run a job to its end and return its summary.

    If a user error is found before the run starts, ConfigError is raised, and the run writes no
    files. If a user error is found later, RunFailed is raised.
    """
    built = at_place(build(job.config), job)
    for each in (*built.analysis, *built.tracker, *built.callback):
        each.check()
    with ExitStack() as held:
        early = held.enter_context(early_lines())
        folder = held.enter_context(RunFolder(job, built))  # decides what to do in the directory
        if folder.is_done:
            return folder.show_result()
        callbacks = make_callbacks(folder)  # first, since loading the data may take long
        simulation = assemble(folder)
        state = folder.restore(simulation)
        if folder.saved is not None:
            callbacks.load_states(folder.saved.state)
        log_start(folder, simulation, state)
        # before files change, because a rank may lack the data
        held.enter_context(started_engine(simulation, state))
        if job.overwrite:
            files.remove_run(job.directory)
        held.enter_context(as_failure())
        held.enter_context(run_log(job.directory, early))
        recorder = held.enter_context(recording(folder, simulation, state, callbacks))
        run_rounds(simulation, state, recorder)
        folder.begin(simulation)  # if no round was left, such as with another stop.patience
        return finish(folder, simulation, state, callbacks)


def assemble(folder: RunFolder) -> Simulation:
    """Check the options of a run, load its data, and assemble its parts."""
    job = folder.job
    # Options without effect are allowed in a search and if a sweep continues a job.
    if not job.in_search and (not folder.continues or job.sweep is None):
        check_used(folder.config, typed_overrides(job.overrides))
    if job.sweep is not None:
        log.info("%s: %s", job.name, " ".join(job.overrides))
    simulation = prepare(folder.built, job.place.cores, folder.precision)
    folder.built.figures.check_classes(len(simulation.runtime.data.classes))
    if not folder.continues:
        check_result_names(simulation)
    if simulation.hardware.vectorises:
        check_padding(simulation, simulation.initial_state())
    return simulation


def at_place(built: Built, job: Job) -> Built:
    """Return the configuration with the GPU of a sweep's job, and without figures if none is shown.

    `fedexp figures <sweep>` draws them later.
    """
    if job.place.number is not None:
        built = replace(built, hardware=built.hardware.for_job(job.place.number))
    if job.sweep is not None and not built.tracker:
        built = replace(built, figures=replace(built.figures, draw=False))
    return built


@contextmanager
def started_engine(simulation: Simulation, state: State) -> Iterator[None]:
    """Start the engine if rounds are left, and close it at the end of the block."""
    try:
        if state.status == "running":
            simulation.engine.start(simulation.runtime)
        yield
    finally:
        simulation.engine.close()


@contextmanager
def as_failure() -> Iterator[None]:
    """Convert a ConfigError raised in the block to RunFailed, because the run has started."""
    try:
        yield
    except ConfigError as error:
        raise RunFailed(str(error)) from error


def log_start(folder: RunFolder, simulation: Simulation, state: State) -> None:
    """Log the hardware, the place of the client states, and what a run resumes from."""
    hardware = simulation.hardware
    log.info("hardware: %s", hardware.sentence())
    if folder.built.hardware.precision == "tf32" and hardware.precision == "fp32":
        log.warning("hardware.precision=tf32: this CPU continues the run in fp32")
    place_states(simulation, state)
    if folder.saved is None:
        return
    if folder.saved.problem is not None:
        log.warning("%s; the previous checkpoint is used", folder.saved.problem)
    last, after = folder.run.last_round or 0, state.round
    lost = f"; the later rounds, up to round {last}, are run again" if last > after else ""
    log.info("resuming after round %d%s", after, lost)
    if origin.changed_data(folder.origin, folder.checksums):
        log.warning("the data have changed since the previous rounds: %s", folder.checksums)
    if folder.extends:
        log.info("the run now has rounds=%s", folder.config["rounds"])


def place_states(simulation: Simulation, state: State) -> None:
    """Choose where the client states are stored, and log this place and their size."""
    federation = simulation.stages[0].federation
    example = simulation.first_client_state(simulation.algorithm, federation)
    if each := tree.num_bytes(example):
        clients, device = federation.num_clients, simulation.runtime.device
        home, resident, sentence = choose_place(each, clients, device)
        state.clients.place(home, resident)
        log.info("%s", sentence)


def make_callbacks(folder: RunFolder) -> Callbacks:
    """Return the callbacks of a run in the order in which they see a round.

    These are the analyses and what options on the top level ask for, the user's own callbacks, the
    trackers, and the console.
    """
    job, built = folder.job, folder.built
    console = Progress(None, not job.place.alone, "" if job.sweep is None else job.name)
    return Callbacks([*callbacks_of(built), *own_callbacks(built), console])


@contextmanager
def recording(
    folder: RunFolder, simulation: Simulation, state: State, callbacks: Callbacks
) -> Iterator[Recorder]:
    """Open the recorder and the callbacks of a run while the block runs.

    The callbacks are closed even if the block raises an exception. The files of a finished run that
    is extended do not change before the first of the new rounds is recorded, unless its last
    checkpoint is damaged: rows are then cut here, so the run is no longer complete.
    """
    info = run_info(folder, simulation, state, callbacks.members)
    lengths = folder.saved.state["lengths"] if folder.saved else None
    begin = partial(folder.begin, simulation)
    recorder = Recorder(folder.directory, simulation, callbacks, lengths, begin)
    if not folder.reopens or folder.lost_rounds:
        begin()
    try:
        callbacks.call("start", info)
        yield recorder
    except BaseException:
        callbacks.call("abort")
        raise


def run_info(
    folder: RunFolder, simulation: Simulation, state: State, callbacks: Sequence[Callback]
) -> RunInfo:
    """Return the facts about a run, with labels derived from its configuration."""
    config, choices, sweep = folder.config, folder.job.choices, folder.sweep
    tags = [choices[group] for group in ("dataset", "partition", "algorithm", "model")]
    return RunInfo(
        directory=folder.directory,
        config=copy.deepcopy(config),
        name=f"{setting(config)}_seed{config['seed']}",
        group=group_name(config),
        job_type=choices["algorithm"],
        tags=(*tags, *([sweep] if sweep else [])),
        total_rounds=simulation.rounds,
        first_round=state.round,
        classes=simulation.runtime.data.classes,
        best_accuracy=None if state.best is None else state.best[1],
        resumed=folder.saved is not None,
        past=partial(past_records, folder.run, state, state.round, callbacks)
        if folder.saved
        else tuple,
        pictures=partial(interim_pictures, folder.directory),
        simulation=simulation,
    )


def past_records(
    run: RunDirectory, state: State, last: int, callbacks: Sequence[Callback]
) -> Iterator[RoundRecord]:
    """Yield the records of a resumed run's rounds up to its checkpoint, that of round `last`."""
    for record in past_rounds(run, state.records, last):
        for each in callbacks:
            each.recall(record)
        yield record


def finish(
    folder: RunFolder, simulation: Simulation, state: State, callbacks: Callbacks
) -> dict[str, Any]:
    """Write the results, pass them to the callbacks, and return the summary.

    The file summary.json is written after the figures, so a run directory that contains it is
    complete.
    """
    summary = summarise(folder, simulation, state, callbacks)
    if "hint" in summary:
        log.warning("algorithm=%s: %s", folder.job.choices["algorithm"], summary["hint"])
    pictures = draw_all(folder.directory, callbacks, summary)
    storage.write_json(folder.directory / files.SUMMARY, summary)
    checksums.write(folder.directory)
    callbacks.call("finish", summary, pictures, final_tables(folder.directory))
    return summary


def summarise(
    folder: RunFolder,
    simulation: Simulation,
    state: State,
    callbacks: Callbacks,
) -> dict[str, Any]:
    """Return the contents of summary.json, with what the callbacks add to it."""
    groups = ("algorithm", "dataset", "scenario", "partition", "model")
    identity: dict[str, Any] = {name: folder.job.choices[name] for name in groups}
    built, parts = folder.built, list(map(origin.in_short, folder.origin["parts"]))
    identity |= {"seed": built.settings.seed, "seeds": vars(built.seeds)}
    results = summary_of(simulation, state)
    return {
        "status": state.status,
        **identity,
        "sweep": folder.sweep,
        "identity": digest(folder.values),
        **results,
        **values_of_callbacks(callbacks, results),
        **environment(simulation.hardware),
        "checksums": folder.checksums,
        **({"parts": parts} if len(parts) > 1 else {}),
        "data": data_sizes(simulation),
        "peak_memory": peak_memory(simulation.hardware.device),
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
