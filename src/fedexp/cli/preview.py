"""List the jobs of a sweep and their states (`preview=true`), and check their configurations."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from fedexp.rundir import files
from fedexp.rundir.lock import is_occupied
from fedexp.rundir.reader import OVER, RunDirectory
from fedexp.training.checks import check, check_used
from fedexp.training.prepare import centralized_config, metrics_of
from fedexp.training.stopping import is_finished

log = logging.getLogger("fedexp")


@dataclass(frozen=True)
class Planned:
    """A job whose configuration has been composed, but which has not been started."""

    directory: Path
    # resolved; empty if the configuration has an error, which the job will report
    config: Mapping[str, Any]
    overrides: Sequence[str] = ()
    composed: Any = None  # the DictConfig, not resolved, including the node hydra


def show_plan(plan: Plan) -> int:
    """List the jobs of a sweep without running them, and return the exit code.

    Raises ConfigError if a job's configuration is invalid.
    """
    jobs = plan_jobs(plan.launches, plan.folders)
    show_jobs(jobs)
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


def job_status(job: Planned) -> str:
    """Return the state of a job, read from its directory.

    The state is completed, diverged, stopped, failed, damaged, running, `interrupted at <round>` or
    new.
    """
    if is_occupied(job.directory):
        return "running"
    run = RunDirectory(job.directory)
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


# --- what is printed


def show_jobs(jobs: Sequence[Planned]) -> None:
    """Print a line for each job, and a line `N jobs: D done, ...`."""
    names = name_jobs(jobs)
    width = max(map(len, names), default=0)
    counts: Counter[str] = Counter()
    for name, job in zip(names, jobs, strict=True):
        state = job_status(job)
        counts["done" if state in OVER else state.split()[0]] += 1
        print(f"{name:<{width}}  {state}")
    others = [f", {number} {kind}" for kind, number in sorted(counts.items()) if kind != "done"]
    print(f"{len(jobs)} jobs: {counts['done']} done{''.join(others)}")


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
