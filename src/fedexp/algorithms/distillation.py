"""Code shared by distillation methods: a divergence, and training on the server's public data."""

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.interfaces import PublicData, ServerNetwork
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core import tree
from fedexp.core.tree import Params, Tree

# maps (logits, labels, example indices) to a scalar loss
Loss = Callable[[Tensor, Tensor, np.ndarray], Tensor]
# receives (parameters, gradients) and changes the parameters in place
Update = Callable[[Params, Params], None]


def kl_divergence(
    teacher: Tensor, student: Tensor, tau: float, without: Tensor | None = None
) -> Tensor:
    """Return KL(softmax(teacher / tau) || softmax(student / tau)) of each example, [B].

    teacher, student: logits [B, C]. without: int64 [B], a class of each example that both softmax
    functions leave out, or None. No gradient flows to the teacher.
    """
    rows = [row if tau == 1 else row / tau for row in (teacher.detach(), student)]
    if without is not None:
        lowest = torch.finfo(student.dtype).min  # finite, because 0 * -inf would be NaN
        shift = torch.zeros_like(student).scatter(-1, without[:, None], lowest)
        rows = [row + shift for row in rows]
    log_p, log_q = (F.log_softmax(row, -1) for row in rows)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def log_shares(logits: Tensor, kept: Tensor) -> Tensor:
    """Return the log-softmax over the classes for which `kept` is true, [B, C].

    logits: [B, C]. kept: bool [B, C] or [C]. The entries of all other classes are finite but
    meaningless.
    """
    return F.log_softmax(torch.where(kept, logits, torch.finfo(logits.dtype).min), dim=-1)


def local_models(messages: Tree, buffers: Params) -> list[Params]:
    """Return the local models of the cohort: parameters and running statistics of each client."""
    count = len(next(iter(messages["params"].values())))
    return [tree.row(messages["params"], i) | tree.row(buffers, i) for i in range(count)]


def minibatches(
    rng: np.random.Generator, examples: int, size: int, epochs: int
) -> Iterator[np.ndarray]:
    """Yield the example indices of each mini-batch.

    The examples are reshuffled in each epoch, and the last batch of an epoch may be smaller.
    """
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
    """Train the model in `net` on public examples.

    Batches with a single example are skipped if the model has batch norm. batches: the indices of
    the examples of each batch. dropout: the generator for dropout on texts, or None for no dropout.
    """
    for numbers in batches:
        if len(numbers) > 1 or not net.mixes_examples:
            x, y = public.take(numbers) if dropout is None else public.take(numbers, dropout)
            value = loss(net(net.params, x).logits, y, numbers)
            grads = torch.autograd.grad(value, list(net.params.values()), materialize_grads=True)
            update(net.params, dict(zip(net.params, grads, strict=True)))


def distil(
    net: ServerNetwork,
    server: Tree,
    public: PublicData,
    batches: Iterator[np.ndarray],
    loss: Loss,
    local: LocalTraining,
    lr: float,
    dropout: np.random.Generator | None = None,
) -> Tree:
    """Train the server's model on public examples, and return the server's state with the result.

    local: the settings of the optimizer. lr: its learning rate. For the other parameters, see
    `fit`.
    """
    net.load(server["params"], server["buffers"])
    memory, steps = optimizers.memory_of(net.snapshot(), local), count()

    def update(params: Params, grads: Params) -> None:
        optimizers.step_in_place(params, grads, memory, lr, local, next(steps))

    fit(net, public, batches, loss, update, dropout)
    return with_trained_model(net, server)


def with_trained_model(net: ServerNetwork, server: Tree) -> Tree:
    """Return a copy of the server's state in which the model is the one in `net`."""
    return server | {"params": net.snapshot(), "buffers": net.buffers()}
