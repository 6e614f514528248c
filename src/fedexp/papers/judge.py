"""Verdicts: whether a value lies within the tolerance of the print, and whether the methods stand
in its order."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

# How far from the printed value is still "within": a fraction of the unit, or of the printed value
# (rounds, ratios).
ABSOLUTE = {"percent": 2.0, "fraction": 0.02}
FORGETTING, RELATIVE = 0.05, 0.25
REDUCED = "reduced protocol"
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
    noise = 0.0 if error is None or math.isnan(error) else 2 * error
    if not row["value"]:
        return math.nan
    if row["unit"] in ("rounds", "ratio"):
        return max(RELATIVE * float(row["value"]), noise)
    least = FORGETTING if row["metric"] in ("forgetting", "alignment") else ABSOLUTE[row["unit"]]
    return max(least, 2 * float(row["std"] or 0), noise)


def verdict(row: Mapping[str, Any], diverged: Sequence[bool], why: str = "") -> str:
    """Return the verdict: within | outside | failed as printed | not reached as printed | not run |
    not judged: <why>.

    row: of the tidy table; diverged: of each run; why: it cannot be judged, unless all diverged."""
    note, difference = str(row["note"]), row["difference"]
    if not diverged:
        return "not run"
    if why == REDUCED:
        return f"not judged: {why}"
    if note.startswith("suspect"):
        return "not judged: suspect print"
    if note.startswith("failed"):
        return beside_a_failure(row, all(diverged))
    if all(diverged):
        return "outside"
    if why or math.isnan(row["mean"]):
        return f"not judged: {why or 'no number'}"
    if note == "not_reached":
        return "not reached as printed" if math.isinf(row["mean"]) else "outside"
    if math.isnan(difference):
        return "not judged: no number"
    return "within" if abs(difference) <= row["tolerance"] else "outside"


def beside_a_failure(row: Mapping[str, Any], diverged: bool) -> str:
    """Return the verdict on what is printed as failed. Some failures have an accuracy, that of
    chance: a run that ends there has failed as printed, with finite numbers too. A forgetting has
    none, so only a run that diverged is judged.
    """
    if not diverged and row["metric"] == "forgetting":
        return "not judged: no printed number"
    printed = re.search(r'printed "([0-9.]+)', str(row["note"]))
    at_chance = printed and abs(row["mean"] - float(printed[1])) <= ABSOLUTE["percent"]
    return "failed as printed" if diverged or at_chance else "outside"


def with_order(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells with `rho`, `order` and `order_by`: the verdict on the order of the methods
    in each column of the paper's table.

    Prints that are not suspect take part, and runs at the full protocol; where there are none,
    those that depart from it in their data alone and have the same data."""
    known = cells["printed"].notna() & ~cells["note"].str.startswith(("suspect", "failed"))
    data = cells["changes"].map(other_data)
    full = cells["protocol"] == "full"
    found = cells.assign(rho=np.nan, order="", order_by="")
    for _, column in cells[known & (full | (data != ""))].groupby(list(COLUMN), sort=False):
        whole = bool(full[column.index].any())
        same = data[column.index].mode()[0]
        alike = column[full[column.index] if whole else data[column.index] == same]
        for key, value in order(alike, whole).items():
            found.loc[alike.index, key] = value
    return found


def other_data(changes: str) -> str:
    """Return in what training and test data runs depart from the protocol; "" where they do not, or
    not in their data alone. Fewer surrogate examples, which not every method of a column reads, are
    data too."""
    texts = [text for text in changes.split("; ") if not text.startswith("surrogate.examples=")]
    return "; ".join(texts) if all(text.startswith("data: ") for text in texts) else ""


def order(column: pd.DataFrame, full: bool = True) -> dict[str, Any]:
    """Return Spearman's rho between ours and the print, and what is swapped beyond noise, in one
    column of a table. full: at the paper's protocol, not on other data.

    Ours is the value under the paper's rule where all methods have it but those that have diverged;
    else, of all of them, the mean of the last ten rounds of the plain test. rho needs three
    methods."""
    alive = column.loc[column["diverged"] < column["n"], "mean"]
    ruled = bool(len(alive) and alive.notna().all())
    ours, error = ("mean", "error") if ruled else ("plain_last10", "plain_error")
    known = column.dropna(subset=ours)
    if len(known) < 3:
        return {"rho": math.nan, "order": f"not judged: {len(known)} of 3 methods", "order_by": ""}
    names = {ours: "ours", error: "ours_error"}
    swaps, unknown = swapped(known.rename(columns=names, errors="raise"))
    verdict = "no swap beyond noise"
    if swaps:
        verdict = f"swapped: {'; '.join(swaps)}"
    elif unknown:
        verdict = f"not judged: no noise is known of {', '.join(unknown)}"
    by = str(known["rule"].iloc[0] or TABLE) if ruled else "mean_of_last(10), plain test"
    rho = known[ours].corr(known["printed"], method="spearman")
    return {"rho": rho, "order": verdict, "order_by": by if full else f"{by}, {DATA}"}


def swapped(methods: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the pairs that stand the other way round than printed, both here and there by more
    than two standard errors of the difference; and the methods without a known error in pairs that
    stand so, which cannot be judged. Where the print has no error, its difference counts.

    methods: columns method, ours, ours_error, printed, printed_std."""
    found: list[str] = []
    unknown: dict[str, None] = {}
    for pair in itertools.combinations(methods.to_dict("records"), 2):
        low, high = sorted(pair, key=lambda row: row["ours"])
        ours, printed = high["ours"] - low["ours"], low["printed"] - high["printed"]
        spreads = [0.0 if pd.isna(row["printed_std"]) else row["printed_std"] for row in pair]
        if not ours or printed <= 2 * math.hypot(*spreads):
            continue
        without = [str(row["method"]) for row in pair if pd.isna(row["ours_error"])]
        unknown |= dict.fromkeys(without)
        if not without and ours > 2 * math.hypot(high["ours_error"], low["ours_error"]):
            found.append(f"{high['method']} above {low['method']}")
    return found, [*unknown]
