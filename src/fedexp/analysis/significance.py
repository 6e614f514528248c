"""Compare methods by runs with the same setting and seeds.

The seeds are independent, but the settings of one seed are not: its partition and initial model are
similar in all of them. So a seed counts once, with its mean over settings.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis.layout import Section
from fedexp.analysis.measures import format_value, less_is_better, title_of
from fedexp.analysis.naming import differing, displayed, ordered
from fedexp.core.errors import ConfigError, nearest
from fedexp.rundir.objective import TARGETS

LEVEL = 0.05
# with fewer pairs, no sign-flip test reaches LEVEL: n pairs of equal sign have p = 2^(1 - n)
LEAST_SEEDS = 1 + math.ceil(-math.log2(LEVEL))
OVERALL = "all settings"
ABOUT = (
    "Mean difference over n seeds, without runs that diverged, and its 95 % interval (Student's t)."
    " Over all settings, a seed counts once, with the mean of its pairs of runs. p: two-sided"
    " sign-flip test of the seeds, adjusted for the number of methods (Holm); no p is given if n"
    " seeds cannot be significant."
)
GAPS = " `of 15 pairs`: some seeds lack a setting."


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
    Methods with fewer than LEAST_SEEDS seeds are left out, since hardly anything can be told from
    them, and so are methods with diverged runs, or with seeds that missed a target, since their
    values are not comparable. The result is empty for fewer than two other methods, and for a
    metric whose direction is unknown. table: the runs of one setting, see `frame.tidy`.
    """
    less = less_is_better(metric, table["run"])
    values: dict[str, pd.Series[float]] = {}
    for name, group in table.groupby("method"):
        found = group.set_index("seeds")[metric].dropna()
        sound = np.isfinite(found).all() and not group["diverged"].any()
        if len(found) >= LEAST_SEEDS and sound:
            values[str(name)] = found if less else -found
    if less is None or len(values) < 2:
        return []
    best = min(values.values(), key=lambda found: found.mean())
    close = []
    for name, found in values.items():
        worse = (found - best).dropna().to_numpy()
        if len(worse) >= LEAST_SEEDS and interval(worse)[0] <= 1e-12:
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

    table: see `frame.tidy`. Each setting has rows, and OVERALL has rows if there are several.
    Columns: setting, metric, method, n, pairs, difference, low, high, p, least_p. n is the number
    of seeds, and least_p the smallest p that they allow. Rounds to targets are left out, since
    pairs in which a run never reached the target have no difference.
    """
    runs = {str(setting): group for setting, group in table.groupby("setting")}
    groups = {setting: runs[setting] for setting in ordered(runs)}
    if len(groups) > 1:
        groups = {OVERALL: table} | groups
    rows: list[dict[str, Any]] = []
    for (setting, group), metric in itertools.product(groups.items(), metrics):
        if metric.startswith(TARGETS) or metric not in group:
            continue
        sound = group[~group["diverged"]].set_index(["setting", "seeds", "method"])[metric]
        wide = sound.unstack("method").reindex(columns=group["method"].unique())
        if baseline not in wide:
            continue
        pairs = {
            method: (wide[method] - wide[baseline]).dropna()
            for method in ordered(wide.columns.drop(baseline))
        }
        compared = [
            {"setting": setting, "metric": metric, "method": method} | compare_pairs(values)
            for method, values in pairs.items()
            if len(values)
        ]
        raw = np.array([row["p"] for row in compared])
        least = np.array([2.0 ** (1 - row["n"]) for row in compared])
        adjusted = zip(compared, holm(raw), holm(least), strict=True)
        rows += [row | {"p": p, "least_p": least_p} for row, p, least_p in adjusted]
    return pd.DataFrame(rows)


def compare_pairs(values: "pd.Series[float]") -> dict[str, Any]:
    """Return n, pairs, difference, low, high and p of the differences of two methods.

    values: a difference for each pair of runs, with the index (setting, seeds).
    """
    from scipy.stats import permutation_test

    found = values.groupby(level="seeds").mean().to_numpy()
    low, high = interval(found)
    p = 1.0
    if len(found) > 1:
        flips = permutation_test((found,), np.mean, permutation_type="samples", random_state=0)
        p = flips.pvalue
    sizes = {"n": len(found), "pairs": len(values)}
    return sizes | {"difference": found.mean(), "low": low, "high": high, "p": p}


def holm(values: np.ndarray) -> np.ndarray:
    """Return Holm's adjusted p: the i-th smallest of m is multiplied by m - i + 1, and is then at
    least the one before, and at most 1."""
    order = np.argsort(values)
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted


def tabulate(found: pd.DataFrame, baseline: str, settings: Iterable[str]) -> list[Section]:
    """Return the section of a report with the differences, or [] without two pairs of runs.

    settings: all settings of the sweep, of which some may have no pair.
    """
    if found.empty or found["n"].max() < 2:
        return []
    settings = ordered(settings)
    shown = displayed(differing(settings)) if len(settings) > 1 else [""]
    heads = {OVERALL: OVERALL} | dict(zip(settings, shown, strict=True))
    texts = pd.Series(
        [format_difference(row, len(settings)) for row in found.to_dict("records")],
        pd.MultiIndex.from_frame(found[["method", "setting", "metric"]]),
    )
    columns = found[["setting", "metric"]].drop_duplicates()
    wide = texts.unstack([1, 2]).fillna("-")[list(columns.itertuples(index=False, name=None))]
    wide = wide.rename(columns=heads, level=0).rename(columns=title_of, level=1)
    wide = wide.loc[ordered(wide.index)]
    wide = wide.set_axis(displayed(list(wide.index)))
    about = ABOUT + GAPS * bool(texts.str.contains(" pairs)", regex=False).any())
    return [Section(f"Difference to {displayed([baseline])[0]}", wide, about=about)]


def format_difference(row: Mapping[Any, Any], settings: int) -> str:
    """Return a text such as `+1.20 [0.40, 2.00], n=10, p=0.012`, in points for accuracies.

    p is omitted if it would exceed 0.05 even with all differences of the same sign. settings:
    the number of settings, whose pairs a row of OVERALL would have without gaps.
    """
    metric, size = str(row["metric"]), row["n"]
    shown = [format_value(row[key], metric) for key in ("difference", "low", "high")]
    sign = "+" if row["difference"] > 0 else ""
    text = f"{sign}{shown[0]}" + (f" [{shown[1]}, {shown[2]}]" if size > 1 else "")
    whole = size * (settings if row["setting"] == OVERALL else 1)
    gaps = "" if row["pairs"] == whole else f" ({row['pairs']} of {whole} pairs)"
    end = "" if row["least_p"] > LEVEL else f", p={row['p']:.2g}"
    return f"{text}, n={size}{gaps}{end}"
