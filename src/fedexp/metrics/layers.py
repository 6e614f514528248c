"""Norms of a model's parameters, for each layer and in total."""

import torch
from torch import Tensor

from fedexp.core.tree import Params

TOTAL = "total"  # all layers together


def layer_sums(stacked: Params) -> dict[str, Tensor]:
    """Return layer -> sum over its parameters' entries, and `total`.

    Leaves [S, ...] give float64 [S] each, in the order of the model. `conv.weight` and `conv.bias`
    belong to the layer `conv`. A parameter whose name has no dot is a separate layer.
    """
    parts: dict[str, list[Tensor]] = {}
    for name, leaf in stacked.items():
        total = leaf.reshape(len(leaf), -1).sum(1, dtype=torch.float64)
        parts.setdefault(name.rpartition(".")[0] or name, []).append(total)
    found = {layer: torch.stack(totals).sum(0) for layer, totals in parts.items()}
    return found | {TOTAL: torch.stack(list(found.values())).sum(0)}


def l1_norms(stacked: Params) -> dict[str, Tensor]:
    """Return layer -> sum_i |w_i| over its parameters, as `layer_sums`."""
    return layer_sums({name: leaf.abs() for name, leaf in stacked.items()})


def squared_norms(stacked: Params) -> dict[str, Tensor]:
    """Return layer -> sum_i w_i^2 over its parameters, as `layer_sums`."""
    return layer_sums({name: leaf**2 for name, leaf in stacked.items()})


def l2_norms(stacked: Params) -> dict[str, Tensor]:
    """Return layer -> sqrt(sum_i w_i^2) over its parameters, as `layer_sums`."""
    return {layer: value.sqrt() for layer, value in squared_norms(stacked).items()}
