"""Compute parts of sweep reports: run states, the values a search chose, and rounds to targets."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.measures import precision_of
from fedexp.analysis.naming import differing, displayed, names
from fedexp.data.views import VALIDATION, name_in_view
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir.reader import RunDirectory

# Flashback Table 1: rounds to these fractions of A, which is 0.95 times the best accuracy
FACTORS, SHARE = (0.75, 0.9, 1.0), 0.95
ROUNDS = [f"rounds_to_{factor:g}A" for factor in FACTORS]
PURPOSES = ("partition", "sampling", "training")  # of the seeds in summary.json
CHOSEN = "Chosen values (highest accuracy in the last round, averaged over seeds)"
WHAT_A_IS = (
    f"A is {SHARE:g} of the best accuracy of any run of the setting; speed-ups are relative to"
    " FedAvg. `-`: at least one seed diverged or never reached the target."
)


def find_repeats(runs: Sequence[RunDirectory]) -> dict[Path, RunDirectory]:
    """Return the runs whose method and seeds another run has, each with the run that counts.

    Such a run is no further seed, for example because it is a copy. Of several runs, the first one
    with the most test views counts.
    """
    found: dict[Path, RunDirectory] = {}
    counted: dict[Any, RunDirectory] = {}
    order = sorted(range(len(runs)), key=lambda i: -len(runs[i].views))
    named = names(runs)
    for i in order:
        run, summary = runs[i], runs[i].summary
        if summary.get("seed") is None:
            continue
        # older summaries only have the seed of all purposes
        seeds = summary.get("seeds") or dict.fromkeys(PURPOSES, summary["seed"])
        first = counted.setdefault((named[i], *sorted(seeds.items())), run)
        if first is not run:
            found[run.directory] = first
    return found


def drop_repeats(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Return the runs that count once per seed, see `find_repeats`."""
    repeated = find_repeats(runs)
    return [run for run in runs if run.directory not in repeated]


def describe_left_out(jobs: Sequence[RunDirectory]) -> list[str]:
    """Return one line for each job without a result in the tables, with the reason."""
    reasons = dict.fromkeys((run.directory for run in jobs), "")
    for run in jobs:
        if run.status == "failed":
            reasons[run.directory] = f"failed: {run.summary.get('error') or 'see error.txt'}"
    repeats = find_repeats([run for run in jobs if run.finished])
    for path, run in repeats.items():
        reasons[path] = f"has the settings and seeds of {run.directory.name}"
    return [f"Not in the tables: {path.name} {why}" for path, why in reasons.items() if why]


def describe_states(jobs: Iterable[RunDirectory]) -> str:
    """Return a sentence that counts the runs by status, or "" if all runs are completed."""
    found = Counter(run.status for run in jobs)
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


def rounds_to_targets(runs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Return how many rounds methods need to reach 0.75 A, 0.9 A and A, and speed-ups over FedAvg.

    A is 0.95 times the best accuracy of any run of the setting that did not diverge. The rounds are
    averaged over seeds. A number is missing if any seed diverged or never reached the target
    (Flashback Table 1). The column `diverged` counts the seeds that diverged.
    """
    table = pd.DataFrame(names(runs, of_data=True), columns=["setting", "method"])
    table["diverged"] = [run.diverged for run in runs]
    table["best"] = [np.nan if run.diverged else read_best_accuracy(run) for run in runs]
    table["A"] = SHARE * table.groupby("setting")["best"].transform("max")
    for name, factor in zip(ROUNDS, FACTORS, strict=True):
        pairs = zip(runs, factor * table["A"], strict=True)
        table[name] = np.array([rounds_to(run, goal) for run, goal in pairs], dtype=float)
    table["fedavg"] = list(map(is_fedavg, runs))
    table["precision"] = list(map(precision_of, runs))
    groups = table.drop(columns="best").groupby(["setting", "method"], sort=False, as_index=False)
    rules: dict[str, Any] = dict.fromkeys(("A", "fedavg", "precision"), "first")
    rules["diverged"] = "sum"
    rules |= dict.fromkeys(ROUNDS, lambda column: column.mean(skipna=False))
    found = groups.agg(rules)
    fedavg = found.apply(lambda method: find_rounds_of_fedavg(found, method), axis="columns")
    speedups = (fedavg / found[ROUNDS]).set_axis([f"speedup_{f:g}A" for f in FACTORS], axis=1)
    shown = found[["setting", "method", "diverged", "A", *ROUNDS]].join(speedups)
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
