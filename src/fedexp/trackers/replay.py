"""A finished run read back from its files, as a tracker was told about it while it ran."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.core.errors import ConfigError
from fedexp.core.pictures import Pictures, picture_files
from fedexp.core.views import PLAIN, VIEWS, file_of
from fedexp.data.partitioned import later_partitions
from fedexp.figures import make_figures
from fedexp.metrics.history import load_history
from fedexp.rundir import files
from fedexp.rundir.analyses import round_means
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.base import RoundRecord, RunInfo, Tracker


def final_tables(directory: Path) -> dict[str, pd.DataFrame]:
    """The tables in long format of a finished run, by name."""
    paths = (
        directory / name
        for name in (*(file_of(files.CLASSES, view) for view in VIEWS), files.TASKS)
    )
    return {path.stem: pd.read_csv(path) for path in paths if path.exists()}


def load_finished(directory: Path) -> RunDirectory:
    """Return a run that has come to its end, for `replay`. Raises ConfigError naming what is
    missing or damaged."""
    run = RunDirectory(directory)
    if not run.has(files.SUMMARY):
        raise ConfigError(f"{directory}: no finished run there (it lacks {files.SUMMARY})")
    if run.summary and not run.over:
        raise ConfigError(f"{directory}: the run there has not come to its end (see {files.ERROR})")
    if run.damaged:
        raise ConfigError(f"{directory}: {run.describe_damage()}")
    return run


def total_rounds(run: RunDirectory) -> int:
    """Return how many rounds were asked for, of all tasks."""
    per_task = (run.config.get("scenario") or {}).get("rounds_per_task") or run.config.get(
        "rounds", 0
    )
    return int(per_task) * (1 + len(later_partitions(run.directory)))


def info(run: RunDirectory, wandb_id: str | None) -> RunInfo:
    """Return what a tracker is told first. Raises ConfigError where the configuration lacks what
    labels are made of."""
    try:
        return RunInfo.of(
            run.directory,
            run.config,
            run.summary.get("sweep"),
            total_rounds=total_rounds(run),
            first_round=0,
            classes=tuple(run.class_names or ()),
            wandb_id=wandb_id,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{run.directory / files.CONFIG}: is not that of a whole run ({error!r})"
        ) from error


def records(run: RunDirectory) -> Iterator[RoundRecord]:
    """Yield what a tracker is told of each round. Raises ConfigError where a file is damaged."""
    further = {view: load_history(run.directory, view) for view in run.views}
    tests = further.pop(PLAIN, None)
    accuracy = {} if tests is None else dict(zip(tests.rounds, tests.class_accuracy, strict=True))
    tables = {
        name: by_round(table)
        for name in files.ANALYSES
        if (table := run.analysis(name)) is not None
    }
    assert run.rounds is not None  # of a run that is over
    for row in run.rounds.to_dict("records"):
        here = int(row.pop("round"))
        values = {str(name): number(value) for name, value in row.items()}
        views = {view: each.upto(here) for view, each in further.items()}
        history = None if tests is None else tests.upto(here)
        analysed = {
            k: v
            for name, rows in tables.items()
            for k, v in round_means(name, rows.get(here, ())).items()
        }
        yield RoundRecord(here, values, accuracy.get(here), history, views, analysed)


def by_round(table: pd.DataFrame) -> dict[int, list[dict[str, Any]]]:
    """Return round -> its rows of a table."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_dict("records"):
        found.setdefault(int(row["round"]), []).append(
            {str(name): value for name, value in row.items()}
        )
    return found


def figures_of(run: RunDirectory) -> list[Path]:
    """Return the pictures that are there, drawn anew where there are none although the run was to
    have them."""
    drawn = picture_files(run.directory / "figures")
    return drawn or (
        make_figures(run.directory) if Pictures.of(run.config.get("figures")).draw else []
    )


def replay(run: RunDirectory, tracker: Tracker, wandb_id: str | None = None) -> None:
    """Tell a tracker all of a finished run again. Raises ConfigError, before it tells anything,
    where a file is damaged."""
    rows, told = list(records(run)), info(run, wandb_id)
    tracker.start(told)
    for record in rows:
        tracker.log_round(record)
    tracker.finish(run.summary, figures_of(run), final_tables(run.directory))


def number(value: float) -> int | float | None:
    """Return a cell as it was written: a whole number without a fraction, None where it is not
    finite."""
    if not np.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(value)
