"""Judge whether measured values agree with the published ones."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Tolerances by unit. RELATIVE is a fraction of the published value, for rounds and ratios.
ABSOLUTE = {"percent": 2.0, "fraction": 0.02}
FORGETTING, RELATIVE = 0.05, 0.25
# A tolerance of more than this many strict ones, such as 5 points, is too wide to test anything.
TOO_WIDE = 2.5
REDUCED = "reduced protocol"
ENDED_EARLY = r"^rounds=(\d+)$"  # the changes of a run that departs only in its length
AGREEING = ("within", "failed as printed", "not reached as printed")
VERDICTS = (*AGREEING, "outside")  # on judged values
TOLERANCES = (
    f"Tolerance: for accuracy, {ABSOLUTE['percent']:g} points, two published standard deviations or"
    " two standard errors of our value, whichever is largest; for forgetting and alignment,"
    f" {FORGETTING}, and for rounds and speed-ups, {RELATIVE:.0%}, or two standard errors. The"
    " standard error is computed from the seeds; for fewer than three, from a known standard"
    " deviation over seeds if there is one; otherwise, for one seed, from the last ten rounds."
)


def compute_tolerance(row: Mapping[str, str], error: float | None = None) -> float:
    """Return the largest difference from a published value that counts as within the tolerance.

    row: the row of the published value. error: the standard error of our value, in the same unit.
    """
    noise = 0.0 if error is None or math.isnan(error) else 2 * error
    if not row["value"]:
        return math.nan
    least = strict_tolerance(row["unit"], row["metric"], float(row["value"]))
    return max(least, 2 * float(row["std"] or 0), noise)


def strict_tolerance(unit: str, metric: str, published: float) -> float:
    """Return the tolerance that does not depend on any standard deviation."""
    if unit in ("rounds", "ratio"):
        return RELATIVE * published
    return FORGETTING if metric in ("forgetting", "alignment") else ABSOLUTE[unit]


def judge(row: Mapping[str, Any], diverged: Sequence[bool], why: str = "") -> str:
    """Return the verdict on a value.

    The verdicts are: within | outside | failed as printed | not reached as printed | not run |
    not judged: <why>.

    If all runs diverged, a published number is outside, but a target that was never reached is not
    judged, as the runs ended early.

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
    if why and not all(diverged):
        return f"not judged: {why}"
    if note.startswith("failed"):
        return judge_published_failure(row, all(diverged))
    if all(diverged) and note != "not_reached":
        return "outside"
    if all(diverged) or math.isnan(row["mean"]):
        return "not judged: no number"
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
