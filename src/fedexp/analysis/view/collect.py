"""Collect the contents of run directories as plain data for the page.

Any file may be missing, truncated or damaged. The page lists these problems.
"""

import base64
import itertools
import json
import math
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedexp
from fedexp.analysis import paper_table
from fedexp.analysis.aggregate import drop_repeats, label_rows, rounds_to_targets
from fedexp.analysis.measures import is_pruned, less_is_better, main_measures
from fedexp.analysis.naming import displayed, names, ordered
from fedexp.analysis.sweep import find_sweep
from fedexp.core.errors import ConfigError, nearest
from fedexp.core.storage import regular
from fedexp.data.views import AUGMENTED, PLAIN, file_in_view, suffix
from fedexp.figures.load import class_matrix
from fedexp.rundir import files
from fedexp.rundir.evidence import how_to_restore
from fedexp.rundir.fingerprint import flatten
from fedexp.rundir.reader import MARKS, RunDirectory
from fedexp.rundir.sweeps import find_runs

EXPECTED = (files.CONFIG, files.SUMMARY, files.ROUNDS, files.PARTITION)  # and class accuracies
MOST_POINTS = 300  # approximate maximum number of points in a curve
MOST_CELLS = 12_000  # approximate maximum number of cells in a heat map
LEVELS = 250  # levels between 0 and 1 in a heat map; the byte 255 means undefined
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


# directory of a sweep -> table of measured and published values; None without published values
BesidePrint = Callable[[Path], dict[str, Any] | None]


@dataclass
class Shared:
    """Values that many runs share. Runs refer to them by index."""

    axes: list[list[int]] = field(default_factory=list)  # round numbers
    classes: list[list[str]] = field(default_factory=list)  # names


def runs_below(path: Path) -> list[Path]:
    """Return the run directories at or inside a path, in order.

    Raises ConfigError if no run is found.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: is not a directory")
    if not path.exists():
        siblings = [each.name for each in path.parent.glob("*/")]
        raise ConfigError(f"{path}: no such directory{nearest(path.name, siblings)}")
    found = find_runs(path)
    if not found:
        raise ConfigError(
            f"{path}: contains no runs; a run directory contains one of {', '.join(MARKS)}"
            f"{how_to_restore(path)}"
        )
    return found


def collect(
    paths: Sequence[Path], beside_print: BesidePrint = lambda directory: None
) -> dict[str, Any]:
    """Return everything that the page shows. Raises ConfigError if no run is found.

    beside_print: a function that takes a sweep directory. It returns a table that compares the
    sweep with published values, or None if no values were published.
    """
    directories = [directory for path in paths for directory in runs_below(path)]
    runs = [RunDirectory(directory) for directory in dict.fromkeys(directories)]
    base = Path(os.path.commonpath([path.absolute() for path in paths]))
    if any(run.directory.absolute() == base for run in runs):
        base = base.parent
    known = [run for run in runs if run.overrides or run.config]
    named = dict(zip([run.directory for run in known], names(known), strict=True))
    settings, methods = (ordered({name[i] for name in named.values()}) for i in (0, 1))
    shared = Shared()
    rows: list[dict[str, Any]] = []
    for run in runs:
        setting, method = named.get(run.directory, (None, None))
        row = {
            "name": run.directory.absolute().relative_to(base).as_posix(),
            "status": "pruned" if is_pruned(run) else run.status,
            "setting": None if setting is None else settings.index(setting),
            "method": None if method is None else methods.index(method),
        }
        rows.append(row | describe_run(run, shared))
    finished = [run for run in runs if run.finished]
    sweeps = itertools.groupby(finished, lambda run: run.directory.parent)
    tables = [collect_tables(directory, list(group), beside_print) for directory, group in sweeps]
    sweep = find_sweep(paths[0].absolute())
    title = sweep.title if sweep else paths[0].absolute().name
    return {
        "title": title if len(paths) == 1 else f"{len(paths)} directories of runs",
        "made": datetime.now().astimezone().isoformat(timespec="minutes"),
        "version": fedexp.__version__,
        "levels": LEVELS,
        "settings": displayed(settings),
        "methods": displayed(methods),  # in the order in which figures assign colours
        "axes": shared.axes,
        "classes": shared.classes,
        "measures": list_measures(runs),
        "keys": encode_configurations(runs),
        "runs": rows,
        "tables": tables,
    }


def index_of(item: Any, values: list[Any]) -> int:
    """Return the index of an item in a list. If the item is not in the list, it is appended."""
    if item not in values:
        values.append(item)
    return values.index(item)


def describe_run(run: RunDirectory, shared: Shared) -> dict[str, Any]:
    """Return the data of a run, except for its setting, method and configuration."""
    report = error_of(run)
    found = {
        "seed": run.config.get("seed", run.summary.get("seed")),
        # Quote the text, as users may paste it into a shell and the run may come from someone else.
        "command": shlex.join(["fedexp", *run.overrides]) if run.overrides else "",
        "problems": problems_of(run),
        "error": report and report.strip()[-2000:],
        "summary": {name: to_json(run.summary[name]) for name in SHOWN if name in run.summary},
        **encode_curves(run.rounds, shared),
        "heat": encode_heat_map(run, next(iter(run.views), PLAIN), shared),
    }
    if augmented := encode_heat_map(run, AUGMENTED, shared):
        found["heat_augmented"] = augmented
    return found


def problems_of(run: RunDirectory) -> list[str]:
    """List the damaged files of a run, and the expected files that are missing."""
    _ = run.class_names  # partition.npz
    found = dict(run.problems)
    # a failed run may not have started training, and an imported run has only accuracies
    if run.status != "failed" and "imported" not in run.summary:
        expected = (*EXPECTED, *(file_in_view(files.CLASSES, view) for view in run.views))
        found |= {name: "is missing" for name in expected if not run.has(name)}
    return [f"{name}: {reason}" for name, reason in found.items()]


def error_of(run: RunDirectory) -> str | None:
    """Return the error report of a failed run, or None if it is missing or unreadable."""
    # Do not follow a link, since the page would contain its target and may be shared.
    if (run.directory / files.ERROR).is_symlink():
        return None
    try:
        return regular(run.directory / files.ERROR).read_bytes().decode("utf-8", "replace")
    except OSError:
        return None


def to_json(value: object) -> Any:
    """Convert a value to one that JSON can store.

    Floats are rounded to four significant digits. nan and infinity are converted to None.
    """
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def is_measure(column: str) -> bool:
    return (
        column not in ("round", "lr", "task")
        and not column.endswith(("seconds", "_per_second"))
        and column[:6] != "bytes_"
    )


def list_measures(runs: Sequence[RunDirectory]) -> list[str]:
    """Return the columns of rounds.csv that have values in any run, the main measures first."""
    tables = [run.rounds.dropna(axis=1, how="all") for run in runs if run.rounds is not None]
    used = [str(name) for table in tables for name in table]
    main = [measure.column for measure in main_measures(runs) if measure.column in used]
    return list(filter(is_measure, dict.fromkeys(main + used)))


def encode_curves(table: pd.DataFrame | None, shared: Shared) -> dict[str, Any]:
    """Return the curves of a run as plain data.

    Keys:

    - axis: the index of the round numbers in `Shared.axes`
    - curves: measure -> values
    - every: n if only every n-th evaluated round is included
    - tasks: the last round of each task that is followed by another task
    """
    if table is None or table.empty:
        return {}
    starts = table["round"][table["task"].diff() > 0] if "task" in table else ()
    columns = [str(name) for name in table if is_measure(str(name))]
    table = table.dropna(subset=columns, how="all")
    kept, every = choose_rows(len(table), MOST_POINTS)
    table = table[kept]
    values = table[columns].dropna(axis=1, how="all")
    return {
        "axis": index_of(table["round"].astype(int).tolist(), shared.axes),
        "curves": {name: to_json(values[name].tolist()) for name in values},
        "every": every,
        "tasks": [int(r) - 1 for r in starts if r > 1],
    }


def choose_rows(length: int, most: int) -> tuple[np.ndarray, int]:
    """Choose about `most` rows to keep: every n-th row and the last one.

    Return whether each row is kept, bool [length], and n.
    """
    every = max(1, -(-length // most))
    kept = np.arange(length) % every == 0
    kept[-1:] = True
    return kept, every


def encode_heat_map(run: RunDirectory, view: str, shared: Shared) -> dict[str, Any] | None:
    """Return the class accuracies in a test view as plain data, or None if they were not saved.

    Keys:

    - axis, classes: indices into the lists of `Shared`
    - every: as in `encode_curves`
    - data: bytes [R, C], encoded in base64
    """
    table, names = run.class_accuracy(view), run.class_names
    if table is None or table.empty:
        return None
    count = max(len(names or ()), int(table["class"].max()) + 1)
    matrix = class_matrix(table, count)
    kept, every = choose_rows(len(matrix), max(2, MOST_CELLS // max(count, 1)))
    shares = np.round(matrix[kept].clip(0, 1).to_numpy() * LEVELS)
    levels = np.where(np.isfinite(shares), shares, 255).astype(np.uint8)
    return {
        "axis": index_of(matrix.index[kept].astype(int).tolist(), shared.axes),
        "classes": index_of(names or [str(c) for c in range(count)], shared.classes),
        "every": every,
        "data": base64.b64encode(levels.tobytes()).decode(),
    }


def encode_configurations(runs: Sequence[RunDirectory]) -> list[dict[str, Any]]:
    """Return a list with the different values of each key, and the index of each run's value.

    An index of -1 means that the run does not have the key. Indices are left out if all runs have
    the same value. Keys whose values differ come first.
    """
    flat = [
        {key: format_option(value) for key, value in flatten(run.config).items()} for run in runs
    ]
    found = []
    for key in dict.fromkeys(key for values in flat for key in values):
        places, values = pd.factorize(np.array([each.get(key) for each in flat], dtype=object))
        differing = {"of": places.tolist()} if places.any() else {}
        found.append({"key": key, "values": values.tolist()} | differing)
    return sorted(found, key=lambda each: "of" not in each)


def format_option(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def collect_tables(
    directory: Path, runs: list[RunDirectory], beside_print: BesidePrint
) -> dict[str, Any]:
    """Return the tables of the finished runs: table.csv and rounds to targets."""
    known = drop_repeats(runs)
    targets = rounds_to_targets(known).dropna(axis=1, how="all")
    found = {"title": directory.absolute().name, "targets": encode_table(targets)}
    if printed := beside_print(directory.absolute()):
        return found | printed
    return found | {"means": encode_means(paper_table.means(known))}


def encode_means(table: pd.DataFrame) -> dict[str, Any]:
    """Return the means over seeds as plain data.

    The column n is left out if every mean has one seed. The columns `diverged` and `pruned` are
    left out if they are 0 everywhere. For settings with several methods, the key `best` maps each
    measure to the rows that are the best in their setting.
    """
    columns = table.columns.difference(["setting", "method", *paper_table.COUNTS], sort=False)
    counts = [name for name in ("n", "diverged", "pruned") if table[name].max() > (name == "n")]
    several = table.groupby("setting")["method"].transform("size") > 1
    sound = table[columns].where(several & (table["pruned"] == 0))
    best = {}
    for name in columns.drop("best_round", errors="ignore"):
        ascending = less_is_better(name) is not False
        ranks = sound[name].groupby(table["setting"]).rank("min", ascending=ascending)
        best[name] = np.flatnonzero(ranks == 1).tolist()
    return encode_table(table[["setting", "method", *columns, *counts]]) | {"best": best}


def encode_table(table: pd.DataFrame) -> dict[str, Any]:
    """Return a table of settings and methods, with displayed row names, as plain data."""
    rest = table.drop(columns=["setting", "method"]).astype(object)
    rows = zip(label_rows(table), rest.to_numpy().tolist(), strict=True)
    return {"columns": ["run", *rest], "rows": [[name, *map(to_json, row)] for name, row in rows]}
