"""When a run forgets: in which phase, and how long after the clients last held a class.

A_c(t) is the accuracy of class c after the evaluated round t >= 1. The initial model does not
count.
"""

from typing import ClassVar

import numpy as np

from fedexp.metrics.accuracy import class_mean
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.metrics.record import Record

PHASES = ("early_forgetting", "middle_forgetting", "late_forgetting")
ABSENCE = ("present_forgetting", "absent_forgetting")


def lost(matrix: np.ndarray) -> np.ndarray:
    """Return G(t) = 1/C sum_c (max_{1<=s<=t} A_c(s) - A_c(t)) for t = 1..T, float64 [T].

    This is F (FedNTD Eq. 5) up to round t, with the drop of each class clamped at 0. matrix: class
    accuracies, [T + 1, C]; row 0 is the initial model.
    """
    return class_mean(np.maximum.accumulate(matrix[1:]) - matrix[1:])


def phase_ends(rounds: np.ndarray) -> np.ndarray | None:
    """Return the positions of the last evaluated round in each third of the rounds, int [3].

    rounds: the evaluated rounds from 1 to T, ascending. The thirds end with T/3, 2T/3 and T.
    Returns None if a third has no evaluated round.
    """
    if not len(rounds):
        return None
    ends = [np.searchsorted(3 * rounds, part * rounds[-1], side="right") for part in (1, 2, 3)]
    return np.array(ends) - 1 if 0 < ends[0] < ends[1] < ends[2] else None


class ForgettingPhases(ForgettingMetric):
    """Accuracy lost in the early, middle and late third of the rounds.

    `lost_accuracy` is G(t) (see `lost`). With t1 and t2 the last evaluated rounds of the first two
    thirds, `early_forgetting` = G(t1), `middle_forgetting` = G(t2) - G(t1) and `late_forgetting` =
    G(T) - G(t2), so they sum to G(T). A value is negative if the model learned again in this phase
    more than it forgot. They are nan if a third has no evaluated round.
    """

    columns: ClassVar = {"lost_accuracy": "min"}
    further: ClassVar = dict.fromkeys(PHASES, "min")

    def round_values(self, record: Record) -> dict[str, float]:
        found = lost(record.matrix)
        return {"lost_accuracy": float(found[-1]) if len(found) else float("nan")}

    def summary(self, record: Record) -> dict[str, float]:
        found, ends = lost(record.matrix), phase_ends(np.array(record.rounds[1:]))
        parts = np.full(3, np.nan) if ends is None else np.diff(found[ends], prepend=0.0)
        return self.round_values(record) | dict(zip(PHASES, parts.tolist(), strict=True))


def absence(record: Record, round: int) -> np.ndarray:
    """Return how many rounds ago a client of the cohort last held each class, float64 [C].

    The value is 0 if a client of this round's cohort has training examples of the class, and nan if
    no cohort has had any. The examples are those of the partition, without replayed ones.
    """
    found = np.full(record.counts.shape[-1], np.nan)
    for ago in range(round):
        cohort = record.cohorts.get(round - ago, ())
        held = record.counts_in(round - ago)[list(cohort)].any(0)
        found[held & np.isnan(found)] = ago
        if not np.isnan(found).any():
            break
    return found


def by_absence(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Return the absence and the forgetting of each class in each evaluated round t >= 2.

    Both are float64 [T - 1, C]. The forgetting is the summand of F, max_{1<=s<t} A_c(s) - A_c(t).
    """
    trained = record.matrix[1:]
    drops = np.maximum.accumulate(trained)[:-1] - trained[1:]
    away = [absence(record, number) for number in record.rounds[2:]]
    return np.array(away).reshape(drops.shape), drops


def curve_of_absence(record: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return F as a function of absence: absences [A], mean forgetting [A], number of pairs [A].

    F(a) is the mean over all pairs of an evaluated round and a class with absence a.
    """
    away, drops = (values.ravel() for values in by_absence(record))
    known = ~np.isnan(away) & ~np.isnan(drops)
    steps, which, pairs = np.unique(away[known], return_inverse=True, return_counts=True)
    return steps, np.bincount(which, drops[known], len(steps)) / pairs.clip(min=1), pairs


class Absence(ForgettingMetric):
    """Forgetting of the classes that the round's cohort held, and of those that it did not.

    `present_forgetting` and `absent_forgetting` are the means of max_{1<=s<t} A_c(s) - A_c(t) over
    the classes with absence 0, and with absence of at least 1 (see `absence`). Classes that no
    cohort has held are left out. The summary has the means over all rounds and classes.
    """

    columns: ClassVar = dict.fromkeys(ABSENCE, "min")

    def round_values(self, record: Record) -> dict[str, float]:
        last = record.rounds[-1]
        if len(record.rounds) < 3:
            return dict.fromkeys(ABSENCE, float("nan"))
        matrix = record.matrix
        return split_by_absence(absence(record, last), matrix[1:-1].max(0) - matrix[-1])

    def summary(self, record: Record) -> dict[str, float]:
        return split_by_absence(*by_absence(record))


def split_by_absence(away: np.ndarray, drops: np.ndarray) -> dict[str, float]:
    """Return the mean drop where the absence is 0, and where it is larger."""
    parts = [drops[away == 0], drops[away > 0]]
    return {name: float(class_mean(part)) for name, part in zip(ABSENCE, parts, strict=True)}
