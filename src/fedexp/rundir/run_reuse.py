"""Reuse runs from other sweeps in the same `multirun` directory.

If another sweep has a finished run with the same configuration as a job, the job is not run.
Instead, the path of that run is written to `elsewhere.json` in the job's directory, and the tables
of both sweeps use the run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedexp.core import storage
from fedexp.data.views import PLAIN, configured_views
from fedexp.rundir import contents, files, origin
from fedexp.rundir.fingerprint import fingerprint, with_recorded_marks
from fedexp.rundir.reader import RunDirectory, finished_summary

NOTE, ROOT = "elsewhere.json", "multirun"


def tested_subjects(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of models that a configuration tests.

    Older configurations without `evaluate` test the global model.
    """
    return frozenset(config.get("evaluate") or ("global",))


def training_key(config: Mapping[str, Any]) -> str:
    """Return a key that is equal for configurations that train the same models.

    Such configurations may differ in how the models are tested.
    """
    return fingerprint({**config, "test_views": [PLAIN], "evaluate": ["global"]})


def finished_runs(directory: Path) -> Iterator[RunDirectory]:
    """Yield the runs in the `multirun` directory that can be reused, sorted by name.

    A run can be reused if it completed, diverged, or was stopped by `stop.patience`. directory: a
    directory inside `multirun`. If no parent is named `multirun`, nothing is yielded.
    """
    root = next((path for path in directory.absolute().parents if path.name == ROOT), None)
    for folder, names, found in os.walk(root) if root is not None else ():
        names.sort()
        if files.CONFIG not in found:
            continue
        names.clear()
        run = RunDirectory(Path(folder))
        # runs stopped for another reason are left out: their configuration does not show why
        if run.has_ended and (run.summary.get("stopped") or {}).get("by", "patience") == "patience":
            yield run


# `training_key` -> directories and configurations
Finished = Mapping[str, Sequence[tuple[Path, Mapping[str, Any]]]]


def finished_by_training(directory: Path) -> Finished:
    """Return the runs of `finished_runs`, grouped by `training_key`.

    Each configuration contains the marks of the code and data that the run was made with. Runs
    without a readable configuration are left out.
    """
    found: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    for run in finished_runs(directory):
        if run.config:
            config = with_recorded_marks(run.config, origin.recorded_marks(run.directory))
            found.setdefault(training_key(config), []).append((run.directory, config))
    return found


def find_reusable(
    directory: Path,
    config: Mapping[str, Any],
    finished: Finished | None = None,
    marks: Callable[[], Mapping[str, str]] = dict,
) -> Path | None:
    """Return a finished run that can be used instead of running a job, or None.

    The run must have all test views and tested models of the job. Additional views and models are
    allowed, since they do not change the other results.

    directory: the directory of the job. config: the configuration of the job. finished: the runs to
    search. By default, they are read from the disk. marks: a function that returns the current
    marks of the data. Runs made with different data are not used.
    """
    views, subjects = {*configured_views(config)}, tested_subjects(config)
    known = finished_by_training(directory) if finished is None else finished
    for other, found in known.get(training_key(config), ()):
        is_enough = {*configured_views(found)} >= views and tested_subjects(found) >= subjects
        if not is_enough or other == directory.absolute() or finished_summary(other) is None:
            continue
        if not origin.find_changes(origin.recorded_marks(other), marks()):
            return other
    return None


def record_reuse(directory: Path, other: Path, overrides: Sequence[str]) -> None:
    """Write the path of the reused run and the job's overrides to the job's directory."""
    files.write_overrides(directory, overrides)
    run = {"run": os.path.relpath(other, directory)} | origin.fingerprint_of(other)
    storage.write_json(directory / NOTE, run)


def reused_run(directory: Path) -> Path | None:
    """Return the finished run that a job's elsewhere.json refers to, or None.

    Return None if the run has since changed, for example because it was extended to more rounds.
    """
    try:
        found = contents.read_mapping(directory / NOTE)
    except contents.Damaged:
        return None
    other = found.get("run")
    if not isinstance(other, str) or finished_summary(directory / other) is None:
        return None
    now = origin.fingerprint_of(directory / other)["fingerprint"]
    return (
        Path(os.path.normpath(directory / other)) if found.get("fingerprint", now) == now else None
    )
