"""The diagonal of the empirical Fisher information.

Its entries are the mean squared gradients of -log q(y|x) for the given labels y.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedexp.algorithms.base import cross_entropies, masked_mean
from fedexp.algorithms.interfaces import Batch, Network
from fedexp.core.tree import Params


def squared_gradients(
    net: Network, params: Params, batch: Batch, mask: Tensor, estimator: str
) -> tuple[Params, Tensor | float]:
    """Return (sum of the squared gradients of a batch, number of gradients in the sum).

    estimator: `sample` squares the gradient of each example; `batch` squares the gradient of the
    mean cross-entropy. mask: [B], 1 for an example and 0 for padding.
    """
    if estimator == "batch":

        def loss(p: Params) -> Tensor:
            return masked_mean(cross_entropies(net(p, batch.x, mask).logits, batch.y), mask)

        return {k: g * g for k, g in grad(loss)(params).items()}, 1.0

    def one(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(p, x[None]).logits, y[None])

    grads: Any = vmap(grad(one), in_dims=(None, 0, 0))(params, batch.x, batch.y)
    return {k: torch.tensordot(mask, g * g, 1) for k, g in grads.items()}, mask.sum()
