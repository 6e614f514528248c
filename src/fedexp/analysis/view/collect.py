"""Run directories as plain data for the page; every file may be missing, cut short or damaged, which is said there."""

import base64
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

import fedexp
from fedexp.analysis import aggregate, compare, layout
from fedexp.analysis.claims import of_text
from fedexp.analysis.compare import Run
from fedexp.core.errors import ConfigError, nearest
from fedexp.core.views import AUGMENTED, file_of, suffix
from fedexp.data.partition import load_npz
from fedexp.rundir import files
from fedexp.rundir.fingerprint import flatten
from fedexp.rundir.lock import is_occupied

MARKS = (files.CONFIG, files.SUMMARY, files.ROUNDS, files.ERROR)  # one of them makes a directory a run
EXPECTED = (files.CONFIG, files.SUMMARY, files.ROUNDS, files.CLASSES, files.PARTITION)
MOST_POINTS = 300  # of a curve
MOST_CELLS = 12_000  # of a heat map
LEVELS = 250  # of a heat map between 0 and 1; the byte 255 stands for undefined
SHOWN = (
    *aggregate.VALUES,
    *(f"{name}{suffix(AUGMENTED)}" for name in ("accuracy", "best_accuracy", "forgetting")),
    "rounds",
    "seconds",
    "train_samples_per_second",
    "rounds_to_target",
    "commit",
    "versions",
    "hardware",
)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories at or below these, in their order. Raises ConfigError where there are none."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
            raise ConfigError(f"{path}: no such directory{nearest(path.name, siblings)}")
        below = []
        for folder, folders, names in os.walk(path):
            if not {*names}.isdisjoint(MARKS):
                below.append(Path(folder))
                folders.clear()
            folders.sort()
        if not below:
            raise ConfigError(f"{path}: neither a run nor a directory of runs (none of {', '.join(MARKS)} below it)")
        found |= dict.fromkeys(below)
    return list(found)


class Pool:
    """Values that many runs share, kept once."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._places: dict[str, int] = {}

    def add(self, item: Any) -> int:
        """Add a value once and return its place."""
        key = json.dumps(item)
        if key not in self._places:
            self._places[key] = len(self.items)
            self.items.append(item)
        return self._places[key]


@dataclass
class Files:
    """The content of a run directory, as far as it can be read."""

    directory: Path
    problems: list[str] = field(default_factory=list)  # one line each
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    rounds: pd.DataFrame | None = None  # rounds.csv, numbers; no row without a round
    classes: pd.DataFrame | None = None  # class_accuracy.csv, likewise
    augmented: pd.DataFrame | None = None  # class_accuracy_augmented.csv, likewise
    names: list[str] | None = None  # of the classes

    @classmethod
    def read(cls, directory: Path) -> "Files":
        run = cls(directory)
        run.config = run._try(files.CONFIG, read_mapping) or {}
        run.summary = run._try(files.SUMMARY, read_mapping) or {}
        if run.summary.get("status") != "failed":  # it may not have begun
            run.problems += [f"{name} is missing" for name in EXPECTED if not (directory / name).exists()]
        run.overrides = run._try(".hydra/overrides.yaml", read_overrides) or []
        run.rounds = run._try(files.ROUNDS, lambda path: read_table(path, ["round"]))
        run.classes = run._try(files.CLASSES, lambda path: read_table(path, ["round", "class", "accuracy"]))
        run.augmented = run._try(
            file_of(files.CLASSES, AUGMENTED), lambda path: read_table(path, ["round", "class", "accuracy"])
        )
        run.names = run._try(files.PARTITION, lambda path: [str(name) for name in load_npz(path)["classes"]])
        return run

    def _try(self, name: str, read: Callable[[Path], Any]) -> Any:
        """Read a file; None for a missing one, and for a damaged one, which is noted."""
        path = self.directory / name
        try:
            return read(path) if path.exists() else None
        except (OSError, ValueError, KeyError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self.problems.append(f"{name} cannot be read: {reason.removeprefix(f'{path}: ')}")
            return None

    @property
    def status(self) -> str:
        """Return the status: completed | diverged | failed | running | unfinished."""
        if "status" in self.summary:
            return str(self.summary["status"])
        if (self.directory / files.ERROR).exists():
            return "failed"
        return "running" if is_occupied(self.directory) else "unfinished"

    @property
    def choices(self) -> dict[str, Any]:
        chosen = self.config.get("choices")
        return self.summary | (chosen if isinstance(chosen, dict) else {})

    @property
    def countable(self) -> bool:
        """Tell whether the tables include the run."""
        over = self.summary.get("status") in ("completed", "diverged") and "best_accuracy" in self.summary
        return over and self.rounds is not None and "test_accuracy" in self.rounds


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a .yaml or .json file."""
    text = path.read_text(encoding="utf-8")
    content = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=LOADER)
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content


def read_overrides(path: Path) -> list[str]:
    return [str(override) for override in yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER) or ()]


def read_table(path: Path, keys: list[str]) -> pd.DataFrame:
    """Read a csv file as numbers, nan where there is none; keys: columns that it must have, `round` in every row."""
    table = pd.read_csv(path, skip_blank_lines=True)
    if missing := [key for key in keys if key not in table]:
        raise ValueError(f"no column {', '.join(missing)}")
    for name in table:
        if not pd.api.types.is_numeric_dtype(table[name]):  # a damaged cell among the numbers
            table[name] = pd.to_numeric(table[name], errors="coerce")
    return table[np.isfinite(table["round"])]


def collect(paths: Sequence[Path]) -> dict[str, Any]:
    """Collect everything that the page shows. Raises ConfigError where there is no run."""
    directories = find_runs(paths)
    base = Path(os.path.commonpath([path.absolute() for path in (paths if len(paths) > 1 else directories)]))
    if base in (path.absolute() for path in directories):
        base = base.parent
    runs = [Files.read(directory) for directory in directories]
    parts = [parts_of(run) for run in runs]
    names = {"setting": distinct([part and part[0] for part in parts]), "method": [part and part[1] for part in parts]}
    known = {kind: sorted({name for name in given if name is not None}, key=natural) for kind, given in names.items()}
    pools = {"axes": Pool(), "classes": Pool()}
    rows = []
    for i, run in enumerate(runs):
        row: dict[str, Any] = {"name": run.directory.absolute().relative_to(base).as_posix(), "status": run.status}
        for kind, given in names.items():
            row[kind] = None if (name := given[i]) is None else known[kind].index(name)
        rows.append(row | describe(run, pools))
    return {
        "title": title_of(paths),
        "made": datetime.now().astimezone().isoformat(timespec="minutes"),
        "version": fedexp.__version__,
        "levels": LEVELS,
        "settings": known["setting"],
        "methods": known["method"],
        **{name: pool.items for name, pool in pools.items()},
        "measures": measures(runs),
        "keys": configurations(runs),
        "runs": rows,
        "tables": [table for group in by_sweep(paths, runs) if (table := tables(*group))],
    }


def natural(text: str) -> list[tuple[float, str]]:
    """Return a key for sorting: numbers by their value, before words."""
    pieces = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(piece), "") if i % 2 else (math.inf, piece) for i, piece in enumerate(pieces)]


def title_of(paths: Sequence[Path]) -> str:
    if len(paths) > 1:
        return f"{len(paths)} directories of runs"
    sweep = aggregate.sweep_of(paths[0].absolute())
    return sweep.title if sweep else paths[0].absolute().name


def parts_of(run: Files) -> tuple[list[str], str] | None:
    """Return (words of the setting, method); None where the run does not say."""
    if not run.overrides and not run.config:
        return None
    data, method, others = aggregate.parts_of(run.choices, run.overrides)
    return [*data, *others], " ".join(word.removeprefix("algorithm.") for word in method)


def distinct(settings: Sequence[Sequence[str] | None]) -> list[str | None]:
    """Name each setting: by its first two words, and the others that not all with the same first word share."""
    shared: dict[str, set[str]] = {}
    for words in settings:
        if words is not None:
            shared[words[0]] = shared.get(words[0], {*words}) & {*words}
    return [
        None if words is None else " ".join([*words[:2], *(word for word in words[2:] if word not in shared[words[0]])])
        for words in settings
    ]


def describe(run: Files, pools: Mapping[str, Pool]) -> dict[str, Any]:
    """Describe one run without its setting, method and configuration."""
    error = run.directory / files.ERROR
    report = error.read_text(encoding="utf-8", errors="replace") if error.exists() else None
    return {
        "seed": run.config.get("seed", run.summary.get("seed")),
        "overrides": run.overrides,
        "problems": run.problems,
        "error": report and report.strip()[-2000:],
        "summary": {name: plain(run.summary[name]) for name in SHOWN if name in run.summary},
        **curves(run.rounds, pools),
        "heat": heat(run.classes, run.names, pools),
        **({} if run.augmented is None else {"heat_augmented": heat(run.augmented, run.names, pools)}),
    }


def plain(value: Any) -> Any:
    """Return a value without what JSON cannot hold, numbers to four significant digits."""
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


def measures(runs: Iterable[Files]) -> list[str]:
    """Return the columns of rounds.csv that any run has a value of, the usual ones first."""
    found = dict.fromkeys(("test_accuracy", "forgetting", "average_accuracy", "task_forgetting"), False)
    for run in runs:
        if run.rounds is not None:
            found |= dict.fromkeys(
                (str(name) for name in run.rounds if is_measure(str(name)) and run.rounds[name].notna().any()), True
            )
    return [name for name, there in found.items() if there]


def curves(table: pd.DataFrame | None, pools: Mapping[str, Pool]) -> dict[str, Any]:
    """Return the curves as plain data. axis: place of the round numbers; curves: measure -> values; every: n where
    every n-th evaluated round is kept; tasks: the last rounds of tasks that another one follows."""
    if table is None or table.empty:
        return {}
    columns = [str(name) for name in table if is_measure(str(name))]
    table = table.dropna(subset=columns, how="all")
    starts = table["round"][table["task"].diff() > 0] if "task" in table else ()
    kept, every = thin(len(table), MOST_POINTS)
    table = table[kept]
    values = {name: [plain(v) for v in table[name].tolist()] for name in columns if table[name].notna().any()}
    axis = pools["axes"].add(table["round"].astype(int).tolist())
    return {"axis": axis, "curves": values, "every": every, "tasks": [int(r) - 1 for r in starts if r > 1]}


def thin(length: int, most: int) -> tuple[np.ndarray, int]:
    """Choose the rows to keep, at most about `most` of them: bool [length], every n-th and the last; and n."""
    every = max(1, -(-length // most))
    kept = np.arange(length) % every == 0
    kept[-1:] = True
    return kept, every


def heat(table: pd.DataFrame | None, names: list[str] | None, pools: Mapping[str, Pool]) -> dict[str, Any] | None:
    """Return the class accuracies: axis and classes as places, every as for curves, data: bytes [R, C] in base64."""
    if table is None or table.empty:
        return None
    table = table[np.isfinite(table["class"])]
    labels = table["class"].to_numpy().astype(int)
    rounds, row = np.unique(table["round"].to_numpy().astype(int), return_inverse=True)
    count = max(len(names or ()), labels.max(initial=-1) + 1)
    matrix = np.full((len(rounds), count), np.nan)
    matrix[row, labels] = table["accuracy"]
    kept, every = thin(len(rounds), max(2, MOST_CELLS // max(count, 1)))
    matrix = matrix[kept]
    levels = np.where(np.isfinite(matrix), np.round(np.clip(matrix, 0, 1) * LEVELS), 255).astype(np.uint8)
    return {
        "axis": pools["axes"].add(rounds[kept].tolist()),
        "classes": pools["classes"].add(names or [str(c) for c in range(count)]),
        "every": every,
        "data": base64.b64encode(levels.tobytes()).decode(),
    }


def configurations(runs: Sequence[Files]) -> list[dict[str, Any]]:
    """Return, for every key: its different values, and the place of each run's (-1: it has none; absent where all have
    the first). Those that differ come first."""
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


def as_typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def by_sweep(paths: Sequence[Path], runs: Sequence[Files]) -> list[tuple[Path, list[Run]]]:
    """Return a table of the finished runs below each path; single run directories share one."""
    groups: dict[Path, list[Run]] = {}
    for run in runs:
        if run.countable:
            above = next((path for path in paths if path != run.directory and run.directory.is_relative_to(path)), None)
            groups.setdefault(above or run.directory.parent, []).append(Run(run.directory))
    return list(groups.items())


def tables(directory: Path, runs: list[Run]) -> dict[str, Any] | None:
    """Return the table of a sweep as in table.csv, and its rounds to target."""
    found = aggregate.tables_of(directory.absolute(), runs)
    if found is None:
        return None
    common = {"title": found.sweep.title if found.sweep else directory.absolute().name, "targets": frame(found.targets)}
    if found.sweep is None:
        return common | {"means": frame(found.tidy.drop(columns=list(aggregate.ORIGIN[1:])))}
    tidy = found.tidy[~of_text(found.tidy)]
    named = tidy.assign(column=layout.column_names(tidy))
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (method, column), group in named.groupby(["method", "column"], sort=False):
        cells.setdefault(str(method), {})[str(column)] = [cell(row) for row in group.to_dict("records")]  # type: ignore[arg-type]
    return common | {
        "caption": f"{aggregate.verdicts(found.tidy)} Rule: {found.sweep.rule}. {compare.TOLERANCES}",
        "columns": [str(name) for name in named["column"].unique()],
        "cells": cells,
    }


def cell(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell with one printed value and ours."""
    ours, printed = layout.both(row)
    said = {name: str(row[name]) for name in ("metric", "unit", "verdict", "note")}
    return {"ours": ours, "printed": printed, "n": int(row["n"]), "diverged": int(row["diverged"])} | said


def frame(table: pd.DataFrame) -> dict[str, Any]:
    """Return a table whose runs are named by what not all of them have."""
    names = distinct([str(name).split() for name in table["run"]])
    rows = table.drop(columns="run").astype(object).to_numpy().tolist()
    shown = [[name, *map(plain, row)] for name, row in zip(names, rows, strict=True)]
    return {"columns": ["run", *table.columns.drop("run")], "rows": shown}
