"""Convert the table of runs to a table of curves."""

from itertools import product
from typing import Any

import pandas as pd

from fedexp.data.views import VIEWS
from fedexp.papers.runs import MEASURES, select_curve


def list_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each run without tasks, view of the test set and measure with values.

    A row has the columns of the run, `view`, `measure`, the evaluated `rounds` [R] from 1 on, and
    the `values` [R] as fractions. runs: see `fedexp.papers.runs.read_runs`.
    """
    rows: list[dict[Any, Any]] = []
    for run in runs.to_dict("records"):
        table = run.pop("table")
        for view, measure in product(VIEWS, MEASURES):
            curve = select_curve(table, measure, view)
            if len(curve) and "task" not in table:
                rounds, values = curve.index.to_numpy(), curve.to_numpy()
                where = {"view": view, "measure": measure}
                rows.append(run | where | {"rounds": rounds, "values": values})
    names = [*runs.columns.drop("table"), "view", "measure", "rounds", "values"]
    return pd.DataFrame(rows, columns=names)
