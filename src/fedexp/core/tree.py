"""Trees of tensors: nested dicts with the state of a client or the server."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

Tree = Any
Params = dict[str, torch.Tensor]


def map(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply a function to corresponding leaves of several trees with the same structure."""
    return tree_map(function, *trees)


def to(tree: Tree, device: torch.device) -> Tree:
    """Return a tree whose tensors are on the device. Other leaves are unchanged."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def zeros_like(tree: Tree) -> Tree:
    return tree_map(torch.zeros_like, tree)


def empty_stack(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """Return an uninitialised tensor of shape [count, ...] for a leaf of shape [...].

    Each slice along the first dimension has the memory layout of the leaf.
    """
    shape, strides = (count, *leaf.shape), (leaf.numel(), *leaf.stride())
    return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack C trees with leaves [...] into one tree with leaves [C, ...]."""
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


def unstack(tree: Tree, count: int) -> list[Tree]:
    """Split a stacked tree into `count` trees, the inverse of `stack`. The leaves are copies."""
    return [tree_map(lambda leaf, i=i: leaf[i].clone(), tree) for i in range(count)]


def weighted_mean(stacked: Tree, weights: torch.Tensor) -> Tree:
    """Return the weighted mean over the first dimension of the leaves, [C, ...] -> [...].

    The mean of integers is a floating-point number. weights: [C]. Their sum may differ from one.
    """

    def mean(leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf if leaf.is_floating_point() else leaf.to(weights.dtype)
        share = (weights / weights.sum()).to(leaf)
        return torch.tensordot(share, leaf.reshape(len(leaf), -1), 1).view(leaf.shape[1:])

    return tree_map(mean, stacked)


def average_buffers(stacked: Params, weights: torch.Tensor) -> Params:
    """Average stacked buffers over the clients, [C, ...] -> [...].

    Running statistics are averaged like parameters. For integer buffers, such as batch counts, the
    maximum is returned instead.
    """
    return {
        k: weighted_mean(v, weights) if v.is_floating_point() else v.amax(0)
        for k, v in stacked.items()
    }


def squared_distance(a: Params, b: Params) -> torch.Tensor:
    """Return ||a - b||_2^2 over all entries of two trees of parameters, as a scalar tensor.

    This uses `mse_loss`, since a separate subtraction and square take up to three times as long.
    """
    return torch.stack([F.mse_loss(a[k], b[k], reduction="sum") for k in a]).sum()


def dot(a: Params, b: Params) -> torch.Tensor:
    """Return the inner product of two trees of parameters, as a scalar tensor."""
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def subtract(a: Params, b: Params) -> Params:
    return {k: a[k] - b[k] for k in a}


def add(a: Params, b: Params) -> Params:
    return {k: a[k] + b[k] for k in a}


def added(a: Params, stacked: Params, factor: float = 1.0) -> Params:
    """Return a + factor * sum(stacked), with the sum over the leaves' first dimension."""
    return {k: a[k] + factor * stacked[k].sum(0) for k in a}


def row(stacked: Tree, i: int) -> Tree:
    """Return the i-th of the stacked trees, [C, ...] -> [...]. The returned leaves are views."""
    return tree_map(lambda leaf: leaf[i], stacked)


def leaves(tree: Tree) -> list[torch.Tensor]:
    """Return a list of all tensors in a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def num_bytes(tree: Tree) -> int:
    """Return the number of bytes needed to send all tensors of a tree."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def is_finite(tree: Tree) -> bool:
    """Return whether all floating-point leaves are free of NaN and Inf."""
    return all(bool(leaf.isfinite().all()) for leaf in leaves(tree) if leaf.is_floating_point())
