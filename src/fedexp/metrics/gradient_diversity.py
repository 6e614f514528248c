"""Gradient diversity: how much the clients' gradients differ (FedNTD Definition 2, Eq. 8)."""

import torch
from torch import Tensor

from fedexp.core.tree import Params
from fedexp.metrics.layers import squared_norms


def mean_squared_norm(gradients: Params, weights: Tensor) -> dict[str, Tensor]:
    """Return the mean squared norm sum_k w_k ||g_k||^2 per layer and in total, as float64 scalars.

    gradients: leaves [S, ...]; weights: [S], with sum 1.
    """
    return {
        layer: (weights.to(norms) * norms).sum()
        for layer, norms in squared_norms(gradients).items()
    }


def squared_norm_of_mean(gradients: Params, weights: Tensor) -> dict[str, Tensor]:
    """Return the squared norm of the mean, ||sum_k w_k g_k||^2, per layer and in total.

    The values are float64 scalars. gradients: leaves [S, ...]; weights: [S], with sum 1.
    """
    mean = {
        name: torch.tensordot(weights.to(leaf), leaf, 1)[None] for name, leaf in gradients.items()
    }
    return {layer: norm[0] for layer, norm in squared_norms(mean).items()}


def gradient_diversity(gradients: Params, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Return the gradient diversity Lambda >= 1 for each layer and in total.

    Lambda = (1/K sum_k ||g_k||^2) / ||1/K sum_k g_k||^2 for K clients with equal weights; see
    FedNTD (NeurIPS 2022), Definition 2, Eq. 8. `gradients`, with leaves [K, ...], contains the
    gradient g_k of each client's loss at the same model. Each value is a float64 scalar. It is 1 if
    all gradients are equal, and nan or inf if their mean is zero. If `weights` [K] is given, the
    weights divided by their sum replace 1/K.
    """
    first = next(iter(gradients.values()))
    given = first.new_ones(len(first)) if weights is None else weights
    share = given.to(torch.float64) / given.to(torch.float64).sum()
    above, below = mean_squared_norm(gradients, share), squared_norm_of_mean(gradients, share)
    return {layer: above[layer] / below[layer] for layer in above}
