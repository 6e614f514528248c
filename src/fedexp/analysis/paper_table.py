"""table.tex as a paper has it: what varies between the runs as rows and columns, mean ± std in a
cell, best in bold."""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedexp.analysis.sweep_figures import said
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.reader import RunDirectory

# What makes columns; everything else that varies makes rows.
OF_COLUMNS = (
    "experiment",
    "dataset",
    "scenario",
    "partition",
    "alpha",
    "shards_per_client",
    "num_clients",
)
# whose value says what it is
UNNAMED = ("experiment", "dataset", "scenario", "partition", "algorithm", "model")
USUAL = (("average_accuracy", "task_forgetting"), ("accuracy", "forgetting"))  # with tasks, without
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
DAGGER = r"\textsuperscript{\textdagger}"

Key = tuple[str | None, ...]  # the value of each key of rows, or of columns


@dataclass(frozen=True)
class Layout:
    """Wishes of the user for the table; empty: as it is usual."""

    metrics: tuple[str, ...] = ()  # values of summary.json
    rows: tuple[str, ...] = ()  # keys whose values are rows
    sort: str = "name"  # or a metric, best first
    transpose: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Return what the flags of `add_layout_flags` say."""
        metrics, rows = (
            tuple(filter(None, (text or "").split(","))) for text in (options.metrics, options.rows)
        )
        return cls(metrics, rows, options.sort or "name", options.transpose)


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how table.tex is laid out."""
    parser.add_argument(
        "--metrics", help="of table.tex: values of summary.json (default: accuracy,forgetting)"
    )
    parser.add_argument(
        "--rows", help="of table.tex: keys whose values are rows, such as algorithm,local.lr"
    )
    parser.add_argument(
        "--sort", help="the rows of table.tex: name, or a metric, whose best row then comes first"
    )
    parser.add_argument(
        "--transpose", action="store_true", help="rows of table.tex as columns, columns as rows"
    )


@dataclass(frozen=True)
class Cell:
    """The results of the seeds of one run."""

    values: tuple[float, ...]  # of the seeds that did not diverge
    diverged: int

    def text(self, metric: str) -> str:
        """Return mean ± standard deviation (n - 1) as it is printed."""
        if not self.values:
            return "diverged" if self.diverged else "--"
        mean = form(float(np.mean(self.values)), metric)
        spread = (
            f" $\\pm$ {form(float(np.std(self.values, ddof=1)), metric)}"
            if len(self.values) > 1
            else ""
        )
        return mean + spread

    def rank(self, metric: str) -> float:
        """Return a number that is smaller for better results; infinite for none."""
        if not self.values:
            return math.inf
        value = float(np.mean(self.values))
        return value if less_is_better(metric) else -value


@dataclass(frozen=True)
class Grid:
    """The cells of a table, by row, column and metric."""

    row_keys: tuple[str, ...]
    column_keys: tuple[str, ...]
    rows: tuple[Key, ...]
    columns: tuple[Key, ...]
    metrics: tuple[str, ...]
    cells: Mapping[tuple[Key, Key, str], Cell]
    seeds: tuple[int, ...]  # the different numbers of seeds in a cell

    def cell(self, row: Key, column: Key, metric: str) -> Cell:
        return self.cells.get((row, column, metric), Cell((), 0))

    def transposed(self) -> "Grid":
        """Return the table with rows and columns changed."""
        cells = {(column, row, metric): cell for (row, column, metric), cell in self.cells.items()}
        return Grid(
            self.column_keys,
            self.row_keys,
            self.columns,
            self.rows,
            self.metrics,
            cells,
            self.seeds,
        )


def latex(runs: Sequence[RunDirectory], layout: Layout) -> str:
    """Return a tabular of booktabs, for `\\input` in a table environment. Raises ConfigError for a
    metric or a key that no run has."""
    grid = grid_of(runs, layout)
    # The best of a column is that of its methods, also where these stand beside each other.
    best = {
        (column, metric): min(
            (shown_rank(grid.cell(row, column, metric), metric) for row in grid.rows), default=0.0
        )
        for column in grid.columns
        for metric in grid.metrics
    }

    def shown(row: Key, column: Key, metric: str) -> str:
        cell = grid.cell(row, column, metric)
        text, rank = cell.text(metric), shown_rank(cell, metric)
        if len(grid.rows) > 1 and rank == best[column, metric] < math.inf:
            text = f"\\textbf{{{text}}}"
        return text + (DAGGER if cell.values and cell.diverged else "")

    partly = any(cell.values and cell.diverged for cell in grid.cells.values())
    if layout.transpose:
        return tabular(
            grid.transposed(), lambda row, column, metric: shown(column, row, metric), partly
        )
    return tabular(grid, shown, partly)


def tabular(grid: Grid, shown: Callable[[Key, Key, str], str], partly: bool) -> str:
    """Return the LaTeX of a grid; shown: the text of a cell; partly: some cells leave out seeds
    that diverged."""
    places = [(column, metric) for column in grid.columns for metric in grid.metrics]
    several = len(grid.columns) > 1 or bool(grid.column_keys)
    lines = [f"% {about(grid)}", f"\\begin{{tabular}}{{l{'c' * len(places)}}}", "\\toprule"]
    if several and len(grid.metrics) > 1:
        spans = [
            f"\\multicolumn{{{len(grid.metrics)}}}{{c}}{{{label(grid.column_keys, c)}}}"
            for c in grid.columns
        ]
        ends = [
            (2 + i * len(grid.metrics), 1 + (i + 1) * len(grid.metrics))
            for i in range(len(grid.columns))
        ]
        lines += [
            row_of("", spans),
            " ".join(f"\\cmidrule(lr){{{first}-{last}}}" for first, last in ends),
        ]
        lines += [row_of("", [title_of(metric) for _, metric in places])]
    elif several:
        lines += [
            row_of(
                title_of(grid.metrics[0]),
                [label(grid.column_keys, column) for column in grid.columns],
            )
        ]
    else:
        lines += [row_of("", [title_of(metric) for metric in grid.metrics])]
    lines += ["\\midrule"]
    lines += [
        row_of(label(grid.row_keys, row), [shown(row, c, metric) for c, metric in places])
        for row in grid.rows
    ]
    lines += ["\\bottomrule"]
    if partly:
        note = f"{DAGGER} without the seeds that diverged"
        lines += [f"\\multicolumn{{{len(places) + 1}}}{{l}}{{\\footnotesize {note}}} \\\\"]
    return "\n".join([*lines, "\\end{tabular}"]) + "\n"


def grid_of(runs: Sequence[RunDirectory], layout: Layout) -> Grid:
    """Group runs by what varies between them, but for the seed."""
    found = [fields(run) for run in runs]
    keys = list(dict.fromkeys(key for each in found for key in each))
    varying = [key for key in keys if len({each.get(key) for each in found}) > 1]
    require_known(layout.rows, keys, "--rows")
    rows = layout.rows or tuple(key for key in varying if key not in OF_COLUMNS)
    columns = tuple(key for key in varying if key not in rows)
    rows = rows or tuple(key for key in ("algorithm",) if key in keys)
    metrics = metrics_of(runs, layout.metrics)
    groups: dict[tuple[Key, Key], list[RunDirectory]] = {}
    for run, values in zip(runs, found, strict=True):
        place = tuple(map(values.get, rows)), tuple(map(values.get, columns))
        groups.setdefault(place, []).append(run)
    cells = {
        (*place, metric): cell_of(group, metric)
        for place, group in groups.items()
        for metric in metrics
    }
    grid = Grid(
        rows,
        columns,
        ordered({row for row, _ in groups}),
        ordered({column for _, column in groups}),
        metrics,
        cells,
        tuple(sorted({len(group) for group in groups.values()})),
    )
    return sort_rows(grid, layout.sort)


def sort_rows(grid: Grid, by: str) -> Grid:
    """Return the table with its rows in order. by: `name`, or a metric: the best mean over the
    columns first."""
    if by == "name":
        return grid
    require_known([by], ("name", *grid.metrics), "--sort")

    def rank(row: Key) -> float:
        ranks = [
            cell.rank(by) for column in grid.columns if (cell := grid.cell(row, column, by)).values
        ]
        return float(np.mean(ranks)) if ranks else math.inf

    rows = tuple(sorted(grid.rows, key=rank))
    return Grid(
        grid.row_keys, grid.column_keys, rows, grid.columns, grid.metrics, grid.cells, grid.seeds
    )


def fields(run: RunDirectory) -> dict[str, str]:
    """Return what says what was run, but for the seed: groups by their options, and overrides."""
    given = {key: value for key, _, value in (text.partition("=") for text in said(run))}
    groups = [key for key in UNNAMED if key not in given and run.summary.get(key) is not None]
    if "experiment" in given:  # which says the rest
        groups = [key for key in groups if key == "algorithm"]
    return given | {key: str(run.summary[key]) for key in groups}


def metrics_of(runs: Sequence[RunDirectory], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics asked for, else the usual ones that some run has."""
    known = {key for run in runs for key, value in run.summary.items() if is_number(value)}
    if wanted:
        require_known(wanted, sorted(known), "--metrics")
        return tuple(wanted)
    return next(
        (found for usual in USUAL if (found := tuple(m for m in usual if m in known))),
        ("accuracy",),
    )


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
        run.summary[metric]
        for run in group
        if not run.diverged and is_number(run.summary.get(metric))
    ]
    return Cell(tuple(map(float, values)), sum(run.diverged for run in group))


def shown_rank(cell: Cell, metric: str) -> float:
    """Return the rank of a cell by its mean as it is printed, so that what looks equal is equal."""
    if not cell.values:
        return math.inf
    value = float(form(float(np.mean(cell.values)), metric))
    return value if less_is_better(metric) else -value


def form(value: float, metric: str) -> str:
    """Return a number as papers print it: accuracies in per cent."""
    return f"{100 * value:.2f}" if is_accuracy(metric) else f"{value:.3f}"


def is_accuracy(metric: str) -> bool:
    """Tell whether a key of summary.json is an accuracy, its worst or its deviation over clients,
    in whatever view."""
    return re.sub("(_worst|_std)?(_augmented)?$", "", metric).endswith("accuracy")


def less_is_better(metric: str) -> bool:
    name = metric.removesuffix("_augmented")
    ends = ("forgetting", "forgetting_degree", "loss", "seconds", "rounds", "bytes")
    return name.endswith("_std") or name.removesuffix("_worst").endswith(ends)


def title_of(metric: str) -> str:
    """Return the head of a metric's column."""
    words = metric.replace("_", " ").capitalize()
    return escape(f"{words} (%)" if is_accuracy(metric) else words)


def label(keys: Sequence[str], values: Key) -> str:
    """Return the head of a row or column: the values of its keys, without what a run does not
    have."""
    pairs = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
    texts = [
        value if key in UNNAMED else f"{key.removeprefix('algorithm.')}={value}"
        for key, value in pairs
    ]
    return escape(" ".join(texts))


def escape(text: str) -> str:
    """Return a text as LaTeX shows it."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def ordered(keys: Iterable[Key]) -> tuple[Key, ...]:
    """Sort rows or columns by name, numbers by their value; what has no value first."""
    return tuple(sorted(keys, key=lambda key: [natural(value or "") for value in key]))


def natural(text: str) -> list[tuple[float, str]]:
    """Return a key for sorting: numbers by their value, before words."""
    pieces = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(piece), "") if i % 2 else (math.inf, piece) for i, piece in enumerate(pieces)]


def row_of(head: str, cells: Sequence[str]) -> str:
    return " & ".join([head, *cells]) + r" \\"


def about(grid: Grid) -> str:
    """Return the comment above a table."""
    counts = " to ".join(map(str, sorted({grid.seeds[0], grid.seeds[-1]})))
    seeds = f"Mean and standard deviation over {counts} seeds" if grid.seeds[-1] > 1 else "One seed"
    return f"Needs the package booktabs. {seeds}; best in bold."
