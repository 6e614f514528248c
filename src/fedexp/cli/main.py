"""The `fedexp` command: what is asked for, composed by Hydra, done; the exit code.

Exit codes: 0 done (a diverged run is a result), 1 failed, 2 bad input, 130 interrupted. torch is
imported by `fedexp.training.job`, which is imported late, so that help and `--cfg job` answer at
once.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.cli.arguments import config_directories, expand_resume, sort_out
from fedexp.cli.commands import call, is_called
from fedexp.config.options import conf_directory
from fedexp.core import console, interrupts
from fedexp.core.errors import FAILED, INTERRUPTED, ConfigError, lacks_memory, say, say_no_memory
from fedexp.engine.processes.ranks import find_ranks

NO_FIGURES = {"figures=false", "figures.draw=false"}

if TYPE_CHECKING:
    from fedexp.cli.callbacks import SweepWatch


def main(arguments: list[str] | None = None) -> int:
    """Does what is asked for; the exit code.

    arguments: None for those of this process, which is then set up for them (signals, environment).
    """
    if arguments is None:
        set_up_process()
        arguments = sys.argv[1:]
    with console.views():
        try:
            ranks = find_ranks()
            together: AbstractContextManager[None] = nullcontext()
            if ranks is not None:
                from fedexp.engine.processes.distributed import follow, leading

                interrupts.release()
                if ranks.rank:
                    return follow(ranks)
                together = leading(ranks)
            check_arguments(arguments)
            with together:
                if is_called(arguments):
                    return call(arguments[0], arguments[1:])
                if (text := information(arguments)) is not None:
                    print(text)
                    return 0
                if not here():
                    raise ConfigError(
                        "the working directory has been removed; go to one that is there"
                    )
                code = run_hydra(arguments)
                interrupts.release()
                return code
        except ConfigError as error:
            return say(str(error))
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def set_up_process() -> None:
    """Everything global (signals, environment) is set here and nowhere else."""
    if sys.getfilesystemencoding().lower() != "utf-8":
        # A locale without UTF-8, with which paths that somebody else wrote cannot be opened: the
        # same process anew.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    interrupts.hold()  # until everything is imported: `fedexp.cli.job` and below
    if not {"", here()} & set(sys.path[:1]):
        # nor do processes that are started from here import from the directory
        os.environ["PYTHONSAFEPATH"] = "1"
    # Waiting threads that spin make runs that share cores several times slower; must be set before
    # torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # else Ray withholds lines of a job that are like those of another
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


def check_arguments(arguments: list[str]) -> None:
    """Raises ConfigError for what is no text, and for a `--config-dir` that cannot be read
    safely."""
    if wrong := [repr(each) for each in [*arguments, here()] if surrogate(each)]:
        raise ConfigError(f"{wrong[0]}: is not UTF-8 text; give the file or directory another name")
    if folders := config_directories(arguments):
        from fedexp.core.yaml_files import check_directories

        check_directories(folders)


def information(arguments: list[str]) -> str | None:
    """Return what is printed where no run is asked for; None where one is."""
    if "--help" in arguments or "-h" in arguments:
        from fedexp.cli.help import help_text

        return help_text(conf_directory(), config_directories(arguments))
    if "--version" in arguments:
        from fedexp.cli.version import version_text

        return version_text()
    if "--shell-completion" in arguments or "-sc" in arguments:
        from fedexp.cli.completion import answer_shell

        return answer_shell(arguments, [*config_directories(arguments), conf_directory()])
    return None


def here() -> str:
    """Return the working directory; an empty text where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def surrogate(text: str) -> bool:
    """Return whether a character stands for bytes that are no text."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def run_hydra(arguments: list[str], watch: "SweepWatch | None" = None) -> int:
    """Hand over to Hydra and turn what comes back into an exit code. watch: takes what becomes of
    the sweeps."""
    import hydra

    from fedexp.cli.callbacks import SweepWatch
    from fedexp.cli.job import run_job
    from fedexp.cli.launchers import check_installed
    from fedexp.cli.launchers import register as register_launchers
    from fedexp.cli.multirun import finish_sweeps, show_preview
    from fedexp.config import composing
    from fedexp.config.run_names import register

    began = time.time()
    # Hydra then raises instead of printing and exiting by itself
    os.environ["HYDRA_FULL_ERROR"] = "1"
    composing.install()
    register()
    register_launchers(conf_directory())
    asked = sort_out(expand_resume(arguments))
    codes: list[int] = []
    watch = watch or SweepWatch()

    try:
        if asked.preview:
            interrupts.release()
            return show_preview(asked, config_directories(arguments))
        shown = {"--cfg", "-c", "--info"} & {flag.split("=")[0] for flag in asked.flags}
        launches = asked.launches
        if asked.budget is not None:
            from fedexp.cli.budget import limited

            launches = limited(launches, began + 60 * asked.budget)
        for overrides in launches:
            check_installed(overrides)
            sys.argv = [sys.argv[0], *asked.flags, *overrides]
            check_flags(sys.argv[1:])
            with watch.handed_over(), words_of_hydra(shown={"--cfg", "-c"} & set(asked.flags)):
                application = hydra.main(
                    config_path=str(conf_directory()), config_name="config", version_base="1.3"
                )
                application(lambda config: codes.append(run_job(config)))()
        elsewhere = not codes  # launchers may have used other processes
        codes += finish_sweeps(
            watch, asked, elsewhere, figures=not NO_FIGURES & {a.lower() for a in arguments}
        )
        if asked.budget is not None and not shown:
            from fedexp.cli.budget import show_state

            show_state(asked.launches, config_directories(arguments))
    except Exception as error:
        watch.take_back(Path.cwd())
        return say_error(error, watch, config_directories(arguments))
    return max(codes, default=0)


def say_error(error: Exception, watch: "SweepWatch", folders: list[Path]) -> int:
    """One message for what Hydra, a launcher or the system has raised, and its exit code; any other
    error is raised.

    A job's own errors end in `run_job`. folders: of `--config-dir`.
    """
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from fedexp.cli.messages import explain
    from fedexp.cli.multirun import broken

    if isinstance(error, ConfigError):
        raise error
    if isinstance(
        error,
        HydraException | OmegaConfBaseException | ValueError | yaml.YAMLError | RecursionError,
    ):
        raise ConfigError(explain(error, conf_directory(), folders)) from error
    if watch.running:
        (directory, launcher) = watch.running.popitem()
        if launcher != "basic":
            return say(broken(error, directory, launcher), FAILED)
    if lacks_memory(error):
        return say_no_memory(error)
    if isinstance(error, OSError):
        where = error.filename or "the working directory, or a file in it"
        return say(f"{where}: cannot be written ({error.strerror})")
    raise error


def check_flags(arguments: list[str]) -> None:
    """Raises ConfigError for what Hydra's parser would print its usage for and exit."""
    from fedexp.core.private.of_hydra import parse_flags

    try:
        parse_flags(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def words_of_hydra(shown: Collection[str]) -> Iterator[None]:
    """Turn what Hydra says before it exits by itself (of a `--package` that is not there) into one
    message of ours, where a configuration is only shown."""
    said = io.StringIO()
    try:
        with redirect_stderr(said) if shown else nullcontext():
            yield
    except SystemExit as stop:
        if not shown or not stop.code:
            raise
        raise ConfigError(said.getvalue().strip()) from stop
    print(said.getvalue(), end="", file=sys.stderr)
