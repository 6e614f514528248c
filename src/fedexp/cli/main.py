"""The `fedexp` command: parse the command line, plan the runs, run them, return the exit code.

Exit codes are 0 for success (a diverged run is a result), 1 for a failure, 2 for bad input and 130
for an interrupt. `fedexp.training.run` imports torch. It is imported late, so that help and
`--cfg job` are fast.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.cli.arguments import Plan, config_folders, make_plan, split_flags
from fedexp.cli.commands import call, is_subcommand
from fedexp.config.options import conf_directory
from fedexp.core import console, interrupts
from fedexp.core.errors import (
    FAILED,
    INTERRUPTED,
    ConfigError,
    lacks_memory,
    say,
    say_no_memory,
)

if TYPE_CHECKING:
    from fedexp.cli.sweeps import SweepWatch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    arguments: the command line. If None, `sys.argv` is used and the process is set up first
    (signals, environment).
    """
    if arguments is None:
        set_up_process()
        arguments = sys.argv[1:]
    with console.safe_streams():
        try:
            check_readable(arguments)
            return dispatch(arguments)
        except ConfigError as error:
            return say(str(error))
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def dispatch(arguments: Sequence[str]) -> int:
    """Call a subcommand, print information, or run the jobs. Return the exit code."""
    if is_subcommand(arguments):
        return call(arguments[0], arguments[1:])
    flags, overrides = split_flags(arguments)
    if (text := information_text(flags)) is not None:
        print(text)
        return 0
    return run(make_plan(flags, overrides))


def set_up_process() -> None:
    """Set up signals and environment variables. No other function changes such global state."""
    if sys.getfilesystemencoding().lower() != "utf-8":
        # In a locale without UTF-8, paths with non-ASCII letters cannot be opened, so start this
        # process again in UTF-8 mode.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    interrupts.hold()  # until `fedexp.cli.job` and its dependencies are imported
    if not {"", working_directory()} & set(sys.path[:1]):
        # child processes must not import from the working directory either
        os.environ["PYTHONSAFEPATH"] = "1"
    # If threads spin while they wait, runs that share cores are several times slower. This variable
    # must be set before torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # otherwise Ray hides output lines that several jobs have in common
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


def working_directory() -> str:
    """Return the working directory, or an empty string if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def check_readable(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an argument or a working directory whose name is not UTF-8."""
    for text in (*arguments, working_directory()):
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # bytes that are not text
            raise ConfigError(f"{text!r}: this name is not valid UTF-8; rename the file")


def information_text(flags: Mapping[str, str]) -> str | None:
    """Return the text to print, or None if the command line asks for a run."""
    if "--help" in flags:
        from fedexp.cli.help import help_text

        return help_text(conf_directory(), config_folders(flags))
    if "--version" in flags:
        from fedexp.cli.help import version_text

        return version_text()
    return None


def run(plan: Plan, watch: "SweepWatch | None" = None) -> int:
    """Pass each launch to Hydra and return the exit code. Hydra calls `run_job` for each job.

    watch: the object that records the state of the sweeps; None for a new one.
    """
    import hydra
    from hydra.core.utils import env_override

    from fedexp.cli import launchers, sweeps
    from fedexp.cli.composition import register
    from fedexp.cli.job import run_job
    from fedexp.config import composing

    if not working_directory():
        raise ConfigError("the working directory has been removed; change to an existing directory")
    composing.install()
    register()
    codes: list[int] = []
    errors = StringIO()
    watch = watch or sweeps.SweepWatch()
    try:
        if plan.lists_jobs or plan.preview:
            from fedexp.cli import preview
        if plan.preview:
            interrupts.release()
            return preview.show_plan(plan)
        if plan.lists_jobs:
            interrupts.release()
            jobs = preview.plan_jobs(plan.launches, plan.folders)
            preview.check_jobs(jobs)
            watch.jobs = {job.directory.name for job in jobs}
        application = hydra.main(
            config_path=str(conf_directory()), config_name="config", version_base="1.3"
        )(lambda config: codes.append(run_job(config)))
        for overrides in plan.launches:
            launchers.check_installed(overrides)
            sys.argv = [sys.argv[0], *plan.words, *overrides]
            quiet = redirect_stderr(errors) if "--package" in plan.flags else nullcontext()
            # Hydra then raises instead of printing and exiting
            raising = env_override({"HYDRA_FULL_ERROR": "1"})
            with watch.as_current(), quiet, raising:
                application()
        elsewhere = not codes  # launchers may have used other processes
        codes += sweeps.write_reports(watch, plan, elsewhere)
    except SystemExit as stop:  # how Hydra reports an unknown `--package`
        return say(errors.getvalue().strip()) if stop.code else 0
    except Exception as error:
        watch.remove_rejected(Path.cwd())
        return report_error(error, watch, plan)
    interrupts.release()
    return max(codes, default=0)


def report_error(error: Exception, watch: "SweepWatch", plan: Plan) -> int:
    """Print one message for an error raised by Hydra, a launcher or the operating system.

    Return the exit code. Any other error is re-raised. `run_job` handles errors in jobs.
    """
    from fedexp.cli.composition import COMPOSITION_ERRORS
    from fedexp.cli.messages import explain
    from fedexp.cli.sweeps import explain_launcher_error

    if isinstance(error, ConfigError):
        raise error
    if isinstance(error, COMPOSITION_ERRORS):
        raise ConfigError(explain(error, conf_directory(), plan.folders)) from error
    if watch.running:
        directory, launcher = watch.running.popitem()
        if launcher != "basic":
            return say(explain_launcher_error(error, directory, launcher), FAILED)
    if lacks_memory(error):
        return say_no_memory(error)
    if isinstance(error, OSError):
        where = error.filename or "the working directory, or a file in it"
        return say(f"{where}: cannot be written ({error.strerror})")
    raise error
