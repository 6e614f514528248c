"""Rank methods over several settings and seeds, and test which differences are significant.

The tests follow J. Demsar, "Statistical comparisons of classifiers over multiple data sets", JMLR 7
(2006): the Friedman test (section 3.2.2) in the form of Iman and Davenport, and the Nemenyi test
with its critical difference (section 3.2.2) and diagram (Figure 1). A block is a unit on which each
method was run once. In the paper, a block is a data set. In fedexp, a block is a setting with one
seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

ALPHA = 0.05


@dataclass(frozen=True)
class Comparison:
    """The mean ranks of methods, best (1) first, and the results of the tests over blocks."""

    methods: tuple[str, ...]
    ranks: tuple[float, ...]  # mean ranks over the blocks
    blocks: int
    p: float  # p-value of the hypothesis that all methods are equal
    critical_difference: float  # critical difference between two mean ranks, at level ALPHA

    @property
    def cliques(self) -> list[tuple[int, int]]:
        """Return the largest groups of methods that do not differ significantly in mean rank.

        The mean ranks in a group differ by less than the critical difference. Each group is (first,
        last), where both are indices into `methods`. Groups of one method are omitted.
        """
        found: list[tuple[int, int]] = []
        for first, rank in enumerate(self.ranks):
            last = max(
                i for i, other in enumerate(self.ranks) if other - rank < self.critical_difference
            )
            if last > first and (not found or last > found[-1][1]):
                found.append((first, last))
        return found


def compare_methods(methods: Sequence[str], values: np.ndarray) -> Comparison:
    """Compare methods by their values [N, k], with one row per block. Larger values are better.

    The value of a failed run is -inf. At least two methods and two blocks are required.
    """
    ranks = ranks_of(values)
    means = ranks.mean(0)
    order = np.argsort(means, kind="stable")
    blocks, count = ranks.shape
    return Comparison(
        tuple(methods[i] for i in order),
        tuple(float(means[i]) for i in order),
        blocks,
        p_value(friedman(means, blocks), blocks, count),
        critical_difference(count, blocks),
    )


def ranks_of(values: np.ndarray) -> np.ndarray:
    """Return each value's rank in its row, [N, k]: 1 for the largest, mean ranks for ties."""
    return np.asarray(stats.rankdata(-values, axis=1), dtype=np.float64)


def friedman(means: np.ndarray, blocks: int) -> float:
    """Return Friedman's chi-square for mean ranks [k] over N blocks.

    The formula is 12 N / (k (k + 1)) (sum_j R_j^2 - k (k + 1)^2 / 4), where R_j are the mean ranks.
    """
    count = len(means)
    return float(
        12 * blocks / (count * (count + 1)) * ((means**2).sum() - count * (count + 1) ** 2 / 4)
    )


def iman_davenport(chi_square: float, blocks: int, count: int) -> float:
    """Return F = (N - 1) chi^2 / (N (k - 1) - chi^2) for N blocks and k methods.

    F is infinite if all blocks rank the methods in the same order.
    """
    rest = blocks * (count - 1) - chi_square
    return (blocks - 1) * chi_square / rest if rest > 1e-9 else math.inf


def p_value(chi_square: float, blocks: int, count: int) -> float:
    """Return the p-value P(F >= f) of Friedman's chi-square for k methods and N blocks.

    F has k - 1 and (k - 1)(N - 1) degrees of freedom.
    """
    statistic = iman_davenport(chi_square, blocks, count)
    return float(stats.f.sf(statistic, count - 1, (count - 1) * (blocks - 1)))


def critical_difference(count: int, blocks: int, alpha: float = ALPHA) -> float:
    """Return Nemenyi's critical difference, q sqrt(k (k + 1) / (6 N)).

    k is the number of methods, and N is the number of blocks. q is the (1 - alpha) quantile of the
    studentized range with infinite degrees of freedom, divided by sqrt(2) (Demsar's Table 5a).
    """
    quantile = stats.studentized_range.ppf(1 - alpha, count, np.inf) / math.sqrt(2)
    return float(quantile * math.sqrt(count * (count + 1) / (6 * blocks)))
