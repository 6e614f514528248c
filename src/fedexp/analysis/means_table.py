"""Make tables of a sweep's means over seeds, with methods as rows and settings as columns.

Each cell shows mean ± standard deviation. The best value in a column is bold, and so are the values
that a paired interval over the seeds cannot tell from it. With few seeds, nothing is bold, since
they would hardly tell anything apart.
"""

import argparse
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedexp.analysis.frame import average, main_keys
from fedexp.analysis.layout import SOME_DIVERGED, Section
from fedexp.analysis.measures import format_value, less_is_better, title_of
from fedexp.analysis.naming import differing, displayed, ordered
from fedexp.analysis.significance import LEAST_SEEDS, find_best
from fedexp.core.console import comma_list
from fedexp.core.errors import ConfigError, nearest
from fedexp.metrics.task_matrix import MEASURES
from fedexp.rundir.objective import TARGETS

CHOSEN = "Chosen values (highest accuracy in the last round, averaged over seeds)"


@dataclass(frozen=True)
class Layout:
    """The user's options for the table. An empty value selects the default."""

    metrics: tuple[str, ...] = ()  # keys of summary.json
    sort: str = ""  # "name" or a metric (best first); by default, the first metric
    transpose: bool = False
    baseline: str = ""  # the method that all others are compared with
    latex: bool = False  # whether to write the tables for LaTeX, too
    appendix: bool = False  # whether to write a description of the runs for an appendix


def make_table(table: pd.DataFrame, layout: Layout) -> Section:
    """Return the table of means. Raises ConfigError if no run has a requested metric.

    table: the runs, see `frame.tidy`.
    """
    metrics = shown_metrics(table, layout)
    metrics_of = {
        str(setting): metrics if layout.metrics else main_keys(group)
        for setting, group in table.groupby("setting")
    }
    require_known([layout.sort or "name"], ("name", *metrics), "--sort")
    table = table.reindex(columns=list(dict.fromkeys([*table, *metrics])))
    found = average(table, metrics)
    best = {
        (setting, metric): find_best(group, metric)
        for setting, group in table.groupby("setting")
        for metric in metrics_of[str(setting)]
    }
    cells: dict[tuple[str, str, str], str] = {}
    seeds = int(found["n"].max())
    for row in found.to_dict("records"):
        for metric in metrics_of[row["setting"]]:
            is_best = row["method"] in best[row["setting"], metric]
            cells[row["method"], row["setting"], metric] = format_cell(row, metric, seeds, is_best)
    texts = pd.Series(cells)
    methods, settings = ordered(set(found["method"])), ordered(metrics_of)
    if layout.sort != "name":
        metric = layout.sort or metrics[0]
        less = less_is_better(metric, table["run"])
        ranks = found.apply(rank, axis="columns", args=(metric, less))
        order = ranks.groupby(found["method"]).mean().to_dict()
        methods.sort(key=lambda method: (math.isnan(order[method]), order[method]))
    rows, columns = (settings, methods) if layout.transpose else (methods, settings)
    wide: Any = texts.unstack([0, 2] if layout.transpose else [1, 2])
    heads = itertools.product(columns, metrics)
    shown = wide.loc[rows, [head for head in heads if head in wide]].fillna("-")
    about = describe_seeds(seeds, any("(n=" in text for text in cells.values()))
    if any(metric.startswith(TARGETS) for metric in metrics):
        about += " Rounds to a target are over the seeds that reached it."
    return make_section(shown, about)


def shown_metrics(table: pd.DataFrame, layout: Layout) -> list[str]:
    """Return the keys of all metrics in the table of means, in order.

    Of the requested metrics, rounds_to_target stands for all targets. Raises ConfigError if no run
    has a requested metric.
    """
    if not layout.metrics:
        return main_keys(table)
    found = list(map(str, table.select_dtypes("number").dropna(axis="columns", how="all")))
    targets = [key for key in found if key.startswith(TARGETS)]
    require_known(layout.metrics, sorted({*found, *([TARGETS] if targets else [])}), "--metrics")
    keys = [targets if metric == TARGETS else [metric] for metric in layout.metrics]
    return list(dict.fromkeys(itertools.chain.from_iterable(keys)))


def make_section(table: pd.DataFrame, about: str) -> Section:
    """Return a section for a table of formatted values, with display names for rows and columns.

    table: the table, whose columns are pairs (name, metric).
    """
    names, metrics = (list(table.columns.unique(level)) for level in (0, 1))
    shown = displayed(differing(names)) if len(names) > 1 else [""]
    table = table.rename(columns=dict(zip(names, shown, strict=True)), level=0)
    table = table.rename(columns=title_of, level=1)
    table = table.set_axis(displayed(differing(table.index)), axis="index")
    legend = legend_of(table)
    if len(metrics) == 1 and len(names) > 1:
        table, corner = table.droplevel(1, axis="columns"), title_of(metrics[0])
        return Section("", table, corner, about, legend)
    return Section("", table, "", about, legend)


def legend_of(table: pd.DataFrame) -> str:
    """Return the explanation of the mark of cells without diverged seeds, if any cell has it."""
    some_diverged = any(SOME_DIVERGED in str(text) for text in table.to_numpy().ravel())
    return f"`{SOME_DIVERGED}` without the seeds that diverged." if some_diverged else ""


def rank(record: Mapping[Any, Any], metric: str, less: bool | None) -> float:
    """Return a sort key that is smaller for better results.

    Results that are displayed as the same number have the same key. A missing result, a target that
    some seed missed and a metric whose direction is unknown have the key nan. less: whether less is
    better, or None if this is unknown.
    """
    value = record[metric]
    missed = record.get(f"{metric}_reached", record["n"]) < record["n"]
    if math.isnan(value) or missed or less is None:
        return math.nan
    return float(format_value(value, metric)) * (1 if less else -1)


def format_cell(record: Mapping[Any, Any], metric: str, seeds: int, best: bool = False) -> str:
    """Return mean ± standard deviation (n - 1 in the denominator) in Markdown.

    record: a row of `frame.average`. seeds: the number of seeds that the table states; a cell over
    another number of seeds says so.
    """
    value, spread, size = record[metric], record[f"{metric}_std"], record["n"]
    reached, known = record.get(f"{metric}_reached"), record.get(f"{metric}_n", math.nan)
    if reached is None or math.isnan(reached):
        size = size if math.isnan(known) else int(known)
        of_seeds = "" if size == seeds else f" (n={size})"
    else:
        of_seeds = f" ({reached:.0f} of {size} seeds)" if size > 1 and reached < size else ""
        of_seeds = of_seeds or ("" if size == seeds else f" (n={size})")
        if reached == 0 and record["diverged"] < size:
            return f"never{of_seeds}"
    if math.isnan(value):
        return "diverged" if record["diverged"] else "-"
    text = format_value(value, metric)
    if not math.isnan(spread):
        text += f" ± {format_value(spread, metric)}"
    text = f"**{text}**" if best else text
    return text + of_seeds + SOME_DIVERGED * bool(record["diverged"])


def require_known(names: Iterable[str], known: Sequence[str], flag: str) -> None:
    for name in names:
        if name not in known:
            hint = f"available: {', '.join(known)}" if known else "summary.json has no number"
            raise ConfigError(f"{flag} {name}: no run has this value{nearest(name, known)}; {hint}")


def describe_seeds(seeds: int, differ: bool) -> str:
    """Return the text above a table over this number of seeds. differ: whether some cells differ"""
    if seeds == 1:
        return "One seed, so nothing is in bold."
    some = ", or over the number n in a cell" if differ else ""
    text = f"Mean ± standard deviation over {seeds} seeds{some}; "
    if seeds < LEAST_SEEDS:
        return f"{text}nothing is in bold, which needs {LEAST_SEEDS} seeds."
    return (
        f"{text}bold: the best, and what the 95 % interval of the differences between equal seeds"
        f" cannot tell from it, of the methods with at least {LEAST_SEEDS} seeds."
    )


def label_rows(table: pd.DataFrame) -> list[str]:
    """Return the displayed row names of a table of settings and methods."""
    columns = ["setting", "method"] if table["setting"].nunique() > 1 else ["method"]
    return displayed(differing(table[columns].agg(" ".join, axis="columns")))


def choose_values(means: pd.DataFrame, accuracy: str) -> Section:
    """Return a table of the best value for each setting and algorithm of a search.

    The best value has the highest accuracy. Values whose runs all diverged are left out. means: see
    `frame.means`. accuracy: the column of the main accuracy.
    """
    names = means["method"].str.partition(" ")
    known = means.assign(algorithm=names[0], chosen=names[2])[means["n"] > means["diverged"]]
    best = known.drop_duplicates(["setting", "algorithm"]).assign(method=known["algorithm"])
    values = (100 * best[accuracy]).map("{:.2f}".format)
    table = pd.DataFrame({"chosen": best["chosen"], title_of(accuracy): values})
    return Section(CHOSEN, table.set_axis(label_rows(best), axis="index"))


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set the layout of a sweep's table."""
    add = parser.add_argument
    metrics = (
        "comma-separated numbers of summary.json, such as best_accuracy, and measures between"
        f" tasks: {', '.join(MEASURES)}"
    )
    add("--metrics", type=comma_list, default=(), help=metrics)
    add("--sort", default="", help="sort rows by name, or by a metric with the best first")
    add("--transpose", action="store_true", help="exchange rows and columns")
    latex = "also write the tables for LaTeX, to table.tex, which later reports keep up to date"
    add("--latex", action="store_true", help=latex)
    appendix = (
        "also describe data, model, settings, seeds, time and software for an appendix, in"
        " appendix.md and appendix.tex, which later reports keep up to date"
    )
    add("--appendix", action="store_true", help=appendix)
    baseline = "method that all others are compared with (default: FedAvg, else the first)"
    add("--baseline", default="", metavar="NAME", help=baseline)
