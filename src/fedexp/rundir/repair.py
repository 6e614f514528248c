"""Repair a job with damaged files: restore the files if possible, or start the run again."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from fedexp.core import storage
from fedexp.rundir import files
from fedexp.rundir.reader import RunDirectory

log = logging.getLogger("fedexp")


def repair_job(directory: Path, overrides: Sequence[str]) -> None:
    """Prepare a job's directory so that the job can continue.

    The caller must hold the lock of the directory. If the configuration cannot be read, the other
    files may belong to another run and are moved to damaged/. If the file with the overrides is
    damaged, `overrides` are written to it. Damaged tables are found when the checkpoint is loaded,
    since it contains the tables' checksums.
    """
    run = RunDirectory(directory)
    written = (files.CONFIG, files.SUMMARY, files.CHECKPOINT, files.PREVIOUS, *files.TABLES)
    left = [name for name in written if run.has(name)]
    # the job failed before its first round, and no file is damaged
    if left == [files.SUMMARY] and run.status == "failed":
        with storage.storing(directory):
            remove_failed_attempt(directory)
        return
    if not left:
        return
    if not run.config:
        log.warning(
            "%s: %s: %s; the run starts again, and its old files are moved to %s",
            *(directory, files.CONFIG, "is missing", directory / files.ASIDE),
        )
        files.set_aside(directory, written)


def remove_failed_attempt(directory: Path) -> None:
    """Remove the files that a failed attempt wrote.

    Folders with the names of these files are moved to damaged/.
    """
    written = (files.CONFIG, files.OVERRIDES, files.ERROR, files.SUMMARY, *files.TABLES)
    files.set_aside(directory, [name for name in written if is_folder(directory / name)])
    for left in (files.ERROR, files.SUMMARY):
        (directory / left).unlink(missing_ok=True)


def is_folder(path: Path) -> bool:
    return path.is_dir() and not os.path.islink(path)
