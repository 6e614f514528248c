"""All runs of sweeps as one tidy table, read from run directories and from evidence files.

`read_runs` returns a row for each run, view of the test set, measure and task:

sweep, run    the directory of the sweep and, in it, that of the run
made_by       the sweep that made the run: another one where its run is counted here
overrides     list of what started the job
config, summary   contents of config.yaml and summary.json, dicts
status        completed | stopped | diverged | failed | damaged | running | unfinished
seed, precision   of the run; None where unknown
view          plain | augmented | validation
measure       a key of MEASURES
task          of continual learning, from 1 on; 0 without tasks
rounds, values    arrays [R]: the evaluated rounds from 1 on, and the fraction after each

A run without such a measure has one row with an empty view and measure.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis.sweep import Sweep, find_cell, find_protocol_changes
from fedexp.config.overrides import key_of
from fedexp.core.errors import ConfigError
from fedexp.data.views import VIEWS, name_in_view
from fedexp.rundir import evidence, files
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.revisions import value_of
from fedexp.rundir.run_reuse import ROOT
from fedexp.rundir.schema import OVER
from fedexp.rundir.sweeps import SweepDirectory, without_outdated

# measure -> column of rounds.csv in the plain view
MEASURES = {
    "accuracy": "test_accuracy",
    "forgetting": "forgetting",
    "average_accuracy": "average_accuracy",
    "new_task_accuracy": "new_task_accuracy",
}
COLUMNS = (
    *("sweep", "run", "made_by", "overrides", "config", "summary", "status", "seed", "precision"),
    *("view", "measure", "task", "rounds", "values"),
)

SCALARS = (str, int, float)
Wanted = Callable[[list[str], dict[str, Any]], Any]  # overrides and configuration of a run


@dataclass(frozen=True)
class Record:
    """What the tables read of one run, wherever it is stored."""

    made_by: str
    overrides: list[str]
    config: dict[str, Any]
    summary: dict[str, Any]
    status: str
    table: pd.DataFrame  # rounds.csv from round 1 on

    @property
    def is_finished(self) -> bool:
        return self.status in OVER


def read_runs(
    directories: Iterable[Path],
    wanted: Wanted = lambda overrides, config: True,
) -> pd.DataFrame:
    """Return the runs of these sweeps' directories; see the columns above.

    wanted: which runs, by overrides and configuration. Raises ConfigError for an evidence file that
    is damaged."""
    rows = [row for directory in directories for row in rows_of(directory, wanted)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"task": int})


def counted_runs(
    sweep: Sweep, directory: Path, everything: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Return the runs of a sweep's directory, and those that other sweeps below the same `multirun`
    have finished at its protocol, with the overrides of its job; their `run` is <sweep>/<run>.

    everything: all runs there, where they have been read."""
    if everything is None:
        own, root = read_runs([directory]), directory.absolute().parent
        folders = sorted(root.iterdir()) if root.name == ROOT and sweep.paper else []
        others = [path for path in folders if path.is_dir() and path.name != directory.name]
        fits = partial(as_job, sweep)
        return counted_runs(sweep, directory, pd.concat([own, read_runs(others, fits)]))
    mine = everything["sweep"] == directory.name
    others_there = everything[~mine & everything["status"].isin(OVER)]
    jobs: dict[Any, Any] = {}
    for _, run in others_there.drop_duplicates(["sweep", "run"]).iterrows():
        jobs[run["sweep"], run["run"]] = as_job(sweep, run["overrides"], run["config"])
    keys = list(zip(others_there["sweep"], others_there["run"], strict=True))
    found = others_there.assign(overrides=[jobs[key] for key in keys])
    found = found[found["overrides"].notna()]
    found = found.assign(run=found["sweep"] + "/" + found["run"], sweep=directory.name)
    return pd.concat([everything[mine], found], ignore_index=True)


def as_job(sweep: Sweep, overrides: list[str], config: Mapping[str, Any]) -> list[str] | None:
    """Return the overrides of a run with what its configuration says of the sweep's other keys;
    None unless it is a run of the sweep at its protocol."""
    if find_protocol_changes(sweep, overrides):
        return None
    given = {key_of(text) for text in overrides}
    keys = {key for block in sweep.blocks for key in [*block.axes, *map(key_of, block.fixed)]}
    values = {key: value_of(config, key) for key in sorted(keys - given)}
    more = [f"{key}={value}" for key, value in values.items() if isinstance(value, SCALARS)]
    return [*overrides, *more] if find_cell(sweep, [*overrides, *more]) else None


def rows_of(directory: Path, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Yield the rows of one sweep's directory."""
    for name, record in sorted(records(directory, wanted).items()):
        common = {
            "sweep": directory.name,
            "run": name,
            "made_by": record.made_by,
            "overrides": record.overrides,
            "config": record.config,
            "summary": record.summary,
            "status": record.status,
            "seed": record.summary.get("seed"),
            "precision": (record.summary.get("hardware") or {}).get("precision"),
        }
        found = list(series(record.table))
        for each in found or [{"view": "", "measure": "", "task": 0, "rounds": (), "values": ()}]:
            yield common | each


def records(directory: Path, wanted: Wanted) -> dict[str, Record]:
    """Return the runs of a sweep's directory by name; one that is over here counts before its
    evidence file."""
    found = {
        run.directory.name: of_directory(run)
        for run in without_outdated(SweepDirectory(directory.absolute()).jobs)
        if wanted(run.overrides, run.config)
    }
    for path in sorted((directory / evidence.FOLDER).glob(f"*{evidence.SUFFIX}")):
        name = path.name.removesuffix(evidence.SUFFIX)
        if name in found and found[name].is_finished:
            continue
        kept = of_file(path)
        if kept is not None and wanted(kept.overrides, kept.config):
            found[name] = kept
    return found


def of_directory(run: RunDirectory) -> Record:
    made_by = run.directory.parent.name
    return Record(made_by, run.overrides, run.config, run.summary, run.status, run.table)


def of_file(path: Path) -> Record | None:
    """Return the run of an evidence file; None where the run of another sweep that it names is not
    there. Raises ConfigError for a damaged file."""
    content = evidence.read(path)
    overrides = [str(text) for text in content["overrides"]]
    if "elsewhere" in content:
        other = path.parents[2].joinpath(*PurePosixPath(content["elsewhere"]).parts[-2:])
        kept = other.parent / evidence.FOLDER / f"{other.name}{evidence.SUFFIX}"
        if RunDirectory(other).finished:
            return replace(of_directory(RunDirectory(other)), overrides=overrides)
        record = of_file(kept) if kept.is_file() else None
        return record and replace(record, overrides=overrides)
    try:
        table = frame_of(content["tables"].get(files.ROUNDS, {}))
        status = str(content["summary"]["status"])
    except evidence.DAMAGE as error:
        raise ConfigError(f"{path}: not the file of a run ({error!r})") from error
    made_by = path.parents[1].name
    return Record(made_by, overrides, content["config"], content["summary"], status, table)


def frame_of(columns: Mapping[str, str]) -> pd.DataFrame:
    """Return a table of an evidence file from round 1 on; its columns are texts with commas."""
    cells = {name: text.split(",") for name, text in columns.items()}
    table = pd.DataFrame({name: [float(c or "nan") for c in cells[name]] for name in cells})
    return table[table["round"] >= 1] if len(table) else table


def series(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield rounds and values of each view and measure that a table of rounds has, task by task."""
    for view in VIEWS:
        for measure, column in MEASURES.items():
            name = name_in_view(column, view)
            if name not in table:
                continue
            known = table.dropna(subset=name)
            tasks = known["task"] if "task" in known else pd.Series(0, index=known.index)
            for task, part in known.groupby(tasks.astype(int)):
                rounds = part["round"].to_numpy(dtype=np.int64)
                values = part[name].to_numpy(dtype=np.float64)
                where = {"view": view, "measure": measure, "task": task}
                yield where | {"rounds": rounds, "values": values}


def hours_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the hours of all rounds of a run on CPU cores and on GPUs; nan where unknown."""
    hardware, seconds = summary.get("hardware") or {}, summary.get("seconds") or np.nan
    hours = seconds * max(hardware.get("workers") or 1, 1) / 3600
    if str(hardware.get("device", "cpu")).startswith("cuda"):
        return {"cpu": np.nan, "gpu": hours}
    return {"cpu": hours * (hardware.get("threads") or 1), "gpu": np.nan}
