"""Runs that other sweeps below the same `multirun` directory have made: measured once, a run counts
in every table.

A job that is complete elsewhere is not run again: its directory gets `elsewhere.json`, which names
the run.
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
# What may differ between a job and a run that stands for it in a table: the seed, and what
# `protocol_of` has harmless.
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
    """Return a key that is equal for configurations with the same result. The only place that says
    when two runs are the same."""
    return fingerprint(config)


def subjects_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return whose models a configuration tests; one from before that could be asked for tests the
    global model."""
    return frozenset(config.get("evaluate") or ("global",))


def cell_key(config: Mapping[str, Any]) -> str:
    """Return a key that is equal for runs that stand in the same cell of a table, with other seeds
    or on other hardware."""
    kept = {key: value for key, value in config.items() if key not in OPEN}
    dataset = kept.get("dataset")
    if isinstance(dataset, Mapping) and isinstance(dataset.get("root"), str):
        kept["dataset"] = {**dataset, "root": Path(dataset["root"]).name}  # wherever data_dir is
    return run_key(kept)


def finished_runs(directory: Path) -> Iterator[Path]:
    """The directories of all runs whose summary says that they are over below the `multirun`
    directory in which a sweep's directory (or one within it) lies, in the order of their names;
    none where it lies in no `multirun`."""
    root = next((path for path in directory.absolute().parents if path.name == ROOT), None)
    for folder, names, found in os.walk(root) if root is not None else ():
        names.sort()
        if files.CONFIG in found:
            names.clear()
            run = RunDirectory(Path(folder))
            if run.over and (run.summary.get("stopped") or {}).get("by", "patience") == "patience":
                yield Path(folder)  # what ended another stopped run is no part of its configuration


def config_of(directory: Path) -> dict[str, Any]:
    """The configuration of a run; {} where it cannot be read."""
    return RunDirectory(directory).config


def made_with(directory: Path) -> dict[str, Any]:
    """Return `config_of` with the code of a user's own classes, and the data, as they were when the
    run was made."""
    return as_made(config_of(directory), origin.noted_marks(directory))


def training(config: Mapping[str, Any]) -> str:
    """Return a key that is equal for configurations that train the same models, whatever is tested
    of them."""
    return run_key({**config, "test_views": [PLAIN], "evaluate": ["global"]})


# `training` -> directories and configurations
Finished = Mapping[str, Sequence[tuple[Path, Mapping[str, Any]]]]


def finished_by_training(directory: Path) -> Finished:
    """The runs of `finished_runs` for many questions of `complete`; those without a readable
    configuration are left out."""
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
    """Return the run elsewhere that makes the job of this directory needless; None where there is
    none.

    It may have more test views, or test personal models too, since that changes no number of the
    others, but never less. finished: the runs to look at, where they are known. marks: gives those
    of the data as they are now; a run that was made with others does not count."""
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
    """Write into the directory of a job which run stands for it."""
    text = yaml.safe_dump(list(overrides), allow_unicode=True).encode()
    storage.write_atomically(directory / ".hydra" / "overrides.yaml", text)
    run = {"run": os.path.relpath(other, directory)} | origin.fingerprint_of(other)
    storage.write_json(directory / NOTE, run)


def noted(directory: Path) -> Path | None:
    """Return the finished run that stands for the job of this directory, as noted there; None
    where it has since been given more rounds."""
    try:
        found = contents.read_json(directory / NOTE)
    except contents.Damaged:
        return None
    other = found.get("run")
    if not isinstance(other, str) or finished_summary(directory / other) is None:
        return None
    now = origin.fingerprint_of(directory / other)["fingerprint"]
    if found.get("fingerprint", now) != now:
        return None
    return Path(os.path.normpath(directory / other))
