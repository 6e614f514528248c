"""One run from its configuration to its finished directory; imported late, since it brings torch with it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from fedexp import checkpoint, elsewhere, files, gpus, tree
from fedexp.build import Built, build, resolve
from fedexp.client_states import choose_place
from fedexp.errors import ConfigError
from fedexp.expected import data_of
from fedexp.experiment import Experiment, Stage, State
from fedexp.files import finished_summary
from fedexp.hardware import Resolved
from fedexp.identity import essential
from fedexp.launchers import Place
from fedexp.lock import occupied
from fedexp.memory import peak_memory
from fedexp.metrics.history import task_partition
from fedexp.prepare import Prepared, prepare
from fedexp.provenance import environment
from fedexp.record import Recorder
from fedexp.replay import final_tables
from fedexp.results import result_files, write_results
from fedexp.run import run
from fedexp.trackers.base import RunInfo, Tracker
from fedexp.trackers.progress import Progress, result_line, result_table
from fedexp.trust import foreign

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class Job:
    """What the command line knows of a job."""

    config: DictConfig
    directory: Path
    overrides: Sequence[str]
    choices: Mapping[str, str]  # group -> option
    sweep: str | None  # name of the sweep this job belongs to
    place: Place = field(default_factory=Place)


def execute(job: Job) -> dict[str, Any]:
    """Runs a job to its end and returns its summary. User errors raise ConfigError and leave nothing behind."""
    built = build(job.config)
    container = resolve(job.config) | {"choices": dict(job.choices)}
    with ExitStack() as held:
        # A job of a sweep may wait for a GPU, and nobody shall begin it meanwhile.
        if ours := job.sweep is not None or (job.directory / files.CONFIG).exists():
            make_directory(job.directory)
            held.enter_context(occupied(job.directory))
        saved, summary = find_start(job, built, container)
        if summary is not None:
            return summary
        if (
            job.sweep is not None
            and saved is None
            and (other := elsewhere.complete(job.directory, container)) is not None
        ):
            elsewhere.note(job.directory, other, job.overrides)
            log.info("%s is complete in %s; counted, not run again", job.directory.name, other)
            return finished_summary(other) or {}
        if job.sweep is not None:
            (job.directory / elsewhere.NOTE).unlink(missing_ok=True)
        built = held.enter_context(on_a_gpu(built, job.place))
        prepared = prepare(built, job.place.cores)
        make_directory(job.directory)
        if not ours:
            held.enter_context(occupied(job.directory))
            check_new(job.directory)  # nobody has been quicker
        return start(job, built, container, prepared, saved)


@contextmanager
def on_a_gpu(built: Built, place: Place) -> Iterator[Built]:
    """While the block runs, a GPU that few other jobs of this machine use is ours, where there are some."""
    hardware = built.groups["hardware"]
    names = gpus.visible() if place.finds_gpu and hardware.takes_any_gpu else []
    if not names:
        yield built
        return
    with gpus.one_gpu(names, hardware.jobs_per_gpu) as number:
        yield replace(built, groups={**built.groups, "hardware": replace(hardware, device=f"cuda:{number}")})


def find_start(
    job: Job, built: Built, container: Mapping[str, Any]
) -> tuple[checkpoint.Saved | None, dict[str, Any] | None]:
    """(the checkpoint to go on from, the summary of a run that is over); each None where there is none."""
    resumed = built.settings.resume is not None
    if job.sweep is None and not resumed:
        check_new(job.directory)
        return None, None
    if not resumed and not checkpoint.exists(job.directory):
        return None, None  # a job of a sweep that is new, or that ended before it had anything to go on from
    check_resume(job.directory, container)
    summary = finished_summary(job.directory)
    if summary is None:
        return checkpoint.load(job.directory), None
    log.info("%s is complete (%d rounds); nothing to do", job.directory, summary["rounds"])
    if job.sweep is None:
        result_table(summary, result_files(job.directory, sorted((job.directory / "figures").glob("*.png"))))
    return None, summary


def start(
    job: Job, built: Built, container: dict[str, Any], prepared: Prepared, saved: checkpoint.Saved | None
) -> dict[str, Any]:
    """Runs the rounds that are left, in a directory that is ours."""
    experiment, hardware = prepared.experiment, prepared.hardware
    if saved is None:
        state = experiment.initial_state()
    else:
        state = State.from_tree(saved.state, hardware.device, job.directory)
        check_partition(job.directory, experiment)
    with files.storing(job.directory):
        for left in (files.ERROR, files.SUMMARY):  # of an attempt that failed
            (job.directory / left).unlink(missing_ok=True)
        files.remove_temporaries(job.directory)
    handler = log_to(job.directory / "run.log")
    try:
        for sentence in foreign(container):
            log.warning("%s", sentence)
        log.info("hardware: %s", hardware.sentence())
        place_states(experiment, state)
        if saved is not None:
            say_where_it_goes_on(job.directory, saved)
        elif built.settings.resume is not None:
            log.info("no round was saved: the run begins anew")
        if saved is None:
            write_inputs(job, container, experiment)
        elif saved.problem is not None:
            checkpoint.set_aside(job.directory)
        return conduct(job, built, container, experiment, hardware, state, saved)
    finally:
        log.removeHandler(handler)
        handler.close()


def say_where_it_goes_on(directory: Path, saved: checkpoint.Saved) -> None:
    """With what is lost: rounds that are in the tidy files and in no state that could be gone on from."""
    after, last = saved.state["round"], files.last_round(directory)
    lost = ""
    if last is not None and last > after:
        rounds = f"round {last} is" if last == after + 1 else f"rounds {after + 1} to {last} are"
        lost = f"; {rounds} run again"
    if saved.problem is not None:
        log.warning("%s; the checkpoint before it is used", saved.problem)
    log.info("resuming after round %d%s", after, lost)


def place_states(experiment: Experiment, state: State) -> None:
    """Decides where client states are kept, and says how much they are."""
    federation = experiment.stages[0].federation
    example = experiment.algorithm.client_init(experiment.initial, federation)
    if each := tree.num_bytes(example):
        home, resident, sentence = choose_place(each, federation.num_clients, experiment.bench.device)
        state.clients.place(home, resident)
        log.info("%s", sentence)


def conduct(
    job: Job,
    built: Built,
    container: dict[str, Any],
    experiment: Experiment,
    hardware: Resolved,
    state: State,
    saved: checkpoint.Saved | None,
) -> dict[str, Any]:
    """Runs the rounds with everything that watches them, and closes all of it whatever happens."""
    tracker: Tracker = built.groups["tracker"].create()
    trackers: list[Tracker] = [Progress(among_others=not job.place.alone), tracker]
    recorder = Recorder(job.directory, experiment, trackers, None if saved is None else saved.state["lengths"])
    try:
        info = run_info(job, container, experiment, state)
        for watching in trackers:
            watching.start(info)
        state.wandb_id = tracker.run_id
        run(experiment, state, recorder)
        summary = (
            {"status": state.status} | identity(job, built) | recorder.summary(state) | environment(container, hardware)
        )
        summary |= {"data": data_of(experiment), "peak_memory": peak_memory(hardware.device)}
        pictures = write_results(job.directory, state, summary, built.settings.figures)
        for watching in trackers:
            watching.finish(summary, pictures, final_tables(job.directory))
        if job.place.alone:
            result_table(summary, result_files(job.directory, pictures))
        else:
            result_line(info.name, summary, job.directory)
        return summary
    except BaseException:
        for watching in trackers:
            watching.abort()
        raise
    finally:
        recorder.close()
        experiment.engine.close()


def check_new(directory: Path) -> None:
    if (directory / files.ROUNDS).exists():
        raise ConfigError(
            f"{directory}: already holds a run; continue it with resume={directory} or choose another hydra.run.dir"
        )


def check_resume(directory: Path, container: Mapping[str, Any]) -> None:
    """Makes sure that the run there was begun with this configuration."""
    saved_config = read_config(directory)
    now, before = essential(container), essential(saved_config)
    differing = [
        f"{key}: {before.get(key, '(absent)')} there, {now.get(key, '(absent)')} asked for"
        for key in sorted(now.keys() | before.keys())
        if now.get(key) != before.get(key)
    ]
    if differing:
        raise ConfigError(f"resume={directory}: the run there has another configuration:\n  " + "\n  ".join(differing))


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / files.CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"resume={directory}: not a run directory (no {files.CONFIG} there)") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: is not the configuration of a run")
    return config


def check_partition(directory: Path, experiment: Experiment) -> None:
    """The data must still give the partitions that the run began with."""
    from fedexp.data.partition import Partition

    for name, stage in partition_files(experiment).items():
        if Partition.load(directory / name).hash != stage.partition.hash:
            raise ConfigError(f"resume={directory}: the data now give another partition than this run began with")


def partition_files(experiment: Experiment) -> dict[str, Stage]:
    """File name -> the task whose partition it holds."""
    names = [files.PARTITION, *(task_partition(number) for number in range(2, len(experiment.stages) + 1))]
    return dict(zip(names, experiment.stages, strict=True))


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".hydra").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from error


class RunLog(logging.FileHandler):
    """run.log, which a full disk cuts short: the console has its lines too, and files that matter say it."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Not a traceback for every line."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def log_to(path: Path) -> logging.Handler:
    with files.storing(path):
        handler = RunLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    return handler


def write_inputs(job: Job, container: Mapping[str, Any], experiment: Experiment) -> None:
    """What the run was asked to do and which data each client has."""
    text = yaml.safe_dump(dict(container), sort_keys=False, allow_unicode=True).encode()
    files.write_atomically(job.directory / files.CONFIG, text)
    overrides = yaml.safe_dump(list(job.overrides), allow_unicode=True).encode()
    files.write_atomically(job.directory / ".hydra" / "overrides.yaml", overrides)
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
        job.sweep,
        total_rounds=experiment.rounds,
        first_round=state.round,
        classes=experiment.bench.data.classes,
        wandb_id=state.wandb_id,
        best_accuracy=max((value for number, value in state.accuracy if number >= 1), default=None),
    )


def identity(job: Job, built: Built) -> dict[str, Any]:
    return {
        "algorithm": job.choices["algorithm"],
        "dataset": job.choices["dataset"],
        "scenario": job.choices["scenario"],
        "partition": job.choices["partition"],
        "model": job.choices["model"],
        "seed": built.settings.seed,
        "seeds": vars(built.seeds),
        "sweep": job.sweep,
    }
