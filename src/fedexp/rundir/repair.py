"""A job of a sweep whose files are damaged: what its command can write again is written, else the
run begins again."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from fedexp.core import storage
from fedexp.rundir import files
from fedexp.rundir.reader import RunDirectory

log = logging.getLogger("fedexp")


def begin_again_where_damaged(directory: Path, overrides: Sequence[str]) -> None:
    """Make the directory of a job ready to be gone on with, which must be ours.

    Without a configuration that can be read nothing says what the files there belong to: they are
    moved to damaged/. What was typed (`overrides`) is written again. Damaged tables are left to the
    checkpoints, which know their checksums."""
    run = RunDirectory(directory)
    written = (files.CONFIG, files.SUMMARY, files.CHECKPOINT, files.PREVIOUS, *files.TABLES)
    left = [name for name in written if run.has(name)]
    # it ended before it began, and nothing is damaged
    if left == [files.SUMMARY] and run.status == "failed":
        with storage.storing(directory):
            remove_attempt(directory)
        return
    if not left:
        return
    if not run.config:
        reasons = [str(problem) for problem in run.problems if problem.file == files.CONFIG]
        log.warning(
            "%s: %s; the run begins again, and what was there is kept in %s",
            *(directory, *(reasons or [f"{files.CONFIG}: is missing"]), directory / files.ASIDE),
        )
        files.set_aside(directory, written)
    elif run.damaged:
        log.warning(
            "%s: %s; the job is run again as far as it has to be", directory, run.describe_damage()
        )
    if any(problem.file == files.OVERRIDES for problem in run.problems):
        if (directory / files.OVERRIDES).is_dir():
            files.set_aside(directory, [files.OVERRIDES])
        text = yaml.safe_dump(list(overrides), allow_unicode=True).encode()
        storage.write_atomically(directory / files.OVERRIDES, text)


def remove_attempt(directory: Path) -> None:
    """Remove what an attempt that failed has left, and move folders aside that lie where a run
    writes its files."""
    written = (files.CONFIG, files.OVERRIDES, files.ERROR, files.SUMMARY, *files.TABLES)
    files.set_aside(directory, [name for name in written if is_folder(directory / name)])
    for left in (files.ERROR, files.SUMMARY):
        (directory / left).unlink(missing_ok=True)


def is_folder(path: Path) -> bool:
    return path.is_dir() and not os.path.islink(path)
