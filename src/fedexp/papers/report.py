"""The reports of `fedexp report SWEEP ...`, and all runs below some directories as one table."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis.layout import markdown
from fedexp.analysis.naming import named_overrides, shared_overrides
from fedexp.core.errors import ConfigError
from fedexp.core.storage import display_path, write_atomically
from fedexp.figures.pictures import PNG
from fedexp.metrics.task_matrix import MEASURES
from fedexp.metrics.tasks import over_clients
from fedexp.papers.aggregate import write_report
from fedexp.rundir.evidence import FOLDER, SUFFIX, how_to_restore, keep_runs, restore
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import find_runs

# Columns of the table of all runs; those of OF_SOME where a run has a value.
OF_TASKS = ("scenario", "partition")  # in a table with runs of continual learning
RESULTS = ("accuracy", "last5_accuracy", "best_accuracy", "forgetting", "round_forgetting")
COSTS = ("seconds_per_round", "mb_up_per_client", "mb_down_per_client")
COLUMNS = ("seed", "status", "rounds", *RESULTS, *COSTS)
OF_SOME = (
    *("validation_accuracy", "validation_best_accuracy", "best_round"),
    *("personal_accuracy", "personal_accuracy_worst", "personal_forgetting"),
)
DIGITS = {"rounds": 0, "best_round": 0, "forgetting": 3, **dict.fromkeys(COSTS, 2)}
AFTER_TASK = re.compile(r"(average|new)_task\d+")
# beginnings of overrides that columns say
SAID = ("dataset=", "algorithm=", "scenario=", "partition=", "rounds=", "eval_interval")


def row(run: RunDirectory, shared: set[str]) -> dict[str, Any]:
    """One finished run. last5_accuracy: mean over the last five evaluated rounds; bytes: mean of a
    client's exchange in a round. Both accuracies after each task from the second on: after the
    first they are one, and CFeD's tables leave it out."""
    clients = np.nan if run.clients is None else run.clients.groupby("round").size().mean()
    values = {
        name: run.summary.get(name)
        for name in ("dataset", *OF_TASKS, "algorithm", *COLUMNS, *OF_SOME)
    }
    values["options"] = " ".join(
        sorted(
            text
            for text in named_overrides(run)
            if text not in shared and not text.startswith(SAID)
        )
    )
    for end in (run.summary.get("tasks") or [])[1:]:
        values[f"average_task{end['task']}"] = end["average_accuracy"]
        values[f"new_task{end['task']}"] = end["new_task_accuracy"]
    values["task_forgetting"] = run.summary.get("task_forgetting")
    values["last5_accuracy"] = np.mean(run.values(run.accuracy_name or "")[-5:] or [np.nan])
    values["seconds_per_round"] = np.median(run.values("seconds") or [np.nan])
    for way in ("up", "down"):
        sent = np.mean(run.values(f"bytes_{way}") or [np.nan])
        values[f"mb_{way}_per_client"] = sent / clients / 1e6
    return values


def task_measures(run: RunDirectory, names: Sequence[str]) -> dict[str, float]:
    """Return the measures of this name of a run; nan where it has no tasks, or no accuracy of the
    initial model."""
    matrix = np.array(
        [end["accuracies"] for end in run.summary.get("tasks") or []], dtype=np.float64
    )
    if not len(matrix):
        return dict.fromkeys(names, float("nan"))
    start = np.full(matrix.shape[1], np.nan)
    if run.tasks is not None:
        first = run.tasks[run.tasks["round"] == 0]
        start[first["evaluated_task"].to_numpy(dtype=np.int64) - 1] = first["accuracy"]
    orders = run.summary.get("task_orders")
    columns = None if orders is None else np.array(orders, dtype=np.int64) - 1
    return {name: over_clients(MEASURES[name], columns, matrix, start) for name in names}


def sweep_reports(options: argparse.Namespace) -> int:
    """Write the report of each sweep and print its table. options: the flags of `fedexp report`."""
    PNG.changed(options)  # raises ConfigError for a flag that is wrong, before anything is written
    for directory in options.directories:
        if not directory.is_dir():
            print(f"fedexp: {directory}: is not a directory", file=sys.stderr)
            return 2
        if options.restore is not None:
            restored(directory, options.restore / directory.resolve().name)
            continue
        if options.keep:
            kept = keep_runs(directory)
            size = sum(path.stat().st_size for path in kept)
            print(
                f"{len(kept)} runs are kept in {display_path(directory / FOLDER)}: {size / 1e6:.2f}"
                " MB\n"
            )
        paths = write_report(directory, not options.no_figures, options)
        if not paths:
            print(f"fedexp: no finished run in {directory}", file=sys.stderr)
            return 2
        print((directory / "table.md").read_text(encoding="utf-8"))
        print("\n".join(f"  {display_path(path)}" for path in paths))
    return 0


def restored(sweep: Path, target: Path) -> None:
    """Make the run directories of a sweep's files, and say where. Raises ConfigError where the
    sweep has no files."""
    made = restore(sweep, target)
    if not made:
        raise ConfigError(
            f"{sweep}: has no {FOLDER}/*{SUFFIX} of a finished run, which --keep writes"
        )
    print(f"{len(made)} runs are restored in {display_path(target)}")


def one_table(directories: Sequence[Path], out: Path | None, measures: Sequence[str]) -> int:
    """Print all runs below the directories as one table, and write it where `out` says so."""
    there = [RunDirectory(path) for directory in directories for path in find_runs(directory)]
    for run in there:
        if run.damaged:
            print(f"fedexp: {run.directory}: {run.describe_damage()}; left out", file=sys.stderr)
    finished = [run for run in there if run.finished]
    if not finished:
        hint = next(filter(None, map(how_to_restore, directories)), "")
        places = ", ".join(map(str, directories))
        print(f"fedexp: no finished run below {places}{hint}", file=sys.stderr)
        return 2
    shared = shared_overrides(finished)
    table = pd.DataFrame([row(run, shared) | task_measures(run, measures) for run in finished])
    after = [str(name) for name in table if AFTER_TASK.fullmatch(str(name))]
    after.sort(key=lambda name: (int(name.rpartition("task")[2]), name))
    of_tasks = (
        [*after, "task_forgetting"] if any(run.summary.get("tasks") for run in finished) else []
    )
    some = [name for name in OF_SOME if table[name].notna().any()]
    first = ["dataset", *(OF_TASKS if of_tasks else ()), "algorithm"]
    options = ["options"] * any(table["options"])
    table = table[[*first, *options, *COLUMNS, *of_tasks, *some, *measures]]
    table = table.sort_values([*first, "seed"])
    cells = {name: [cell(str(name), value) for value in table[name]] for name in table}
    text = markdown(pd.DataFrame(cells).set_index("dataset"), "dataset")
    if out is not None:
        write_atomically(out.with_suffix(".csv"), table.to_csv(index=False).encode())
        write_atomically(out.with_suffix(".md"), text.encode())
    print(text, end="")
    return 0


def cell(name: str, value: Any) -> str:
    """Return a value of a column as it is printed."""
    if pd.isna(value):
        return ""
    if isinstance(value, str) or name == "seed":
        return str(value)
    return f"{value:,.{DIGITS.get(name, 4)}f}"
