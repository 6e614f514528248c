"""Norms of a model's parameters, per layer and in total."""

import torch
from torch import Tensor

from fedexp.core.tree import Params

TOTAL = "total"  # all layers together


def layer_sums(stacked: Params) -> dict[str, Tensor]:
    """Return a dict that maps each layer, and `total`, to the sum of its parameters' entries.

    stacked: parameters of S models, leaves [S, ...]. The sums are float64 [S], in the order of the
    model's layers. `conv.weight` and `conv.bias` belong to the layer `conv`. A parameter whose name
    has no dot is a layer of its own.
    """
    parts: dict[str, list[Tensor]] = {}
    for name, leaf in stacked.items():
        total = leaf.reshape(len(leaf), -1).sum(1, dtype=torch.float64)
        parts.setdefault(name.rpartition(".")[0] or name, []).append(total)
    found = {layer: torch.stack(totals).sum(0) for layer, totals in parts.items()}
    return found | {TOTAL: torch.stack(list(found.values())).sum(0)}


def squared_norms(stacked: Params) -> dict[str, Tensor]:
    """Return the squared L2 norm of each layer and of the model (see `layer_sums`)."""
    return layer_sums({name: leaf**2 for name, leaf in stacked.items()})
