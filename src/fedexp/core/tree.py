"""Trees of tensors: nested dicts that hold everything a client or the server keeps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

Tree = Any
Params = dict[str, torch.Tensor]


def map(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply a function to the leaves of trees of one shape."""
    return tree_map(function, *trees)


def zeros_like(tree: Tree) -> Tree:
    return tree_map(torch.zeros_like, tree)


def room_for(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """Return an empty [count, ...] for a leaf [...], each in the memory layout of the leaf."""
    shape, strides = (count, *leaf.shape), (leaf.numel(), *leaf.stride())
    return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack C trees with leaves [...] into one tree with leaves [C, ...]."""
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


def unstack(tree: Tree, count: int) -> list[Tree]:
    """Undo `stack`; the parts own their memory."""
    return [tree_map(lambda leaf, i=i: leaf[i].clone(), tree) for i in range(count)]


def weighted_mean(stacked: Tree, weights: torch.Tensor) -> Tree:
    """Average leaves [C, ...] -> [...], weighted by weights [C], which need not sum to one."""

    def mean(leaf: torch.Tensor) -> torch.Tensor:
        share = (weights / weights.sum()).to(leaf)
        return torch.tensordot(share, leaf.reshape(len(leaf), -1), 1).view(leaf.shape[1:])

    return tree_map(mean, stacked)


def average_buffers(stacked: Params, weights: torch.Tensor) -> Params:
    """Average running statistics [C, ...] like parameters; integer buffers (batch counts) take the
    largest."""
    return {
        k: weighted_mean(v, weights) if v.is_floating_point() else v.amax(0)
        for k, v in stacked.items()
    }


def squared_distance(a: Params, b: Params) -> torch.Tensor:
    """Return ||a - b||_2^2 over all entries of two trees of parameters; a scalar. By one operation
    with its gradient: subtraction and square apart cost up to three times as much."""
    return torch.stack([F.mse_loss(a[k], b[k], reduction="sum") for k in a]).sum()


def dot(a: Params, b: Params) -> torch.Tensor:
    """Return the inner product of two trees of parameters; a scalar."""
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def subtract(a: Params, b: Params) -> Params:
    return {k: a[k] - b[k] for k in a}


def add(a: Params, b: Params) -> Params:
    return {k: a[k] + b[k] for k in a}


def added(a: Params, stacked: Params, factor: float = 1.0) -> Params:
    """Return a + factor * the sum over the first dimension of the leaves of `stacked`."""
    return {k: a[k] + factor * stacked[k].sum(0) for k in a}


def row(stacked: Tree, i: int) -> Tree:
    """Return one of the stacked trees, as views: leaves [C, ...] -> those of one."""
    return tree_map(lambda leaf: leaf[i], stacked)


def leaves(tree: Tree) -> list[torch.Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def num_bytes(tree: Tree) -> int:
    """Return the bytes of all tensors in a tree, as they would be sent."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def is_finite(tree: Tree) -> bool:
    """Return True where no floating-point leaf holds NaN or Inf."""
    return all(bool(leaf.isfinite().all()) for leaf in leaves(tree) if leaf.is_floating_point())
