"""Run one job that Hydra starts: set its directory, record failures, return its exit code."""

import logging
import os
import platform
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.config.overrides import destinations, typed_overrides
from fedexp.core import console, interrupts
from fedexp.core.errors import (
    BAD_INPUT,
    FAILED,
    ConfigError,
    RunFailed,
    StorageError,
    lacks_memory,
    say,
    say_no_memory,
)
from fedexp.core.storage import (
    display_path,
    read_json,
    remove_if_empty,
    write_atomically,
    write_json,
)
from fedexp.rundir import files

if TYPE_CHECKING:
    from fedexp.training.job import Job


def run_job(config: Any) -> int:
    """Run one job of a run or sweep, and return its exit code."""
    from hydra.core.hydra_config import HydraConfig

    from fedexp.config.values import check_first

    console.install()
    log_to_console()
    hydra_config = HydraConfig.get()
    job = read_job(config, hydra_config)
    is_new = not has_run(job.directory)
    try:
        if "torch" not in sys.modules:
            check_first(job.config, job.overrides)
        from fedexp.training.run import train_run

        interrupts.release()
        summary = train_run(job)
    except KeyboardInterrupt:
        say_interrupted(job)
        raise
    except Exception as error:
        return report_failure(error, job, hydra_config, is_new)
    if summary.get("status") == "stopped" and job.sweep is None:
        from fedexp.training.stopping import stop_reason

        command = resume_command(job)
        print(f"\nThe run {stop_reason(summary)}. Continue with:  {command}", file=sys.stderr)
    return 0


def read_job(config: Any, hydra_config: Any) -> "Job":
    """Return the job that Hydra starts, and change to the command's working directory."""
    from hydra.types import RunMode

    from fedexp.cli.launchers import read_place
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


def make_job(config: Any, hydra_config: Any, directory: Path, **options: Any) -> "Job":
    """Return the job for a composed configuration. options: further fields of `Job`."""
    from fedexp.training.job import Job

    choices = to_plain(hydra_config.runtime.choices)
    return Job(
        config=config,
        directory=directory,
        overrides=to_plain(hydra_config.overrides.task),
        choices={key: str(value) for key, value in choices.items() if not key.startswith("hydra/")},
        **options,
    )


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


def say_interrupted(job: "Job") -> None:
    """Print the command that resumes the run, or a message if no state was saved."""
    from fedexp.rundir.checkpoint import saved_round

    if saved_round(job.directory) is not None:
        print(f"\nInterrupted. Continue with:  {resume_command(job)}", file=sys.stderr)
    else:
        print(
            "\nInterrupted before the first evaluation; there is nothing to resume.",
            file=sys.stderr,
        )


def resume_command(job: "Job") -> str:
    """Return the command that resumes a run.

    The command repeats `--config-dir`, since the run may need the user's config groups. It also
    repeats the overrides that set where the run is tracked (see `fedexp.config.trust`).
    """
    from fedexp.config.trust import user_folders

    folders = [f"--config-dir={display_path(folder)}" for folder in user_folders()]
    named = destinations(typed_overrides(job.overrides))
    return shlex.join(["fedexp", *folders, f"resume={display_path(job.directory)}", *named])


def continue_hint(job: "Job") -> str:
    """Return a message with the last saved round and the command that continues the run."""
    from fedexp.rundir.checkpoint import saved_round

    after, same = (
        saved_round(job.directory),
        job.sweep is not None or not has_started(job.directory),
    )
    command = "the same command" if same else resume_command(job)
    if after is None:
        return f"No state was saved; start again with:  {command}"
    return f"The state after round {after} was saved; continue with:  {command}"


class ToStderr(logging.Handler):
    """Write each line to the current sys.stderr. The live display may have redirected it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_to_console() -> None:
    """Set up console logging for this process."""
    logger = logging.getLogger("fedexp")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        handler = ToStderr(logging.INFO)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


# --- failures


def report_failure(error: Exception, job: "Job", hydra_config: Any, is_new: bool) -> int:
    """Record why a job failed, print one message, and return the exit code.

    is_new: whether the directory contained no run before the job started.
    """
    from fedexp.cli.sweeps import is_repeated
    from fedexp.rundir.lock import Occupied

    sweep = None if job.sweep is None else Path(hydra_config.sweep.dir)
    if isinstance(error, Occupied) and sweep is not None:
        return say(f"skipped: {error}", 0)
    if isinstance(error, ConfigError):
        if sweep is not None:
            record_failure(job, str(error), BAD_INPUT, sweep, is_new)
            return BAD_INPUT if is_repeated(str(error)) else say(str(error))
        if not isinstance(error, Occupied):
            remove_empty_log(job.directory, hydra_config)
            remove_if_empty(job.directory, Path(to_plain(hydra_config.runtime)["cwd"]))
        return say(str(error))
    if isinstance(error, StorageError):
        record_failure(job, str(error), FAILED, sweep)
        return say(f"the run failed: {error}\n{continue_hint(job)}", FAILED)
    if "fedexp.training.run" not in sys.modules and lacks_memory(error):
        return say_no_memory(error)  # torch could not be imported
    where = record_failure(job, "".join(traceback.format_exception(error)), FAILED, sweep)
    kind = "" if isinstance(error, RunFailed) else f"{type(error).__name__}: "
    print(f"\nfedexp: the run failed: {kind}{error}\n{where}", file=sys.stderr)
    return FAILED


def remove_empty_log(directory: Path, hydra_config: Any) -> None:
    """Remove the empty log file that Hydra creates before a job begins (hydra/job_logging)."""
    path = directory / f"{hydra_config.job.name}.log"
    if path.is_file() and not path.stat().st_size:
        path.unlink()


def record_failure(
    job: "Job", report: str, code: int, sweep: Path | None = None, ours: bool = True
) -> str:
    """Write error.txt and a summary with the status `failed` to the job's directory.

    Return a message that says where to find the report. A finished run is never overwritten.

    sweep: the sweep's directory. A note for the process that launched the sweep is written there.

    ours: whether the directory belongs to this job. False if it contains a different run.
    """
    directory, where = job.directory, ""
    error = report.strip().splitlines()[-1]
    if not ours or not directory.is_dir() or has_result(directory):
        where = f"No report was written to {directory}. The report is:\n{report}"
    else:
        chosen = {key: job.choices[key] for key in ("algorithm", "dataset") if key in job.choices}
        summary = {"status": "failed", "error": error, "exit_code": code, **chosen}
        try:
            write_json(directory / files.SUMMARY, summary)
            write_atomically(directory / files.ERROR, report.encode())
        except OSError as failure:
            where = f"{directory} cannot be written ({failure.strerror}). The report is:\n{report}"
    if sweep is not None and sweep.is_dir():
        from fedexp.cli.sweeps import note_failure

        note_failure(sweep, f"{directory}: {error}" if where else None, code)
    return where or f"The traceback is in {display_path(directory / files.ERROR)}"


def has_run(directory: Path) -> bool:
    """Return whether a directory contains a run. If so, a rejected job must not change it."""
    return (directory / files.CONFIG).exists() or has_started(directory) or has_result(directory)


def has_started(directory: Path) -> bool:
    """Return whether a run has written its first table to a directory.

    If so, a new run in this directory is rejected, but `resume=` continues the existing run.
    """
    return (directory / files.ROUNDS).exists()


def has_result(directory: Path) -> bool:
    """Return whether a directory has a summary that does not record a failure."""
    try:
        summary = read_json(directory / files.SUMMARY)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # an unreadable file; do not replace it
    return not isinstance(summary, dict) or summary.get("status") != "failed"
