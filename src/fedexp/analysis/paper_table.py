"""Tables of a sweep's results: means over seeds, and methods x settings as in a paper.

A cell of the paper's layout shows mean ± standard deviation. The best of each column is bold.
"""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd

from fedexp.analysis.layout import PRUNED, SOME_DIVERGED, Section
from fedexp.analysis.measures import (
    form,
    is_pruned,
    less_is_better,
    main_measures,
    origin,
    title_of,
)
from fedexp.analysis.naming import differing, displayed, grouped, ordered
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.reader import RunDirectory

VALUES = (  # keys of summary.json
    *("accuracy", "best_accuracy", "forgetting", "round_forgetting"),
    *("average_accuracy", "new_task_accuracy", "task_forgetting"),
    *("validation_accuracy", "validation_best_accuracy", "best_round", "validation_forgetting"),
    *("validation_average_accuracy", "personal_accuracy", "personal_accuracy_worst"),
    *("personal_forgetting", "personal_global_accuracy"),
)
# further columns of table.csv
COUNTS = ("n", "diverged", "pruned", "seeds", "commits", "hardware")


@dataclass(frozen=True)
class Layout:
    """The user's options for the table. Empty values choose the default layout."""

    metrics: tuple[str, ...] = ()  # keys of summary.json
    sort: str = ""  # "name" or a metric, best first; by default the first metric
    transpose: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Return the layout that the command line's flags ask for."""
        metrics = tuple(filter(None, (options.metrics or "").split(",")))
        return cls(metrics, options.sort or "", options.transpose)


def means(runs: Sequence[RunDirectory], further: Iterable[str] = ()) -> pd.DataFrame:
    """Return mean and standard deviation over seeds for each setting and method.

    Within a setting, rows are sorted by the main accuracy, the best first. Methods that a search
    pruned come last. further: additional keys of summary.json.
    """
    main = [measure.key for measure in main_measures(runs)]
    values = list(dict.fromkeys([*main, *VALUES, *further]))
    rows = [
        {"setting": setting, "method": method} | mean_row(members, values)
        for setting, methods in grouped(runs, of_data=True).items()
        for method, members in methods.items()
    ]
    known = {name for row in rows for name in row}
    columns = [name for value in values for name in (value, f"{value}_std") if name in known]
    frame = pd.DataFrame(rows, columns=["setting", "method", *COUNTS, *columns])
    by = [name for name in ("setting", "pruned", main[0]) if name in frame]
    return frame.sort_values(by, ascending=[*[True] * (len(by) - 1), less_is_better(by[-1])])


def mean_row(runs: Sequence[RunDirectory], values: Iterable[str]) -> dict[str, Any]:
    """Return the row of table.csv for the seeds of a method. values: keys of summary.json."""
    counts = {"n": len(runs), "diverged": sum(run.diverged for run in runs)}
    row: dict[str, Any] = (
        counts | {"pruned": sum(map(is_pruned, runs))} | origin(run.summary for run in runs)
    )
    for value in values:
        every = [run.summary.get(value) for run in runs if not run.diverged]
        found = [each for each in every if each is not None]
        if found:
            row[value] = float(np.mean(found))
        if len(found) > 1:
            row[f"{value}_std"] = float(np.std(found, ddof=1))
    return row


def table_of(runs: Sequence[RunDirectory], layout: Layout) -> Section:
    """Return the table of runs. Raises ConfigError for a metric that no run has."""
    found = {key for run in runs for key, value in run.summary.items() if is_number(value)}
    require_known(layout.metrics, sorted(found), "--metrics")
    main = [measure.key for measure in main_measures(runs)]
    metrics = layout.metrics or tuple(main)
    groups = grouped(runs, of_data=True)
    kinds = {
        setting: [m.key for m in main_measures(run for group in methods.values() for run in group)]
        for setting, methods in groups.items()
    }
    table = means(runs, layout.metrics)
    cells: dict[tuple[str, str, str], Mapping[Any, Any]] = {}
    for record in table.to_dict("records"):
        for metric in layout.metrics or kinds[record["setting"]]:
            cells[record["method"], record["setting"], metric] = record
    ranks = {place: rank(record, place[2]) for place, record in cells.items()}
    rows, columns = ordered(set(table["method"])), ordered(groups)
    if layout.sort != "name":
        by = layout.sort or metrics[0]
        require_known([by], ("name", *metrics), "--sort")
        rows.sort(key=lambda row: mean_rank([ranks.get((row, each, by)) for each in columns]))
    texts = {}
    for (row, column, metric), cell in cells.items():
        every = [ranks[row, column, metric] for row in rows if (row, column, metric) in ranks]
        best = len(every) > 1 and ranks[row, column, metric] == min(every) < math.inf
        at = (column, row, metric) if layout.transpose else (row, column, metric)
        texts[at] = text_of(cell, metric, best)
    if layout.transpose:
        rows, columns = columns, rows
    return section(texts, rows, columns, metrics, about(set(table["n"])))


def section(
    texts: Mapping[tuple[str, str, str], str],
    rows: Sequence[str],
    columns: Sequence[str],
    metrics: Sequence[str],
    about: str,
) -> Section:
    """Return a table of texts by (row, column, metric), without columns that have no text."""
    heads = [
        (column, metric)
        for column in columns
        for metric in metrics
        if any((row, column, metric) in texts for row in rows)
    ]
    body = [[texts.get((row, *head), "-") for head in heads] for row in rows]
    shown = dict(zip(columns, displayed(differing(columns)), strict=True))
    names = [(shown[column] * (len(columns) > 1), title_of(metric)) for column, metric in heads]
    corner = title_of(metrics[0]) if len(metrics) == 1 and len(columns) > 1 else ""
    frame = pd.DataFrame(body, index=displayed(differing(rows)))
    frame.columns = (
        pd.Index([column for column, _ in names]) if corner else pd.MultiIndex.from_tuples(names)
    )
    return Section("", frame, corner, about)


def rank(record: Mapping[Any, Any], metric: str) -> float:
    """Return a number that is smaller for better results, and equal for results that are shown
    equal.

    Return infinity for a missing result or a pruned run.
    """
    value = record.get(metric, math.nan)
    if math.isnan(value) or record["pruned"]:
        return math.inf
    return float(form(value, metric)) * (1 if less_is_better(metric) else -1)


def mean_rank(ranks: Iterable[float | None]) -> float:
    """Return the mean rank of a row over its columns; infinity for a row without results."""
    known = [rank for rank in ranks if rank is not None and rank < math.inf]
    return float(np.mean(known)) if known else math.inf


def text_of(record: Mapping[Any, Any], metric: str, best: bool) -> str:
    """Return mean ± standard deviation (n - 1 in the denominator) in Markdown."""
    value, spread = record.get(metric, math.nan), record.get(f"{metric}_std", math.nan)
    if math.isnan(value):
        return "diverged" if record["diverged"] else "-"
    text = form(value, metric) + ("" if math.isnan(spread) else f" ± {form(spread, metric)}")
    text = f"**{text}**" if best else text
    return text + SOME_DIVERGED * bool(record["diverged"]) + PRUNED * bool(record["pruned"])


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_known(names: Iterable[str], known: Sequence[str], flag: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{flag} {name}: no run has it{nearest(name, known)}; known: {', '.join(known)}"
            )


def about(sizes: set[int]) -> str:
    """Return the text above a table. sizes: the different numbers of seeds in a cell."""
    counts = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
    seeds = f"Mean ± standard deviation over {counts} seeds" if max(sizes) > 1 else "One seed"
    return f"{seeds}; best in bold."
