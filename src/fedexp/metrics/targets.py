"""Rounds to a target accuracy (Flashback Table 1, FedKA Table 2)."""

from collections.abc import Sequence

import numpy as np


def rounds_to_target(
    rounds: Sequence[int],
    accuracy: Sequence[float | None],
    targets: Sequence[float],
    fractions: Sequence[float],
) -> dict[str, int | None]:
    """R = min{t >= 1: A^(t) >= target}: the first crossing of the raw accuracy among the evaluated
    rounds.

    `rounds` and `accuracy` [T+1] belong together; None or nan is "not evaluated". Keys: "0.5" for
    an absolute target, "0.9*best" for a fraction of this run's best accuracy after round 0. None
    when the run never gets there.
    """
    number, value = np.asarray(rounds, dtype=np.int64), np.asarray(accuracy, dtype=np.float64)
    known = (number >= 1) & ~np.isnan(value)
    number, value = number[known], value[known]
    best = value.max(initial=-np.inf)
    wanted = {str(float(x)): float(x) for x in targets} | {
        f"{float(x)}*best": float(x) * best for x in fractions
    }

    def first(target: float) -> int | None:
        reached = number[value >= target - 1e-12]  # f * best may round above a value that equals it
        return int(reached[0]) if reached.size else None

    return {key: first(target) for key, target in wanted.items()}
