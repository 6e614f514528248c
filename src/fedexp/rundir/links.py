"""Reject links that lead outside a run directory.

The directory may come from another person. Through a link to another place, fedexp could write,
truncate or remove files there.
"""

import os
from pathlib import Path

from fedexp.core.errors import ConfigError
from fedexp.rundir import files

WANDB = "wandb"  # this folder has links to log files in the user's cache


def require_run_directory(directory: Path, given: str) -> None:
    """Raise ConfigError unless the directory contains a run that is safe to resume.

    given: the directory as the user wrote it, for messages.
    """
    for name in (files.OVERRIDES, files.CONFIG):
        try:
            there = (directory / name).is_file()
        except (OSError, ValueError):
            there = False
        if not there:
            raise ConfigError(f"resume={given}: not a run directory ({name} is missing)")
    require_no_outside_links(directory)


def require_no_outside_links(directory: Path) -> None:
    """Raise ConfigError if a run directory contains a link that leads outside the directory.

    An entry that is neither a file nor a folder is also rejected.
    """
    home = directory.resolve()
    for folder, folders, names in os.walk(directory):
        for path in (Path(folder, name) for name in (*folders, *names)):
            if path.is_symlink() and not stays_inside(path, home):
                raise ConfigError(
                    f"{path}: links to a file outside the run directory; remove the link"
                )
            if not path.is_file() and not path.is_dir():
                raise ConfigError(f"{path}: is neither a file nor a folder; remove it")
        if WANDB in folders:
            folders.remove(WANDB)


def require_replaceable(directory: Path) -> None:
    """Raise ConfigError unless the run in a directory may be replaced.

    The directory must not be a sweep's, contain the working directory, or contain links, through
    which files elsewhere could be deleted.
    """
    problem = ""
    if Path.cwd().is_relative_to(directory.resolve()):
        problem = "contains the working directory"
    elif any((directory / name).exists() for name in files.SWEEP):
        problem = "is the directory of a sweep"
    elif directory.is_symlink():
        problem = "is a link"
    for folder, folders, names in () if problem else os.walk(directory):
        links = [name for name in (*folders, *names) if Path(folder, name).is_symlink()]
        if links:
            problem = f"contains the link {Path(folder, links[0]).relative_to(directory)}"
            break
        folders[:] = [name for name in folders if name != WANDB]
    if problem:
        raise ConfigError(f"{directory}: {problem}, so overwrite=True cannot be used")


def stays_inside(link: Path, home: Path) -> bool:
    try:
        return link.resolve(strict=True).is_relative_to(home)
    # the target is missing (it could be created later), or links form a cycle
    except (OSError, RuntimeError):
        return False
