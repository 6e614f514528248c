"""The `fedexp` command: finds conf/, lets Hydra compose, runs the job, reports failure.

Exit codes: 0 done (a diverged run is a result), 1 failed, 2 bad input, 130 interrupted.
torch is imported by `fedexp.job`, which is imported late, so that help and `--cfg job` answer at once.
"""

import json
import os
import platform
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.engine.ranks import find_ranks
from fedexp.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from fedexp.job import Job

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main() -> int:
    """The console script. Everything global (signals, logging, environment) is set here and nowhere else."""
    arguments, ranks = sys.argv[1:], find_ranks()
    # Waiting threads that spin make runs that share cores several times slower; must be set before torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else Ray withholds lines of a job that are like those of another
    if ranks is None:
        return answer(arguments, nullcontext())
    from fedexp.engine.distributed import follow, leading

    return follow(ranks) if ranks.rank else answer(arguments, leading(ranks))


def answer(arguments: list[str], together: AbstractContextManager[None]) -> int:
    """Does what was asked, with the other ranks at hand; the exit code."""
    try:
        with together:
            if "--help" in arguments or "-h" in arguments:
                from fedexp.help import help_text

                print(help_text(conf_directory(), config_directories(arguments)))
                return 0
            if "--shell-completion" in arguments or "-sc" in arguments:
                from fedexp.completion import answer_shell

                print(answer_shell(arguments, [*config_directories(arguments), conf_directory()]))
                return 0
            return run_hydra(arguments)
    except ConfigError as error:
        return say(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def conf_directory() -> Path:
    """conf/ inside the installed package, else the checkout's."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "conf", here.parents[1] / "conf"):
        if (candidate / "config.yaml").exists():
            return candidate
    raise ConfigError(f"conf/config.yaml: not found beside {here} or in its checkout; install fedexp again")


def config_directories(arguments: list[str]) -> list[Path]:
    """The user's own groups (`--config-dir`)."""
    found = [value for flag, value in pairwise(arguments) if flag in ("--config-dir", "-cd")]
    found += [a.split("=", 1)[1] for a in arguments if a.startswith(("--config-dir=", "-cd="))]
    return [Path(directory) for directory in found]


def run_hydra(arguments: list[str]) -> int:
    """Hands over to Hydra and turns what comes back into an exit code."""
    import hydra
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from fedexp.callbacks import begun, ended, running
    from fedexp.explain import explain
    from fedexp.identity import register
    from fedexp.launchers import check_installed
    from fedexp.launchers import register as register_launchers

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting by itself
    signal.signal(signal.SIGTERM, interrupt)
    register()
    register_launchers(conf_directory())
    flags, lists, name, preview = sort_out(expand_resume(arguments))
    outcomes: list[int] = []
    begun.clear()
    running.clear()
    ended.clear()

    def task(config: Any) -> None:
        outcomes.append(run_job(config))

    try:
        if preview:
            return show_preview(lists, config_directories(arguments))
        for overrides in lists:
            check_installed(overrides)
            sys.argv = [sys.argv[0], *flags, *overrides]
            hydra.main(config_path=str(conf_directory()), config_name="config", version_base="1.3")(task)()
        for sweep in dict.fromkeys(ended):
            show_report(sweep, name, figures="figures=false" not in arguments)
            outcomes += failed(sweep, begun[sweep])  # launchers may have used other processes
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError, RecursionError) as error:
        return say(explain(error, conf_directory(), config_directories(arguments)))  # a job's own errors end in run_job
    except Exception as error:
        if running:
            (directory, launcher) = running.popitem()
            if launcher != "basic":
                return say(broken(error, directory, launcher), FAILED)
        if isinstance(error, OSError):
            return say(f"{error.filename}: cannot be written ({error.strerror})")
        raise
    return max(outcomes, default=0)


def sort_out(arguments: list[str]) -> tuple[list[str], list[list[str]], str | None, bool]:
    """(flags, the overrides of each run of Hydra, name of the sweep, whether it is only to be shown).

    Hydra's parser does not take overrides on both sides of a flag.
    """
    from fedexp.sweep import launches, load_sweep

    flags, overrides = split_flags(arguments)
    asked = {key: [o.partition("=")[2] for o in overrides if o.startswith(f"{key}=")] for key in ("sweep", "preview")}
    own = [o for o in overrides if not o.startswith(("sweep=", "preview="))]
    if called := [o for o in own if key_of(o).startswith("hydra") and "_target_" in o]:
        raise ConfigError(f"{called[0]}: what Hydra calls can only be set in a directory of your own (--config-dir)")
    multirun = "--multirun" in flags or "-m" in flags
    for key, values in asked.items():
        if values and not multirun:
            raise ConfigError(f"{key}={values[-1]}: goes with --multirun")
    preview = asked["preview"][-1:]
    if preview not in ([], ["true"], ["false"]):
        raise ConfigError(f"preview={preview[0]}: must be true or false")
    if not asked["sweep"]:
        return flags, [own], None, preview == ["true"]
    name, folders = asked["sweep"][-1], [*config_directories(arguments), conf_directory()]
    if not any(o.startswith("hydra.sweep.dir=") for o in own):
        own.append(f"hydra.sweep.dir=multirun/{name}")
    return flags, launches(load_sweep(name, folders), own), name, preview == ["true"]


def failed(sweep: Path, before: Mapping[Path, Any]) -> list[int]:
    """The exit codes of the jobs of a sweep that have failed anew. before: callbacks.failures as it began."""
    from fedexp.callbacks import failures

    return [failure_code(path.parent) for path, mark in failures(sweep).items() if mark != before.get(path)]


def failure_code(directory: Path) -> int:
    """As `record_failure` has left it."""
    try:
        return int(json.loads((directory / "summary.json").read_text(encoding="utf-8"))["exit_code"])
    except (OSError, ValueError, KeyError):
        return FAILED


def broken(error: Exception, directory: Path, launcher: str) -> str:
    """For an error of the launcher itself; those of jobs end in `run_job`."""
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return (
        f"hydra/launcher={launcher}: {type(error).__name__}: {reason}\n"
        "The launcher cannot work, or the process of a job has ended before the job (killed, out of memory). The same "
        f"command with hydra.sweep.dir={shorten(directory)} goes on with what is not complete."
    )


def show_report(directory: Path, name: str | None, figures: bool) -> None:
    """At the end of a sweep: its tables and pictures; name: of a sweep of conf/sweep."""
    from fedexp.aggregate import mark, write_report
    from fedexp.wandb_push import config_of_sweep, is_tracked, push_tables

    if name is not None:
        mark(directory, name)
    paths = write_report(directory, figures)
    if paths:
        print((directory / "table.md").read_text(encoding="utf-8"))
        print("\n".join(f"  {shorten(path)}" for path in paths))
        if is_tracked(config := config_of_sweep(directory)):
            push_tables(directory, config, {})


def show_preview(lists: list[list[str]], extra: list[Path]) -> int:
    """Lists the jobs of a sweep and runs none."""
    from fedexp.preview import measurements, plan, show

    jobs = plan(lists, conf_directory(), extra)
    folders = {job.directory.parent for job in jobs} | {Path("multirun"), Path("outputs")}
    show(jobs, measurements(sorted(folders)))
    return 0


# Hydra's flags that are followed by a value.
WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
}


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(flags with their values, overrides), which users write in any order."""
    flags, overrides, rest = [], [], iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flags.append(argument)
        if argument in WITH_VALUE:
            flags += [value for value in [next(rest, None)] if value is not None]
    return flags, overrides


def interrupt(number: int, frame: Any) -> None:
    """SIGTERM (Slurm's preemption, `kill`) saves and stops like Ctrl+C."""
    raise KeyboardInterrupt


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


def expand_resume(arguments: list[str]) -> list[str]:
    """`resume=DIR` means: the overrides that DIR was started with, in DIR."""
    given = [a.split("=", 1)[1] for a in arguments if a.startswith("resume=")]
    if not given or given[-1] in ("null", ""):
        return arguments
    if "--multirun" in arguments or "-m" in arguments:
        raise ConfigError("resume: goes with a single run, not with --multirun")
    import yaml

    directory = Path(given[-1].strip("'\"")).expanduser().resolve()
    stored = directory / ".hydra" / "overrides.yaml"
    try:
        before = yaml.safe_load(stored.read_text(encoding="utf-8")) or []
    except FileNotFoundError:
        raise ConfigError(f"resume={given[-1]}: not a run directory (no .hydra/overrides.yaml there)") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{stored}: cannot be read ({error})") from error
    if not isinstance(before, list) or not all(isinstance(override, str) for override in before):
        raise ConfigError(f"{stored}: must be a list of overrides")
    # The directory may be somebody else's: it says what to run, not where Hydra finds code and configuration.
    if strange := [o for o in before if o.startswith("-") or key_of(o).startswith("hydra")]:
        raise ConfigError(f"{stored}: {strange[0]} is not the override of a run")
    flags, now = split_flags(arguments)
    later = [a for a in now if not a.startswith("resume=")]
    # A later override of the same key replaces the stored one, so that check_resume can compare the two.
    kept = [o for o in before if key_of(o) not in {key_of(a) for a in later} and key_of(o) != "resume"]
    path = str(directory).replace("\\", "\\\\").replace("'", "\\'")
    return [*flags, *kept, *later, f"resume='{path}'", f"hydra.run.dir='{path}'"]


def key_of(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def say(message: str, code: int = BAD_INPUT) -> int:
    """One message, for bad input unless another exit code is given, which is returned."""
    print(f"fedexp: {message}", file=sys.stderr)
    return code


def shorten(path: Path) -> Path:
    """Relative to the working directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


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
