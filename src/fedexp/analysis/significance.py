"""Compare methods by runs with the same setting and seeds."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis.layout import Section
from fedexp.analysis.measures import format_value, less_is_better, title_of
from fedexp.analysis.naming import displayed, ordered
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.objective import TARGETS

LEVEL = 0.05
ABOUT = (
    "Mean difference over the n pairs of runs with the same setting and seeds, without runs that"
    " diverged, and its 95 % interval (Student's t). p: two-sided sign-flip test of the pairs,"
    " adjusted for the number of methods (Holm); no p is given if n pairs cannot be significant."
)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean difference (Student's t), or nan for one difference."""
    from scipy.stats import t

    size = len(differences)
    if size < 2:
        return math.nan, math.nan
    half = t.ppf(1 - LEVEL / 2, size - 1) * differences.std(ddof=1) / math.sqrt(size)
    return differences.mean() - half, differences.mean() + half


def find_best(table: pd.DataFrame, metric: str) -> list[str]:
    """Return the best method of a setting, and the methods that cannot be told from it.

    Two methods cannot be told apart if the 95 % interval of their paired differences contains 0.
    Methods with diverged runs, or with seeds that missed a target, are left out, since their values
    are not comparable. The result is empty for fewer than two methods with two seeds each, and for
    a metric whose direction is unknown. table: the runs of one setting, see `frame.tidy`.
    """
    less = less_is_better(metric, table["run"])
    values: dict[str, pd.Series[float]] = {}
    for name, group in table.groupby("method"):
        found = group.set_index("seeds")[metric].dropna()
        if len(found) > 1 and np.isfinite(found).all() and not group["diverged"].any():
            values[str(name)] = found if less else -found
    if less is None or len(values) < 2:
        return []
    best = min(values.values(), key=lambda found: found.mean())
    close = []
    for name, found in values.items():
        low, high = interval((found - best).dropna().to_numpy())
        if low <= 1e-12 and high >= -1e-12:
            close.append(name)
    return close


def find_baseline(methods: Iterable[str], asked: str = "") -> str:
    """Return the method to compare with: the one asked for, else FedAvg, else the first one.

    Raises ConfigError if no method has the name, as an option or as it is displayed.
    """
    known = ordered(methods)
    if not asked:
        return next((name for name in known if name.split()[0] == "fedavg"), known[0])
    for name, shown in zip(known, displayed(known), strict=True):
        if asked in (name, shown):
            return name
    raise ConfigError(
        f"--baseline {asked}: no such method{nearest(asked, known)}; methods: {', '.join(known)}"
    )


def differences(table: pd.DataFrame, metrics: Iterable[str], baseline: str) -> pd.DataFrame:
    """Return the paired differences of all methods to the baseline, see ABOUT.

    table: see `frame.tidy`. Columns: metric, method, n, difference, low, high, p, least_p. The last
    one is the smallest p that n pairs allow. Rounds to targets are left out, since pairs in which a
    run never reached the target have no difference.
    """
    from scipy.stats import permutation_test

    sound = table[~table["diverged"]].set_index(["setting", "seeds", "method"])
    rows: list[dict[str, Any]] = []
    for metric in metrics:
        if metric.startswith(TARGETS) or metric not in sound:
            continue
        wide = sound[metric].unstack("method").reindex(columns=table["method"].unique())
        compared: list[dict[str, Any]] = []
        for method in ordered(wide.columns.drop(baseline)):
            values = (wide[method] - wide[baseline]).dropna().to_numpy()
            if not len(values):
                continue
            low, high = interval(values)
            row: dict[str, Any] = {"metric": metric, "method": method, "n": len(values)}
            row |= {"difference": values.mean(), "low": low, "high": high, "p": 1.0}
            if len(values) > 1:
                flips = permutation_test(
                    (values,), np.mean, permutation_type="samples", random_state=0
                )
                row["p"] = flips.pvalue
            compared.append(row)
        raw = np.array([row["p"] for row in compared])
        least = np.array([2.0 ** (1 - row["n"]) for row in compared])
        adjusted = zip(compared, holm(raw), holm(least), strict=True)
        rows += [row | {"p": p, "least_p": least_p} for row, p, least_p in adjusted]
    return pd.DataFrame(rows)


def holm(values: np.ndarray) -> np.ndarray:
    """Return Holm's adjusted p: the i-th smallest of m is multiplied by m - i + 1, and is then at
    least the one before, and at most 1."""
    order = np.argsort(values)
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted


def tabulate(found: pd.DataFrame, baseline: str) -> list[Section]:
    """Return the section of a report with the differences, or [] without two pairs of runs."""
    if found.empty or found["n"].max() < 2:
        return []
    texts = pd.Series(
        [format_difference(row) for row in found.to_dict("records")],
        pd.MultiIndex.from_frame(found[["method", "metric"]]),
    )
    wide = texts.unstack().fillna("-")[found["metric"].unique()]
    wide = wide.set_axis(displayed(list(wide.index))).rename(columns=title_of)
    return [Section(f"Difference to {displayed([baseline])[0]}", wide, about=ABOUT)]


def format_difference(row: Mapping[Any, Any]) -> str:
    """Return a text such as `+1.20 [0.40, 2.00], n=10, p=0.012`, in points for accuracies.

    There is no p if it would exceed 0.05 even with all differences of the same sign.
    """
    metric, size = str(row["metric"]), row["n"]
    shown = [format_value(row[key], metric) for key in ("difference", "low", "high")]
    sign = "+" if row["difference"] > 0 else ""
    text = f"{sign}{shown[0]}" + (f" [{shown[1]}, {shown[2]}]" if size > 1 else "")
    end = "" if row["least_p"] > LEVEL else f", p={row['p']:.2g}"
    return f"{text}, n={size}{end}"
