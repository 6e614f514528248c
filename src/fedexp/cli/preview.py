"""List the jobs of a sweep (`preview=true`) and limit their time (`budget=<minutes>`).

The list shows which jobs are done. The time of each unfinished job is estimated from the most
similar run with measured rounds. With a budget, jobs start in the listed order until the time is
over.

The budget's deadline is added to the overrides of every job, so that it works with every launcher.
No job starts after the deadline. A running job saves its state and ends if the next round could not
be saved in time (fedexp.training.job).
"""

import logging
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from fedexp.analysis.sweep import expand
from fedexp.cli.arguments import Plan
from fedexp.cli.composition import isolated_hydra, search_path_override, without_hydra
from fedexp.config.build import build
from fedexp.config.options import conf_directory
from fedexp.config.run_names import run_name
from fedexp.config.settings import Stop
from fedexp.config.values import resolve
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import find_task_partitions
from fedexp.data.views import configured_views
from fedexp.rundir import files
from fedexp.rundir.evidence import kept_below
from fedexp.rundir.lock import is_occupied
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.revisions import value_of
from fedexp.rundir.run_reuse import (
    cell_key,
    find_reusable,
    finished_by_training,
    reused_run,
    tested_subjects,
)
from fedexp.rundir.schema import OVER
from fedexp.trackers.progress import duration
from fedexp.training.checks import check, check_used
from fedexp.training.job import DEADLINE
from fedexp.training.prepare import centralized_config, metrics_of
from fedexp.training.stopping import is_finished

log = logging.getLogger("fedexp")

# Two runs with equal values for these keys take equally long for a round.
WORK = (
    *("dataset.name", "model", "num_clients", "participation", "scenario._target_"),
    *("local.epochs", "local.batch_size", "local.optimizer", "hardware.precision"),
)


@dataclass(frozen=True)
class Planned:
    """A job whose configuration has been composed, but which has not been started."""

    directory: Path
    # resolved; empty if the configuration has an error, which the job will report
    config: Mapping[str, Any]
    overrides: Sequence[str] = ()
    composed: Any = None  # the DictConfig, not resolved, including the node hydra


class Measured(NamedTuple):
    """The time per round of an earlier run, and what a round of this run computes."""

    work: list[Any]
    algorithm: Any
    seconds: float  # median time per round
    tasks: int
    machine: str  # empty, or the machine named in a file that `--keep` wrote


def show_plan(plan: Plan) -> int:
    """List the jobs of a sweep without running them, and return the exit code.

    Raises ConfigError if a job's configuration is invalid.
    """
    jobs = plan_jobs(plan.launches, plan.folders)
    seconds = show_jobs(jobs, find_measured_runs(jobs))
    if plan.budget is not None:
        show_limit(seconds, plan.budget)
    check_jobs(jobs)
    return 0


def check_jobs(jobs: Sequence[Planned]) -> None:
    """Check the configuration of every job, without data.

    Raises ConfigError with all messages, and the jobs that each of them is about.
    """
    wrong: dict[str, list[str]] = {}
    for job, name in zip(jobs, name_jobs(jobs), strict=True):
        try:
            with isolated_hydra():
                check_job(job)
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(name)
        except Exception:
            log.debug("%s: cannot be checked", name, exc_info=True)  # the job reports the error
    if wrong:
        texts = [
            f"{message}\n  (in {len(names)} of {len(jobs)} jobs: {names[0]}"
            f"{', ...' if len(names) > 1 else ''})"
            for message, names in wrong.items()
        ]
        raise ConfigError("\n".join([*texts, "no job has been started"]))


def check_job(job: Planned) -> None:
    """Raise ConfigError if the configuration of a job is invalid."""
    HydraConfig.instance().set_config(job.composed)
    built = build(without_hydra(job.composed))
    built.tracker.check()
    check(centralized_config(built), metrics_of(built))
    if not job.directory.exists():  # a continued job may have options without effect
        check_used(built.values, job.overrides)


def show_state(plan: Plan) -> None:
    """Print the command's last line: how many jobs are done, begun and failed."""
    jobs = plan_jobs(plan.launches, plan.folders)
    found = Counter(state_kind(state) for _, state, _ in job_states(jobs))
    begun = found["interrupted"] + found["running"]
    counted = {"begun": begun, "failed": found["failed"]}
    others = [f", {number} {kind}" for kind, number in counted.items() if number]
    end = "; the same command continues the sweep" if found["done"] < len(jobs) else ""
    print(f"{found['done']} of {len(jobs)} done{''.join(others)}{end}")


def add_deadline(launches: Sequence[Sequence[str]], deadline: float) -> list[list[str]]:
    """Pass the deadline to the jobs of each multirun by adding an override."""
    return [[*each, f"+hydra.job.env_set.{DEADLINE}='{deadline:.3f}'"] for each in launches]


def plan_jobs(launches: Sequence[Sequence[str]], folders: Sequence[Path]) -> list[Planned]:
    """Compose the jobs of the multiruns, and return one job per run directory.

    folders: directories with the user's config groups.
    """
    search = search_path_override(folders)
    jobs: dict[Path, Planned] = {}
    conf = str(conf_directory().resolve())
    with isolated_hydra(), initialize_config_dir(conf, version_base="1.3"):
        for overrides in launches:
            # The default name of a sweep contains the time, so it is resolved only once.
            sweep: Path | None = None
            for job in expand(overrides):
                config = compose("config", overrides=[*job, *search], return_hydra_config=True)
                HydraConfig.instance().set_config(config)  # it says where own options are
                sweep = sweep or Path(str(config.hydra.sweep.dir))
                directory = sweep / run_name(config)
                values: dict[str, Any] = {}
                with suppress(ConfigError):
                    values = resolve(without_hydra(config))
                jobs.setdefault(directory, Planned(directory, values, job, config))
    return list(jobs.values())


# --- the states of jobs


def job_states(jobs: Sequence[Planned]) -> Iterator[tuple[Planned, str, str]]:
    """Yield (job, state, note) for each job.

    If a run from another sweep is used for the job, the note names that run.
    """
    finished = cache(finished_by_training)
    kept: dict[tuple[str, Any], list[frozenset[str]]] = {}
    for content in kept_below(folders_of(jobs)):
        kept.setdefault(setting_of(content["config"]), []).append(tests_of(content["config"]))
    for job in jobs:
        state, note = job_status(job), ""
        if state == "new" and job.config:
            multirun = job.directory.absolute().parent.parent
            tests = kept.get(setting_of(job.config), ())
            if other := find_reusable(job.directory, job.config, finished(multirun / "any")):
                state, note = RunDirectory(other).status, f"in {other.parent.name}/{other.name}"
            elif any(tests_of(job.config) <= each for each in tests):
                state = "kept"
        yield job, state, note


def job_status(job: Planned) -> str:
    """Return the state of a job, read from its directory.

    The state is completed, diverged, stopped, failed, damaged, running, `interrupted at <round>` or
    new.
    """
    if is_occupied(job.directory):
        return "running"
    run = RunDirectory(reused_run(job.directory) or job.directory)
    if run.has(files.SUMMARY):
        # a run that was ended by `stop` continues if the job has different limits
        stop = Stop(**(job.config.get("stop") or {}))
        if (
            run.status != "stopped"
            or not job.config
            or is_finished(run.summary, stop, resumed=False)
        ):
            return run.status
    return f"interrupted at {run.last_round or 0}" if run.has(files.ROUNDS) else "new"


def state_kind(state: str) -> str:
    """Return the category in which a state is counted, such as done or interrupted."""
    return "done" if state in OVER else state.split()[0]


def folders_of(jobs: Sequence[Planned]) -> list[Path]:
    """Return the directories to search for runs that are similar to these jobs."""
    return sorted({job.directory.parent for job in jobs} | {Path("multirun"), Path("outputs")})


def setting_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    return cell_key(config), config.get("seed")


def tests_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the views in which a run tests models, and the kinds of models that it tests."""
    return frozenset(configured_views(config)) | tested_subjects(config)


# --- the time that jobs take


def find_measured_runs(jobs: Sequence[Planned]) -> list[Measured]:
    """Return the durations of earlier runs in `folders_of(jobs)` that have at least one round.

    Run directories come first, then run files. Run files may come from another machine.
    """
    folders = folders_of(jobs)
    found = []
    for path in sorted({path for folder in folders for path in folder.rglob(files.ROUNDS)}):
        run = RunDirectory(path.parent)
        seconds = run.values("seconds")
        if run.config and seconds and not run.damaged:
            found.append(measure(run.config, seconds, 1 + len(find_task_partitions(run.directory))))
    for content in kept_below(folders):
        cells = (content["tables"].get(files.ROUNDS) or {}).get("seconds", "").split(",")
        tasks = sum("from_round" not in each["info"] for each in content.get("partitions", ())) or 1
        if seconds := [float(cell) for cell in cells if cell]:
            made_on = content["summary"].get("hardware") or {}
            hardware = {**content["config"].get("hardware", {}), **made_on}
            machine = str(made_on.get("name", "another machine"))
            found.append(
                measure(content["config"] | {"hardware": hardware}, seconds, tasks, machine)
            )
    return found


def measure(
    config: Mapping[str, Any], seconds: Sequence[float], tasks: int, machine: str = ""
) -> Measured:
    algorithm = value_of(config, "algorithm._target_")
    return Measured(work_of(config), algorithm, statistics.median(seconds), tasks, machine)


def work_of(config: Mapping[str, Any]) -> list[Any]:
    """Return the values that determine how long a round takes, except for the algorithm."""
    device = device_of(str(value_of(config, "hardware.device")))
    return [device, *(value_of(config, key) for key in WORK)]


def device_of(asked: str) -> str:
    """Return the type of device that `hardware.device` selects on this machine: cpu or cuda."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked.partition(":")[0]


def seconds_left(
    job: Planned, state: str, measured: Sequence[Measured]
) -> tuple[float | None, str]:
    """Estimate a job's remaining time from the most similar measured run.

    Return (seconds, a note about the estimate), or (None, "") if no run is similar. Similar runs
    that have a run directory are preferred to runs that only have a run file (`--keep`). Among
    equally preferred runs, those with the job's algorithm come first.
    """
    work, algorithm = work_of(job.config), value_of(job.config, "algorithm._target_")
    like = [run for run in measured if run.work == work]
    # with several tasks, the rounds of one task
    rounds = value_of(job.config, "scenario.rounds_per_task") or job.config.get("rounds")
    if not like or not isinstance(rounds, int):
        return None, ""
    run = min(like, key=lambda each: (bool(each.machine), each.algorithm != algorithm))
    done = int(state.rpartition(" ")[2]) if state.startswith("interrupted") else 0
    about = " (measured with another algorithm)" if run.algorithm != algorithm else ""
    if run.machine:
        about += f" (measured on {run.machine})"
    return max(rounds * run.tasks - done, 0) * run.seconds, about


# --- what is printed


def show_jobs(jobs: Sequence[Planned], measured: Sequence[Measured]) -> list[float | None]:
    """Print a line for each job, the total remaining time, and a line `N jobs: D done, ...`.

    Return the remaining seconds of each unfinished job in order. Unknown times are None.
    """
    counts: Counter[str] = Counter()
    seconds: list[float | None] = []
    names = name_jobs(jobs)
    width = max(map(len, names), default=0)
    for name, (job, state, note) in zip(names, job_states(jobs), strict=True):
        counts[state_kind(state)] += 1
        if state not in OVER:
            left, about = seconds_left(job, state, measured)
            seconds.append(left)
            note = "?" if left is None else f"{duration(left)}{about}"
        print(f"{name:<{width}}  {state:<18} {note}".rstrip())
    known = [each for each in seconds if each is not None]
    unknown = len(seconds) - len(known)
    total = duration(sum(known)) if known or not unknown else "?"
    more = (
        f", plus {unknown} jobs without an estimate (?); a run with rounds=1 provides one"
        if unknown
        else ""
    )
    print(f"remaining time: {total}, one job at a time (estimated from measured rounds){more}")
    others = [f", {number} {kind}" for kind, number in sorted(counts.items()) if kind != "done"]
    print(f"{len(jobs)} jobs: {counts['done']} done{''.join(others)}")
    return seconds


def name_jobs(jobs: Sequence[Planned]) -> list[str]:
    """Name each job by the overrides that differ between the jobs.

    If there are several sweeps, the name starts with the sweep's name. A job whose overrides do not
    differ is named by its directory.
    """
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
    several = len({job.directory.parent for job in jobs}) > 1
    names = []
    for job in jobs:
        own = [text for text in job.overrides if text not in shared and text[:6] != "hydra."]
        own = own or [job.directory.name]
        names.append(" ".join([job.directory.parent.name] * several + own))
    return names


def show_limit(seconds: Sequence[float | None], minutes: float) -> None:
    """Print how many jobs would finish within a budget.

    seconds: the remaining time of each unfinished job, or None if it is unknown. minutes: the
    budget.
    """
    known = [each for each in seconds if each is not None]
    whole = sum(total <= 60 * minutes for total in accumulate(known))
    unknown = len(seconds) - len(known)
    more = f"; no estimate for {unknown}" if unknown else ""
    print(
        f"budget {duration(60 * minutes)}, one job at a time in this order: {whole} of"
        f" {len(seconds)} remaining jobs would finish{more}"
    )
