"""Gradient diversity: how much the gradients of the clients' losses differ (FedNTD Definition 2,
Eq. 8)."""

import torch
from torch import Tensor

from fedexp.core.tree import Params
from fedexp.metrics.layers import squared_norms


def mean_squared_norm(gradients: Params, weights: Tensor) -> dict[str, Tensor]:
    """sum_k w_k ||g_k||^2 of each layer and in total: leaves [S, ...], weights [S] of sum 1 ->
    float64 scalars."""
    return {
        layer: (weights.to(norms) * norms).sum()
        for layer, norms in squared_norms(gradients).items()
    }


def squared_norm_of_mean(gradients: Params, weights: Tensor) -> dict[str, Tensor]:
    """||sum_k w_k g_k||^2 of each layer and in total: leaves [S, ...], weights [S] of sum 1 ->
    float64 scalars."""
    mean = {
        name: torch.tensordot(weights.to(leaf), leaf, 1)[None] for name, leaf in gradients.items()
    }
    return {layer: norm[0] for layer, norm in squared_norms(mean).items()}


def gradient_diversity(gradients: Params, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Lambda = (1/K sum_k ||g_k||^2) / ||1/K sum_k g_k||^2 >= 1 of each layer and in total, float64
    scalars.

    FedNTD (NeurIPS 2022) Definition 2, Eq. 8, for K uniformly weighted clients with the gradients
    g_k of their losses at the same model: leaves [K, ...]. 1: all gradients are equal; nan or inf:
    their mean is zero. weights [K]: others in the place of 1/K, scaled to sum 1.
    """
    first = next(iter(gradients.values()))
    given = first.new_ones(len(first)) if weights is None else weights
    share = given.to(torch.float64) / given.to(torch.float64).sum()
    above, below = mean_squared_norm(gradients, share), squared_norm_of_mean(gradients, share)
    return {layer: above[layer] / below[layer] for layer in above}
