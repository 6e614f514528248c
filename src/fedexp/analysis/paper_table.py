"""A sweep's table as a paper has it, in Markdown and LaTeX: what varies between runs as rows and
columns, mean ± standard deviation in a cell, the best of each column in bold."""

import argparse
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from fedexp.analysis.layout import PRUNED, SOME_DIVERGED, Section
from fedexp.analysis.measures import form, is_pruned, less_is_better, main_measures, title_of
from fedexp.analysis.naming import DATA, chosen, displayed, ordered, said
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.reader import RunDirectory

OF_COLUMNS = ("experiment", *DATA)  # everything else that varies makes rows
# whose value says what it is
UNNAMED = ("experiment", "dataset", "scenario", "partition", "algorithm", "model")


@dataclass(frozen=True)
class Layout:
    """Wishes of the user for the table; empty: as it is usual."""

    metrics: tuple[str, ...] = ()  # values of summary.json
    rows: tuple[str, ...] = ()  # keys whose values are rows
    sort: str = ""  # name, or a metric, best first; by default the first metric
    transpose: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Return what the flags of `add_layout_flags` say."""
        metrics, rows = (
            tuple(filter(None, (text or "").split(","))) for text in (options.metrics, options.rows)
        )
        return cls(metrics, rows, options.sort or "", options.transpose)


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how the table is laid out."""
    parser.add_argument(
        "--metrics", help="of the table: values of summary.json, such as best_accuracy"
    )
    parser.add_argument(
        "--rows", help="of the table: keys whose values are rows, such as algorithm,local.lr"
    )
    parser.add_argument(
        "--sort", help="the rows of the table: name, or a metric, whose best row comes first"
    )
    parser.add_argument(
        "--transpose", action="store_true", help="rows of the table as columns, columns as rows"
    )


@dataclass(frozen=True)
class Cell:
    """The results of the seeds of one run by one metric."""

    metric: str
    values: tuple[float, ...] = ()  # of the seeds that did not diverge
    diverged: int = 0
    pruned: bool = False  # a search has stopped it

    @property
    def mean(self) -> str:
        """Return the mean as it is printed, so that what looks equal is equal."""
        return form(float(np.mean(self.values)), self.metric)

    @property
    def rank(self) -> float:
        """Return a number that is smaller for better results; infinite for none, and for those of a
        run that a search has stopped."""
        if not self.values or self.pruned:
            return math.inf
        return float(self.mean) * (1 if less_is_better(self.metric) else -1)

    def text(self, best: bool) -> str:
        """Return mean ± standard deviation (n - 1) in Markdown."""
        if not self.values:
            return "diverged" if self.diverged else "-"
        text = self.mean
        if len(self.values) > 1:
            text += f" ± {form(float(np.std(self.values, ddof=1)), self.metric)}"
        text = f"**{text}**" if best else text
        return text + SOME_DIVERGED * bool(self.diverged) + PRUNED * self.pruned


def table_of(runs: Sequence[RunDirectory], layout: Layout) -> Section:
    """Group runs by what varies between them, but for the seed. Raises ConfigError for a metric or
    a key that no run has."""
    found = [fields(run) for run in runs]
    keys = list(dict.fromkeys(key for each in found for key in each))
    varying = [key for key in keys if len({each.get(key) for each in found}) > 1]
    require_known(layout.rows, keys, "--rows")
    of_rows = layout.rows or tuple(key for key in varying if key not in OF_COLUMNS)
    of_columns = tuple(key for key in varying if key not in of_rows)
    of_rows = of_rows or ("algorithm",)
    groups: dict[tuple[str, str], list[RunDirectory]] = {}
    for run, each in zip(runs, found, strict=True):
        groups.setdefault((label(of_rows, each), label(of_columns, each)), []).append(run)
    rows, columns = (ordered({place[i] for place in groups}) for i in (0, 1))
    known = {key for run in runs for key, value in run.summary.items() if is_number(value)}
    require_known(layout.metrics, sorted(known), "--metrics")
    metrics = layout.metrics or tuple(measure.key for measure in main_measures(runs))
    cells: dict[tuple[str, str, str], Cell] = {}
    for place, group in groups.items():
        for metric in layout.metrics or [measure.key for measure in main_measures(group)]:
            cells[*place, metric] = cell_of(group, metric)
    if layout.sort != "name":
        by = layout.sort or metrics[0]
        require_known([by], ("name", *metrics), "--sort")
        rows.sort(key=lambda row: mean_rank(cells.get((row, each, by)) for each in columns))
    texts = marked(cells)
    if layout.transpose:
        rows, columns = columns, rows
        texts = {(column, row, metric): text for (row, column, metric), text in texts.items()}
    heads = [
        (column, metric)
        for column in columns
        for metric in metrics
        if any((row, column, metric) in texts for row in rows)
    ]
    body = [[texts.get((row, *head), "-") for head in heads] for row in rows]
    shown = dict(zip(columns, displayed(columns), strict=True))
    names = [(shown[column], title_of(metric)) for column, metric in heads]
    corner = names[0][1] if len(metrics) == 1 and columns != [""] else ""
    frame = pd.DataFrame(body, index=displayed(rows))
    frame.columns = (
        pd.Index([column for column, _ in names]) if corner else pd.MultiIndex.from_tuples(names)
    )
    return Section("", frame, corner, about({len(group) for group in groups.values()}))


def marked(cells: Mapping[tuple[str, str, str], Cell]) -> dict[tuple[str, str, str], str]:
    """Return the text of each cell (row, column, metric); the best of several rows is bold."""
    ranks: dict[tuple[str, str], list[float]] = {}
    for (_, column, metric), cell in cells.items():
        ranks.setdefault((column, metric), []).append(cell.rank)
    found = {}
    for (row, column, metric), cell in cells.items():
        every = ranks[column, metric]
        best = len(every) > 1 and cell.rank == min(every) < math.inf
        found[row, column, metric] = cell.text(best)
    return found


def mean_rank(cells: Iterable[Cell | None]) -> float:
    """Return the mean rank of a row over its columns; infinite for a row without a result."""
    ranks = [cell.rank for cell in cells if cell is not None and cell.rank < math.inf]
    return float(np.mean(ranks)) if ranks else math.inf


def fields(run: RunDirectory) -> dict[str, str]:
    """Return what says what was run, but for the seed: groups by their options, and overrides."""
    given = {key: value for key, _, value in (text.partition("=") for text in said(run))}
    of = chosen(run)
    groups = [key for key in UNNAMED if key not in given and of.get(key) is not None]
    if "experiment" in given:  # which says the rest
        groups = [key for key in groups if key == "algorithm"]
    return given | {key: str(of[key]) for key in groups}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_known(names: Iterable[str], known: Sequence[str], flag: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{flag} {name}: no run has it{nearest(name, known)}; known: {', '.join(known)}"
            )


def cell_of(group: Sequence[RunDirectory], metric: str) -> Cell:
    """Return the results of the runs of a cell. metric: a value of summary.json."""
    values = [
        float(run.summary[metric])
        for run in group
        if not run.diverged and is_number(run.summary.get(metric))
    ]
    return Cell(
        metric, tuple(values), sum(run.diverged for run in group), any(map(is_pruned, group))
    )


def label(keys: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the head of a row or column: the values of its keys, without what a run does not
    have."""
    texts = [
        values[key] if key in UNNAMED else f"{key.removeprefix('algorithm.')}={values[key]}"
        for key in keys
        if key in values
    ]
    return " ".join(texts)


def about(sizes: Collection[int]) -> str:
    """Return what stands above a table. sizes: the different numbers of seeds in a cell."""
    counts = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
    seeds = f"Mean ± standard deviation over {counts} seeds" if max(sizes) > 1 else "One seed"
    return f"{seeds}; best in bold."
