"""One job as Hydra hands it over: where it runs, its exit code, and what is left of it when it fails."""

import os
import platform
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp import interrupts
from fedexp.errors import BAD_INPUT, FAILED, ConfigError, StorageError, say
from fedexp.files import shorten

if TYPE_CHECKING:
    from fedexp.job import Job


def run_job(config: Any) -> int:
    """One job of a run or sweep; the exit code that it stands for."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    log_to_console()
    from fedexp.checkpoint import kept
    from fedexp.job import Job, execute
    from fedexp.launchers import Place, place_of
    from fedexp.lock import Occupied

    hydra_config = HydraConfig.get()
    go_to(Path(hydra_config.runtime.cwd))
    directory, in_sweep = Path(hydra_config.runtime.output_dir), hydra_config.mode == RunMode.MULTIRUN
    job = Job(
        config=config,
        directory=directory,
        # Not resolved: an override may itself be an interpolation.
        overrides=OmegaConf.to_container(hydra_config.overrides.task, resolve=False),  # type: ignore[arg-type]
        choices={k: str(v) for k, v in hydra_config.runtime.choices.items() if not k.startswith("hydra/")},
        sweep=Path(hydra_config.sweep.dir).name if in_sweep else None,
        place=place_of(hydra_config.launcher) if in_sweep else Place(),
    )
    try:
        interrupts.release()
        execute(job)
        return 0
    except Occupied as error:
        return say(f"skipped: {error}", 0) if in_sweep else say(str(error))
    except ConfigError as error:
        if in_sweep:
            record_failure(job, str(error), BAD_INPUT)
        else:
            remove_hydras(directory, hydra_config)
            remove_if_empty(directory, Path(hydra_config.runtime.cwd))
        return say(str(error))
    except KeyboardInterrupt:
        if kept(directory) is not None:
            print(f"\nInterrupted. Go on with:  fedexp resume={shorten(directory)}", file=sys.stderr)
        else:
            print("\nInterrupted before the first evaluation; nothing to resume.", file=sys.stderr)
        raise
    except StorageError as error:
        after = kept(directory)
        again = "the same command" if in_sweep or after is None else f"fedexp resume={shorten(directory)}"
        state = "No state was saved; begin" if after is None else f"The state after round {after} is kept; go on"
        record_failure(job, str(error), FAILED)
        return say(f"the run failed: {error}\n{state} with:  {again}", FAILED)
    except Exception as error:
        where = record_failure(job, traceback.format_exc(), FAILED)
        print(f"\nfedexp: the run failed: {type(error).__name__}: {error}\n{where}", file=sys.stderr)
        return FAILED


def go_to(directory: Path) -> None:
    """The directory that the command was given in, where relative paths begin; Ray starts jobs in another one."""
    try:
        os.chdir(directory)
    except OSError as error:
        host = platform.node()
        raise RuntimeError(f"{directory}: is not there on {host}; jobs need the file system of the launcher") from error


def log_to_console() -> None:
    """Console logging; looks up sys.stderr at every line, since the live display redirects it."""
    import logging

    logger = logging.getLogger("fedexp")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        handler = logging._StderrHandler(logging.INFO)  # type: ignore[attr-defined]
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def remove_hydras(directory: Path, hydra_config: Any) -> None:
    """What Hydra itself writes before a job begins, where it is asked to (hydra/job_logging, hydra.output_subdir)."""
    logs = [directory / f"{hydra_config.job.name}.log"]
    if subdirectory := hydra_config.output_subdir:
        logs += [directory / subdirectory / f"{name}.yaml" for name in ("config", "hydra", "overrides")]
    for path in logs:
        if path.suffix != ".log" or (path.exists() and not path.stat().st_size):
            path.unlink(missing_ok=True)
    if subdirectory:
        remove_if_empty(directory / subdirectory, directory)


def remove_if_empty(directory: Path, here: Path) -> None:
    """Takes back the directories that Hydra made for a run that never began; of parents only those below `here`."""
    for candidate in (directory, *directory.parents):
        if candidate != directory and here not in candidate.parents:
            return
        try:
            candidate.rmdir()
        except OSError:
            return


def record_failure(job: "Job", report: str, code: int) -> str:
    """error.txt and a summary that says `failed`, in the job's own directory; returns where the report is."""
    from fedexp import files

    summary: dict[str, Any] = {"status": "failed", "error": report.strip().splitlines()[-1], "exit_code": code}
    summary |= {group: job.choices[group] for group in ("algorithm", "dataset") if group in job.choices}
    if not job.directory.is_dir():
        return f"{job.directory} is not there any more; the report:\n{report}"
    try:
        files.write_json(job.directory / files.SUMMARY, summary)
        files.write_atomically(job.directory / files.ERROR, report.encode())
    except OSError as error:
        return f"{job.directory} cannot be written ({error.strerror}); the report:\n{report}"
    return f"The traceback is in {shorten(job.directory / files.ERROR)}"
