"""The class that each neuron prefers, and the agreement of two models (FedNTD Eq. 19, Table 2)."""

import numpy as np


def preferences(activations: np.ndarray) -> np.ndarray:
    """Return the preferred class of each neuron, pi_j = argmax_c h_{j,c}, int64 [d].

    `activations` [C, d] contains h, the mean activation of each neuron on the test examples of each
    class; it is nan for a class without test examples. The published Eq. 19 has a sum over the
    examples, which is equivalent if all classes have the same size. Ties go to the first class, so
    dead neurons prefer the first class.
    """
    return np.where(np.isnan(activations), -np.inf, activations).argmax(0)


def dead(activations: np.ndarray) -> int:
    """Return the number of neurons that respond to no class: h_{j,c} = 0 for all c."""
    return int((np.nan_to_num(activations) == 0).all(0).sum())


def alignment(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of neurons that prefer the same class in both models.

    This is 1/d sum_j [pi_j = pi'_j]. one, other: the models' mean activations [C, d].
    """
    return float((preferences(one) == preferences(other)).mean())
