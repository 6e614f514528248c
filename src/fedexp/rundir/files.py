"""The names of the files in a run directory."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from fedexp.core.errors import ConfigError
from fedexp.core.storage import storing
from fedexp.data.views import VIEW_TABLES, VIEWS, file_in_view

ROUNDS, CLIENTS, TASKS = "rounds.csv", "clients.csv", "tasks.csv"
HAS_ARRIVED = "arrived"  # column of CLIENTS, with cohorts.dropout: whether the messages arrived
CONFIG, SUMMARY, PARTITION = "config.yaml", "summary.json", "partition.npz"
CHECKPOINT, PREVIOUS, CLIENT_STATES = (
    "checkpoint/latest.pt",
    "checkpoint/previous.pt",
    "checkpoint/clients",
)
CHECKSUMS = "checksums.json"  # see `fedexp.rundir.checksums`
WANDB = "wandb/*run-*"  # glob pattern
LATER_PARTITIONS = ("partition_task*.npz", "partition_from_round*.npz")  # glob patterns
CLASSES = "classes.csv"  # number and name of each class
SOURCES = "source"  # copies of the user's own files
ERROR, OVERRIDES = "error.txt", ".hydra/overrides.yaml"
# tables that analyses write, which are callbacks
ANALYSES = ("weight_divergence.csv", "gradient_diversity.csv", "local_epochs.csv", "cka.csv")
OF_VIEWS = tuple(file_in_view(name, view) for name in VIEW_TABLES for view in VIEWS)
TABLES = (ROUNDS, CLIENTS, TASKS, *OF_VIEWS, *ANALYSES)
MULTIRUN = "multirun.yaml"  # in a sweep, the configuration that Hydra writes before the jobs start
SWEEP = ("sweep.json", MULTIRUN)  # files that only the directory of a sweep has
IN_VIEWS = (
    *("class_accuracy", "class_accuracy_normalised", "domain_accuracy"),
    *("tasks", "task_matrix", "local_round"),
)
REPORTED = ("task_matrix", "client_results")  # tables of `fedexp report`
OF_METRICS = ("example_forgetting", "phases", "absence", "clients", "own_tests")
FIGURES = (
    *(file_in_view(name, view) for name in (*IN_VIEWS, *OF_METRICS) for view in VIEWS),
    *("curves", "loss", "data_distribution", "class_reduction"),
    *(Path(name).stem for name in ANALYSES),
)
# glob patterns of everything that runs and their trackers write
WRITTEN = (
    *TABLES,
    *(
        file_in_view(f"{name}.{form}", view)
        for name in REPORTED
        for view in VIEWS
        for form in ("csv", "tex")
    ),
    *(CHECKSUMS, SUMMARY, ERROR, PARTITION, CLASSES, *LATER_PARTITIONS),
    *("origin.json", "run.log", ".hydra/*.yaml", "checkpoint/*.pt"),
    *(SOURCES, f"{SOURCES}_from_round[0-9]*"),
    *(f"{CLIENT_STATES}/*.pt", "models/round_[0-9]*.pt"),
    "tensorboard/events.out.tfevents.*",
    # analyses of the models of a finished run
    *(f"analysis/*_round*.{form}" for form in ("csv", "npz", "png", "pdf", "svg")),
    *(WANDB, "wandb/debug*.log", "wandb/data", "wandb/cache"),
    *(f"figures/{name}.{form}" for name in FIGURES for form in ("png", "pdf", "svg")),
    CONFIG,  # last: until then, the directory is recognised as a run
)


def remove_run(directory: Path) -> None:
    """Delete the files that a run has written. All other files stay.

    Raises StorageError if a file cannot be deleted.
    """
    remove_temporaries(directory)
    remove(directory, WRITTEN)


def remove(directory: Path, patterns: Iterable[str]) -> None:
    """Delete the files and folders in a run directory that match one of the glob patterns.

    Raises StorageError if a file cannot be deleted.
    """
    with storing(directory):
        for path in (path for pattern in patterns for path in sorted(directory.glob(pattern))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def require_replaceable(directory: Path) -> None:
    """Raise ConfigError unless the run in a directory may be replaced.

    The directory must not be a sweep's, contain the working directory, or contain links, through
    which files elsewhere could be deleted.
    """
    problem = ""
    if Path.cwd().is_relative_to(directory.resolve()):
        problem = "contains the working directory"
    elif any((directory / name).exists() for name in SWEEP):
        problem = "is the directory of a sweep"
    elif directory.is_symlink():
        problem = "is a link"
    for folder, folders, names in () if problem else os.walk(directory):
        links = [name for name in (*folders, *names) if Path(folder, name).is_symlink()]
        if links:
            problem = f"contains the link {Path(folder, links[0]).relative_to(directory)}"
            break
        folders[:] = [name for name in folders if name != "wandb"]  # links to the user's cache
    if problem:
        raise ConfigError(f"{directory}: {problem}, so overwrite=True cannot be used")


def remove_temporaries(directory: Path) -> None:
    """Remove the temporary files of a run that was killed while it was writing."""
    for folder in (".", ".hydra", "checkpoint", CLIENT_STATES, "figures", "models"):
        for path in (directory / folder).glob(".*.tmp"):
            if not path.is_dir():
                path.unlink(missing_ok=True)


CHECKPOINT_FORMAT = 3
