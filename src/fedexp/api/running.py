"""A run that Python starts, such as a notebook: Hydra's composition inside, errors as
exceptions."""

import os
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.api.directories import Run
from fedexp.cli.composition import composed, plain, without_hydra
from fedexp.cli.job import holds_a_run, log_to_console, record_failure
from fedexp.core.errors import FAILED, ConfigError
from fedexp.core.storage import remove_if_empty

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fedexp.training.job import Job


def run(
    overrides: Sequence[str] = (),
    directory: str | os.PathLike[str] | None = None,
    config_dir: str | os.PathLike[str] | None = None,
) -> Run:
    """Train a run to its end in this process, as `fedexp <overrides>` does, and return it.

    overrides: as on the command line, such as ["algorithm=fedntd", "alpha=0.1"]; ["resume=<run
    directory>"] goes on with a run. directory: of the run; None: as the command line chooses it,
    below outputs/. config_dir: a directory of your own groups, whose classes are then trusted
    (`--config-dir`). Raises ConfigError for bad input, and leaves nothing behind then; whatever
    else stops the run is raised as it is, after error.txt has been written. Sweeps are for the
    command line (`fedexp --multirun`).
    """
    given = list(overrides) if not isinstance(overrides, str) else overrides
    if directory is not None and not isinstance(given, str):
        from fedexp.cli.arguments import literal

        given.append(f"hydra.run.dir={literal(os.fspath(Path(directory).expanduser().absolute()))}")
    own = None if config_dir is None else Path(config_dir)
    log_to_console()
    with composed(given, own) as config:
        job = job_of(config)
        train(job)
    return Run(job.directory, own)


def job_of(config: "DictConfig") -> "Job":
    """Return the job of a composed configuration, in the directory that it names."""
    from fedexp.training.job import Job

    choices = plain(config.hydra.runtime.choices)
    return Job(
        config=without_hydra(config),
        directory=Path(config.hydra.run.dir).absolute(),
        overrides=plain(config.hydra.overrides.task),
        choices={key: str(value) for key, value in choices.items() if not key.startswith("hydra/")},
        sweep=None,
    )


def train(job: "Job") -> None:
    """Train the run; of one that fails, write down why."""
    from fedexp.training.job import train_run

    new = not holds_a_run(job.directory)
    try:
        train_run(job)
    except ConfigError:
        if new:
            with suppress(OSError):
                remove_if_empty(job.directory, Path.cwd())
        raise
    except Exception as error:
        record_failure(job, "".join(traceback.format_exception(error)), FAILED, ours=True)
        raise
