"""One run from its configuration to its finished directory; imported late, since it brings torch with it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from fedexp.config.build import Built, build, resolve
from fedexp.config.cohorts import check_begun
from fedexp.config.named import search_path
from fedexp.config.options import PRESETS, list_groups
from fedexp.config.overrides import key_of, read_overrides
from fedexp.config.trust import foreign
from fedexp.core import console, storage, tree, yaml_files
from fedexp.core.errors import ConfigError
from fedexp.metrics.history import task_partition
from fedexp.rundir import checkpoint, csv_files, elsewhere, files, origin
from fedexp.rundir.client_states import choose_place
from fedexp.rundir.links import require_no_way_out
from fedexp.rundir.lock import occupied
from fedexp.rundir.mending import begin_again_where_damaged, remove_attempt
from fedexp.rundir.reader import finished_summary
from fedexp.trackers.base import RunInfo, Tracker
from fedexp.trackers.progress import Progress, result_line, result_table
from fedexp.trackers.replay import final_tables
from fedexp.training import gpus
from fedexp.training.checkpoint_fit import fits_run
from fedexp.training.deadline import Deadline
from fedexp.training.experiment import Experiment, Stage, State
from fedexp.training.fastest import way_of
from fedexp.training.memory import peak_memory
from fedexp.training.place import Place
from fedexp.training.prepare import Prepared, prepare
from fedexp.training.provenance import begin_span, environment
from fedexp.training.recorder import Recorder
from fedexp.training.results import data_of, draw_missing, result_files, write_results
from fedexp.training.rounds import run_rounds

log = logging.getLogger("fedexp")
NEW_LEVELS = 3  # folders above a run directory that a command makes: outputs/<date>/<time>, multirun/<sweep>/<job>


@dataclass(frozen=True)
class Job:
    """Facts that the command line knows about a job."""

    config: DictConfig
    directory: Path
    overrides: Sequence[str]
    choices: Mapping[str, str]  # group -> option
    sweep: str | None  # name of the sweep this job belongs to
    place: Place = field(default_factory=Place)
    deadline: Deadline = field(default_factory=Deadline)


def train_run(job: Job) -> dict[str, Any]:
    """Train a run to its end and return its summary. User errors raise ConfigError and leave nothing behind."""
    job = at_its_place(job)
    built = build(job.config)
    container = resolve(job.config) | {"choices": dict(job.choices)}
    with ExitStack() as held:
        # A job of a sweep may wait for a GPU, and nobody shall begin it meanwhile.
        if ours := job.sweep is not None or (job.directory / files.CONFIG).exists():
            require_no_way_out(job.directory)
            make_directory(job.directory)
            held.enter_context(occupied(job.directory))
        goes_on, summary = find_start(job, built, container)
        if summary is None and job.sweep is not None and not goes_on:
            summary = find_elsewhere(job, container)
        if summary is not None:
            return summary
        if job.sweep is not None:
            (job.directory / elsewhere.NOTE).unlink(missing_ok=True)
        built = held.enter_context(on_a_gpu(built, job.place))
        job.deadline.check_start()  # the job may have waited for a GPU
        before = origin.mapping_of(origin.read(job.directory), "way") if goes_on else None
        prepared = prepare(built, job.place.cores, before)
        make_directory(job.directory)
        if not ours:
            held.enter_context(occupied(job.directory))
            check_new(job.directory)  # nobody has been quicker
        experiment = prepared.experiment
        saved = checkpoint.load(job.directory, fits_run(job.directory, experiment)) if goes_on else None
        state = first_state(job, prepared, saved)
        clear_failed_attempt(job.directory)
        held.enter_context(run_log(job.directory))
        note_beginning(job, built, container, prepared, state, saved)
        info = run_info(job, container, experiment, state)
        recorder, trackers = held.enter_context(recording(job, built, experiment, state, info, saved))
        run_rounds(experiment, state, recorder, job.deadline)
        summary = summarise(job, built, container, prepared, state, recorder)
        finish_run(job, built, state, summary, trackers, info)
        return summary


def at_its_place(job: Job) -> Job:
    """Return a job that is resumed, with relative paths of data as it was started with them."""
    stored = job.directory / ".hydra" / "overrides.yaml"
    if job.sweep is not None or job.config.get("resume") is None or not stored.exists():
        return job
    before = set(read_overrides(stored, [*list_groups(search_path()), *PRESETS]))
    typed = [key_of(override) for override in job.overrides if override not in before]
    return replace(job, config=origin.from_where_it_began(job.config, job.directory, typed))


@contextmanager
def on_a_gpu(built: Built, place: Place) -> Iterator[Built]:
    """Hold a GPU that few other jobs of this machine use while the block runs, where there are some."""
    hardware = built.hardware
    names = gpus.visible() if place.finds_gpu and hardware.takes_any_gpu else []
    if not names:
        yield built
        return
    with gpus.one_gpu(names, hardware.jobs_per_gpu) as number:
        yield replace(built, hardware=replace(hardware, device=f"cuda:{number}"))


def find_start(job: Job, built: Built, container: Mapping[str, Any]) -> tuple[bool, dict[str, Any] | None]:
    """Return (whether there is something to resume from, the summary of a run that is over or None)."""
    resumed = built.settings.resume is not None
    if job.sweep is None and not resumed:
        check_new(job.directory)
        return False, None
    if not resumed:
        begin_again_where_damaged(job.directory, job.overrides)
    if not resumed and not checkpoint.exists(job.directory):
        return False, None  # a job of a sweep that is new, or that ended before it had anything to resume from
    check_resume(job.directory, container)
    summary = finished_summary(job.directory)
    if summary is None:
        return True, None
    if built.settings.figures:
        draw_missing(job.directory, summary)
    log.info("%s is complete (%d rounds); nothing to do", job.directory, summary["rounds"])
    if job.sweep is None:
        result_table(summary, result_files(job.directory, sorted((job.directory / "figures").glob("*.png"))))
    return False, summary


def find_elsewhere(job: Job, container: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the summary of the same run where another sweep has made it, which is noted; None where none has."""
    other = elsewhere.complete(job.directory, container)
    if other is None:
        return None
    elsewhere.note(job.directory, other, job.overrides)
    log.info("%s is complete in %s; counted, not run again", job.directory.name, other)
    return finished_summary(other) or {}


def first_state(job: Job, prepared: Prepared, saved: checkpoint.Saved | None) -> State:
    """Return the state that the rounds begin from: a saved one, if the run and its data are still the same, or new."""
    experiment = prepared.experiment
    if saved is None or saved.state is None:
        return experiment.initial_state()
    state = State.from_tree(saved.state, prepared.hardware.device, job.directory)
    origin.check_data(job.directory, experiment.bench.data)
    check_partition(job.directory, experiment)
    check_begun(job.directory, experiment.cohorts, state.round)
    return state


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
) -> None:
    """Note in the directory and in its log what is run, with what, from where on."""
    experiment = prepared.experiment
    for sentence in foreign(container):
        log.warning("%s", sentence)
    log.info("hardware: %s", prepared.hardware.sentence())
    begin_span(state, prepared.hardware)
    place_states(experiment, state)
    if saved is None or saved.state is None:
        say_that_it_begins_anew(job.directory, saved, built)
        write_inputs(job, container, experiment)
    else:
        say_where_it_goes_on(job.directory, saved.state["round"], saved.problem)
        if saved.problem is not None:
            checkpoint.set_aside(job.directory)
    origin.note(job.directory, container, experiment.bench.data, way_of(prepared.hardware))


def say_that_it_begins_anew(directory: Path, saved: checkpoint.Saved | None, built: Built) -> None:
    """Say that the run begins anew: a damaged table cannot be made again from a state, so it is kept, out of the
    way."""
    if saved is not None:
        checkpoint.set_tables_aside(directory)
        log.warning("%s; the run begins again, and what was there is kept in %s", saved.problem, directory / "damaged")
    elif built.settings.resume is not None:
        log.info("no round was saved: the run begins anew")


def say_where_it_goes_on(directory: Path, after: int, problem: str | None) -> None:
    """Say where the run resumes, and what is lost: rounds that are in the tidy files and in no state to resume from."""
    last = csv_files.last_round(directory)
    lost = ""
    if last is not None and last > after:
        rounds = f"round {last} is" if last == after + 1 else f"rounds {after + 1} to {last} are"
        lost = f"; {rounds} run again"
    if problem is not None:
        log.warning("%s; the checkpoint before it is used", problem)
    log.info("resuming after round %d%s", after, lost)


def place_states(experiment: Experiment, state: State) -> None:
    """Decide where client states are kept, and say how large they are."""
    federation = experiment.stages[0].federation
    example = experiment.algorithm.client_init(experiment.initial, federation)
    if each := tree.num_bytes(example):
        home, resident, sentence = choose_place(each, federation.num_clients, experiment.bench.device)
        state.clients.place(home, resident)
        log.info("%s", sentence)


@contextmanager
def recording(
    job: Job, built: Built, experiment: Experiment, state: State, info: RunInfo, saved: checkpoint.Saved | None
) -> Iterator[tuple[Recorder, list[Tracker]]]:
    """While the block runs, its rounds are recorded and tracked; closes all of it whatever happens."""
    tracker: Tracker = built.tracker.create()
    trackers: list[Tracker] = [Progress(among_others=not job.place.alone), tracker]
    going_on = None if saved is None else saved.state
    recorder = Recorder(job.directory, experiment, trackers, None if going_on is None else going_on["lengths"])
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
        experiment.engine.close()


def summarise(
    job: Job, built: Built, container: dict[str, Any], prepared: Prepared, state: State, recorder: Recorder
) -> dict[str, Any]:
    """Return what summary.json holds."""
    summary = (
        {"status": state.status}
        | identity(job, built)
        | origin.fingerprint_of(job.directory)
        | recorder.summary(state)
        | environment(container, prepared.hardware, state)
    )
    if "hint" in summary:
        log.warning("algorithm=%s: %s", job.choices["algorithm"], summary["hint"])
    return summary | {"data": data_of(prepared.experiment), "peak_memory": peak_memory(prepared.hardware.device)}


def finish_run(
    job: Job, built: Built, state: State, summary: dict[str, Any], trackers: Sequence[Tracker], info: RunInfo
) -> None:
    """Write the results of the last round, hand them to the trackers and print them."""
    pictures = write_results(job.directory, state, summary, built.settings.figures)
    for watching in trackers:
        watching.finish(summary, pictures, final_tables(job.directory))
    if job.place.alone:
        result_table(summary, result_files(job.directory, pictures))
    else:
        result_line(info.name, summary, job.directory)


def check_new(directory: Path) -> None:
    if (directory / files.ROUNDS).exists():
        raise ConfigError(
            f"{directory}: already holds a run; continue it with resume={directory} or choose another hydra.run.dir"
        )


def check_resume(directory: Path, container: Mapping[str, Any]) -> None:
    """Make sure that the run there was begun with this configuration."""
    if differing := origin.differences(directory, read_config(directory), container):
        raise ConfigError(f"resume={directory}: the run there has another configuration:\n  " + "\n  ".join(differing))


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / files.CONFIG
    try:
        config = yaml_files.load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"resume={directory}: not a run directory (no {files.CONFIG} there)") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: is not the configuration of a run")
    return config


def check_partition(directory: Path, experiment: Experiment) -> None:
    """Raise ConfigError unless the data still give the partitions that the run began with."""
    from fedexp.data.partition import Partition

    for name, stage in partition_files(experiment).items():
        if Partition.load(directory / name).hash != stage.partition.hash:
            raise ConfigError(f"resume={directory}: the data now give another partition than this run began with")


def partition_files(experiment: Experiment) -> dict[str, Stage]:
    """Return file name -> the task whose partition it holds."""
    names = [files.PARTITION, *(task_partition(number) for number in range(2, len(experiment.stages) + 1))]
    return dict(zip(names, experiment.stages, strict=True))


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".hydra").mkdir(exist_ok=True)
        storage.sync(directory)
        storage.sync_above(directory, NEW_LEVELS)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from error


class RunLog(logging.FileHandler):
    """run.log, which a full disk cuts short: the console has its lines too, and files that matter say it."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback for every line."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def run_log(directory: Path) -> Iterator[None]:
    """While the block runs, run.log takes what is logged."""
    path = directory / "run.log"
    with storage.storing(path):
        handler = RunLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        if console.problem is not None:  # there, and not on the console
            handler.handle(log.makeRecord(log.name, logging.WARNING, __file__, 0, console.problem, (), None))
        log.removeHandler(handler)
        handler.close()


def write_inputs(job: Job, container: Mapping[str, Any], experiment: Experiment) -> None:
    """Write what the run was asked to do and which data each client has."""
    text = yaml.safe_dump(dict(container), sort_keys=False, allow_unicode=True).encode()
    storage.write_atomically(job.directory / files.CONFIG, text)
    overrides = yaml.safe_dump(list(job.overrides), allow_unicode=True).encode()
    storage.write_atomically(job.directory / ".hydra" / "overrides.yaml", overrides)
    for name, stage in partition_files(experiment).items():
        partition = stage.partition
        if len(experiment.stages) > 1:
            partition = replace(partition, info=partition.info | {"rounds_per_task": experiment.rounds_per_task})
        partition.save(job.directory / name, experiment.bench.data.classes)
        log.info("partition %s: %s", partition.hash[:12], partition.info)


def run_info(job: Job, container: dict[str, Any], experiment: Experiment, state: State) -> RunInfo:
    return RunInfo.of(
        job.directory,
        container,
        sweep_of(job),
        total_rounds=experiment.rounds,
        first_round=state.round,
        classes=experiment.bench.data.classes,
        wandb_id=state.wandb_id,
        best_accuracy=max((value for number, value in state.accuracy if number >= 1), default=None),
    )


def sweep_of(job: Job) -> str | None:
    """Return the name of the sweep that the job belongs to, also where it is resumed alone: Hydra has left its file
    above."""
    above = (path for path in list(job.directory.absolute().parents)[:2] if (path / "multirun.yaml").is_file())
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
