"""Compute parts of sweep reports: run states, the values a search chose, and rounds to targets."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.measures import is_pruned, precision_of
from fedexp.analysis.naming import differing, displayed, names
from fedexp.data.views import VALIDATION, name_in_view
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir.reader import RunDirectory

# Flashback Table 1: rounds to these fractions of A, which is 0.95 times the best accuracy
FACTORS, SHARE = (0.75, 0.9, 1.0), 0.95
ROUNDS = [f"rounds_to_{factor:g}A" for factor in FACTORS]
CHOSEN = "Chosen values (highest accuracy in the last round, averaged over seeds)"
WHAT_A_IS = (
    f"A is {SHARE:g} of the best accuracy of any run of the setting; speed-ups are relative to"
    " FedAvg. `-`: at least one seed never reached the target."
)


def drop_repeats(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Drop a run if the same seed was also run with more test views."""
    keys = [(name, run.summary.get("seed")) for name, run in zip(names(runs), runs, strict=True)]
    most: Counter[Any] = Counter()
    for key, run in zip(keys, runs, strict=True):
        most[key] = max(len(run.views), most[key])
    return [run for key, run in zip(keys, runs, strict=True) if len(run.views) == most[key]]


def describe_states(jobs: Iterable[RunDirectory]) -> str:
    """Return a sentence that counts the runs by status, or "" if all runs are completed.

    Damaged runs are not counted: `describe_damage` reports them.
    """
    sound = [run for run in jobs if not run.damaged]
    found = Counter("pruned" if is_pruned(run) else run.status for run in sound)
    if not found.keys() - {"completed"}:
        return ""
    counts = ", ".join(f"{number} {state}" for state, number in sorted(found.items()))
    return f"\n{found.total()} runs: {counts}.\n"


def choose_values(means: pd.DataFrame) -> layout.Section:
    """Return a table of the best value for each setting and algorithm of a search.

    The best value has the highest accuracy. Values whose runs all diverged are left out.
    """
    names = means["method"].str.partition(" ")
    known = means.assign(algorithm=names[0], chosen=names[2])[means["n"] > means["diverged"]]
    best = known.drop_duplicates(["setting", "algorithm"]).assign(method=known["algorithm"])
    table = pd.DataFrame(
        {"chosen": best["chosen"], "accuracy (%)": (100 * best["accuracy"]).map("{:.2f}".format)}
    )
    return layout.Section(CHOSEN, table.set_axis(label_rows(best), axis="index"))


def label_rows(table: pd.DataFrame) -> list[str]:
    """Return the displayed row names of a table of settings and methods."""
    columns = ["setting", "method"] if table["setting"].nunique() > 1 else ["method"]
    return displayed(differing(table[columns].agg(" ".join, axis="columns")))


def describe_damage(jobs: Sequence[RunDirectory]) -> list[str]:
    """Return one line for each run that the tables leave out because its files are damaged."""
    return [
        f"Not in the tables: {run.directory.name} is damaged ({run.describe_damage()}); the same"
        " `--multirun` command runs it again"
        for run in jobs
        if run.damaged
    ]


def rounds_to_targets(runs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Return how many rounds methods need to reach 0.75 A, 0.9 A and A, and speed-ups over FedAvg.

    A is 0.95 times the best accuracy of any run of the setting that did not diverge. The rounds are
    averaged over seeds. A number is missing if any seed diverged or never reached the target
    (Flashback Table 1).
    """
    table = pd.DataFrame(names(runs, of_data=True), columns=["setting", "method"])
    table["best"] = [np.nan if run.diverged else read_best_accuracy(run) for run in runs]
    table["A"] = SHARE * table.groupby("setting")["best"].transform("max")
    for name, factor in zip(ROUNDS, FACTORS, strict=True):
        pairs = zip(runs, factor * table["A"], strict=True)
        table[name] = np.array([rounds_to(run, goal) for run, goal in pairs], dtype=float)
    table["fedavg"] = list(map(is_fedavg, runs))
    table["precision"] = list(map(precision_of, runs))
    groups = table.drop(columns="best").groupby(["setting", "method"], sort=False, as_index=False)
    rules: dict[str, Any] = dict.fromkeys(("A", "fedavg", "precision"), "first")
    rules |= dict.fromkeys(ROUNDS, lambda column: column.mean(skipna=False))
    found = groups.agg(rules)
    fedavg = found.apply(lambda method: find_rounds_of_fedavg(found, method), axis="columns")
    speedups = (fedavg / found[ROUNDS]).set_axis([f"speedup_{f:g}A" for f in FACTORS], axis=1)
    shown = found[["setting", "method", "A", *ROUNDS]].join(speedups)
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
