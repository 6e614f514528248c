"""Similarity of the features that two models have of the same examples."""

import torch
from torch import Tensor


def linear_cka(one: Tensor, other: Tensor) -> float:
    """CKA = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F), in [0, 1], of features X [n, D] and Y [n,
    D'] of the same n examples, each column minus its mean; nan where all rows of one are equal.

    S. Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019,
    section 3, with the linear kernel. 1: equal up to a rotation and a scale of all features.
    """
    x, y = (each.double() - each.double().mean(0) for each in (one, other))
    norm = torch.linalg.matrix_norm
    return float(norm(y.T @ x) ** 2 / (norm(x.T @ x) * norm(y.T @ y)))
