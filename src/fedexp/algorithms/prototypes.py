"""Class means of features: clients and server exchange them as prototypes (FedPAC, FedProto)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedexp.algorithms.interfaces import Batch, Network
from fedexp.core import tree
from fedexp.core.tree import Params, Tree


def no_prototypes(classes: int, width: int, like: Tensor) -> Tree:
    """Return the initial prototypes: means [C, D], and a mask [C] of the known classes."""
    return {"mean": like.new_zeros(classes, width), "known": like.new_zeros(classes)}


def statistics(
    net: Network, params: Params, batches: Iterable[tuple[Batch, Tensor]], like: Tensor
) -> Tree:
    """Return each class's number of examples, mean feature and mean squared feature norm.

    The keys are "count" [C], "mean" [C, D] and "square" [C].

    params: the model that computes the features. batches: pairs of a batch and its mask [B]. like:
    a tensor [C, D] with the dtype and device of the result.
    """
    classes = len(like)
    count, total, squares = like.new_zeros(classes), torch.zeros_like(like), like.new_zeros(classes)
    for batch, mask in batches:
        features = net(params, batch.x, mask).features
        member = one_hot(batch.y, count) * mask[:, None]
        count, total = count + member.sum(0), total + member.T @ features
        squares = squares + member.T @ (features**2).sum(-1)
    seen = count.clamp(min=1)
    return {"count": count, "mean": total / seen[:, None], "square": squares / seen}


def select_present(present: Tensor, values: Tree) -> Tree:
    """Select the classes with `present` [..., C] > 0 in each leaf [..., C, ...] of a tree."""
    return tree.map(lambda leaf: leaf[present > 0], values)


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """Return the labels [B] as one-hot rows [B, C].

    like: a tensor [C] with the dtype and device of the result.
    """
    return (labels[:, None] == torch.arange(len(like), device=labels.device)).to(like.dtype)


def average_prototypes(old: Tree, means: Tensor, weights: Tensor) -> Tree:
    """Return the prototypes after a round: for each class, the weighted mean over the clients.

    means: the clients' prototypes, [|S|, C, D]. weights: the clients' weights for each class, [|S|,
    C]. If no client of the round has a class, the prototype in `old` is kept.
    """
    total = weights.sum(0)
    mean = (weights[..., None] * means).sum(0) / total.clamp(min=1)[:, None]
    return {
        "mean": torch.where((total > 0)[:, None], mean, old["mean"]),
        "known": torch.where(total > 0, torch.ones_like(total), old["known"]),
    }
