"""The reports of `fedexp report SWEEP ...`, and all runs below some directories as one table."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis.aggregate import write_report
from fedexp.core.errors import ConfigError
from fedexp.core.pictures import PNG
from fedexp.core.storage import write_atomically
from fedexp.metrics.task_matrix import MEASURES
from fedexp.metrics.tasks import over_clients
from fedexp.rundir.evidence import FOLDER, SUFFIX, how_to_restore, keep_runs, restore
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import find_runs
from fedexp.trackers.base import display_path

COLUMNS = {  # column -> how it is printed
    "dataset": "{}",
    "scenario": "{}",
    "partition": "{}",
    "algorithm": "{}",
    "seed": "{}",
    "status": "{}",
    "rounds": "{:,}",
    "accuracy": "{:.4f}",
    "last5_accuracy": "{:.4f}",
    "best_accuracy": "{:.4f}",
    "forgetting": "{:.3f}",
    "round_forgetting": "{:.4f}",
    "seconds_per_round": "{:.1f}",
    "mb_up_per_client": "{:.2f}",
    "mb_down_per_client": "{:.2f}",
}
# in a table with runs that were evaluated on a validation set, or that tested personal models
OF_SOME = {
    "validation_accuracy": "{:.4f}",
    "validation_best_accuracy": "{:.4f}",
    "best_round": "{:.0f}",
    "personal_accuracy": "{:.4f}",
    "personal_accuracy_worst": "{:.4f}",
    "personal_forgetting": "{:.4f}",
}
OF_TASKS = ("scenario", "partition")  # these only in a table with runs of continual learning


def columns(tasks: int) -> dict[str, str]:
    """Return column -> how it is printed, where the longest sequence has so many tasks (0: there is
    none). Both accuracies after each task from the second on: after the first they are one, and
    CFeD's tables leave it out."""
    if not tasks:
        return {name: form for name, form in COLUMNS.items() if name not in OF_TASKS}
    after = [f"{kind}_task{task}" for task in range(2, tasks + 1) for kind in ("average", "new")]
    return COLUMNS | dict.fromkeys([*after, "task_forgetting"], "{:.4f}")


def runs(directories: Sequence[Path]) -> Iterator[RunDirectory]:
    """Yield the runs at or below these directories."""
    for directory in directories:
        yield from map(RunDirectory, find_runs(directory))


def row(run: RunDirectory) -> dict[str, Any]:
    """One finished run. last5_accuracy: mean over the last five evaluated rounds; bytes: mean of a
    client's exchange in a round; tasks: how many were learned to their end, 0 without a sequence of
    tasks."""
    clients = None if run.clients is None else run.clients.groupby("round").size().mean()
    values = {name: run.summary.get(name) for name in (*COLUMNS, *OF_SOME, "task_forgetting")}
    ends = run.summary.get("tasks") or []
    for end in ends:
        values[f"average_task{end['task']}"] = end["average_accuracy"]
        values[f"new_task{end['task']}"] = end["new_task_accuracy"]
    sent = {
        f"mb_{way}_per_client": np.mean(run.values(f"bytes_{way}") or [np.nan])
        for way in ("up", "down")
    }
    return values | {
        "tasks": len(ends),
        "overrides": run.overrides,
        "last5_accuracy": np.mean(run.values(run.accuracy_name or "")[-5:] or [np.nan]),
        "seconds_per_round": np.median(run.values("seconds") or [np.nan]),
        **{name: total / clients / 1e6 if clients else np.nan for name, total in sent.items()},
    }


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


def what_differs(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return, for each run, the overrides that not all runs on its data set share, without what
    other columns say."""
    said = (
        "dataset=",
        "algorithm=",
        "scenario=",
        "partition=",
        "seed",
        "rounds=",
        "hydra",
        "hardware",
        "tracker",
        "figures",
        "eval_interval",
        "test_views",
        "evaluate",
        "keep_models",
        "keep_local_models",
        "objective",
    )
    own = [{o for o in values["overrides"] if not o.startswith(said)} for values in found]
    shared: dict[str, set[str]] = {}
    for values, mine in zip(found, own, strict=True):
        shared[values["dataset"]] = shared.get(values["dataset"], mine) & mine
    return [
        " ".join(sorted(mine - shared[values["dataset"]]))
        for values, mine in zip(found, own, strict=True)
    ]


def markdown(table: pd.DataFrame, forms: dict[str, str]) -> str:
    def cell(name: str, value: float | str | None) -> str:
        return "" if pd.isna(value) else forms[name].format(value)

    lines = ["| " + " | ".join(forms) + " |", "|" + " --- |" * len(forms)]
    for _, values in table.iterrows():
        lines.append("| " + " | ".join(cell(name, values[name]) for name in forms) + " |")
    return "\n".join(lines) + "\n"


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
    there = list(runs(directories))
    for run in there:
        if run.damaged:
            print(f"fedexp: {run.directory}: {run.describe_damage()}; left out", file=sys.stderr)
    found = [row(run) | task_measures(run, measures) for run in there if run.finished]
    if not found:
        hint = next(filter(None, map(how_to_restore, directories)), "")
        print(
            f"fedexp: no finished run below {', '.join(map(str, directories))}{hint}",
            file=sys.stderr,
        )
        return 2
    forms = columns(max(values["tasks"] for values in found))
    forms |= {
        name: form
        for name, form in OF_SOME.items()
        if any(values[name] is not None for values in found)
    }
    forms |= dict.fromkeys(measures, "{:.4f}")
    for values, text in zip(found, what_differs(found), strict=True):
        values["options"] = text
    if any(values["options"] for values in found):
        forms = (
            {k: forms[k] for k in list(forms)[: list(forms).index("seed")]}
            | {"options": "{}"}
            | forms
        )
    keys = [name for name in ("dataset", *OF_TASKS, "algorithm", "seed") if name in forms]
    table = pd.DataFrame(found, columns=list(forms)).sort_values(keys)
    text = markdown(table, forms)
    if out is not None:
        write_atomically(out.with_suffix(".csv"), table.to_csv(index=False).encode())
        write_atomically(out.with_suffix(".md"), text.encode())
    print(text, end="")
    return 0
