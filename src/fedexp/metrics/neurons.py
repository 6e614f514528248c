"""Preferred class of a neuron, and whether two models agree on it (FedNTD 5.1, Eq. 19, Table 2)."""

import numpy as np


def preferences(activations: np.ndarray) -> np.ndarray:
    """pi_j = argmax_c h_{j,c}, int64 [d], from h [C, d]: the mean activation of each neuron on the
    test examples of a class, nan for a class that the test set lacks.

    Eq. 19 prints a sum over the examples, which is the same where classes are equally large. The
    first class wins ties, and so has the dead neurons.
    """
    return np.where(np.isnan(activations), -np.inf, activations).argmax(0)


def dead(activations: np.ndarray) -> int:
    """Count the neurons that answer to no class: h_{j,c} = 0 for all c."""
    return int((np.nan_to_num(activations) == 0).all(0).sum())


def alignment(one: np.ndarray, other: np.ndarray) -> float:
    """1/d sum_j [pi_j = pi'_j]: the share of neurons [C, d] that prefer the same class in both
    models."""
    return float((preferences(one) == preferences(other)).mean())
