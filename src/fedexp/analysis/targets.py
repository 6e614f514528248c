"""Rounds to fractions of the best accuracy of a setting, and speed-ups (Flashback Table 1)."""

import math
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.frame import KEYS, absolute_targets, average
from fedexp.analysis.layout import Section
from fedexp.analysis.means_table import Layout, format_cell, label_rows, legend_of, make_table
from fedexp.data.views import VALIDATION, name_in_view
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir.identity import value_of
from fedexp.rundir.objective import TARGETS
from fedexp.rundir.reader import RunDirectory

# Flashback Table 1: rounds to these fractions of A, which is 0.95 times the best accuracy
FACTORS, SHARE = (0.75, 0.9, 1.0), 0.95
ROUNDS = [f"rounds_to_{factor:g}A" for factor in FACTORS]
GOALS = [f"{TARGETS}_{factor:g}A" for factor in FACTORS]  # the same as columns of `frame.tidy`
WHAT_A_IS = (
    f"A is {SHARE:g} of the best accuracy of any run of the setting. Rounds are mean ± standard"
    " deviation over the seeds that reached the target."
)
WHAT_SPEEDUPS_ARE = (
    " Speed-ups are relative to FedAvg, to the fastest one if a setting has several; `-`: at least"
    " one seed diverged or never reached the target."
)


def rounds_to_targets(every: pd.DataFrame) -> pd.DataFrame:
    """Return how many rounds methods need to reach 0.75 A, 0.9 A and A, and speed-ups over FedAvg.

    A is 0.95 times the best accuracy of any run of the setting that did not diverge. The rounds are
    averaged over the seeds that reached the target; the columns `_std` and `_reached` have their
    standard deviation and number, n and `diverged` the number of all seeds and of those that
    diverged. A speed-up is missing if any seed diverged or never reached the target (Flashback
    Table 1). every: the runs, see `frame.tidy`.
    """
    runs, table = every["run"], every.drop(columns=GOALS, errors="ignore")
    table["best"] = [np.nan if run.diverged else read_best_accuracy(run) for run in runs]
    table["A"] = SHARE * table.groupby("setting")["best"].transform("max")
    for name, factor in zip(GOALS, FACTORS, strict=True):
        pairs = zip(runs, factor * table["A"], strict=True)
        table[name] = [rounds_to(run, goal) for run, goal in pairs]
    table["fedavg"] = list(map(is_fedavg, runs))
    table["precision"] = [str(run.summary.get("hardware", {}).get("precision")) for run in runs]
    found = average(table, GOALS).rename(columns=lambda name: name.replace(TARGETS, "rounds_to"))
    found = found.merge(table.groupby(KEYS)[["A", "fedavg", "precision"]].first(), on=KEYS)
    whole = found.copy()  # without the rounds that only some seeds reached
    for name in ROUNDS:
        whole[name] = whole[name].where(whole[f"{name}_reached"] == whole["n"])
    fedavg = whole.apply(lambda method: find_rounds_of_fedavg(whole, method), axis="columns")
    speedups = (fedavg / whole[ROUNDS]).set_axis([f"speedup_{f:g}A" for f in FACTORS], axis=1)
    columns = [name + end for name in ROUNDS for end in ("", "_std", "_reached")]
    shown = found[[*KEYS, "n", "diverged", "A", *columns]].join(speedups)
    order = whole.sort_values(["setting", *reversed(ROUNDS)], kind="stable").index
    return shown.loc[order]


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
    changed |= value_of(run.config, "server.optimizer") is not None
    return run.summary.get("algorithm") == "fedavg" and not changed


def rounds_to(run: RunDirectory, accuracy: float) -> float:
    """Return the first round that reaches an accuracy (on a validation set, if the run has one).

    Return inf if the run diverged or if no round reaches the accuracy.
    """
    if run.diverged or run.curve.empty:
        return math.inf
    validation = name_in_view("test_accuracy", VALIDATION)
    column = validation if validation in run.curve else run.accuracy_name
    rounds, values = run.curve["round"].astype(int).tolist(), run.curve[column].tolist()
    found = next(iter(rounds_to_target(rounds, values, [accuracy], ()).values()))
    return math.inf if found is None else found


def describe_targets(every: pd.DataFrame) -> list[Section]:
    """Return the tables of the rounds to the key `targets` and to fractions of A.

    every: the runs, see `frame.tidy`.
    """
    table = rounds_to_targets(every)
    seeds = int(table["n"].max())
    targets = table[[name for name in table if str(name).startswith(("A", "speedup"))]]
    targets = targets.dropna(axis=1, how="all").map(layout.plain_number)
    as_goals = table.rename(columns=lambda name: name.replace("rounds_to", TARGETS))
    for place, (name, goal) in enumerate(zip(ROUNDS, GOALS, strict=True), 1):
        cells = [format_cell(row, goal, seeds) for row in as_goals.to_dict("records")]
        targets.insert(min(place, targets.shape[1]), name, cells)
    targets = targets.rename(columns=layout.heading).set_axis(label_rows(table), axis="index")
    about = WHAT_A_IS + WHAT_SPEEDUPS_ARE * any("speedup" in str(name) for name in targets)
    parts = [Section("", targets, about=about, legend=legend_of(targets))]
    if wished := absolute_targets(every):
        parts.insert(0, make_table(every, Layout(tuple(wished))))
    return parts
