"""Make tables of a sweep's means over seeds, with methods as rows and settings as columns.

Each cell shows mean ± standard deviation. The best value in a column is bold,
and so are the values that a paired interval over the seeds cannot tell from it.
"""

import argparse
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pandas as pd

from fedexp.analysis.layout import SOME_DIVERGED, Section
from fedexp.analysis.measures import (
    describe_origin,
    format_value,
    less_is_better,
    main_measures,
    title_of,
)
from fedexp.analysis.naming import differing, displayed, grouped, ordered
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.objective import TARGETS
from fedexp.rundir.reader import RunDirectory

VALUES = (  # keys of summary.json
    *("accuracy", "best_accuracy", "forgetting", "round_forgetting"),
    *("average_accuracy", "new_task_accuracy", "task_forgetting"),
    *("validation_accuracy", "validation_best_accuracy", "best_round", "validation_forgetting"),
    *("validation_average_accuracy", "personal_accuracy", "personal_accuracy_worst"),
    *("personal_forgetting", "personal_global_accuracy"),
)
# additional columns of table.csv
COUNTS = ("n", "diverged", "seeds", "commits", "hardware")


@dataclass(frozen=True)
class Layout:
    """The user's options for the table. An empty value selects the default."""

    metrics: tuple[str, ...] = ()  # keys of summary.json
    sort: str = ""  # "name" or a metric (best first); by default, the first metric
    transpose: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Return the layout that the command line's flags specify."""
        metrics = tuple(filter(None, (options.metrics or "").split(",")))
        return cls(metrics, options.sort or "", options.transpose)


def means(runs: Sequence[RunDirectory], further: Iterable[str] = ()) -> pd.DataFrame:
    """Return the mean and standard deviation over seeds for each setting and method.

    Within a setting, rows are sorted by the main accuracy. The best method comes first. Runs
    that diverged are left out. further: keys of summary.json to average in addition to VALUES.
    """
    main = [measure.key for measure in main_measures(runs)]
    values = list(dict.fromkeys([*main, *VALUES, *further]))
    rows = [
        {"setting": setting, "method": method} | average_row(members, values)
        for setting, methods in grouped(runs, of_data=True).items()
        for method, members in methods.items()
    ]
    columns = [f"{value}{part}" for value in values for part in ("", "_std")]
    columns += [f"{value}_reached" for value in values if value.startswith(TARGETS)]
    table = pd.DataFrame(rows, columns=["setting", "method", *COUNTS, *columns])
    table = table.dropna(axis="columns", how="all")
    by = [name for name in ("setting", main[0]) if name in table]
    ascending = less_is_better(by[-1]) is not False
    return table.sort_values(by, ascending=[*[True] * (len(by) - 1), ascending])


def average_row(runs: Sequence[RunDirectory], values: Sequence[str]) -> dict[Any, Any]:
    """Return a method's row of table.csv, averaged over its seeds. values: keys of summary.json."""
    counts = {"n": len(runs), "diverged": sum(run.diverged for run in runs)}
    sound = [[numbers_of(run).get(key) for key in values] for run in runs if not run.diverged]
    table = pd.DataFrame(sound, columns=list(values), dtype=float)
    spread = table.std().add_suffix("_std")
    for key in values:
        if key.startswith(TARGETS) and any(key in numbers_of(run) for run in runs):
            counts[f"{key}_reached"] = int(table[key].count())
    return (
        counts
        | describe_origin(run.summary for run in runs)
        | table.mean().to_dict()
        | spread.to_dict()
    )


def numbers_of(run: RunDirectory) -> dict[str, float | None]:
    """Return the numbers in summary.json, and the rounds to targets as rounds_to_target_<target>.

    A value is None if it is undefined, or if the run never reached the target.
    """
    reached = run.summary.get(TARGETS) or {}
    found = {key: value for key, value in run.summary.items() if value is None or is_number(value)}
    return found | {f"{TARGETS}_{target}": number for target, number in reached.items()}


def absolute_targets(runs: Iterable[RunDirectory]) -> tuple[str, ...]:
    """Return the keys of `numbers_of` for the option `targets`, without fractions of the best."""
    keys = dict.fromkeys(key for run in runs for key in numbers_of(run))
    return tuple(key for key in keys if key.startswith(TARGETS) and not key.endswith("best"))


def make_table(runs: Sequence[RunDirectory], layout: Layout) -> Section:
    """Return the table of the given runs. Raises ConfigError if no run has a requested metric."""
    layout = replace(layout, metrics=known_metrics(runs, layout.metrics))
    metrics = layout.metrics or tuple(measure.key for measure in main_measures(runs))
    require_known([layout.sort or "name"], ("name", *metrics), "--sort")
    groups, table = grouped(runs, of_data=True), means(runs, layout.metrics)
    records: dict[tuple[str, str, str], Mapping[Any, Any]] = {}
    for record in table.to_dict("records"):
        members = itertools.chain.from_iterable(groups[record["setting"]].values())
        for metric in layout.metrics or [measure.key for measure in main_measures(members)]:
            records[record["method"], record["setting"], metric] = record
    ranks = pd.Series({place: rank(record, place[2]) for place, record in records.items()})
    bold = {
        (method, setting, metric)
        for setting, metric in {place[1:] for place in records}
        for method in find_best(groups[setting], metric)
    }
    texts = pd.Series(
        {key: format_cell(record, key[2], key in bold) for key, record in records.items()}
    )
    methods, settings = ordered(set(table["method"])), ordered(groups)
    if layout.sort != "name":
        by = ranks.index.get_level_values(2) == (layout.sort or metrics[0])
        known = ranks[by & (ranks < math.inf)]
        means_of_ranks = known.groupby(level=0).mean().to_dict()
        methods.sort(key=lambda method: means_of_ranks.get(method, math.inf))
    rows, columns = (settings, methods) if layout.transpose else (methods, settings)
    wide: Any = texts.unstack([0, 2] if layout.transpose else [1, 2])
    heads = itertools.product(columns, metrics)
    shown = wide.loc[rows, [head for head in heads if head in wide]].fillna("-")
    about = describe_seeds(set(table["n"]))
    if any(metric.startswith(TARGETS) for metric in metrics):
        about += " Rounds to a target are over the seeds that reached it."
    return make_section(shown, about)


def known_metrics(runs: Iterable[RunDirectory], metrics: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of the requested metrics; rounds_to_target stands for all targets.

    Raises ConfigError if no run has a requested metric.
    """
    numbers = [item for run in runs for item in numbers_of(run).items()]
    found = {key for key, value in numbers if value is not None or key.startswith(TARGETS)}
    targets = [key for key in dict(numbers) if key.startswith(TARGETS)]
    require_known(metrics, sorted({*found, *([TARGETS] if targets else [])}), "--metrics")
    keys = [targets if metric == TARGETS else [metric] for metric in metrics]
    return tuple(itertools.chain.from_iterable(keys))


def make_section(table: pd.DataFrame, describe_seeds: str) -> Section:
    """Return a section for a table of formatted values, with display names for rows and columns.

    table: the table, whose columns are pairs (name, metric).
    """
    names, metrics = (list(table.columns.unique(level)) for level in (0, 1))
    shown = displayed(differing(names)) if len(names) > 1 else [""]
    table = table.rename(columns=dict(zip(names, shown, strict=True)), level=0)
    table = table.rename(columns={metric: title_of(metric) for metric in metrics}, level=1)
    table = table.set_axis(displayed(differing(table.index)), axis="index")
    some_diverged = any(SOME_DIVERGED in text for text in table.to_numpy().ravel())
    legend = f"`{SOME_DIVERGED}` without the seeds that diverged." if some_diverged else ""
    if len(metrics) == 1 and len(names) > 1:
        table, corner = table.droplevel(1, axis="columns"), title_of(metrics[0])
        return Section("", table, corner, describe_seeds, legend)
    return Section("", table, "", describe_seeds, legend)


def rank(record: Mapping[Any, Any], metric: str) -> float:
    """Return a sort key that is smaller for better results.

    Results that are displayed as the same number have the same key. A missing result, a target that
    some seed missed and a metric whose direction is unknown have the key infinity.
    """
    value, less = record.get(metric, math.nan), less_is_better(metric)
    missed = record.get(f"{metric}_reached", record["n"]) < record["n"]
    if math.isnan(value) or missed or less is None:
        return math.inf
    return float(format_value(value, metric)) * (1 if less else -1)


def find_best(methods: Mapping[str, Sequence[RunDirectory]], metric: str) -> list[str]:
    """Return the best method of a setting, and the methods that cannot be told from it.

    Two methods cannot be told apart if the 95 % interval (Student's t) of their differences, paired
    by seed, contains 0. Methods with diverged runs, or with seeds that missed a target, are left
    out, since their values are not comparable. The result is empty without a pair of methods that
    have two common seeds, and for a metric whose direction is unknown.
    """
    less = less_is_better(metric)
    if less is None:
        return []
    values: dict[str, pd.Series[float]] = {}
    for name, runs in methods.items():
        numbers = {run.summary.get("seed"): numbers_of(run).get(metric) for run in runs}
        every = pd.Series(numbers, dtype=float)
        found = every.dropna()
        missed = metric.startswith(TARGETS) and len(found) < len(every)
        if len(found) > 1 and not missed and not any(run.diverged for run in runs):
            values[name] = found if less else -found
    if len(values) < 2:
        return []
    best = min(values.values(), key=lambda found: found.mean())
    return [name for name, found in values.items() if is_close((found - best).dropna().to_numpy())]


def is_close(differences: np.ndarray) -> bool:
    """Return whether the 95 % interval of the mean difference contains 0."""
    from scipy.stats import t

    if len(differences) < 2:
        return False
    half = t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / len(differences) ** 0.5
    return bool(abs(differences.mean()) <= half + 1e-12)


def format_cell(record: Mapping[Any, Any], metric: str, best: bool) -> str:
    """Return mean ± standard deviation (n - 1 in the denominator) in Markdown."""
    value, spread = record.get(metric, math.nan), record.get(f"{metric}_std", math.nan)
    reached, seeds = record.get(f"{metric}_reached", math.nan), record["n"]
    of_seeds = f" ({reached:.0f} of {seeds} seeds)" if seeds > 1 and reached < seeds else ""
    if math.isnan(value) and reached == 0 and record["diverged"] < seeds:
        return f"never{of_seeds}"
    if math.isnan(value):
        return "diverged" if record["diverged"] else "-"
    text = format_value(value, metric) + (
        "" if math.isnan(spread) else f" ± {format_value(spread, metric)}"
    )
    text = f"**{text}**" if best else text + of_seeds
    return text + SOME_DIVERGED * bool(record["diverged"])


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_known(names: Iterable[str], known: Sequence[str], flag: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{flag} {name}: no run has this value{nearest(name, known)}; available:"
                f" {', '.join(known)}"
            )


def describe_seeds(sizes: set[int]) -> str:
    """Return the text above a table. sizes: the different numbers of seeds in a cell."""
    counts = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
    if max(sizes) == 1:
        return "One seed, so nothing is in bold."
    return (
        f"Mean ± standard deviation over {counts} seeds; bold: the best, and what the 95 % interval"
        " of the differences between equal seeds cannot tell from it."
    )
