"""A sweep's table as a paper has it, in Markdown and LaTeX: what varies between runs as rows and
columns, mean ± standard deviation in a cell, the best of each column in bold."""

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from fedexp.analysis.layout import NOTES, PRUNED, SOME_DIVERGED, Section, marks_in
from fedexp.analysis.measures import form, is_pruned, less_is_better, main_measures, title_of
from fedexp.analysis.naming import DATA, chosen, displayed, ordered, said
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.reader import RunDirectory

OF_COLUMNS = ("experiment", *DATA)  # everything else that varies makes rows
# whose value says what it is
UNNAMED = ("experiment", "dataset", "scenario", "partition", "algorithm", "model")
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
SYMBOLS = {
    "±": r"$\pm$",
    SOME_DIVERGED: r"\textsuperscript{\textdagger}",
    PRUNED: r"\textsuperscript{\textdaggerdbl}",
}


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


@dataclass(frozen=True)
class Grid:
    """The texts of a table."""

    metrics: tuple[str, ...]
    columns: tuple[str, ...]  # labels; one that is empty where nothing of the data varies
    rows: Mapping[str, Sequence[str]]  # label -> text by column and metric, the metrics innermost
    about: str

    @property
    def section(self) -> Section:
        heads = [
            ": ".join(filter(None, [column, title_of(metric) if self.shows_metrics else ""]))
            for column in self.columns
            for metric in self.metrics
        ]
        frame = pd.DataFrame(list(self.rows.values()), index=list(self.rows), columns=heads)
        return Section("", frame, self.corner)

    @property
    def shows_metrics(self) -> bool:
        return len(self.metrics) > 1 or self.columns == ("",)

    @property
    def corner(self) -> str:
        """Return the head of the first column: the metric, where columns do not say it."""
        return "" if self.shows_metrics else title_of(self.metrics[0])


def latex(grid: Grid) -> str:
    """Return a tabular of booktabs, for `\\input` in a table environment."""
    width = len(grid.metrics)
    wide = len(grid.columns) * width
    lines = [f"% Needs the package booktabs. {grid.about}", f"\\begin{{tabular}}{{l{'c' * wide}}}"]
    lines.append("\\toprule")
    if not grid.shows_metrics:
        lines.append(row_of(grid.corner, grid.columns))
    else:
        if grid.columns != ("",):
            spans = [f"\\multicolumn{{{width}}}{{c}}{{{escape(label)}}}" for label in grid.columns]
            ends = range(2, 2 + wide, width)
            rules = [f"\\cmidrule(lr){{{first}-{first + width - 1}}}" for first in ends]
            lines += [" & ".join(["", *spans]).lstrip() + r" \\", " ".join(rules)]
        lines.append(row_of("", [title_of(metric) for metric in grid.metrics] * len(grid.columns)))
    lines.append("\\midrule")
    lines += [row_of(label, texts) for label, texts in grid.rows.items()]
    lines.append("\\bottomrule")
    for mark in marks_in(text for texts in grid.rows.values() for text in texts):
        note = f"\\footnotesize {SYMBOLS[mark]} {NOTES[mark]}"
        lines.append(f"\\multicolumn{{{wide + 1}}}{{l}}{{{note}}} \\\\")
    return "\n".join([*lines, "\\end{tabular}"]) + "\n"


def grid_of(runs: Sequence[RunDirectory], layout: Layout) -> Grid:
    """Group runs by what varies between them, but for the seed. Raises ConfigError for a metric or
    a key that no run has."""
    found = [fields(run) for run in runs]
    keys = list(dict.fromkeys(key for each in found for key in each))
    varying = [key for key in keys if len({each.get(key) for each in found}) > 1]
    require_known(layout.rows, keys, "--rows")
    rows = layout.rows or tuple(key for key in varying if key not in OF_COLUMNS)
    columns = tuple(key for key in varying if key not in rows)
    rows = rows or tuple(key for key in ("algorithm",) if key in keys)
    metrics = metrics_of(runs, layout.metrics)
    groups: dict[tuple[str, str], list[RunDirectory]] = {}
    for run, each in zip(runs, found, strict=True):
        groups.setdefault((label(rows, each), label(columns, each)), []).append(run)
    cells = {
        (*place, metric): cell_of(group, metric)
        for place, group in groups.items()
        for metric in metrics
    }
    across = ordered({column for _, column in groups})
    down = ordered({row for row, _ in groups})
    if layout.sort != "name":
        by = layout.sort or metrics[0]
        require_known([by], ("name", *metrics), "--sort")
        down.sort(key=lambda row: mean_rank([cells.get((row, each, by)) for each in across]))
    best = {
        (column, metric): min(
            cell.rank for (_, *at), cell in cells.items() if at == [column, metric]
        )
        for column in across
        for metric in metrics
    }

    def texts(row: str, column: str) -> list[str]:
        """Return the texts of a row in a column, metric by metric."""
        mine = [cells.get((row, column, metric), Cell(metric)) for metric in metrics]
        lead = [best[column, metric] for metric in metrics]
        bold = [
            len(down) > 1 and cell.rank == to < math.inf
            for cell, to in zip(mine, lead, strict=True)
        ]
        return [cell.text(each) for cell, each in zip(mine, bold, strict=True)]

    outer, inner = (across, down) if layout.transpose else (down, across)
    body = [
        [text for b in inner for text in (texts(b, a) if layout.transpose else texts(a, b))]
        for a in outer
    ]
    return Grid(
        metrics,
        tuple(displayed(inner)),
        dict(zip(displayed(outer), body, strict=True)),
        about(sorted({len(group) for group in groups.values()})),
    )


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


def metrics_of(runs: Sequence[RunDirectory], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics asked for, else the main ones."""
    known = {key for run in runs for key, value in run.summary.items() if is_number(value)}
    require_known(wanted, sorted(known), "--metrics")
    return tuple(wanted) or tuple(measure.key for measure in main_measures(runs))


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


def escape(text: str) -> str:
    """Return a text of Markdown as LaTeX shows it."""
    plain = "".join(SPECIAL.get(letter, letter) for letter in text)
    for mark, command in SYMBOLS.items():
        plain = plain.replace(mark, command)
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", plain)


def row_of(head: str, cells: Iterable[str]) -> str:
    return " & ".join(map(escape, [head, *cells])) + r" \\"


def about(sizes: Sequence[int]) -> str:
    """Return what stands above a table. sizes: the different numbers of seeds in a cell."""
    counts = " to ".join(map(str, sorted({sizes[0], sizes[-1]})))
    seeds = f"Mean ± standard deviation over {counts} seeds" if sizes[-1] > 1 else "One seed"
    return f"{seeds}; best in bold."
