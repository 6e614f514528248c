"""Verdicts: whether a value lies within the tolerance of the print, and whether the methods stand
in its order."""

import math
import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedexp.analysis.layout import missing

# How far from the printed value is still "within": a fraction of the unit, or of the printed value
# (rounds, ratios).
ABSOLUTE = {"percent": 2.0, "fraction": 0.02}
FORGETTING, RELATIVE = 0.05, 0.25
NO_VIEW, BY_DEFINITION = "not judged: no {} view", "not judged: by definition"
TOLERANCES = (
    f"Within: accuracy by {ABSOLUTE['percent']:g} points, two printed standard deviations or two"
    f" standard errors of ours, whichever is most; forgetting and alignment by {FORGETTING}, rounds"
    f" and speed-ups by {RELATIVE:.0%}, or two standard errors. A standard error is taken from the"
    " seeds; below three, from a known spread over seeds or, without one, from the last ten rounds."
)
DATA, TABLE = "on other data", "the value in the table"  # of metrics without a rule
COLUMN = (
    "dataset",
    "partition",
    "partition_param",
    "clients",
    "participation",
    "local_epochs",
    "setting",
    "metric",
)


def tolerance(row: Mapping[str, str], error: float | None = None) -> float:
    """Return how far our value may lie from a printed one, in its unit; error: the standard error
    of ours, in the same."""
    noise = 2 * (error or 0.0)
    if row["unit"] in ("rounds", "ratio"):
        return max(RELATIVE * float(row["value"]), noise)
    least = FORGETTING if row["metric"] in ("forgetting", "alignment") else ABSOLUTE[row["unit"]]
    return max(least, 2 * float(row["std"] or 0), noise)


def verdict(
    row: Mapping[str, str],
    diverged: list[bool],
    there: int,
    never: int,
    difference: float | None,
    within: float | None,
    reduced: bool,
    missing_view: str = "",
    mean: float | None = None,
) -> str:
    """Return the verdict: within | outside | failed as printed | not reached as printed | not run |
    not judged: <why>.

    diverged: of each run; there, never: how many runs have a number, and how many never reach their
    target; within: the tolerance; missing_view: the view of the rule where the runs were not tested
    through it; mean: our number."""
    if not diverged:
        return "not run"
    if reduced:
        return "not judged: reduced protocol"
    if row["note"].startswith("suspect"):
        return "not judged: suspect print"
    if row["note"].startswith("failed"):
        return beside_a_failure(row, all(diverged), mean)
    if all(diverged):
        return "outside"
    if missing_view:
        return NO_VIEW.format(missing_view)
    if there and never:
        return f"not judged: reached by {there} of {there + never}"
    if row["note"] == "not_reached" and (there or never):
        return "not reached as printed" if never else "outside"
    if never:
        return "outside"
    if difference is None or within is None:
        return "not judged: no number"
    return "within" if abs(difference) <= within else "outside"


def beside_a_failure(row: Mapping[str, str], diverged: bool, mean: float | None) -> str:
    """Return the verdict on what is printed as failed. Some failures have an accuracy, that of
    chance: a run that ends there has failed as printed, with finite numbers too. A forgetting has
    none, so only a run that diverged is judged.
    """
    if not diverged and row["metric"] == "forgetting":
        return "not judged: no printed number"
    printed = re.search(r'printed "([0-9.]+)', row["note"])
    at_chance = (
        printed and mean is not None and abs(mean - float(printed[1])) <= ABSOLUTE["percent"]
    )
    return "failed as printed" if diverged or at_chance else "outside"


def with_order(tidy: pd.DataFrame) -> pd.DataFrame:
    """Return the tidy table with `rho`, `order` and `order_by`: of every column of the paper's
    table, the verdict on the order of its methods. Prints that are not suspect take part, and runs
    at the full protocol; where there are none, those that depart from it in their data alone and
    have the same training and test data: their values are not judged."""
    found = pd.DataFrame({"rho": None, "order": "", "order_by": ""}, index=tidy.index, dtype=object)
    known = tidy["printed"].notna() & ~tidy["note"].str.startswith(("suspect", "failed"))
    full, other = tidy["protocol"] == "full", tidy["changes"].map(other_data)
    for _, column in tidy[known & (full | (other != ""))].groupby(list(COLUMN), sort=False):
        whole = column["protocol"] == "full"
        there = other[column.index]
        alike = column[whole if whole.any() else there == there.mode()[0]]
        for key, value in order(alike).items():
            found.loc[alike.index, key] = (
                value if whole.any() or key != "order_by" or not value else f"{value}, {DATA}"
            )
    return tidy.assign(
        rho=found["rho"].astype(float), order=found["order"], order_by=found["order_by"]
    )


def other_data(changes: str) -> str:
    """Return in what training and test data runs depart from the protocol; "" where they do not, or
    not in their data alone. Fewer surrogate examples, which not every method of a column reads, are
    data too."""
    texts = [text for text in changes.split("; ") if not text.startswith("surrogate.examples=")]
    return "; ".join(texts) if all(text.startswith("data: ") for text in texts) else ""


def order(column: pd.DataFrame) -> dict[str, Any]:
    """Return Spearman's rho between ours and the print, and what is swapped beyond noise, in one
    column of a table.

    Ours is the value under the paper's rule where all methods have it but those that have diverged;
    else, of all of them, the mean of the last ten rounds of the plain test. rho needs three
    methods."""
    alive = column.loc[column["diverged"] < column["n"], "mean"]
    ruled = bool(len(alive) and alive.notna().all())
    ours, error = ("mean", "error") if ruled else ("plain_last10", "plain_error")
    known = column.dropna(subset=ours)
    if len(known) < 3:
        return {"rho": None, "order": f"not judged: {len(known)} of 3 methods", "order_by": ""}
    swaps, unknown = swapped(
        known.rename(columns={ours: "ours", error: "ours_error"}, errors="raise")
    )
    unjudged = f"not judged: no seeds or rounds to take the noise of {', '.join(unknown)} from"
    return {
        "rho": spearman(known[ours], known["printed"]),
        "order": (
            f"swapped: {'; '.join(swaps)}"
            if swaps
            else unjudged
            if unknown
            else "no swap beyond noise"
        ),
        "order_by": (
            (str(known["rule"].iloc[0]) or TABLE) if ruled else "mean_of_last(10), plain test"
        ),
    }


def spearman(first: pd.Series, second: pd.Series) -> float | None:
    """Return Spearman's rank correlation: Pearson's of the ranks, equal values sharing their mean
    rank; None where all values of a side are equal."""
    ranks, others = first.rank(), second.rank()
    spread = float(ranks.std(ddof=0) * others.std(ddof=0))
    if not spread:
        return None
    return float(((ranks - ranks.mean()) * (others - others.mean())).mean()) / spread


def swapped(methods: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the pairs that stand the other way round than printed, both here and there by more
    than two standard errors of the difference; and the methods without a known error in pairs that
    stand so, which cannot be judged. Where the print has no error, its difference counts.

    methods: columns method, ours, ours_error, printed, printed_std."""
    rows, found = methods.to_dict("records"), list[str]()
    unknown: dict[str, None] = {}
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            high, low = (one, other) if one["ours"] > other["ours"] else (other, one)
            ours, printed = high["ours"] - low["ours"], low["printed"] - high["printed"]
            spread = 2 * math.hypot(
                *(0.0 if missing(r["printed_std"]) else r["printed_std"] for r in (high, low))
            )
            if not ours or printed <= spread:
                continue
            without = [str(r["method"]) for r in (one, other) if missing(r["ours_error"])]
            unknown |= dict.fromkeys(without)
            if not without and ours > 2 * math.hypot(high["ours_error"], low["ours_error"]):
                found.append(f"{high['method']} above {low['method']}")
    return found, [*unknown]
