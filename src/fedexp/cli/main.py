"""The `fedexp` command: what is asked for, composed by Hydra, done; the exit code.

Exit codes: 0 done (a diverged run is a result), 1 failed, 2 bad input, 130 interrupted.
torch is imported by `fedexp.training.job`, which is imported late, so that help and `--cfg job` answer at once.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from typing import Any

from fedexp.cli.arguments import config_directories, expand_resume, sort_out
from fedexp.config.options import conf_directory
from fedexp.core import console, interrupts
from fedexp.core.errors import FAILED, INTERRUPTED, ConfigError, lacks_memory, say, say_no_memory
from fedexp.engine.processes.ranks import find_ranks


def main() -> int:
    """The console script. Everything global (signals, logging, environment) is set here and nowhere else."""
    if sys.getfilesystemencoding().lower() != "utf-8":
        # A locale without UTF-8, with which paths that somebody else wrote cannot be opened: the same process anew.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    interrupts.hold()  # until everything is imported: `fedexp.cli.job` and below
    arguments, ranks = sys.argv[1:], find_ranks()
    if not {"", here()} & set(sys.path[:1]):
        os.environ["PYTHONSAFEPATH"] = "1"  # nor do processes that are started from here import from the directory
    # Waiting threads that spin make runs that share cores several times slower; must be set before torch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else Ray withholds lines of a job that are like those of another
    with console.views():
        if ranks is None:
            return answer(arguments, nullcontext())
        from fedexp.engine.processes.distributed import follow, leading

        try:
            interrupts.release()
        except KeyboardInterrupt:
            return INTERRUPTED
        return follow(ranks) if ranks.rank else answer(arguments, leading(ranks))


def answer(arguments: list[str], together: AbstractContextManager[None]) -> int:
    """Does what was asked, with the other ranks at hand; the exit code."""
    try:
        if wrong := [repr(each) for each in [*arguments, here()] if surrogate(each)]:
            raise ConfigError(f"{wrong[0]}: is not UTF-8 text; give the file or directory another name")
        if folders := config_directories(arguments):
            from fedexp.core.yaml_files import check_directories

            check_directories(folders)
        with together:
            if "--help" in arguments or "-h" in arguments:
                from fedexp.cli.help import help_text

                print(help_text(conf_directory(), config_directories(arguments)))
                return 0
            if "--shell-completion" in arguments or "-sc" in arguments:
                from fedexp.cli.completion import answer_shell

                print(answer_shell(arguments, [*config_directories(arguments), conf_directory()]))
                return 0
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


def here() -> str:
    """The working directory; an empty text where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def surrogate(text: str) -> bool:
    """Whether it stands for bytes that are no text."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def run_hydra(arguments: list[str]) -> int:
    """Hands over to Hydra and turns what comes back into an exit code."""
    import hydra
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from fedexp.cli.callbacks import begun, ended, queued, running
    from fedexp.cli.job import run_job
    from fedexp.cli.launchers import check_installed
    from fedexp.cli.launchers import register as register_launchers
    from fedexp.cli.messages import explain
    from fedexp.cli.multirun import broken, failed, show_preview, show_report, within_budget
    from fedexp.config import composing
    from fedexp.config.run_names import register

    began = time.time()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting by itself
    composing.install()
    register()
    register_launchers(conf_directory())
    asked = sort_out(expand_resume(arguments))
    outcomes: list[int] = []
    begun.clear()
    running.clear()
    ended.clear()
    queued.clear()

    def task(config: Any) -> None:
        try:
            outcomes.append(run_job(config))
        except Exception as error:
            if not lacks_memory(error):
                raise
            outcomes.append(say_no_memory(error))  # torch could not be imported

    try:
        if asked.preview:
            interrupts.release()
            return show_preview(asked, config_directories(arguments))
        shown = {"--cfg", "-c", "--info"} & {flag.split("=")[0] for flag in asked.flags}
        launches, budget = (
            asked.launches,
            nullcontext() if shown else within_budget(asked, config_directories(arguments), began),
        )
        with budget as queue:
            for overrides in launches if queue is None else queue.launches:
                check_installed(overrides)
                sys.argv = [sys.argv[0], *asked.flags, *overrides]
                check_flags(sys.argv[1:])
                with words_of_hydra(shown={"--cfg", "-c"} & set(asked.flags)):
                    hydra.main(config_path=str(conf_directory()), config_name="config", version_base="1.3")(task)()
        elsewhere = not outcomes  # launchers may have used other processes
        for sweep in dict.fromkeys(ended):
            if not sweep.is_dir():
                outcomes.append(say(f"{sweep}: was removed while the sweep ran", FAILED))
                continue
            outcomes += failed(sweep, begun[sweep], elsewhere)
            show_report(sweep, asked.name_of(sweep), figures="figures=false" not in arguments)
        if queue is not None:
            queue.say_state()
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError, RecursionError) as error:
        return say(explain(error, conf_directory(), config_directories(arguments)))  # a job's own errors end in run_job
    except Exception as error:
        if running:
            (directory, launcher) = running.popitem()
            if launcher != "basic":
                return say(broken(error, directory, launcher), FAILED)
        if lacks_memory(error):
            return say_no_memory(error)
        if isinstance(error, OSError):
            return say(f"{error.filename}: cannot be written ({error.strerror})")
        raise
    return max(outcomes, default=0)


def check_flags(arguments: list[str]) -> None:
    """Raises ConfigError for what Hydra's parser would print its usage for and exit."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def words_of_hydra(shown: Collection[str]) -> Iterator[None]:
    """Where a configuration is only shown, what Hydra says before it exits by itself (of a `--package` that is not
    there) becomes one message of ours."""
    said = io.StringIO()
    try:
        with redirect_stderr(said) if shown else nullcontext():
            yield
    except SystemExit as stop:
        if not shown or not stop.code:
            raise
        raise ConfigError(said.getvalue().strip()) from stop
    print(said.getvalue(), end="", file=sys.stderr)
