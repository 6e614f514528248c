"""Rounds to fractions of the best accuracy of a setting, and speed-ups (Flashback Table 1)."""

from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.frame import KEYS, absolute_targets
from fedexp.analysis.means_table import Layout, label_rows, make_table
from fedexp.data.views import VALIDATION, name_in_view
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir.reader import RunDirectory

# Flashback Table 1: rounds to these fractions of A, which is 0.95 times the best accuracy
FACTORS, SHARE = (0.75, 0.9, 1.0), 0.95
ROUNDS = [f"rounds_to_{factor:g}A" for factor in FACTORS]
WHAT_A_IS = (
    f"A is {SHARE:g} of the best accuracy of any run of the setting; speed-ups are relative to"
    " FedAvg. `-`: at least one seed diverged or never reached the target."
)


def rounds_to_targets(every: pd.DataFrame) -> pd.DataFrame:
    """Return how many rounds methods need to reach 0.75 A, 0.9 A and A, and speed-ups over FedAvg.

    A is 0.95 times the best accuracy of any run of the setting that did not diverge. The rounds are
    averaged over seeds. A number is missing if any seed diverged or never reached the target
    (Flashback Table 1). The column `diverged` counts the seeds that diverged. every: the runs, see
    `frame.tidy`.
    """
    runs, table = every["run"], every[[*KEYS, "diverged"]].copy()
    table["best"] = [np.nan if run.diverged else read_best_accuracy(run) for run in runs]
    table["A"] = SHARE * table.groupby("setting")["best"].transform("max")
    for name, factor in zip(ROUNDS, FACTORS, strict=True):
        pairs = zip(runs, factor * table["A"], strict=True)
        table[name] = np.array([rounds_to(run, goal) for run, goal in pairs], dtype=float)
    table["fedavg"] = list(map(is_fedavg, runs))
    table["precision"] = [str(run.summary.get("hardware", {}).get("precision")) for run in runs]
    rules: dict[str, Any] = dict.fromkeys(("A", "fedavg", "precision"), "first")
    rules["diverged"] = "sum"
    rules |= dict.fromkeys(ROUNDS, lambda column: column.mean(skipna=False))
    found = table.groupby(KEYS, sort=False, as_index=False).agg(rules)
    fedavg = found.apply(lambda method: find_rounds_of_fedavg(found, method), axis="columns")
    speedups = (fedavg / found[ROUNDS]).set_axis([f"speedup_{f:g}A" for f in FACTORS], axis=1)
    shown = found[[*KEYS, "diverged", "A", *ROUNDS]].join(speedups)
    return shown.sort_values(["setting", *reversed(ROUNDS)], kind="stable")


def find_rounds_of_fedavg(methods: pd.DataFrame, method: "pd.Series[Any]") -> "pd.Series[float]":
    """Return the rounds that FedAvg needs to reach each target in a method's setting and precision.

    If FedAvg was not run in this precision, its runs in any other precision are used. If several
    variants of FedAvg were run, the smallest number of rounds is used.
    """
    fedavg = methods[methods["fedavg"] & (methods["setting"] == method["setting"])]
    same = fedavg[fedavg["precision"] == method["precision"]]
    return (fedavg if same.empty else same)[ROUNDS].min()


def read_best_accuracy(run: RunDirectory) -> float:
    """Return the best accuracy of a run, measured on the validation set if the run has one."""
    return float(run.summary.get("validation_best_accuracy", run.summary.get("best_accuracy", 0.0)))


def is_fedavg(run: RunDirectory) -> bool:
    changed = any(text.startswith("algorithm.") for text in run.overrides)
    return run.summary.get("algorithm") == "fedavg" and not changed


def rounds_to(run: RunDirectory, accuracy: float) -> int | None:
    """Return the first round that reaches an accuracy (on a validation set, if the run has one).

    Return None if the run diverged or if no round reaches the accuracy.
    """
    if run.diverged or run.curve.empty:
        return None
    validation = name_in_view("test_accuracy", VALIDATION)
    column = validation if validation in run.curve else run.accuracy_name
    rounds, values = run.curve["round"].astype(int).tolist(), run.curve[column].tolist()
    return next(iter(rounds_to_target(rounds, values, [accuracy], ()).values()))


def describe_targets(every: pd.DataFrame) -> str:
    """Return the section of a report with the rounds to fractions of A and to the key `targets`.

    every: the runs, see `frame.tidy`.
    """
    table = rounds_to_targets(every)
    hidden = [*KEYS, *([] if table["diverged"].any() else ["diverged"])]
    targets = table.drop(columns=hidden).dropna(axis=1, how="all").rename(columns=layout.heading)
    targets = targets.set_axis(label_rows(table), axis="index").map(layout.plain_number)
    parts = ["## Rounds to target\n"]
    if wished := absolute_targets(every):
        parts.append(layout.all_markdown([make_table(every, Layout(tuple(wished)))]))
    return "\n".join([*parts, f"{WHAT_A_IS}\n", layout.markdown(targets)])
