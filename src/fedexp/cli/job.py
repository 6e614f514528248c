"""Run one job that Hydra starts: set its directory, record failures, return its exit code."""

import os
import platform
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.config.options import ALIASES
from fedexp.core import console, interrupts
from fedexp.core.console import log_to_console
from fedexp.core.errors import (
    BAD_INPUT,
    FAILED,
    ConfigError,
    JobFailed,
    RankDied,
    RunFailed,
    StorageError,
    describe,
    lacks_memory,
    reason_of,
    say,
    say_no_memory,
)
from fedexp.core.storage import (
    display_path,
    remove_if_empty,
    write_atomically,
    write_json,
)
from fedexp.rundir import files

if TYPE_CHECKING:
    from hydra.conf import HydraConf
    from omegaconf import DictConfig

    from fedexp.training.job import Job, Place


def run_job(config: "DictConfig", command: Sequence[str]) -> None:
    """Run one job of a run or sweep.

    command: the whole command. Raises JobFailed if the job fails, after the error was printed and
    recorded.
    """
    from hydra.core.hydra_config import HydraConfig

    console.install()
    log_to_console()
    hydra_config = HydraConfig.get()
    try:
        job = replace(read_job(config, hydra_config), command=command)
    except ConfigError as error:
        remove_output(Path(to_plain(hydra_config.runtime)["output_dir"]), hydra_config)
        raise JobFailed(str(error), say(str(error))) from error
    try:
        from fedexp.training.run import train_run

        interrupts.release()
        summary = train_run(job)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        say_how_to_continue(job)
        raise
    except Exception as error:
        if code := report_failure(error, job, hydra_config):
            raise JobFailed(first_line(error), code) from error
        return
    if summary.get("status") == "stopped" and job.sweep is None:
        from fedexp.training.callbacks import PATIENCE, stop_reason

        command = resume_command(job)
        if (summary.get("stopped") or {}).get("by") == PATIENCE:
            command += " stop.patience=null"  # otherwise, nothing would be left to do
        print(f"\nThe run {stop_reason(summary)}. Continue with:  {command}", file=sys.stderr)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, after the error's class if it is unexpected."""
    is_expected = isinstance(error, ConfigError | RunFailed | StorageError)
    return reason_of(error) if is_expected else describe(error)


def read_job(config: "DictConfig", hydra_config: "HydraConf") -> "Job":
    """Return the job that Hydra starts, and change to the command's working directory."""
    from hydra.types import RunMode

    from fedexp.training.job import Place

    runtime = to_plain(hydra_config.runtime)
    change_directory(Path(runtime["cwd"]))
    in_sweep = hydra_config.mode == RunMode.MULTIRUN
    return make_job(
        config,
        hydra_config,
        Path(runtime["output_dir"]),
        sweep=Path(hydra_config.sweep.dir).name if in_sweep else None,
        place=read_place(hydra_config.launcher, hydra_config.job.num) if in_sweep else Place(),
        in_search=in_sweep and "n_trials" in hydra_config.sweeper,
    )


def read_place(launcher: Mapping[str, Any], number: int) -> "Place":
    """Return the resources for one job of a sweep.

    launcher: the job's node `hydra.launcher`. number: the job's number.
    """
    from fedexp.engine.hardware import cores
    from fedexp.training.job import Place

    match str(launcher["_target_"]).rpartition(".")[2]:
        case "BasicLauncher":
            return Place(number=number)
        case "JoblibLauncher":
            at_once = launcher["n_jobs"] if launcher["n_jobs"] > 0 else cores()
            return Place(max(cores() // at_once, 1), number, alone=at_once == 1)
        case "LocalLauncher":
            return Place(launcher["cpus_per_task"], number)
        case "SlurmLauncher":
            return Place(launcher["cpus_per_task"])
        case "RayLauncher":
            return Place(max(int(launcher["ray"]["remote"].get("num_cpus") or 1), 1), alone=False)
        case _:  # an unknown plugin
            return Place(alone=False)


def make_job(
    config: "DictConfig", hydra_config: "HydraConf", directory: Path, **options: Any
) -> "Job":
    """Return the job for a composed configuration. options: further fields of `Job`."""
    from fedexp.cli.resumed import resumed_job
    from fedexp.training.job import Job

    choices = {
        group: str(name)
        for group, name in to_plain(hydra_config.runtime.choices).items()
        if not group.startswith("hydra/")
    }
    choices["partition"] = ALIASES.get(choices["partition"], choices["partition"])
    overrides = to_plain(hydra_config.overrides.task)
    job = Job(config=config, directory=directory, overrides=overrides, choices=choices, **options)
    return job if config.get("resume") is None else resumed_job(job)


def to_plain(node: Any) -> Any:
    """Convert a node of Hydra's configuration to plain values without resolving interpolations.

    Otherwise, `${` in a path would be read as an interpolation.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=False)


def change_directory(directory: Path) -> None:
    """Change to the directory where the command was started.

    Relative paths refer to this directory, but Ray starts jobs in a different one.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise RuntimeError(
            f"{directory}: does not exist on {platform.node()}; all machines in a sweep need a"
            " shared file system"
        ) from error


# --- messages


def say_how_to_continue(job: "Job") -> None:
    """Print the command that continues a run. A sweep prints its own command."""
    from fedexp.rundir.checkpoint import saved_round
    from fedexp.rundir.reader import RunDirectory

    if job.sweep is not None:
        return
    if not RunDirectory(job.directory).begun:
        print("There is nothing to resume.", file=sys.stderr)
        return
    after = saved_round(job.directory)
    kept = "No state was saved. Start again with"
    if after is not None:
        kept = f"The state after round {after} was saved. Continue with"
    print(f"{kept}:  {resume_command(job)}", file=sys.stderr)


def resume_command(job: "Job") -> str:
    """Return the command that resumes a run, with the directories of the user's config groups."""
    from fedexp.config.composition import path_override
    from fedexp.config.values import user_folders

    folders = [f"--config-dir={display_path(folder)}" for folder in user_folders()]
    return shlex.join(["fedexp", *folders, path_override("resume", job.directory)])


# --- failures


def report_failure(error: Exception, job: "Job", hydra_config: "HydraConf") -> int:
    """Record why a job failed, print one message, and return the exit code."""
    from fedexp.rundir.lock import Occupied

    if isinstance(error, Occupied) and job.sweep is not None:
        return say(f"skipped: {error}", 0)
    if isinstance(error, ConfigError):
        if job.sweep is not None:
            record_failure(job, error, str(error), BAD_INPUT)
        elif not isinstance(error, Occupied):
            remove_output(job.directory, hydra_config)
        return say(str(error))
    if isinstance(error, StorageError):
        record_failure(job, error, str(error), FAILED)
        say(f"the run failed: {error}")
        say_how_to_continue(job)
        return FAILED
    if "fedexp.training.run" not in sys.modules and lacks_memory(error):
        return say_no_memory(error)  # torch could not be imported
    where = record_failure(job, error, "".join(traceback.format_exception(error)), FAILED)
    kind = "" if isinstance(error, RunFailed) else f"{type(error).__name__}: "
    print(f"\nfedexp: the run failed: {kind}{error}\n{where}", file=sys.stderr)
    if isinstance(error, RankDied):
        say_how_to_continue(job)
    return FAILED


def remove_output(directory: Path, hydra_config: "HydraConf") -> None:
    """Remove the empty directory and log file that Hydra creates before a job begins."""
    path = directory / f"{hydra_config.job.name}.log"
    if path.is_file() and not path.stat().st_size:
        path.unlink()
    remove_if_empty(directory, Path(to_plain(hydra_config.runtime)["cwd"]))


def record_failure(job: "Job", error: Exception, report: str, code: int) -> str:
    """Write error.txt and a summary with the status `failed` to the job's directory.

    Return a message that says where to find the report. A finished run is never overwritten, and no
    run by a job that was rejected before it started.
    """
    from fedexp.rundir.reader import RunDirectory

    directory, where = job.directory, ""
    run = RunDirectory(directory)
    keeps = run.begun if isinstance(error, ConfigError) else run.has_result
    if keeps or not directory.is_dir():
        where = f"No report was written to {directory}. The report is:\n{report}"
    else:
        chosen = {key: job.choices[key] for key in ("algorithm", "dataset") if key in job.choices}
        summary = {"status": "failed", "error": first_line(error), "exit_code": code, **chosen}
        try:
            write_json(directory / files.SUMMARY, summary)
            write_atomically(directory / files.ERROR, report.encode())
        except OSError as failure:
            where = f"{directory} cannot be written ({failure.strerror}). The report is:\n{report}"
    return where or f"The traceback is in {display_path(directory / files.ERROR)}"
