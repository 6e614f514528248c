"""Write one table of all runs in some directories (`fedexp report --out`)."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis.frame import tidy
from fedexp.analysis.layout import csv, markdown
from fedexp.analysis.means_table import Layout, shown_metrics
from fedexp.analysis.naming import named_overrides, shared_overrides
from fedexp.core.errors import ConfigError
from fedexp.core.storage import display_path, remove_leftovers, write_texts
from fedexp.metrics.forgetting_metric import main_columns
from fedexp.rundir import files, jobs
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import find_runs

# Columns of the table of all runs. A column is left out if no run has a value for it.
DATA = ("dataset", "scenario", "partition")
COSTS = ("seconds_per_round", "mb_up_per_client", "mb_down_per_client")
DIGITS = {"rounds": 0, "forgetting": 3, **dict.fromkeys(COSTS, 2)}
# prefixes of overrides that are left out because another column shows them
SHOWN = ("dataset=", "algorithm=", "scenario=", "partition=", "rounds=", "eval_interval")


def run_row(run: RunDirectory, shared: set[str], tasks: Sequence[int]) -> dict[str, Any]:
    """Return a finished run's row in the table of all runs.

    last5_accuracy: the mean over the last five evaluated rounds
    mb_up_per_client, mb_down_per_client: the mean traffic of one client in one round in which it
        takes part, in MB
    average_task2, new_task2, ...: accuracies after each task from the second on. After the first
        task, both accuracies are equal.

    shared: the overrides that all runs share. tasks: the numbers of all tasks, except the first,
    that any run has.
    """
    summary = run.summary
    found = {name: summary.get(name) for name in (*DATA, "algorithm")}
    own = set(named_overrides(run)) - shared
    options = sorted(text for text in own if not text.startswith(SHOWN))
    found["options"] = " ".join(options) or None
    found |= {name: summary.get(name) for name in ("seed", "status", "rounds", "accuracy")}
    found["last5_accuracy"] = np.mean(run.values(run.accuracy_name or "")[-5:] or [np.nan])
    found |= {column.key: summary.get(column.key) for column in main_columns()}
    found["seconds_per_round"] = np.median(run.values("seconds") or [np.nan])
    for way in ("up", "down"):
        sent = np.sum(run.values(f"bytes_{way}") or [np.nan])
        found[f"mb_{way}_per_client"] = sent / count_participations(run) / 1e6
    ends = {end["task"]: end for end in summary.get("tasks") or ()}
    for task in tasks:
        found[f"average_task{task}"] = ends.get(task, {}).get("average_accuracy")
        found[f"new_task{task}"] = ends.get(task, {}).get("new_task_accuracy")
    return found


def count_participations(run: RunDirectory) -> float:
    """Return how many clients took part in the rounds of a run together, or nan if none did.

    With `cohorts.dropout`, clients that never started do not count.
    """
    rows = run.clients
    if rows is not None and files.HAS_ARRIVED in rows:
        rows = rows[(rows["steps"] > 0) | (rows[files.HAS_ARRIVED] == 1)]
    return np.nan if rows is None or rows.empty else len(rows)


def write_run_table(directories: Sequence[Path], out: Path, metrics: Sequence[str]) -> None:
    """Write all runs in the directories to one table, and print it.

    out: the path of the table's files, without a suffix. metrics: values to add, see
    `shown_metrics`. The column replaced_by has the run that a sweep counts instead, see
    `fedexp.rundir.jobs`.

    Raises ConfigError if no run is finished or has a requested metric.
    """
    there: dict[Path, RunDirectory] = {}
    for path in itertools.chain(*map(find_runs, directories)):
        there.setdefault(path.resolve(), RunDirectory(path))  # links may reach a run several times
    places = [real for real, run in there.items() if run.finished]
    finished = [there[real] for real in places]
    if not finished:
        raise ConfigError(f"no finished run in {', '.join(map(str, directories))}")
    shared = shared_overrides(finished)
    ends = [end for run in finished for end in run.summary.get("tasks") or ()]
    tasks = sorted({end["task"] for end in ends} - {1})
    rows = [run_row(run, shared, tasks) for run in finished]
    replaced = {sweep: jobs.read(sweep).replaced for sweep in {real.parent for real in places}}
    for real, row in zip(places, rows, strict=True):
        row["replaced_by"] = replaced[real.parent].get(real.name)
    table = pd.DataFrame(rows).dropna(axis="columns", how="all")
    if metrics:
        every = tidy(finished)
        asked = shown_metrics(every, Layout(tuple(metrics)))
        table = table.join(every[[name for name in asked if name not in table]])
    table = table.sort_values([name for name in (*DATA, "algorithm", "seed") if name in table])
    digits = DIGITS | {column.key: 0 for column in main_columns() if column.quantity.whole}
    cells = {
        name: [format_cell(str(name), value, digits.get(str(name), 4)) for value in table[name]]
        for name in table
    }
    text = markdown(pd.DataFrame(cells).set_index("dataset"), "dataset")
    name = out.name.removesuffix(".csv").removesuffix(".md")
    paths = write_texts(out.parent, {f"{name}.csv": csv(table), f"{name}.md": text})
    remove_leftovers(paths)
    print(text, end="")
    for path in paths:
        print(f"  {display_path(path)}")


def format_cell(name: str, value: Any, digits: int) -> str:
    """Format a value of the table. name: the column of the value."""
    if pd.isna(value):
        return ""
    if isinstance(value, str) or name == "seed":
        return str(value)
    return f"{value:,.{digits}f}"
