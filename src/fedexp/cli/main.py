"""The `fedexp` command: a subcommand, or runs that Hydra composes and starts.

Exit codes are 0 for success (a diverged run is a result), 1 for a failure, 2 for bad input and 130
for an interrupt. torch is imported late, so that help and `--cfg job` are fast.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp.cli.commands import call, is_subcommand, version_text
from fedexp.config.arguments import given_folders, hydra_arguments
from fedexp.core import console, interrupts
from fedexp.core.errors import (
    INTERRUPTED,
    ConfigError,
    JobFailed,
    lacks_memory,
    say,
    say_no_memory,
)
from fedexp.core.launch import is_launched


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    arguments: the command line. If None, `sys.argv` is used and the process is set up first
    (signals, environment).
    """
    if arguments is None:
        set_up_process()
    launched = False
    with console.safe_streams():
        try:
            launched = arguments is None and is_launched(os.environ)
            if launched:
                from fedexp.engine.ranks import world

                if not world.join():  # another rank than 0, which has served rank 0 to its end
                    return 0
            code = run_command(sys.argv[1:] if arguments is None else arguments)
        except ConfigError as error:
            code = say(str(error))
        except KeyboardInterrupt:
            code = INTERRUPTED
    if launched:
        world.ends_with(code)
    return code


def run_command(arguments: Sequence[str]) -> int:
    check_readable(arguments)
    if is_subcommand(arguments):
        return call(arguments[0], arguments[1:])
    if list(arguments) == ["--version"]:
        print(version_text())
        return 0
    commands = hydra_arguments(arguments)
    if len(commands) > 1:
        check_sweeps(arguments, commands)
    return max(map(run_hydra, commands))


def check_sweeps(arguments: Sequence[str], commands: Sequence[Sequence[str]]) -> None:
    """Raise ConfigError if one of several sweeps does not exist, before any of them is run.

    commands: the arguments of each call of Hydra.
    """
    from fedexp.analysis.sweep import load_named_sweep
    from fedexp.config.named import user_first

    if any(text.startswith("hydra.searchpath=") for text in arguments):
        return  # to folders that only Hydra finds
    key = "hydra.sweeper.sweep="
    for name in (text for each in commands for text in each if text.startswith(key)):
        load_named_sweep(name.removeprefix(key), user_first(given_folders(arguments)))


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


def run_hydra(arguments: Sequence[str]) -> int:
    """Let Hydra parse the arguments and run the jobs. Return the exit code."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import env_override
    from hydra.types import RunMode

    from fedexp.cli.job import run_job
    from fedexp.config.launchers import DEFAULTS, register
    from fedexp.config.options import conf_directory

    if not working_directory():
        raise ConfigError("the working directory has been removed; change to an existing directory")
    register()
    codes, command = [0], ["fedexp", *arguments]

    def job(config: Any) -> None:
        try:
            run_job(config, command)  # launchers send it to their processes
        except JobFailed as failure:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # to the sweeper
            codes.append(failure.code)

    application = hydra.main(str(conf_directory()), "config", **DEFAULTS)(job)
    before, sys.argv = sys.argv, command
    try:
        # Hydra then raises instead of printing and exiting
        with env_override({"HYDRA_FULL_ERROR": "1"}):
            application()
    except JobFailed as failure:
        return failure.code
    except Exception as error:
        return report(error, given_folders(arguments))
    finally:
        sys.argv = before
    interrupts.release()
    return max(codes)


def report(error: Exception, folders: Sequence[Path]) -> int:
    """Print one message for an error of Hydra or the operating system. Return the exit code.

    Any other error is re-raised. Jobs report their own errors. folders: the user's config groups.
    """
    from fedexp.config.composition import is_of_composition
    from fedexp.config.messages import explain

    if isinstance(error, ConfigError):
        raise error
    if is_of_composition(error):
        raise ConfigError(explain(error, folders)) from error
    if lacks_memory(error):
        return say_no_memory(error)
    if isinstance(error, OSError):
        where = error.filename or "the working directory, or a file in it"
        return say(f"{where}: cannot be written ({error.strerror})")
    raise error
