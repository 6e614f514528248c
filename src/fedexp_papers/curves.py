"""Draw learning curves of the runs of a sweep, with one row of panels for each setting.

A panel shows each method's mean over seeds, in a band of one standard deviation. Circles mark known
values of the papers' released code.
"""

import io
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedexp.analysis.draw_sweep import curve, look
from fedexp.analysis.naming import names, number_methods
from fedexp.data.views import PLAIN, VIEWS
from fedexp.rundir.reader import OVER
from fedexp_papers.runs import MEASURES, select_curve
from fedexp_papers.sweeps import PaperSweep

# columns: experiment, algorithm, round, test_accuracy, source
RELEASED_CURVES = Path(__file__).parent / "published" / "released_curves.csv"
# prefixes of overrides that do not start a new row of panels
NOT_OF_A_SETTING = ("hardware", "rounds=", "targets=")
MOST_POINTS = 50  # maximum per curve, to keep the file small
SVG: Any = {"svg.hashsalt": "fedexp", "svg.fonttype": "none"}


def list_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each finished run without tasks, view of the test set and measure.

    A row has the columns of the run, `view`, `measure`, the evaluated `rounds` [R] from 1 on, and
    the `values` [R] as fractions. runs: see `fedexp_papers.runs.read_runs`.
    """
    rows: list[dict[Any, Any]] = []
    for run in runs[runs["status"].isin(OVER)].to_dict("records"):
        table = run.pop("table")
        for view, measure in product(VIEWS, MEASURES):
            curve = select_curve(table, measure, view)
            if len(curve) and "task" not in table:
                rounds, values = curve.index.to_numpy(), curve.to_numpy()
                where = {"view": view, "measure": measure}
                rows.append(run | where | {"rounds": rounds, "values": values})
    return pd.DataFrame(rows)


def draw_learning_curves(sweep: PaperSweep, known: pd.DataFrame) -> Figure:
    """Draw accuracy in the plain view, and accuracy and forgetting in the view of the paper's rule.

    known: the result of `list_curves` for the runs of the sweep
    """
    places = name_runs(known.drop_duplicates("run"))
    known = known.merge(places, on="run")
    columns = {("accuracy", PLAIN): None, ("accuracy", sweep.rule.view): None}
    columns[("forgetting", sweep.rule.view)] = None
    settings, numbers = sorted(known["setting"].unique()), number_methods(known["method"])
    figure = Figure(figsize=(4.2 * len(columns), 2.6 * len(settings)), layout="constrained")
    grid = figure.subplots(len(settings), len(columns), squeeze=False)
    for row, setting in zip(grid, settings, strict=True):
        mine = known[known["setting"] == setting]
        for axes, (measure, view) in zip(row, columns, strict=True):
            draw_curves(axes, mine[(mine["measure"] == measure) & (mine["view"] == view)], numbers)
            axes.set_title(f"{measure}, {view} test", fontsize=8)
        draw_released(row[0], setting, numbers)
        row[0].set_ylabel(setting, fontsize=8)
        row[0].legend(fontsize=5)
    return figure


def name_runs(facts: pd.DataFrame) -> pd.DataFrame:
    """Return the setting and the method of each run, with one row per run."""
    told = [SimpleNamespace(**dict(fact)) for _, fact in facts.iterrows()]
    for fact in told:
        fact.overrides = [o for o in fact.overrides if not o.startswith(NOT_OF_A_SETTING)]
    found = pd.DataFrame(names(told), columns=["setting", "method"])
    return found.assign(run=facts["run"].to_numpy())


def draw_curves(axes: Axes, runs: pd.DataFrame, numbers: Mapping[str, int]) -> None:
    """Draw the curves of all methods in one panel, using the last run of each seed."""
    for method, group in runs.groupby("method"):
        seeds = group.drop_duplicates("seed", keep="last")
        pairs = zip(seeds["values"], seeds["rounds"], strict=True)
        series = [pd.Series(values, index=rounds) for values, rounds in pairs]
        table = pd.concat(series, axis="columns", join="inner")
        table = table.iloc[:: max(1, len(table) // MOST_POINTS)]
        size = f", {len(seeds)} seeds" if len(seeds) > 1 else ""
        values = table.to_numpy().T
        curve(axes, table.index.to_numpy(), values, numbers[str(method)], f"{method}{size}")
    axes.set_ylim(bottom=0)


def draw_released(axes: Axes, setting: str, numbers: Mapping[str, int]) -> None:
    """Draw circles for known values of the released code. The setting must name an experiment."""
    table = pd.read_csv(RELEASED_CURVES)
    for method, number in numbers.items():
        group = table[(table["experiment"] == setting) & (table["algorithm"] == method)]
        if len(group):
            axes.plot(
                group["round"],
                group["test_accuracy"],
                "o",
                color=look(number)["color"],
                label=f"{method}, released code",
                fillstyle="none",
                markersize=4,
            )


def render_svg(figure: Figure) -> bytes:
    """Return a figure as SVG. It has no date or random ids, so equal figures have equal bytes."""
    file = io.BytesIO()
    with mpl.rc_context(SVG):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
