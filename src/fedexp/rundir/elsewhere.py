"""Reuse runs of other sweeps below the same `multirun` directory.

If another sweep has a finished run that equals a job, the job is not run again. Its directory gets
`elsewhere.json` with the path of that run, and tables use the run for both sweeps.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedexp.core import storage
from fedexp.data.views import PLAIN, views_of
from fedexp.rundir import contents, files, origin
from fedexp.rundir.fingerprint import as_made, fingerprint
from fedexp.rundir.reader import RunDirectory, finished_summary

NOTE, ROOT = "elsewhere.json", "multirun"
# Keys that may differ between runs in the same cell of a table: the seed and the keys that
# `protocol_of` treats as harmless.
OPEN = (
    "seed",
    "seeds",
    "hardware",
    "forgetting_metric",
    "targets",
    "target_fractions",
    "test_views",
    "evaluate",
)


def run_key(config: Mapping[str, Any]) -> str:
    """Return a key that is equal for configurations with the same result.

    No other function decides whether two runs are the same.
    """
    return fingerprint(config)


def subjects_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of models that a configuration tests.

    Older configurations without `evaluate` test the global model.
    """
    return frozenset(config.get("evaluate") or ("global",))


def cell_key(config: Mapping[str, Any]) -> str:
    """Return a key that is equal for runs in the same cell of a table.

    Such runs may differ in their seed and hardware, see OPEN.
    """
    kept = {key: value for key, value in config.items() if key not in OPEN}
    dataset = kept.get("dataset")
    if isinstance(dataset, Mapping) and isinstance(dataset.get("root"), str):
        kept["dataset"] = {**dataset, "root": Path(dataset["root"]).name}  # wherever data_dir is
    return run_key(kept)


def finished_runs(directory: Path) -> Iterator[Path]:
    """Yield the directories of all ended runs below the `multirun` directory, sorted by name.

    directory: a sweep's directory or a directory within it. If no parent is named `multirun`,
    nothing is yielded.
    """
    root = next((path for path in directory.absolute().parents if path.name == ROOT), None)
    for folder, names, found in os.walk(root) if root is not None else ():
        names.sort()
        if files.CONFIG in found:
            names.clear()
            run = RunDirectory(Path(folder))
            if run.over and (run.summary.get("stopped") or {}).get("by", "patience") == "patience":
                # other stopped runs are left out: their configuration does not show why they ended
                yield Path(folder)


def config_of(directory: Path) -> dict[str, Any]:
    """Return the configuration of a run, or an empty dict if it cannot be read."""
    return RunDirectory(directory).config


def made_with(directory: Path) -> dict[str, Any]:
    """Return `config_of` with the marks of the code and data that the run was made with."""
    return as_made(config_of(directory), origin.noted_marks(directory))


def training(config: Mapping[str, Any]) -> str:
    """Return a key that is equal for configurations that train the same models.

    The tests of the models may differ.
    """
    return run_key({**config, "test_views": [PLAIN], "evaluate": ["global"]})


# `training` -> directories and configurations
Finished = Mapping[str, Sequence[tuple[Path, Mapping[str, Any]]]]


def finished_by_training(directory: Path) -> Finished:
    """Return the runs of `finished_runs`, grouped by `training`, for repeated calls of `complete`.

    Runs without a readable configuration are left out.
    """
    found: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    for run in finished_runs(directory):
        if config := made_with(run):
            found.setdefault(training(config), []).append((run, config))
    return found


def complete(
    directory: Path,
    config: Mapping[str, Any],
    finished: Finished | None = None,
    marks: Callable[[], Mapping[str, str]] = dict,
) -> Path | None:
    """Return a finished run that can be used instead of running a job, or None.

    The run must have all test views and tested models of the job. It may have more, since they do
    not change the other results.

    directory, config: of the job. finished: the runs to search; by default they are read from the
    disk. marks: returns the current marks of the data; a run made with other data is not used.
    """
    views, subjects = {*views_of(config)}, subjects_of(config)
    known = finished_by_training(directory) if finished is None else finished
    for other, found in known.get(training(config), ()):
        enough = {*views_of(found)} >= views and subjects_of(found) >= subjects
        if not enough or other == directory.absolute() or finished_summary(other) is None:
            continue
        if not origin.changes(origin.noted_marks(other), marks()):
            return other
    return None


def note(directory: Path, other: Path, overrides: Sequence[str]) -> None:
    """Write the path of the run that a job uses, and its overrides, to the job's directory."""
    text = yaml.safe_dump(list(overrides), allow_unicode=True).encode()
    storage.write_atomically(directory / ".hydra" / "overrides.yaml", text)
    run = {"run": os.path.relpath(other, directory)} | origin.fingerprint_of(other)
    storage.write_json(directory / NOTE, run)


def noted(directory: Path) -> Path | None:
    """Return the finished run that elsewhere.json names for a job, or None.

    The run is not returned if it has changed since, for example after it was given more rounds.
    """
    try:
        found = contents.read_mapping(directory / NOTE)
    except contents.Damaged:
        return None
    other = found.get("run")
    if not isinstance(other, str) or finished_summary(directory / other) is None:
        return None
    now = origin.fingerprint_of(directory / other)["fingerprint"]
    if found.get("fingerprint", now) != now:
        return None
    return Path(os.path.normpath(directory / other))
