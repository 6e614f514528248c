"""One run, from its configuration to its finished directory.

This module is imported late, because it imports torch.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from fedexp.config.build import Built, build
from fedexp.config.overrides import typed_now
from fedexp.config.trust import require_named
from fedexp.rundir import checkpoint, elsewhere, files, origin
from fedexp.rundir.links import require_no_way_out
from fedexp.rundir.lock import occupied
from fedexp.trackers.base import RunInfo, Tracker, final_tables
from fedexp.trackers.progress import Progress, result_line, result_table
from fedexp.trackers.several import Guarded
from fedexp.training import gpus
from fedexp.training.checkpoint_fit import fits_run
from fedexp.training.checks import check_used
from fedexp.training.job import Job, Place
from fedexp.training.prepare import Prepared, prepare
from fedexp.training.provenance import environment, peak_memory
from fedexp.training.recorder import Recorder
from fedexp.training.results import data_of, result_files, write_results
from fedexp.training.resuming import (
    at_its_place,
    check_new,
    find_elsewhere,
    find_start,
    first_state,
    precision_before,
)
from fedexp.training.rounds import run_rounds
from fedexp.training.rows import merged
from fedexp.training.run_setup import (
    clear_failed_attempt,
    early_lines,
    failing,
    make_directory,
    note_beginning,
    run_log,
)
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.summary import check_names, summary_of

log = logging.getLogger("fedexp")


def train_run(job: Job) -> dict[str, Any]:
    """Train a run to its end and return its summary.

    User errors raise ConfigError and leave no files behind. Once the run has begun, they raise
    RunFailed.
    """
    job = at_its_place(job)
    built = build(job.config)
    built.tracker.check()
    container = built.values | {"choices": dict(job.choices)}
    with ExitStack() as held:
        early = held.enter_context(early_lines())
        # A sweep's job may wait for a GPU, and no other process may start it meanwhile.
        if ours := job.sweep is not None or (job.directory / files.CONFIG).exists():
            require_no_way_out(job.directory)
            make_directory(job.directory)
            held.enter_context(occupied(job.directory))
        goes_on, summary = find_start(job, built, container)
        if summary is None and job.sweep is not None and not goes_on:
            summary = find_elsewhere(job, built, container)
        if summary is not None:
            return summary
        require_named(built.tracker, job.overrides, job.directory)
        # a sweep's job that has begun continues unchanged, and a search tries everything
        if job.watch is None and (not goes_on or job.sweep is None):
            check_used(container, typed_now(job.overrides))
        if job.sweep is not None:
            (job.directory / elsewhere.NOTE).unlink(missing_ok=True)
        built = held.enter_context(on_a_gpu(built, job.place))
        job.deadline.check()  # the job may have waited for a GPU
        if job.sweep is not None:
            log.info("job %s", job.directory.name)
        prepared = prepare(
            built, job.place.cores, precision_before(job.directory) if goes_on else None
        )
        if not goes_on:
            check_names(prepared.simulation)
        make_directory(job.directory)
        if not ours:
            held.enter_context(occupied(job.directory))
            check_new(job.directory)  # another process may have been faster
        simulation = prepared.simulation
        saved = (
            checkpoint.load(job.directory, fits_run(job.directory, simulation)) if goes_on else None
        )
        marks = origin.marks_of(container, built.sources, simulation.runtime.data)
        state = first_state(job, container, prepared, saved, marks)
        held.enter_context(failing(job, container, saved))
        clear_failed_attempt(job.directory)
        held.enter_context(run_log(job.directory, early))
        note_beginning(job, built, container, prepared, state, saved, marks)
        info = run_info(
            job, container, simulation, state, resumed=saved is not None and saved.state is not None
        )
        recorder, trackers = held.enter_context(
            recording(job, built, simulation, state, info, saved)
        )
        run_rounds(simulation, state, recorder, job.deadline, job.watch)
        summary = summarise(job, built, container, prepared, state)
        finish_run(job, built, state, summary, trackers, info)
        return summary


@contextmanager
def on_a_gpu(built: Built, place: Place) -> Iterator[Built]:
    """Hold a GPU that few other jobs on this machine use, if there are GPUs."""
    hardware = built.hardware
    names = gpus.visible() if place.finds_gpu and hardware.takes_any_gpu else []
    if not names:
        yield built
        return
    with gpus.one_gpu(names, hardware.jobs_per_gpu) as number:
        yield replace(built, hardware=replace(hardware, device=f"cuda:{number}"))


@contextmanager
def recording(
    job: Job,
    built: Built,
    simulation: Simulation,
    state: State,
    info: RunInfo,
    saved: checkpoint.Saved | None,
) -> Iterator[tuple[Recorder, list[Tracker]]]:
    """Record and track the run's rounds while the block runs.

    The recorder, the trackers and the engine are closed even if the block fails.
    """
    tracker: Tracker = Guarded([built.tracker.create()])
    trackers: list[Tracker] = [Progress(among_others=not job.place.alone), tracker]
    going_on = None if saved is None else saved.state
    recorder = Recorder(
        job.directory, simulation, trackers, None if going_on is None else going_on["lengths"]
    )
    try:
        for watching in trackers:
            watching.start(info)
        state.wandb_id = tracker.run_id
        yield recorder, trackers
    except BaseException:
        for watching in trackers:
            watching.abort()
        raise
    finally:
        recorder.close()
        simulation.engine.close()


def summarise(
    job: Job,
    built: Built,
    container: dict[str, Any],
    prepared: Prepared,
    state: State,
) -> dict[str, Any]:
    """Return the contents of summary.json."""
    summary = merged(
        files.SUMMARY,
        {"status": state.status},
        identity(job, built),
        origin.fingerprint_of(job.directory),
        summary_of(prepared.simulation, state),
        environment(container, prepared.hardware, state),
        {
            "data": data_of(prepared.simulation),
            "peak_memory": peak_memory(prepared.hardware.device),
        },
    )
    if "hint" in summary:
        log.warning("algorithm=%s: %s", job.choices["algorithm"], summary["hint"])
    return summary


def finish_run(
    job: Job,
    built: Built,
    state: State,
    summary: dict[str, Any],
    trackers: Sequence[Tracker],
    info: RunInfo,
) -> None:
    """Write the results of the last round, pass them to the trackers and print them."""
    pictures = write_results(job.directory, state, summary, built.figures)
    for watching in trackers:
        watching.finish(summary, pictures, final_tables(job.directory))
    if job.place.alone:
        result_table(summary, result_files(job.directory, pictures))
    else:
        result_line(info.name, summary, job.directory)


def run_info(
    job: Job, container: dict[str, Any], simulation: Simulation, state: State, resumed: bool
) -> RunInfo:
    return RunInfo.of(
        job.directory,
        container,
        sweep_of(job),
        total_rounds=simulation.rounds,
        first_round=state.round,
        classes=simulation.runtime.data.classes,
        wandb_id=state.wandb_id,
        best_accuracy=None if state.best is None else state.best[1],
        resumed=resumed,
    )


def sweep_of(job: Job) -> str | None:
    """Return the name of the job's sweep, or None.

    A job that is resumed alone belongs to its sweep if Hydra's file multirun.yaml is in a directory
    above.
    """
    above = (
        path
        for path in list(job.directory.absolute().parents)[:2]
        if (path / "multirun.yaml").is_file()
    )
    return job.sweep or next((path.name for path in above), None)


def identity(job: Job, built: Built) -> dict[str, Any]:
    return {
        "algorithm": job.choices["algorithm"],
        "dataset": job.choices["dataset"],
        "scenario": job.choices["scenario"],
        "partition": job.choices["partition"],
        "model": job.choices["model"],
        "seed": built.settings.seed,
        "seeds": vars(built.seeds),
        "sweep": sweep_of(job),
    }
