"""Norms of a model's parameters, for each layer and in total."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedexp.core.tree import Params

TOTAL = "total"  # all layers together


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return layer -> names of its parameters, in the order of the model.

    `conv.weight` and `conv.bias` belong to the layer `conv`. A parameter whose name has no dot is a
    separate layer.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return found


def sums(stacked: Params) -> dict[str, Tensor]:
    """Return layer -> sum over its parameters' entries, and `total`: leaves [S, ...] -> float64 [S]
    each."""
    each = {
        name: leaf.reshape(len(leaf), -1).sum(1, dtype=torch.float64)
        for name, leaf in stacked.items()
    }
    found = {
        layer: torch.stack([each[name] for name in names]).sum(0)
        for layer, names in layers_of(stacked).items()
    }
    return found | {TOTAL: torch.stack(list(found.values())).sum(0)}


def l1_norms(stacked: Params) -> dict[str, Tensor]:
    """Return layer -> sum_i |w_i| over its parameters, and `total`: leaves [S, ...] -> float64 [S]
    each."""
    return sums({name: leaf.abs() for name, leaf in stacked.items()})


def squared_norms(stacked: Params) -> dict[str, Tensor]:
    """Return layer -> sum_i w_i^2 over its parameters, and `total`: leaves [S, ...] -> float64 [S]
    each."""
    return sums({name: leaf**2 for name, leaf in stacked.items()})


def l2_norms(stacked: Params) -> dict[str, Tensor]:
    """Return layer -> sqrt(sum_i w_i^2) over its parameters, and `total`: leaves [S, ...] ->
    float64 [S] each."""
    return {layer: value.sqrt() for layer, value in squared_norms(stacked).items()}
