"""Rounds to a target accuracy (Flashback Table 1, FedKA Table 2)."""

from collections.abc import Sequence

import numpy as np


def rounds_to_target(
    rounds: Sequence[int],
    accuracy: Sequence[float | None],
    targets: Sequence[float],
    fractions: Sequence[float],
) -> dict[str, int | None]:
    """Return, for each target, the first evaluated round that reaches it.

    R = min{t >= 1: A^(t) >= target}.

    `rounds` and `accuracy` [T+1] correspond; an accuracy of None or nan means "not evaluated". The
    accuracy is not smoothed. The keys are "0.5" for an absolute target and "0.9*best" for a
    fraction of the run's best accuracy after round 0. The value is None if the run never reaches
    the target.
    """
    number, value = np.asarray(rounds, dtype=np.int64), np.asarray(accuracy, dtype=np.float64)
    known = (number >= 1) & ~np.isnan(value)
    number, value = number[known], value[known]
    best = value.max(initial=-np.inf)
    wanted = {str(float(x)): float(x) for x in targets}
    wanted |= {f"{float(x)}*best": float(x) * best for x in fractions}
    found: dict[str, int | None] = {}
    for key, target in wanted.items():
        reached = number[value >= target - 1e-12]  # f * best may be rounded to above an equal value
        found[key] = int(reached[0]) if reached.size else None
    return found
