"""A run directory that may be somebody else's must not lead out of itself.

What is written, cut back or removed in it would else be a file elsewhere that a link in it points
to.
"""

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from fedexp.core.errors import ConfigError
from fedexp.rundir import files

# What fedexp opens there. W&B's folder has links of its own, to its log files in the user's cache.
OWN = ("*.csv", "*.json", "*.yaml", "*.npz", "*.txt", "*.log", ".*.tmp", ".lock", "wandb")
FOLDERS = (".hydra", "checkpoint", "figures", "profile")


def require_run_directory(directory: Path, given: str) -> None:
    """Raise ConfigError unless a run was begun there that is safe to resume."""
    for name in (Path(".hydra", "overrides.yaml"), Path(files.CONFIG)):
        try:
            there = (directory / name).is_file()
        except (OSError, ValueError):
            there = False
        if not there:
            raise ConfigError(f"resume={given}: not a run directory (no {name} there)")
    require_no_way_out(directory)


def require_no_way_out(directory: Path) -> None:
    """Raise ConfigError for a link among the files of a run that leaves the directory, and for what
    is no file."""
    home = directory.resolve()
    for path in own_paths(directory):
        if path.is_symlink():
            try:
                inside = path.resolve(strict=True).is_relative_to(home)
            except (OSError, RuntimeError):  # to nothing (which would be made), or in a circle
                inside = False
            if not inside:
                raise ConfigError(
                    f"{path}: is a link out of the run directory; a run is not continued through"
                    " links"
                )
        if not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path}: is neither a file nor a folder; remove it to go on")


def own_paths(directory: Path) -> Iterator[Path]:
    """Yield the files and folders there that fedexp opens, replaces or removes."""
    try:
        top = list(os.scandir(directory))
    except OSError:
        return  # nothing there yet
    for entry in top:
        if entry.name in FOLDERS:
            yield Path(entry.path)
            for folder, folders, names in os.walk(entry.path):
                yield from (Path(folder, name) for name in (*folders, *names))
        elif any(fnmatch(entry.name, pattern) for pattern in OWN):
            yield Path(entry.path)
