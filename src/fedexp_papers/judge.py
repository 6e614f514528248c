"""Judge whether measured values, and the order of methods, agree with the published ones."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

# Tolerances by unit. RELATIVE is a fraction of the published value, for rounds and ratios.
ABSOLUTE = {"percent": 2.0, "fraction": 0.02}
FORGETTING, RELATIVE = 0.05, 0.25
REDUCED = "reduced protocol"
TOLERANCES = (
    f"Tolerance: for accuracy, {ABSOLUTE['percent']:g} points, two published standard deviations or"
    " two standard errors of our value, whichever is largest; for forgetting and alignment,"
    f" {FORGETTING}, and for rounds and speed-ups, {RELATIVE:.0%}, or two standard errors. The"
    " standard error is computed from the seeds; for fewer than three, from a known standard"
    " deviation over seeds or, without one, from the last ten rounds."
)
DATA, TABLE = "on other data", "the value in the table"  # TABLE: for metrics without a rule
COLUMN = (
    *("dataset", "partition", "partition_param", "clients", "participation", "local_epochs"),
    *("setting", "metric"),
)


def compute_tolerance(row: Mapping[str, str], error: float | None = None) -> float:
    """Return the largest difference from a published value that counts as within the tolerance.

    row: the row of the published value. error: the standard error of our value, in the same unit.
    """
    noise = 0.0 if error is None or math.isnan(error) else 2 * error
    if not row["value"]:
        return math.nan
    if row["unit"] in ("rounds", "ratio"):
        return max(RELATIVE * float(row["value"]), noise)
    least = FORGETTING if row["metric"] in ("forgetting", "alignment") else ABSOLUTE[row["unit"]]
    return max(least, 2 * float(row["std"] or 0), noise)


def judge(row: Mapping[str, Any], diverged: Sequence[bool], why: str = "") -> str:
    """Return the verdict on a value.

    The verdicts are: within | outside | failed as printed | not reached as printed | not run |
    not judged: <why>.

    row: a row of the tidy table. diverged: whether each run diverged. why: a reason not to judge
    the value. It is ignored if all runs diverged.
    """
    note, difference = str(row["note"]), row["difference"]
    if not diverged:
        return "not run"
    if why == REDUCED:
        return f"not judged: {why}"
    if note.startswith("suspect"):
        return "not judged: suspect print"
    if note.startswith("failed"):
        return judge_published_failure(row, all(diverged))
    if all(diverged):
        return "outside"
    if why or math.isnan(row["mean"]):
        return f"not judged: {why or 'no number'}"
    if note == "not_reached":
        never = 0.0 if row["metric"] == "speedup" else math.inf
        return "not reached as printed" if row["mean"] == never else "outside"
    if math.isnan(difference):
        return "not judged: no number"
    return "within" if abs(difference) <= row["tolerance"] else "outside"


def judge_published_failure(row: Mapping[str, Any], diverged: bool) -> str:
    """Return the verdict on a value that the paper reports as failed.

    For some of these values, the paper gives an accuracy at chance level. Our run has then failed
    as published if it diverged or ends at chance level. Forgetting has no chance level, so it is
    judged only if all runs diverged.
    """
    if not diverged and row["metric"] == "forgetting":
        return "not judged: no printed number"
    printed = re.search(r'printed "([0-9.]+)', str(row["note"]))
    at_chance = printed and abs(row["mean"] - float(printed[1])) <= ABSOLUTE["percent"]
    return "failed as printed" if diverged or at_chance else "outside"


def add_order(cells: pd.DataFrame) -> pd.DataFrame:
    """Add the verdict on the order of the methods in each column of the paper's table.

    The new columns are `rho`, `order` and `order_by`. Suspect published values are left out. Runs
    at the full protocol are used. If a column has no such run, runs on other data that otherwise
    follow the protocol are used.
    """
    known = cells["printed"].notna() & ~cells["note"].str.startswith(("suspect", "failed"))
    data = cells["changes"].map(only_data_changes)
    full = cells["protocol"] == "full"
    found = cells.assign(rho=np.nan, order="", order_by="")
    for _, column in cells[known & (full | (data != ""))].groupby(list(COLUMN), sort=False):
        whole = bool(full[column.index].any())
        same = data[column.index].mode()[0]
        alike = column[full[column.index] if whole else data[column.index] == same]
        for key, value in judge_order(alike, whole).items():
            found.loc[alike.index, key] = value
    return found


def only_data_changes(changes: str) -> str:
    """Return the departures from the protocol if all of them concern the data, or else "".

    The number of surrogate examples is ignored, since not all methods in a column use them.
    """
    texts = [text for text in changes.split("; ") if not text.startswith("surrogate.examples=")]
    return "; ".join(texts) if all(text.startswith("data: ") for text in texts) else ""


def judge_order(column: pd.DataFrame, full: bool = True) -> dict[str, Any]:
    """Judge the order of the methods in one column of a table.

    The verdict consists of Spearman's rho between our values and the published ones, and the pairs
    of methods that are swapped beyond noise. The verdict is based on the values under the paper's
    rule if every method that did not diverge has such a value, and otherwise on the mean of the
    last ten rounds in the plain view. At least three methods are needed.

    full: whether the runs follow the paper's full protocol, rather than using other data.
    """
    alive = column.loc[column["diverged"] < column["n"], "mean"]
    ruled = bool(len(alive) and alive.notna().all())
    ours, error = ("mean", "error") if ruled else ("plain_last10", "plain_error")
    known = column.dropna(subset=ours)
    if len(known) < 3:
        return {"rho": math.nan, "order": f"not judged: {len(known)} of 3 methods", "order_by": ""}
    names = {ours: "ours", error: "ours_error"}
    swaps, unknown = find_swaps(known.rename(columns=names, errors="raise"))
    verdict = "no swap beyond noise"
    if swaps:
        verdict = f"swapped: {'; '.join(swaps)}"
    elif unknown:
        verdict = f"not judged: no noise is known of {', '.join(unknown)}"
    by = str(known["rule"].iloc[0] or TABLE) if ruled else "mean_of_last(10), plain test"
    rho = known[ours].corr(known["printed"], method="spearman")
    return {"rho": rho, "order": verdict, "order_by": by if full else f"{by}, {DATA}"}


def find_swaps(methods: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return (pairs of methods that are swapped, methods that cannot be judged).

    A pair is swapped if its order is the opposite of the published order, and the difference
    exceeds two standard errors both in our results and in the paper. A published value without a
    standard deviation has the error 0. A method cannot be judged if its order in a pair is the
    opposite of the published order but the error of our value is unknown.

    methods: a table with the columns method, ours, ours_error, printed, printed_std.
    """
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
