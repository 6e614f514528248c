"""Centred kernel alignment (CKA), a similarity of two models' features on the same examples."""

import torch
from torch import Tensor


def linear_cka(one: Tensor, other: Tensor) -> float:
    """Return the linear CKA of two feature matrices, in [0, 1].

    CKA = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) for features X [n, D] and Y [n, D'] of the same
    n examples, after the mean of each column is subtracted. The value is 1 if the features are
    equal up to a rotation and a scale, and nan if all rows of X or of Y are equal.

    S. Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019,
    section 3, with the linear kernel.
    """
    x, y = (each.double() - each.double().mean(0) for each in (one, other))
    norm = torch.linalg.matrix_norm
    return float(norm(y.T @ x) ** 2 / (norm(x.T @ x) * norm(y.T @ y)))
