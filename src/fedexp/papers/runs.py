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

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedexp.core.errors import ConfigError
from fedexp.data.views import PLAIN, name_in_view
from fedexp.papers import evidence
from fedexp.rundir import files
from fedexp.rundir.reader import OVER, RunDirectory
from fedexp.rundir.sweeps import find_jobs

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
    rows: list[dict[str, Any]] = []
    for directory in directories:
        for name, facts in sorted(read_sweep(directory).items()):
            rows.append({"sweep": directory.name, "run": name} | facts)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read_sweep(directory: Path) -> dict[str, dict[str, Any]]:
    """Return a dict that maps the runs of a sweep to their facts (columns of the table of runs).

    If a run has both a finished run directory and a line in the table of runs, the directory is
    used.
    """
    runs = find_jobs(directory.absolute())
    found = {run.directory.name: read_directory(run) for run in runs}
    for name, line in evidence.read_table(directory).items():
        if name not in found or found[name]["status"] not in OVER:
            found[name] = read_line(directory, line)
    return found


def read_directory(run: RunDirectory) -> dict[str, Any]:
    """Return the facts of a run. The fact `table` contains rounds.csv from round 1 on."""
    facts = {"status": run.status, "overrides": run.overrides, "table": run.table}
    return facts | common_facts(run.directory.parent.name, run.config, run.summary)


def read_line(sweep: Path, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run from its line in a sweep's table of runs.

    Raises ConfigError if the line is damaged.
    """
    try:
        table = make_frame(line["tables"].get(files.ROUNDS, {}))
        facts = {
            "status": str(line["summary"]["status"]),
            "overrides": [str(text) for text in line["overrides"]],
            "table": table[table["round"] >= 1] if len(table) else table,
            "not_judged": line["not_judged"],
        }
        made_by = line.get("made_by", sweep.name)
        return common_facts(made_by, line["config"], line["summary"]) | facts
    except evidence.DAMAGE as error:
        where = f"{sweep / evidence.TABLE}: {line['run']}"
        raise ConfigError(f"{where}: invalid line ({error!r})") from error


def make_frame(columns: Mapping[str, str]) -> pd.DataFrame:
    """Return a table of numbers. columns: name -> cells, joined by commas."""
    cells = {name: text.split(",") for name, text in columns.items()}
    return pd.DataFrame({name: [float(c or "nan") for c in cells[name]] for name in cells})


def common_facts(made_by: str, config: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "made_by": made_by,
        "config": config,
        "summary": summary,
        "seed": summary.get("seed"),
        "precision": (summary.get("hardware") or {}).get("precision"),
        "not_judged": None,
    }


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
