"""Read all runs of sweeps into one table, from run directories and tables of runs.

`read_runs` returns one row for each run:

sweep, run    names of the sweep's directory and the run's directory
made_by       name of the sweep that made the run; differs from `sweep` if the run is reused
overrides     list of the overrides that started the job
config, summary   contents of config.yaml and summary.json as dicts
status        completed | stopped | diverged | failed | damaged | running | unfinished
seed, precision   the run's seed and precision, or None if unknown
table         rounds.csv from round 1 on, see `select_curve`
not_judged    reasons not to compare the run with published values, from the table of runs; None for
              a run directory
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from fedexp.data.views import PLAIN, name_in_view
from fedexp_papers import evidence

# measure -> column of rounds.csv in the plain view
MEASURES = {
    "accuracy": "test_accuracy",
    "forgetting": "forgetting",
    "average_accuracy": "average_accuracy",
    "new_task_accuracy": "new_task_accuracy",
}
COLUMNS = (
    *("sweep", "run", "made_by", "overrides", "config", "summary", "status", "seed", "precision"),
    *("table", "not_judged"),
)


def read_runs(directories: Iterable[Path]) -> pd.DataFrame:
    """Return the runs in the directories of sweeps. The columns are described above.

    Directories that do not exist are ignored. Raises ConfigError if a table of runs is damaged.
    """
    rows = [row for directory in directories for row in read_sweep(directory.absolute())]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read_sweep(directory: Path) -> list[dict[str, Any]]:
    """Return a row for each run of a sweep, sorted by name."""
    lines = evidence.read_table(directory)
    rows = []
    with evidence.all_jobs(directory) as jobs:
        for run in jobs:
            name = run.directory.name
            # a line describes the run if the job's directory is not in the sweep
            line = lines[name] if run.directory.parent != directory else {}
            rows.append(
                {
                    "sweep": directory.name,
                    "run": name,
                    "made_by": line.get("made_by", directory.name),
                    "overrides": run.overrides,
                    "config": run.config,
                    "summary": run.summary,
                    "status": run.status,
                    "seed": run.summary.get("seed"),
                    "precision": (run.summary.get("hardware") or {}).get("precision"),
                    "table": run.table,
                    "not_judged": line.get("not_judged"),
                }
            )
    return rows


def select_curve(
    table: pd.DataFrame, measure: str = "accuracy", view: str = PLAIN, task: int = 0
) -> pd.Series:
    """Return the known values of a measure as fractions, indexed by round.

    table: a table of rounds. measure: a key of MEASURES. task: the number of a task. 0 selects all
    rounds.
    """
    name = name_in_view(MEASURES[measure], view)
    if name not in table:
        return pd.Series(dtype=float)
    mine = table[table["task"] == task] if task else table
    return mine.set_index("round")[name].dropna()
