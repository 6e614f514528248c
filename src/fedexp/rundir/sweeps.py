"""A sweep directory contains a directory for each job, and the name of the sweep (sweep.json)."""

import logging
import os
from pathlib import Path

from fedexp.core import storage
from fedexp.data.marks import checksums
from fedexp.rundir import contents, files, origin
from fedexp.rundir.fingerprint import TARGET, data_marks
from fedexp.rundir.reader import MARKS, RunDirectory
from fedexp.rundir.run_reuse import reused_run

log = logging.getLogger("fedexp")
MARKER = "sweep.json"  # in the directory of a named sweep


def find_runs(directory: Path) -> list[Path]:
    """Return the run directories at or inside a directory, sorted by name."""
    found = []
    for folder, folders, names in os.walk(directory):
        if not {*names, *folders}.isdisjoint(MARKS):
            found.append(Path(folder))
            folders.clear()
        folders.sort()
    return found


def find_jobs(sweep: Path) -> list[RunDirectory]:
    """Return the jobs of a sweep, sorted by directory name, including failed and unfinished jobs.

    sweep: the directory of the sweep.
    """
    found = {path.parent for name in MARKS for path in sweep.glob(f"*/{name}")}
    found |= {path.parent.parent for path in sweep.glob(f"*/{files.OVERRIDES}")}
    return [resolve_reuse(RunDirectory(path)) for path in sorted(found)]


def sweep_name(directory: Path) -> str:
    """Return a sweep's name from sweep.json, or the directory's name if this file is missing."""
    try:
        name = contents.read_mapping(directory / MARKER).get("sweep")
    except contents.Damaged:
        name = None
    return name if isinstance(name, str) else directory.name


def write_sweep_name(directory: Path, name: str) -> None:
    """Write a sweep's name to sweep.json."""
    directory.mkdir(parents=True, exist_ok=True)
    storage.write_json(directory / MARKER, {"sweep": name})


def without_outdated(runs: list[RunDirectory]) -> list[RunDirectory]:
    """Return a sweep's runs, except for outdated ones.

    If finished runs differ only in the code of users' classes or the content of the data, only one
    of them is returned: the run made with the current code and data or, if there is no such run,
    the run that ended last.
    """
    same: dict[frozenset[str], list[RunDirectory]] = {}
    for run in runs:
        if run.finished and has_marks(run.directory):
            same.setdefault(frozenset(run.overrides), []).append(run)
    others: set[Path] = set()
    for found in same.values():
        latest = found[0] if len(found) == 1 else max(found, key=recency)
        others |= {run.directory for run in found} - {latest.directory}
    if others:
        log.warning(
            "runs left out because the code of your own classes or the data have changed: %d",
            len(others),
        )
    return [run for run in runs if run.directory not in others]


def has_marks(directory: Path) -> bool:
    """Return whether a change to the run's code or data would change the job's directory."""
    marks = origin.recorded_marks(directory).items()
    return any(checksums(mark) and key.endswith((TARGET, ".root", ".path")) for key, mark in marks)


def recency(run: RunDirectory) -> tuple[bool, float]:
    """Return (whether the run's code and data are current, when the run ended in Unix seconds)."""
    return not origin.find_changes(origin.recorded_marks(run.directory), data_marks(run.config)), (
        run.directory / files.SUMMARY
    ).stat().st_mtime


def resolve_reuse(run: RunDirectory) -> RunDirectory:
    """Return the run from another sweep that a job reuses, or `run` itself if it reuses none."""
    other = None if run.finished else reused_run(run.directory)
    return run if other is None else RunDirectory(other, tuple(run.overrides))
