"""The classes that neurons prefer, and how well two models agree (FedNTD Eq. 19, Table 2)."""

import numpy as np


def preferences(activations: np.ndarray) -> np.ndarray:
    """Return the preferred class of each neuron, pi_j = argmax_c h_{j,c}, int64 [d].

    `activations` [C, d] contains h_{j,c}, the mean activation of neuron j on the test examples of
    class c. It is nan for a class without test examples. The published Eq. 19 has a sum over the
    examples, which is equivalent if all classes have the same size. In a tie, the first class is
    preferred; dead neurons therefore prefer the first class.
    """
    return np.where(np.isnan(activations), -np.inf, activations).argmax(0)


def dead(activations: np.ndarray) -> int:
    """Return the number of neurons whose mean activation is 0 for all classes.

    activations: mean activations, [C, d].

    """
    return int((np.nan_to_num(activations) == 0).all(0).sum())


def alignment(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of neurons that prefer the same class in two models.

    one, other: the models' mean activations, [C, d].
    """
    return float((preferences(one) == preferences(other)).mean())
