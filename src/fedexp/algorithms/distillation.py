"""Common part of the methods that train the global model on the server's public data."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.interfaces import PublicData, ServerNetwork
from fedexp.core import tree
from fedexp.core.tree import Params, Tree

# (logits, labels, indices) -> scalar
Loss = Callable[[Tensor, Tensor, np.ndarray], Tensor]
# (parameters, gradients): changes the parameters in place
Update = Callable[[Params, Params], None]


def local_models(messages: Tree, buffers: Params) -> list[Params]:
    """Return the local models of the cohort, each with its running statistics."""
    count = len(next(iter(messages["params"].values())))
    return [tree.row(messages["params"], i) | tree.row(buffers, i) for i in range(count)]


def minibatches(
    rng: np.random.Generator, examples: int, size: int, epochs: int
) -> Iterator[np.ndarray]:
    """Yield example indices, reshuffled in each epoch; the last partial batch is kept."""
    for _ in range(epochs):
        order = rng.permutation(examples)
        yield from (order[start : start + size] for start in range(0, examples, size))


def fit(
    net: ServerNetwork,
    public: PublicData,
    batches: Iterator[np.ndarray],
    loss: Loss,
    update: Update,
    dropout: np.random.Generator | None = None,
) -> None:
    """Train the model that `net` has loaded.

    Batches of one example are skipped if batch norm needs more. dropout: generator for the texts'
    dropout; None: no dropout.
    """
    for numbers in batches:
        if len(numbers) > 1 or not net.mixes_examples:
            x, y = public.take(numbers) if dropout is None else public.take(numbers, dropout)
            value = loss(net(net.params, x).logits, y, numbers)
            grads = torch.autograd.grad(value, list(net.params.values()), materialize_grads=True)
            update(net.params, dict(zip(net.params, grads, strict=True)))


def with_trained_model(net: ServerNetwork, server: Tree) -> Tree:
    """Return the server's state with its model replaced by the trained model."""
    return server | {"params": net.snapshot(), "buffers": net.buffers()}
