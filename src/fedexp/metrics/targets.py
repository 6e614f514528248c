"""Rounds to a target accuracy (Flashback Table 1, FedKA Table 2)."""

from collections.abc import Sequence

import numpy as np


def rounds_to_target(
    rounds: Sequence[int],
    accuracy: Sequence[float | None],
    targets: Sequence[float],
    fractions: Sequence[float],
) -> dict[str, int | None]:
    """Return the first evaluated round whose accuracy reaches each target, as a dict.

    The value is R = min{t >= 1: A^(t) >= target}, or None if the run never reaches the target. The
    key is, for example, "0.5" for an absolute target, and "0.9*best" for a fraction of the run's
    best accuracy after round 0.

    rounds: numbers of the rounds, [T+1]. accuracy: accuracy in each of these rounds, [T+1], not
    smoothed; None or nan means that the round was not evaluated. targets: absolute targets.
    fractions: targets as fractions of the best accuracy.
    """
    number, value = np.asarray(rounds, dtype=np.int64), np.asarray(accuracy, dtype=np.float64)
    known = (number >= 1) & ~np.isnan(value)
    number, value = number[known], value[known]
    best = value.max(initial=-np.inf)
    wanted = {str(float(x)): float(x) for x in targets}
    wanted |= {f"{float(x)}*best": float(x) * best for x in fractions}
    found: dict[str, int | None] = {}
    for key, target in wanted.items():
        # rounding may raise f * best above an equal accuracy
        reached = number[value >= target - 1e-12]
        found[key] = int(reached[0]) if reached.size else None
    return found
