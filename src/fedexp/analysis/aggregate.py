"""What a report says of any sweep: states of its runs, chosen values, rounds to a target."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.measures import is_pruned, precision_of
from fedexp.analysis.naming import differing, displayed, grouped, names
from fedexp.data.views import VALIDATION, named
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir.reader import RunDirectory

# Flashback Table 1: rounds to these parts of A, which is 0.95 of the best
FACTORS, SHARE = (0.75, 0.9, 1.0), 0.95
CHOSEN = "Chosen values: the highest accuracy in the last round, mean over seeds"
WHAT_A_IS = (
    f"A is {SHARE:g} of the best accuracy of any run of the setting; speed-ups are against FedAvg."
    " `-`: some seed never gets there."
)


def without_repeats(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Return the runs without those of a seed that was run again with more test views."""
    keys = [(name, run.summary.get("seed")) for name, run in zip(names(runs), runs, strict=True)]
    most: Counter[Any] = Counter()
    for key, run in zip(keys, runs, strict=True):
        most[key] = max(len(run.views), most[key])
    return [run for key, run in zip(keys, runs, strict=True) if len(run.views) == most[key]]


def states_of(jobs: Iterable[RunDirectory]) -> str:
    """Return how many runs there are of each status, as a sentence; "" where all are completed.
    Damaged ones have lines of their own."""
    sound = [run for run in jobs if not run.damaged]
    found = Counter("pruned" if is_pruned(run) else run.status for run in sound)
    if not found.keys() - {"completed"}:
        return ""
    counts = ", ".join(f"{number} {state}" for state, number in sorted(found.items()))
    return f"\n{found.total()} runs: {counts}.\n"


def chosen_values(means: pd.DataFrame) -> layout.Section:
    """Return, for each setting and algorithm of a search, the value with the highest accuracy. A
    value of which every run diverged is not chosen."""
    names = means["method"].str.partition(" ")
    known = means.assign(algorithm=names[0], chosen=names[2])[means["n"] > means["diverged"]]
    best = known.drop_duplicates(["setting", "algorithm"]).assign(method=known["algorithm"])
    table = pd.DataFrame(
        {"chosen": best["chosen"], "accuracy (%)": (100 * best["accuracy"]).map("{:.2f}".format)}
    )
    return layout.Section(CHOSEN, table.set_axis(labels_of(best), axis="index"))


def labels_of(table: pd.DataFrame) -> list[str]:
    """Return the names of the rows of a table of settings and methods, as they are shown."""
    columns = ["setting", "method"] if table["setting"].nunique() > 1 else ["method"]
    return displayed(differing(table[columns].agg(" ".join, axis="columns")))


def damage_of(jobs: Sequence[RunDirectory]) -> list[str]:
    """A line for each job that no table counts because its files are damaged."""
    return [
        f"Left out, damaged: {run.directory.name}: {run.describe_damage()} (the same `--multirun`"
        " runs it again)"
        for run in jobs
        if run.damaged
    ]


def rounds_to_targets(runs: Sequence[RunDirectory]) -> pd.DataFrame:
    """Rounds to 0.75, 0.9 and 1 times A, mean over seeds, and how many times faster than FedAvg;
    empty where a seed diverged or never gets there. A is 0.95 of the best accuracy of any run of
    the setting that did not diverge."""
    rows: list[dict[str, Any]] = []
    for setting, members in grouped(runs, of_data=True).items():
        sound = [run for group in members.values() for run in group if not run.diverged]
        goal = SHARE * max(map(best_of, sound), default=math.nan)
        rounds = {
            name: [mean_rounds(group, goal * factor) for factor in FACTORS]
            for name, group in members.items()
        }
        for method, values in rounds.items():
            row: dict[str, Any] = {"setting": setting, "method": method, "A": goal}
            row |= {f"rounds_to_{f:g}A": each for f, each in zip(FACTORS, values, strict=True)}
            bases = fedavg_of(members, rounds, precision_of(members[method][0]))
            for factor, each, base in zip(FACTORS, values, bases, strict=True):
                row[f"speedup_{factor:g}A"] = base / each if base and each else None
            rows.append(row)
    fastest_first = ["setting", *(f"rounds_to_{factor:g}A" for factor in reversed(FACTORS))]
    return pd.DataFrame(rows).sort_values(fastest_first, kind="stable")


def fedavg_of(
    members: Mapping[str, Sequence[RunDirectory]],
    rounds: Mapping[str, Sequence[float | None]],
    precision: str,
) -> list[float | None]:
    """Return the rounds of FedAvg in a precision, or in another where there is none: of several
    with different options the fewest."""
    known = {name: group[0] for name, group in members.items() if is_fedavg(group[0])}
    same = [name for name, run in known.items() if precision_of(run) == precision]
    columns = [[rounds[name][i] for name in same or known] for i in range(len(FACTORS))]
    return [min(filter(None, column), default=None) for column in columns]


def best_of(run: RunDirectory) -> float:
    """Return the best accuracy of a run, on the validation set where there is one."""
    return float(run.summary.get("validation_best_accuracy", run.summary.get("best_accuracy", 0.0)))


def is_fedavg(run: RunDirectory) -> bool:
    changed = any(text.startswith("algorithm.") for text in run.overrides)
    return run.summary.get("algorithm") == "fedavg" and not changed


def mean_rounds(runs: Sequence[RunDirectory], accuracy: float) -> float | None:
    """Return the mean over seeds of the rounds to an accuracy; None where one diverged or never
    gets there."""
    found = [None if run.diverged else rounds_to(run, accuracy) for run in runs]
    known = [rounds for rounds in found if rounds is not None]
    return float(np.mean(known)) if len(known) == len(found) else None


def rounds_to(run: RunDirectory, accuracy: float) -> int | None:
    """Return the first round that reaches an accuracy, on the validation set where there is one;
    None where none does."""
    if not len(run.curve):
        return None
    validation = named("test_accuracy", VALIDATION)
    column = validation if validation in run.curve else run.accuracy_name
    rounds, values = run.curve["round"].astype(int).tolist(), run.curve[column].tolist()
    return next(iter(rounds_to_target(rounds, values, [accuracy], ()).values()))
