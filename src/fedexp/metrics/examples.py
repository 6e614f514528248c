"""Forgetting of single test examples: pure functions of right and wrong predictions.

The argument `right` bool [T, M] says whether the global model predicts each of the M test examples
correctly in the evaluated rounds t = 1..T; the initial model is not included. Within a class,
examples that are learned offset examples that are forgotten, so class accuracies hide a part of
the forgetting.
"""

import numpy as np


def forgotten_share(right: np.ndarray) -> np.ndarray:
    """Return the share of examples that are right in round t - 1 and wrong in t, float64 [T-1].

    The rounds are t = 2..T. This is the rate of negative flips from one model to the next (S. Yan
    et al., "Positive-Congruent Training", CVPR 2021). The change of accuracy is `learned_share`
    minus this value.
    """
    return (right[:-1] & ~right[1:]).mean(1)


def learned_share(right: np.ndarray) -> np.ndarray:
    """Return the share of examples that are wrong in round t - 1 and right in t, float64 [T-1]."""
    return (~right[:-1] & right[1:]).mean(1)


def forgetting_events(right: np.ndarray) -> np.ndarray:
    """Return how often each example is forgotten: right in a round, wrong in the next, int64 [M].

    M. Toneva et al., "An Empirical Study of Example Forgetting during Deep Neural Network
    Learning", ICLR 2019, section 3. The paper counts events of training examples between two
    steps that use them. Here, they are events of test examples between two evaluated rounds.
    """
    return (right[:-1] & ~right[1:]).sum(0)


def unforgettable(right: np.ndarray) -> np.ndarray:
    """Return whether each example is learned in some round and never forgotten, bool [M].

    The definition is that of Toneva et al. (see `forgetting_events`): an example that is never
    learned is not unforgettable.
    """
    return right.any(0) & (forgetting_events(right) == 0)
