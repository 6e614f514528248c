"""The jobs of a sweep: which are done, and the time that the others take by the nearest measured
run (`preview=true`); their start in this order until the time is over (`budget=<minutes>`).

The moment at which a budget is over travels with the overrides of every job, so that each launcher
knows it. After that moment no job starts, and a running one saves its state and ends before the
round that it could not save in time (fedexp.training.job).
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from fedexp.analysis.sweep import expand
from fedexp.cli.arguments import Plan
from fedexp.cli.composition import search_path, without_hydra
from fedexp.config.options import conf_directory
from fedexp.config.run_names import run_name
from fedexp.config.settings import Stop
from fedexp.config.values import resolve
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import later_partitions
from fedexp.data.views import views_of
from fedexp.rundir import files
from fedexp.rundir.elsewhere import (
    cell_key,
    complete,
    finished_by_training,
    noted,
    subjects_of,
)
from fedexp.rundir.evidence import kept_below
from fedexp.rundir.lock import is_occupied
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.revisions import value_of
from fedexp.rundir.schema import OVER
from fedexp.trackers.progress import duration
from fedexp.training.job import DEADLINE
from fedexp.training.stopping import is_over

# A round of one run takes as long as a round of another when these values are equal.
WORK = (
    *("dataset.name", "model", "num_clients", "participation", "scenario._target_"),
    *("local.epochs", "local.batch_size", "local.optimizer", "hardware.precision"),
)


@dataclass(frozen=True)
class Planned:
    """A job that has been composed but not started."""

    directory: Path
    # resolved; empty where it has a fault, which the job itself reports
    config: Mapping[str, Any]
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Measured:
    """A run with at least one round."""

    work: list[Any]
    algorithm: Any
    seconds: float  # of a round, median
    tasks: int
    machine: str = ""  # of a run that only a file of `--keep` tells of


def show_plan(plan: Plan) -> int:
    """List the jobs of a sweep and run none; return the exit code."""
    jobs = planned(plan.launches, plan.folders)
    seconds = show(jobs, known_runs(jobs))
    if plan.budget is not None:
        show_limit(seconds, plan.budget)
    return 0


def planned(launches: Sequence[Sequence[str]], folders: Sequence[Path]) -> list[Planned]:
    """Compose all jobs of these multiruns, each directory once. folders: the user's own groups."""
    search = search_path(folders)
    jobs: dict[Path, Planned] = {}
    with initialize_config_dir(str(conf_directory().resolve()), version_base="1.3"):
        for overrides in launches:
            sweep: Path | None = None  # by default its name is the time: once, not for each job
            for job in expand(overrides):
                config = compose("config", overrides=[*job, *search], return_hydra_config=True)
                sweep = sweep or Path(str(config.hydra.sweep.dir))
                directory = sweep / run_name(config)
                values: dict[str, Any] = {}
                with suppress(ConfigError):
                    values = resolve(without_hydra(config))
                jobs.setdefault(directory, Planned(directory, values, job))
    return list(jobs.values())


def states(jobs: Sequence[Planned]) -> Iterator[tuple[Planned, str, str]]:
    """Yield each job with its state and, where a run of another sweep stands for it, which one."""
    tested = cache(partial(tested_by_kept, folders_of(jobs)))
    finished = cache(finished_by_training)
    for job in jobs:
        state, note = status(job), ""
        if state == "new" and job.config:
            multirun = job.directory.absolute().parent.parent
            if other := complete(job.directory, job.config, finished(multirun / "any")):
                state, note = RunDirectory(other).status, f"in {other.parent.name}/{other.name}"
            else:
                kept = tested().get((cell_key(job.config), job.config.get("seed")), ())
                state = "kept" if any(tests_of(job.config) <= each for each in kept) else state
        yield job, state, note


def status(job: Planned) -> str:
    """Return completed, diverged, stopped, failed, damaged, running, `interrupted at r`, or new, as
    the directory of the job says."""
    if is_occupied(job.directory):
        return "running"
    run = RunDirectory(noted(job.directory) or job.directory)
    if run.has(files.SUMMARY):
        # a run that `stop` has ended is continued by a job with other limits
        stop = Stop(**(job.config.get("stop") or {}))
        if run.status != "stopped" or not job.config or is_over(run.summary, stop, resumed=False):
            return run.status
    return f"interrupted at {run.last_round or 0}" if run.has(files.ROUNDS) else "new"


def folders_of(jobs: Sequence[Planned]) -> list[Path]:
    """Return the directories below which there may be runs that are like these jobs."""
    return sorted({job.directory.parent for job in jobs} | {Path("multirun"), Path("outputs")})


def tested_by_kept(folders: Sequence[Path]) -> dict[tuple[str, Any], list[frozenset[str]]]:
    """Return, by setting and seed, what was tested in runs that files of `--keep` tell of."""
    found: dict[tuple[str, Any], list[frozenset[str]]] = {}
    for content in kept_below(folders):
        config = content["config"]
        found.setdefault((cell_key(config), config.get("seed")), []).append(tests_of(config))
    return found


def tests_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the test views of a configuration and whose models it tests."""
    return frozenset(views_of(config)) | subjects_of(config)


def known_runs(jobs: Sequence[Planned]) -> list[Measured]:
    """Return the runs with a round below the working directory and the directories of these jobs;
    first the run directories, then the files of `--keep`, which may be from another machine."""
    folders = folders_of(jobs)
    paths = {path for folder in folders for path in folder.rglob(files.ROUNDS)}
    found = []
    for run in (RunDirectory(path.parent) for path in sorted(paths)):
        seconds = run.values("seconds")
        if run.config and seconds and not run.damaged:
            tasks = 1 + len(later_partitions(run.directory))
            found.append(measure(run.config, seconds, tasks))
    for content in kept_below(folders):
        cells = (content["tables"].get(files.ROUNDS) or {}).get("seconds", "").split(",")
        partitions = [each["info"] for each in content.get("partitions", ())]
        tasks = sum("from_round" not in info for info in partitions) or 1
        if seconds := [float(cell) for cell in cells if cell]:
            made_on = content["summary"].get("hardware") or {}
            hardware = {**content["config"].get("hardware", {}), **made_on}
            config = {**content["config"], "hardware": hardware}
            machine = str(made_on.get("name", "another machine"))
            found.append(measure(config, seconds, tasks, machine))
    return found


def measure(
    config: Mapping[str, Any], seconds: Sequence[float], tasks: int, machine: str = ""
) -> Measured:
    algorithm = value_of(config, "algorithm._target_")
    return Measured(work_of(config), algorithm, statistics.median(seconds), tasks, machine)


def work_of(config: Mapping[str, Any]) -> list[Any]:
    """Return what decides the time of a round, but for the algorithm."""
    device = device_of(str(value_of(config, "hardware.device")))
    return [device, *(value_of(config, key) for key in WORK)]


def device_of(asked: str) -> str:
    """Return what `hardware.device` is on this machine: cpu or cuda, whichever GPU it is."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked.partition(":")[0]


def seconds_left(
    job: Planned, state: str, measured: Sequence[Measured]
) -> tuple[float, str] | None:
    """Return (seconds, what to know of them) by the nearest measured run: one that is here before
    one in a file of `--keep`, then one of the same algorithm; None where there is none."""
    work, algorithm = work_of(job.config), value_of(job.config, "algorithm._target_")
    like = [run for run in measured if run.work == work]
    # the rounds of one task, where there are several
    rounds = value_of(job.config, "scenario.rounds_per_task") or job.config.get("rounds")
    if not like or not isinstance(rounds, int):
        return None
    run = min(like, key=lambda each: (bool(each.machine), each.algorithm != algorithm))
    done = int(state.rpartition(" ")[2]) if state.startswith("interrupted") else 0
    about = " (another algorithm's rounds)" if run.algorithm != algorithm else ""
    if run.machine:
        about += f" (on {run.machine})"
    return max(rounds * run.tasks - done, 0) * run.seconds, about


def show(jobs: Sequence[Planned], measured: Sequence[Measured]) -> list[float | None]:
    """Print a line for each job, the time that is left, and `N jobs: D done, ...`. Return the
    seconds of the jobs that are not done, in their order, None where unknown."""
    counts: Counter[str] = Counter()
    seconds: list[float | None] = []
    names = names_of(jobs)
    width = max(map(len, names), default=0)
    for name, (job, state, note) in zip(names, states(jobs), strict=True):
        counts[kind_of(state)] += 1
        if state not in OVER:
            left, about = seconds_left(job, state, measured) or (None, "")
            seconds.append(left)
            note = "?" if left is None else f"{duration(left)}{about}"
        print(f"{name:<{width}}  {state:<18} {note}".rstrip())
    known = [each for each in seconds if each is not None]
    unknown = len(seconds) - len(known)
    total = duration(sum(known)) if known or not unknown else "?"
    more = f", and {unknown} jobs (?); a run with rounds=1 gives an estimate" if unknown else ""
    print(f"left: {total} one after the other (from measured rounds){more}")
    others = [f", {number} {kind}" for kind, number in sorted(counts.items()) if kind != "done"]
    print(f"{len(jobs)} jobs: {counts['done']} done{''.join(others)}")
    return seconds


def kind_of(state: str) -> str:
    """Return the word by which jobs in a state are counted."""
    return "done" if state in OVER else state.split()[0]


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


def limited(launches: Sequence[Sequence[str]], deadline: float) -> list[list[str]]:
    """Return the overrides of each multirun with those that hand the deadline to its jobs."""
    return [[*each, f"+hydra.job.env_set.{DEADLINE}='{deadline:.3f}'"] for each in launches]


def show_limit(seconds: Sequence[float | None], minutes: float) -> None:
    """Print how far a budget goes. seconds: of the jobs that are left, None where unknown."""
    known = [each for each in seconds if each is not None]
    whole = sum(total <= 60 * minutes for total in accumulate(known))
    unknown = len(seconds) - len(known)
    more = f", {unknown} not measured" if unknown else ""
    print(
        f"budget {duration(60 * minutes)}, one job at a time in this order: {whole} of"
        f" {len(seconds)} that are left would be complete{more}"
    )


def show_state(plan: Plan) -> None:
    """Print the last line of the command: how many jobs are done, and whether there are more."""
    jobs = planned(plan.launches, plan.folders)
    found = Counter(kind_of(state) for _, state, _ in states(jobs))
    begun = found["interrupted"] + found["running"]
    counted = {"begun": begun, "failed": found["failed"]}
    others = [f", {number} {kind}" for kind, number in counted.items() if number]
    end = "; the same command continues" if found["done"] < len(jobs) else ""
    print(f"{found['done']} of {len(jobs)} done{''.join(others)}{end}")
