"""The `fedexp` command: parse, plan, run; the exit code.

Exit codes: 0 done (a diverged run is a result), 1 failed, 2 bad input, 130 interrupted. torch is
imported by `fedexp.training.run`, which is imported late, so that help and `--cfg job` answer at
once.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.cli.arguments import Plan, config_directories, plan_of, split_flags
from fedexp.cli.commands import call, is_called
from fedexp.config.options import conf_directory
from fedexp.core import console, interrupts
from fedexp.core.errors import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    ConfigError,
    lacks_memory,
    say,
    say_no_memory,
)
from fedexp.engine.processes.ranks import find_ranks

if TYPE_CHECKING:
    from fedexp.cli.sweeps import SweepWatch


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked for; return the exit code.

    arguments: None for those of this process, which is then set up for them (signals, environment).
    """
    if arguments is None:
        set_up_process()
        arguments = sys.argv[1:]
    with console.views():
        try:
            check_readable(arguments)
            with distributed() as follower:
                return answer(arguments) if follower is None else follower()
        except ConfigError as error:
            return say(str(error))
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def answer(arguments: Sequence[str]) -> int:
    """Call a subcommand, print what is asked for, or run; return the exit code."""
    if is_called(arguments):
        return call(arguments[0], arguments[1:])
    flags, overrides = split_flags(arguments)
    folders = config_directories(arguments)
    if (text := information(flags, overrides, folders)) is not None:
        print(text)
        return 0
    return run(plan_of(flags, overrides, folders))


def set_up_process() -> None:
    """Everything global (signals, environment) is set here and nowhere else."""
    if sys.getfilesystemencoding().lower() != "utf-8":
        # In a locale without UTF-8, paths with other letters cannot be opened: the
        # same process anew.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    interrupts.hold()  # until everything is imported: `fedexp.cli.job` and below
    if not {"", working_directory()} & set(sys.path[:1]):
        # nor do processes that are started from here import from the directory
        os.environ["PYTHONSAFEPATH"] = "1"
    # Waiting threads that spin make runs that share cores several times slower; must be set before
    # torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # else Ray withholds lines of a job that are like those of another
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


@contextmanager
def distributed() -> Iterator[Callable[[], int] | None]:
    """Yield what a process that torchrun has started does instead of the command: all but the first
    follow that one. None in any other process."""
    ranks = find_ranks()
    if ranks is None:
        yield None
        return
    from fedexp.engine.processes.distributed import follow, leading

    interrupts.release()
    if ranks.rank:
        yield partial(follow, ranks)
        return
    with leading(ranks):
        yield None


def working_directory() -> str:
    """Return the working directory; an empty text where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def check_readable(arguments: Sequence[str]) -> None:
    """Raise ConfigError for what is not text, and for a `--config-dir` that cannot be read
    safely."""
    for text in (*arguments, working_directory()):
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # bytes that are not text
            raise ConfigError(
                f"{text!r}: is not UTF-8 text; give the file or directory another name"
            )
    if folders := config_directories(arguments):
        from fedexp.core.yaml_files import check_directories

        check_directories(folders)


def information(
    flags: Mapping[str, str | None], words: list[str], folders: list[Path]
) -> str | None:
    """Return what is printed where no run is asked for; None where one is."""
    if "--help" in flags:
        from fedexp.cli.help import help_text

        return help_text(conf_directory(), folders)
    if "--version" in flags:
        from fedexp.cli.help import version_text

        return version_text()
    if "--shell-completion" in flags:
        from fedexp.cli.completion import answer_shell

        return answer_shell(words, [*folders, conf_directory()])
    return None


def run(plan: Plan, watch: "SweepWatch | None" = None) -> int:
    """Hand each launch to Hydra, which calls `run_job` for its jobs; return the exit code. watch:
    takes what becomes of the sweeps."""
    import hydra

    from fedexp.cli import launchers, sweeps
    from fedexp.cli.composition import register
    from fedexp.cli.job import run_job
    from fedexp.config import composing

    if not working_directory():
        raise ConfigError("the working directory has been removed; go to one that is there")
    began = time.time()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting
    composing.install()
    register()
    codes: list[int] = []
    watch = watch or sweeps.SweepWatch()
    launches = plan.launches
    try:
        if plan.preview or plan.budget is not None:
            from fedexp.cli import preview
        if plan.preview:
            interrupts.release()
            return preview.show_plan(plan)
        if plan.budget is not None:
            launches = preview.limited(launches, began + 60 * plan.budget)
        application = hydra.main(
            config_path=str(conf_directory()), config_name="config", version_base="1.3"
        )(lambda config: codes.append(run_job(config)))
        for overrides in launches:
            launchers.check_installed(overrides)
            sys.argv = [sys.argv[0], *plan.words, *overrides]
            with watch.handed_over():
                application()
        elsewhere = not codes  # launchers may have used other processes
        codes += sweeps.finish(watch, plan, elsewhere)
        if plan.budget is not None:
            preview.show_state(plan)
    except SystemExit as stop:  # Hydra has said what is wrong (`--package`)
        return BAD_INPUT if stop.code else 0
    except Exception as error:
        watch.take_back(Path.cwd())
        return say_error(error, watch, plan)
    interrupts.release()
    return max(codes, default=0)


def say_error(error: Exception, watch: "SweepWatch", plan: Plan) -> int:
    """One message for what Hydra, a launcher or the system has raised, and its exit code; any other
    error is raised. A job's own errors end in `run_job`."""
    from fedexp.cli.composition import OF_COMPOSING
    from fedexp.cli.messages import explain
    from fedexp.cli.sweeps import broken

    if isinstance(error, ConfigError):
        raise error
    if isinstance(error, OF_COMPOSING):
        raise ConfigError(explain(error, conf_directory(), plan.folders)) from error
    if watch.running:
        directory, launcher = watch.running.popitem()
        if launcher != "basic":
            return say(broken(error, directory, launcher), FAILED)
    if lacks_memory(error):
        return say_no_memory(error)
    if isinstance(error, OSError):
        where = error.filename or "the working directory, or a file in it"
        return say(f"{where}: cannot be written ({error.strerror})")
    raise error
