"""One run from its configuration to its finished directory; imported late, since it brings torch with it."""

import json
import logging
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from omegaconf import DictConfig

import fedexp
from fedexp import files, tree
from fedexp.build import Built, build, resolve
from fedexp.client_states import choose_place
from fedexp.errors import ConfigError
from fedexp.experiment import Experiment, Stage, State
from fedexp.figures import make_figures
from fedexp.hardware import Resolved
from fedexp.identity import essential
from fedexp.lock import occupied
from fedexp.metrics.history import task_partition
from fedexp.prepare import Prepared, prepare
from fedexp.record import Recorder
from fedexp.run import run
from fedexp.trackers.base import RunInfo, Tracker
from fedexp.trackers.progress import Progress, result_table
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


def execute(job: Job) -> dict[str, Any]:
    """Runs a job to its end and returns its summary. User errors raise ConfigError and leave nothing behind."""
    built = build(job.config)
    container = resolve(job.config) | {"choices": dict(job.choices)}
    with ExitStack() as held:
        if begun := (job.directory / files.CONFIG).exists():
            held.enter_context(occupied(job.directory))
        saved, summary = find_start(job, built, container)
        if summary is not None:
            return summary
        prepared = prepare(built)
        make_directory(job.directory)
        if not begun:
            held.enter_context(occupied(job.directory))
            check_new(job.directory)  # nobody has been quicker
        return start(job, built, container, prepared, saved)


def find_start(
    job: Job, built: Built, container: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, dict[str, Any] | None]:
    """(the checkpoint to go on from, the summary of a run that is over); each None where there is none."""
    resumed = built.settings.resume is not None
    if job.sweep is None and not resumed:
        check_new(job.directory)
        return None, None
    if not resumed and not (job.directory / files.CHECKPOINT).exists():
        return None, None  # a job of a sweep that is new, or that ended before it had anything to go on from
    saved = check_resume(job.directory, container)
    summary = finished_summary(job.directory)
    if summary is None:
        return saved, None
    log.info("%s is complete (%d rounds); nothing to do", job.directory, saved["round"])
    if job.sweep is None:
        result_table(summary, result_files(job.directory, sorted((job.directory / "figures").glob("*.png"))))
    return saved, summary


def start(
    job: Job, built: Built, container: dict[str, Any], prepared: Prepared, saved: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Runs the rounds that are left, in a directory that is ours."""
    experiment, hardware = prepared.experiment, prepared.hardware
    state = experiment.initial_state() if saved is None else State.from_tree(saved, hardware.device, job.directory)
    if saved is not None:
        check_partition(job.directory, experiment)
    for left in (files.ERROR, files.SUMMARY):  # of an attempt that failed
        (job.directory / left).unlink(missing_ok=True)
    handler = log_to(job.directory / "run.log")
    try:
        for sentence in foreign(container):
            log.warning("%s", sentence)
        log.info("hardware: %s", hardware.sentence())
        place_states(experiment, state)
        if saved is None:
            write_inputs(job, container, experiment)
        else:
            log.info("resuming after round %d", state.round)
        return conduct(job, built, container, experiment, hardware, state, saved)
    finally:
        log.removeHandler(handler)
        handler.close()


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
    saved: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Runs the rounds with everything that watches them, and closes all of it whatever happens."""
    tracker: Tracker = built.groups["tracker"].create()
    trackers: list[Tracker] = [Progress(), tracker]
    recorder = Recorder(job.directory, experiment, trackers, None if saved is None else saved["lengths"])
    try:
        info = run_info(job, built, container, experiment, state)
        for watching in trackers:
            watching.start(info)
        state.wandb_id = tracker.run_id
        run(experiment, state, recorder)
        summary = {"status": state.status} | identity(job, built) | recorder.summary(state) | environment(hardware)
        pictures = write_results(job.directory, state, summary, built.settings.figures)
        paths = (job.directory / name for name in (files.CLASSES, files.TASKS))
        tables = {path.stem: pd.read_csv(path) for path in paths if path.exists()}
        for watching in trackers:
            watching.finish(summary, pictures, tables)
        result_table(summary, result_files(job.directory, pictures))
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


def check_resume(directory: Path, container: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checkpoint of a directory, after making sure that it was made with this configuration."""
    saved_config = read_config(directory)
    now, before = essential(container), essential(saved_config)
    differing = [
        f"{key}: {before.get(key, '(absent)')} there, {now.get(key, '(absent)')} asked for"
        for key in sorted(now.keys() | before.keys())
        if now.get(key) != before.get(key)
    ]
    if differing:
        raise ConfigError(f"resume={directory}: the run there has another configuration:\n  " + "\n  ".join(differing))
    return files.load_tree(directory / files.CHECKPOINT)


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


def log_to(path: Path) -> logging.Handler:
    handler = logging.FileHandler(path, encoding="utf-8")
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


def run_info(job: Job, built: Built, container: dict[str, Any], experiment: Experiment, state: State) -> RunInfo:
    choices = job.choices
    label = "_".join([choices["dataset"], choices["algorithm"], choices["partition"], f"seed{built.settings.seed}"])
    return RunInfo(
        directory=job.directory,
        config=container,
        name=label,
        group=job.sweep,
        job_type=choices["algorithm"],
        tags=(choices["dataset"], choices["partition"], choices["algorithm"], choices["model"]),
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
    }


def environment(hardware: Resolved) -> dict[str, Any]:
    """With what the numbers were made."""
    packages = ("torch", "torchvision", "numpy", "hydra-core", "wandb")
    versions = {"fedexp": fedexp.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "commit": commit(), "hardware": hardware.as_dict()}


def commit() -> str | None:
    """The git commit of the fedexp checkout that runs, None when installed from a wheel; `+` = with local changes."""
    source = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=source, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != source.parents[1]:
            return None  # some other project's checkout holds the environment that fedexp is installed in
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def write_results(directory: Path, state: State, summary: Mapping[str, Any], figures: bool) -> list[Path]:
    """summary.json last of the files that figures need; a picture that fails does not lose a run."""
    if state.history.local_rounds:
        state.history.save_local(directory / files.LOCAL)
    files.write_json(directory / files.SUMMARY, summary)
    if not figures:
        return []
    try:
        return make_figures(directory)
    except Exception:
        log.exception("the figures could not be drawn; `python -m fedexp.figures %s` tries again", directory)
        return []


def finished_summary(directory: Path) -> dict[str, Any] | None:
    """The summary of a run that has come to its end; None where there is more to do."""
    try:
        summary = json.loads((directory / files.SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ended = isinstance(summary, dict) and summary.get("status") in ("completed", "diverged")
    return summary if ended else None


def result_files(directory: Path, pictures: Sequence[Path]) -> list[Path]:
    names = (
        files.SUMMARY,
        files.ROUNDS,
        files.CLASSES,
        files.TASKS,
        files.CLIENTS,
        files.LOCAL,
        files.PARTITION,
        files.CONFIG,
    )
    return [directory / name for name in names if (directory / name).exists()] + list(pictures)
