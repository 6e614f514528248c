"""Collect run directories as plain data for the page.

Any file may be missing, truncated or damaged; the page lists such problems.
"""

import base64
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedexp
from fedexp.analysis import paper_table
from fedexp.analysis.aggregate import labels_of, rounds_to_targets, without_repeats
from fedexp.analysis.benchmark import benchmark_sections
from fedexp.analysis.measures import is_pruned, less_is_better, main_measures
from fedexp.analysis.naming import displayed, names, ordered
from fedexp.analysis.sweep import sweep_of
from fedexp.core.errors import ConfigError, nearest
from fedexp.core.storage import regular
from fedexp.data.views import AUGMENTED, PLAIN, file_of, suffix
from fedexp.rundir import files
from fedexp.rundir.evidence import how_to_restore
from fedexp.rundir.fingerprint import flatten
from fedexp.rundir.reader import MARKS, RunDirectory
from fedexp.rundir.sweeps import find_runs

EXPECTED = (files.CONFIG, files.SUMMARY, files.ROUNDS, files.PARTITION)  # and class accuracies
MOST_POINTS = 300  # approximate maximum for a curve
MOST_CELLS = 12_000  # approximate maximum for a heat map
LEVELS = 250  # of a heat map between 0 and 1; the byte 255 means undefined
SHOWN = (
    *paper_table.VALUES,
    *(f"{name}{suffix(AUGMENTED)}" for name in ("accuracy", "best_accuracy", "forgetting")),
    "rounds",
    "seconds",
    "train_samples_per_second",
    "rounds_to_target",
    "commit",
    "versions",
    "hardware",
)


def runs_below(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories at or below these paths, in order.

    Raises ConfigError if a path has none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            if path.exists():
                raise ConfigError(f"{path}: is not a directory")
            siblings = (
                [p.name for p in path.parent.iterdir() if p.is_dir()]
                if path.parent.is_dir()
                else []
            )
            raise ConfigError(f"{path}: no such directory{nearest(path.name, siblings)}")
        below = find_runs(path)
        if not below:
            hint = how_to_restore(path)
            raise ConfigError(
                f"{path}: neither a run nor a directory of runs (none of {', '.join(MARKS)} below"
                f" it){hint}"
            )
        found |= dict.fromkeys(below)
    return list(found)


# directory of a sweep -> its table of measured and published values, if it has one
BesidePrint = Callable[[Path], dict[str, Any] | None]


class Pool:
    """A list of values that many runs share, each stored once."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._places: dict[str, int] = {}

    def add(self, item: object) -> int:
        """Add a value if it is new, and return its index."""
        key = json.dumps(item)
        if key not in self._places:
            self._places[key] = len(self.items)
            self.items.append(item)
        return self._places[key]


def collect(
    paths: Sequence[Path], beside_print: BesidePrint = lambda directory: None
) -> dict[str, Any]:
    """Collect everything that the page shows. Raises ConfigError if there is no run.

    beside_print: returns the table that compares a sweep directory with published values, or None
    if it has no such table.
    """
    directories = runs_below(paths)
    base = Path(
        os.path.commonpath([path.absolute() for path in (paths if len(paths) > 1 else directories)])
    )
    if base in (path.absolute() for path in directories):
        base = base.parent
    runs = [RunDirectory(directory) for directory in directories]
    told = [run for run in runs if run.overrides or run.config]
    named = dict(zip([run.directory for run in told], names(told), strict=True))
    settings, methods = (ordered({name[i] for name in named.values()}) for i in (0, 1))
    pools = {"axes": Pool(), "classes": Pool()}
    rows: list[dict[str, Any]] = []
    for run in runs:
        name = run.directory.absolute().relative_to(base).as_posix()
        row: dict[str, Any] = {"name": name, "status": "pruned" if is_pruned(run) else run.status}
        row |= {"setting": None, "method": None}
        if run.directory in named:
            setting, method = named[run.directory]
            row |= {"setting": settings.index(setting), "method": methods.index(method)}
        rows.append(row | describe(run, pools))
    shown = [tables(*group, beside_print) for group in by_sweep(paths, runs)]
    return {
        "title": title_of(paths),
        "made": datetime.now().astimezone().isoformat(timespec="minutes"),
        "version": fedexp.__version__,
        "levels": LEVELS,
        "settings": displayed(settings),
        "methods": displayed(methods),  # in the same order as figures assign colours
        **{name: pool.items for name, pool in pools.items()},
        "measures": measures(runs),
        "keys": configurations(runs),
        "runs": rows,
        "tables": [table for table in shown if table is not None],
    }


def title_of(paths: Sequence[Path]) -> str:
    if len(paths) > 1:
        return f"{len(paths)} directories of runs"
    sweep = sweep_of(paths[0].absolute())
    return sweep.title if sweep else paths[0].absolute().name


def describe(run: RunDirectory, pools: Mapping[str, Pool]) -> dict[str, Any]:
    """Return a run's data, except its setting, method and configuration."""
    classes, augmented = (
        run.class_accuracy(next(iter(run.views), PLAIN)),
        run.class_accuracy(AUGMENTED),
    )
    report = error_of(run)
    return {
        "seed": run.config.get("seed", run.summary.get("seed")),
        # Quote it: users may paste it into a shell, and the run may come from someone else.
        "command": shlex.join(["fedexp", *run.overrides]) if run.overrides else "",
        "problems": problems_of(run),
        "error": report and report.strip()[-2000:],
        "summary": {name: plain(run.summary[name]) for name in SHOWN if name in run.summary},
        **curves(run.rounds, pools),
        "heat": heat(classes, run.class_names, pools),
        **(
            {} if augmented is None else {"heat_augmented": heat(augmented, run.class_names, pools)}
        ),
    }


def problems_of(run: RunDirectory) -> list[str]:
    """Return the problems of a run's files: damaged files, and missing files that the run should
    have."""
    _ = run.class_names  # partition.npz
    found = {problem.file: str(problem) for problem in run.problems}
    if run.status != "failed":  # a failed run may not have started training
        expected = (*EXPECTED, *(file_of(files.CLASSES, view) for view in run.views))
        found |= {name: f"{name}: is missing" for name in expected if not run.has(name)}
    return list(found.values())


def error_of(run: RunDirectory) -> str | None:
    """Return the error report of a failed run; None if there is no readable report."""
    # Do not follow a link: the page may be shared, and would contain the link's target.
    if (run.directory / files.ERROR).is_symlink():
        return None
    try:
        return regular(run.directory / files.ERROR).read_bytes().decode("utf-8", "replace")
    except OSError:
        return None


def plain(value: object) -> Any:
    """Return a value that JSON can store.

    Floats are rounded to four significant digits; nan and infinity become None.
    """
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def is_measure(column: str) -> bool:
    return (
        column not in ("round", "lr", "task")
        and not column.endswith(("seconds", "_per_second"))
        and column[:6] != "bytes_"
    )


def measures(runs: Iterable[RunDirectory]) -> list[str]:
    """Return the columns of rounds.csv in which any run has a value, the main measures first."""
    found = dict.fromkeys((each.column for each in main_measures(runs)), False)
    for run in runs:
        table = pd.DataFrame() if run.rounds is None else run.rounds
        found |= {
            name: True for name in map(str, table) if is_measure(name) and table[name].notna().any()
        }
    return [name for name, there in found.items() if there]


def curves(table: pd.DataFrame | None, pools: Mapping[str, Pool]) -> dict[str, Any]:
    """Return a run's curves as plain data.

    Keys:

    - axis: the index of the round numbers in the pool
    - curves: measure -> values
    - every: n if every n-th evaluated round is kept
    - tasks: the last rounds of all tasks that another task follows
    """
    if table is None or table.empty:
        return {}
    columns = [str(name) for name in table if is_measure(str(name))]
    table = table.dropna(subset=columns, how="all")
    starts = table["round"][table["task"].diff() > 0] if "task" in table else ()
    kept, every = thin(len(table), MOST_POINTS)
    table = table[kept]
    values = {
        name: [plain(v) for v in table[name].tolist()]
        for name in columns
        if table[name].notna().any()
    }
    axis = pools["axes"].add(table["round"].astype(int).tolist())
    return {
        "axis": axis,
        "curves": values,
        "every": every,
        "tasks": [int(r) - 1 for r in starts if r > 1],
    }


def thin(length: int, most: int) -> tuple[np.ndarray, int]:
    """Choose about `most` rows to keep: every n-th row, and the last one.

    Return (whether each row is kept, bool [length]; n).
    """
    every = max(1, -(-length // most))
    kept = np.arange(length) % every == 0
    kept[-1:] = True
    return kept, every


def heat(
    table: pd.DataFrame | None, names: list[str] | None, pools: Mapping[str, Pool]
) -> dict[str, Any] | None:
    """Return class accuracies as plain data; None if there are none.

    Keys:

    - axis, classes: indices in the pools
    - every: as in `curves`
    - data: bytes [R, C] in base64
    """
    if table is None or table.empty:
        return None
    matrix = table.pivot_table(index="round", columns="class", values="accuracy", aggfunc="last")
    count = max(len(names or ()), int(matrix.columns.max()) + 1)
    matrix = matrix.reindex(columns=range(count), index=table["round"].unique()).sort_index()
    kept, every = thin(len(matrix), max(2, MOST_CELLS // max(count, 1)))
    shares = np.round(matrix[kept].clip(0, 1).to_numpy() * LEVELS)
    levels = np.where(np.isfinite(shares), shares, 255).astype(np.uint8)
    return {
        "axis": pools["axes"].add(matrix.index[kept].astype(int).tolist()),
        "classes": pools["classes"].add(names or [str(c) for c in range(count)]),
        "every": every,
        "data": base64.b64encode(levels.tobytes()).decode(),
    }


def configurations(runs: Sequence[RunDirectory]) -> list[dict[str, Any]]:
    """Return, for every key, its different values and the index of each run's value.

    An index of -1 means that the run lacks the key. Indices are omitted if all runs have the same
    value. Keys whose values differ come first.
    """
    flat = [{key: as_typed(value) for key, value in flatten(run.config).items()} for run in runs]
    differing, same = [], []
    for key in dict.fromkeys(key for values in flat for key in values):
        pool = Pool()
        places = [pool.add(values[key]) if key in values else -1 for values in flat]
        if any(places):
            differing.append({"key": key, "values": pool.items, "of": places})
        else:
            same.append({"key": key, "values": pool.items})
    return differing + same


def as_typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def by_sweep(
    paths: Sequence[Path], runs: Sequence[RunDirectory]
) -> list[tuple[Path, list[RunDirectory]]]:
    """Group the finished runs by the given directory that contains them.

    Run directories that are themselves in `paths` are grouped by their parent directory.
    """
    groups: dict[Path, list[RunDirectory]] = {}
    for run in runs:
        if run.finished:
            above = next((path for path in paths if path in run.directory.parents), None)
            groups.setdefault(above or run.directory.parent, []).append(run)
    return list(groups.items())


def tables(
    directory: Path, runs: list[RunDirectory], beside_print: BesidePrint
) -> dict[str, Any] | None:
    """Return a sweep's table, as in table.csv, and its rounds to target; None if no run has
    finished."""
    known = without_repeats(runs)
    if not known:
        return None
    targets = rounds_to_targets(known).dropna(axis=1, how="all")
    found = {"title": directory.absolute().name, "targets": frame(targets)}
    if printed := beside_print(directory.absolute()):
        return found | printed
    table = means(paper_table.means(known))
    return found | {"means": table, "sections": benchmark(directory, runs)}


def means(table: pd.DataFrame) -> dict[str, Any]:
    """Return the means over seeds.

    The column n is omitted if every mean has one seed; the columns diverged and pruned are omitted
    if they are 0 everywhere. The key `best` maps each measure to the rows that are best in their
    setting, for settings with several methods.
    """
    columns = [
        str(name) for name in table if name not in ("setting", "method", *paper_table.COUNTS)
    ]
    counts = [name for name in ("n", "diverged", "pruned") if table[name].max() > (name == "n")]
    several = table.groupby("setting")["method"].transform("size") > 1
    sound = table[columns].where(several & (table["pruned"] == 0))
    best: dict[str, list[int]] = {}
    for name in columns:
        ranks = sound[name].groupby(table["setting"]).rank("min", ascending=less_is_better(name))
        best[name] = [] if name == "best_round" else np.flatnonzero(ranks == 1).tolist()
    return frame(table[["setting", "method", *columns, *counts]]) | {"best": best}


def benchmark(directory: Path, runs: list[RunDirectory]) -> list[dict[str, Any]]:
    """Return a benchmark's tables: results, cost and ranks. Return an empty list for any other
    sweep."""
    sweep = sweep_of(directory.absolute())
    if sweep is None or not sweep.ranks:
        return []
    found = []
    for part in benchmark_sections(sweep, runs):
        columns = ["method", *map(str, part.table.columns)]
        rows = part.table.reset_index().astype(object).to_numpy().tolist()
        found.append({"title": part.title, "columns": columns, "rows": rows})
    return found


def frame(table: pd.DataFrame) -> dict[str, Any]:
    """Return a table of settings and methods as plain data, with its displayed row names."""
    rest = table.drop(columns=["setting", "method"]).astype(object)
    rows = zip(labels_of(table), rest.to_numpy().tolist(), strict=True)
    return {"columns": ["run", *rest], "rows": [[name, *map(plain, row)] for name, row in rows]}
