"""Start runs from Python, for example in a notebook.

Hydra composes the configuration as on the command line, but errors are raised as exceptions.
"""

import os
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.analysis.runs import Run
from fedexp.cli.job import make_job, record_failure
from fedexp.config.composition import checked_overrides, composed, quoted, without_hydra
from fedexp.config.overrides import key_of
from fedexp.core import launch
from fedexp.core.console import log_to_console
from fedexp.core.errors import FAILED, ConfigError
from fedexp.core.launch import is_launched
from fedexp.core.storage import remove_if_empty

if TYPE_CHECKING:
    from fedexp.training.job import Job


def run(
    overrides: Sequence[str] = (),
    directory: str | os.PathLike[str] | None = None,
    config_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Run:
    """Run `fedexp <overrides>` in this process until the run ends, and return the run.

    overrides: as on the command line, such as ["algorithm=fedntd", "alpha=0.1"]. To continue a run,
    pass ["resume=<run directory>"].

    directory: the run directory, or None for a new directory in outputs/, as on the command line.

    config_dir: a directory with your own config groups (`--config-dir`). Its classes are trusted.

    overwrite: whether to replace an existing run in `directory`. When the new run is ready to
    start, the files that fedexp wrote for the old run are deleted; all other files stay.

    Raises ConfigError for invalid input. In that case, nothing is changed on disk. Any other
    exception that stops the run is written to error.txt and raised; that of a metric or a callback
    is the cause of a HookFailed, which names the hook.
    """
    if is_launched(variables := dict(os.environ)):
        raise ConfigError(
            f"fedexp.run: {launch.given(variables)} say that this script runs in several ranks, and"
            " each of them would train the whole run. Ranks are for the command (torchrun ... -m"
            f" fedexp ...); if the script runs once, remove {launch.named(variables)[0]} from the"
            " environment"
        )
    given = checked_overrides(overrides)
    if directory is not None:
        place = Path(directory).expanduser().absolute()
        given.append(f"hydra.run.dir={quoted(os.fspath(place))}")
    if overwrite and directory is None:
        raise ConfigError("overwrite=True: needs directory=<run directory>")
    if overwrite and any(key_of(text) == "resume" for text in given):
        raise ConfigError("overwrite=True: starts a new run, but resume= continues a run; use one")
    own = None if config_dir is None else Path(config_dir)
    command = ["fedexp.run", *([] if own is None else ["--config-dir", str(own)]), *given]
    log_to_console()
    with composed(given, own) as config:
        path = Path(config.hydra.run.dir).absolute()
        options: dict[str, Any] = {"sweep": None, "overwrite": overwrite, "command": command}
        job = make_job(without_hydra(config), config.hydra, path, **options)
        train(job)
    return Run(job.directory, own)


def train(job: "Job") -> None:
    """Train a run. If the run fails, write the reason to error.txt and re-raise the exception."""
    from fedexp.training.run import train_run

    try:
        train_run(job)
    except ConfigError:
        with suppress(OSError):
            remove_if_empty(job.directory, Path.cwd())
        raise
    except Exception as error:
        record_failure(job, error, "".join(traceback.format_exception(error)), FAILED)
        raise
