"""`fedexp --multirun ... preview=true`: the jobs of a sweep, which are done, and what the others
will take."""

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedexp.analysis.sweep import expand
from fedexp.cli.arguments import literal
from fedexp.config.build import build
from fedexp.config.run_names import run_name
from fedexp.config.values import resolve
from fedexp.core.errors import ConfigError
from fedexp.core.settings import Stop
from fedexp.core.views import VIEWS, file_of, views_of
from fedexp.data.partitioned import later_partitions
from fedexp.rundir import files
from fedexp.rundir.elsewhere import alike, complete, finished_by_training, noted, subjects_of
from fedexp.rundir.evidence import kept_below
from fedexp.rundir.lock import is_occupied
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.wholeness import OVER as OVER
from fedexp.trackers.progress import duration
from fedexp.training.stopping import is_over

# What two runs must share for a round of one to take as long as a round of the other; then what may
# differ.
WORK = (
    "dataset",
    "model",
    "local.epochs",
    "local.batch_size",
    "local.optimizer",
    "num_clients",
    "participation",
    "scenario._target_",
    "hardware.device",
    "hardware.precision",
)
GROWING = (
    *(files.ROUNDS, files.CLIENTS, files.TASKS),
    *(file_of(name, view) for name in (files.CLASSES, files.LOCAL) for view in VIEWS),
)  # with every round


@dataclass(frozen=True)
class Planned:
    """A job that has been composed but not started."""

    directory: Path
    config: Mapping[str, Any]
    overrides: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        """Return the number of rounds of one task, where there are several."""
        # by default an interpolation of `rounds`
        own = (self.config.get("scenario") or {}).get("rounds_per_task")
        rounds = own if isinstance(own, int) else self.config.get("rounds")
        return rounds if isinstance(rounds, int) else 0

    @cached_property
    def resolved(self) -> Mapping[str, Any] | None:
        """Return the configuration without interpolations; None with a fault, which the job itself
        will name."""
        try:
            return resolve(OmegaConf.create(dict(self.config)))  # type: ignore[arg-type]
        except ConfigError:
            return None

    @cached_property
    def work(self) -> list[Any]:
        return work_of(self.config)


@dataclass(frozen=True)
class Measured:
    """A run that has been made."""

    config: Mapping[str, Any]
    seconds: float  # of a round, median
    tasks: int
    fixed: int  # bytes of its files but those that grow
    per_round: float  # bytes by which these grow
    per_client: float  # bytes of a client's kept state
    # bytes at the peak, of all its processes; None where the run has not noted it
    memory: int | None
    # of a run of which only the file of --keep is here, whose disk is not known; else ""
    hardware: str = ""

    @cached_property
    def work(self) -> list[Any]:
        return work_of(self.config)


@dataclass(frozen=True)
class Estimate:
    """Estimate of what a job will take."""

    seconds: float
    disk: float | None  # bytes
    memory: int | None  # bytes
    about: str  # "" where it stems from a run of the same algorithm here


def plan(lists: Sequence[Sequence[str]], conf: Path, extra: Sequence[Path]) -> list[Planned]:
    """Plan all jobs of these multiruns, each directory once."""
    folders = ",".join(literal(f"file://{folder.resolve()}") for folder in extra)
    search = [f"hydra.searchpath=[{folders}]"] if extra else []
    jobs: dict[Path, Planned] = {}
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        for overrides in lists:
            sweep: Path | None = None  # by default its name is the time: once, not for each job
            for job in expand(overrides):
                config = compose("config", overrides=[*job, *search], return_hydra_config=True)
                sweep = sweep or Path(str(config.hydra.sweep.dir))
                directory = sweep / run_name(config)
                own = {str(key): value for key, value in config.items() if key != "hydra"}
                if type(own.get("rounds")) is not int or own["rounds"] < 1:
                    # says what is wrong; without a number of rounds nothing is estimated
                    build(OmegaConf.create(own))
                plain = OmegaConf.to_container(OmegaConf.create(own), resolve=False)
                jobs.setdefault(directory, Planned(directory, plain, tuple(job)))  # type: ignore[arg-type]
    return list(jobs.values())


def runs_elsewhere(jobs: Sequence[Planned]) -> dict[Path, Path]:
    """The directory of each job that a finished run of another sweep stands for -> that of the
    run."""
    found: dict[Path, Path] = {}
    for folder in dict.fromkeys(job.directory.absolute().parent.parent for job in jobs):
        finished = finished_by_training(folder / "any")
        for job in jobs if finished else ():
            if job.resolved is None or job.directory.absolute().parent.parent != folder:
                continue
            if other := complete(job.directory, job.resolved, finished):
                found[job.directory] = other
    return found


def kept_jobs(jobs: Sequence[Planned], kept: Sequence[Mapping[str, Any]]) -> set[Path]:
    """The directories of the jobs whose run is among these contents of files of `--keep`, and
    tested all that the job tests: their values are in the tables already."""
    tested: dict[tuple[str, Any], list[frozenset[str]]] = {}
    for config in (value["config"] for value in kept):
        tested.setdefault((alike(config), config.get("seed")), []).append(tests_of(config))
    found = set()
    for job in jobs:
        if (config := job.resolved) is not None:
            others = tested.get((alike(config), config.get("seed")), ())
            if any(tests_of(config) <= other for other in others):
                found.add(job.directory)
    return found


def tests_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the test views of a configuration and whose models it tests."""
    return frozenset(views_of(config)) | subjects_of(config)


def status(job: Planned) -> str:
    """completed, diverged, failed, damaged, running, `interrupted at r`, or new. A run of another
    sweep may stand for it."""
    if is_occupied(job.directory):
        return "running"
    directory = noted(job.directory) or job.directory
    run = RunDirectory(directory)
    if run.has(files.SUMMARY) and not is_to_go_on(job, run):
        return run.status
    return f"interrupted at {run.last_round or 0}" if run.has(files.ROUNDS) else "new"


def is_to_go_on(job: Planned, run: RunDirectory) -> bool:
    """Return whether a run ended by its options, such as `stop.minutes`, and those of the job let
    it go on."""
    if run.status != "stopped" or job.resolved is None:
        return False
    return not is_over(run.summary, Stop(**(job.resolved.get("stop") or {})), resumed=False)


def known_runs(jobs: Sequence[Planned]) -> tuple[list[Measured], set[Path]]:
    """(what is measured below the working directory and the directories of these jobs,
    `kept_jobs`)."""
    folders = sorted({job.directory.parent for job in jobs} | {Path("multirun"), Path("outputs")})
    kept = list(kept_below(folders))
    return [*measurements(folders), *measure_kept(kept)], kept_jobs(jobs, kept)


def measurements(folders: Sequence[Path]) -> list[Measured]:
    """Return the measurements of all runs below these folders that have finished a round."""
    found = []
    for path in sorted(
        file for folder in folders if folder.is_dir() for file in folder.rglob(files.ROUNDS)
    ):
        run = RunDirectory(path.parent)
        seconds = run.values("seconds")
        if not run.config or not seconds or run.damaged:
            continue
        try:
            work_of(run.config)
        except OmegaConfBaseException:
            continue
        found.append(measure(run, statistics.median(seconds)))
    return found


def measure(run: RunDirectory, seconds: float) -> Measured:
    """A run with at least one round, of so many seconds each."""
    directory = run.directory
    sizes = {
        file.relative_to(directory): file.stat().st_size
        for file in directory.rglob("*")
        if file.is_file()
    }
    states = [size for file, size in sizes.items() if file.is_relative_to(files.CLIENT_STATES)]
    growing = sum(size for file, size in sizes.items() if str(file) in GROWING)
    return Measured(
        config=run.config,
        seconds=seconds,
        tasks=1 + len(later_partitions(directory)),
        fixed=sum(sizes.values()) - growing - sum(states),
        per_round=growing / (run.last_round or 1),
        per_client=sum(states) / len(states) if states else 0.0,
        memory=(run.summary.get("peak_memory") or {}).get("host"),
    )


def measure_kept(kept: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Return what the files of `--keep` say of the time and memory of their runs."""
    found = []
    for value in kept:
        cells = (value["tables"].get(files.ROUNDS) or {}).get("seconds", "").split(",")
        seconds, hardware = (
            [float(cell) for cell in cells if cell],
            value["summary"].get("hardware") or {},
        )
        if seconds:
            used = {
                "device": hardware.get("device", "cpu"),
                "precision": hardware.get("precision", "fp32"),
            }
            found.append(
                Measured(
                    config={
                        **value["config"],
                        "hardware": {**value["config"].get("hardware", {}), **used},
                    },
                    seconds=statistics.median(seconds),
                    tasks=sum(
                        "from_round" not in each["info"] for each in value.get("partitions", ())
                    )
                    or 1,
                    fixed=0,
                    per_round=0.0,
                    per_client=0.0,
                    memory=(value["summary"].get("peak_memory") or {}).get("host"),
                    hardware=str(hardware.get("name", "another machine")),
                )
            )
    return found


def closest(job: Planned, measured: Sequence[Measured]) -> tuple[Measured | None, bool]:
    """Return the closest run as (a run with the same work, whether its algorithm is the same too).
    Runs that are here come before those of which only a file is kept: these may be from another
    machine."""
    like = [run for run in measured if run.work == job.work]
    like = [run for run in like if not run.hardware] or like
    same = [
        run for run in like if target(run.config, "algorithm") == target(job.config, "algorithm")
    ]
    return next(iter(same or like), None), bool(same)


def work_of(config: Mapping[str, Any]) -> list[Any]:
    """Return what decides the cost of a round, but the algorithm."""
    values = OmegaConf.create(dict(config))
    chosen = [OmegaConf.select(values, key, throw_on_resolution_failure=False) for key in WORK]
    chosen[0] = OmegaConf.select(values, "dataset.name", throw_on_resolution_failure=False)
    chosen[-2] = device_of(str(chosen[-2]))
    return [
        OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for value in chosen
    ]


def device_of(asked: str) -> str:
    """Return what `hardware.device` is on this machine: cpu or cuda, whichever GPU it is."""
    return (
        ("cuda" if torch.cuda.is_available() else "cpu")
        if asked == "auto"
        else asked.partition(":")[0]
    )


def target(config: Mapping[str, Any], group: str) -> str:
    return str((config.get(group) or {}).get("_target_"))


def estimate(job: Planned, state: str, measured: Sequence[Measured]) -> Estimate | None:
    """Estimate from the closest run; None without one."""
    run, same = closest(job, measured)
    if run is None:
        return None
    rounds = job.rounds * run.tasks
    done = int(state.rpartition(" ")[2]) if state.startswith("interrupted") else 0
    disk = (
        run.fixed + run.per_round * rounds + run.per_client * int(job.config.get("num_clients", 0))
    )
    about = "".join(
        [" (another algorithm's rounds)"] * (not same)
        + [f" (on {run.hardware})"] * bool(run.hardware)
    )
    return Estimate(
        max(rounds - done, 0) * run.seconds, None if run.hardware else disk, run.memory, about
    )


def show(
    jobs: Sequence[Planned],
    measured: Sequence[Measured],
    shared: Collection[Path] = (),
    finished: Mapping[Path, Path] = {},
    kept: Collection[Path] = (),
) -> None:
    """Print a line a job, what is left in all, and as the last line `N jobs: D done, ...`.

    shared: directories of jobs that another job of these stands for; finished: of `runs_elsewhere`;
    kept: of `kept_jobs`."""
    counts: Counter[str] = Counter()
    found: list[Estimate] = []
    unknown = 0
    names = names_of(jobs)
    for job, name in zip(jobs, names, strict=True):
        state, text = "shared" if job.directory in shared else status(job), ""
        if state not in OVER and (other := finished.get(job.directory)) is not None:
            state, text = RunDirectory(other).status, f"in {other.parent.name}/{other.name}"
        if state == "new" and job.directory in kept:
            state = "kept"
        counts["done" if state in OVER else state.split()[0]] += 1
        if state not in (*OVER, "shared"):
            if each := estimate(job, state, measured):
                found.append(each)
                sizes = f"disk {gigabytes(each.disk)}, memory {gigabytes(each.memory)}"
                text = f"{duration(each.seconds):<9} {sizes}{each.about}"
            else:
                text, unknown = "?", unknown + 1
        print(f"{name:<{max(map(len, names))}}  {state:<18} {text}".rstrip())
    if unknown:
        print(
            f"no measured round for {unknown} of them (?): a run with rounds=1 below here gives an"
            " estimate"
        )
    if found or not unknown:
        show_sum(found, " and what is marked ?" if unknown else "")
    else:
        print("left: ? (no measured round)")
    others = ", ".join(
        f"{number} {name}" for name, number in sorted(counts.items()) if name != "done"
    )
    print(f"{len(jobs)} jobs: {counts['done']} done" + (f", {others}" if others else ""))


def names_of(jobs: Sequence[Planned]) -> list[str]:
    """Name each job by the overrides that not all of them share, and by its sweep where there are
    several; a single job by its directory."""
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
    several = len({job.directory.parent for job in jobs}) > 1
    names = []
    for job in jobs:
        own = [text for text in job.overrides if text not in shared and text[:6] != "hydra."]
        own = own or [job.directory.name]
        names.append(" ".join([job.directory.parent.name] * several + own))
    return names


def show_sum(found: Sequence[Estimate], more: str) -> None:
    """Print time and disk of these jobs together, and the memory of the largest."""
    seconds, disks = (
        sum(each.seconds for each in found),
        [each.disk for each in found if each.disk is not None],
    )
    disk = sum(disks) if len(disks) == len(found) else None
    peak = max((each.memory for each in found if each.memory), default=None)
    print(
        f"left: {duration(seconds)} one after the other, {gigabytes(disk)} of disk{more} (from"
        " measured rounds, files)"
    )
    if found:
        print(
            f"memory of one job at a time: {gigabytes(peak)}, "
            + ("the measured peak" if peak else "not measured yet")
        )


def gigabytes(size: float | None) -> str:
    return "?" if size is None else f"{size / 1e9:.2f} GB"
