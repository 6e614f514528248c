"""The optimizer update of a local step: `step` is a pure function, `step_in_place` is faster.

The optimizers have the names and default options of torch.optim; sgd and nesterov use
`local.momentum`. Each optimizer works elementwise, so its input may be one client's parameters or
the stacked parameters of many clients. Weight decay is coupled (added to the gradient), except for
adamw, where the parameters are multiplied by 1 - lr * weight_decay. With the gradient g, the step t
= 1, 2, ..., and the optimizer state (m, v), which starts at 0:
    sgd       m <- rho m + g,   w <- w - lr m
    nesterov  m <- rho m + g,   w <- w - lr (g + rho m)
    adam(w)   m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,
              w <- w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
    adamax    m as for adam,   v <- max(b2 v, |g| + eps),   w <- w - lr / (1 - b1^t) * m / v
    adagrad   v <- v + g^2,   w <- w - lr g / (sqrt(v) + eps)
    rmsprop   v <- a v + (1 - a) g^2,   w <- w - lr g / (sqrt(v) + eps)
    adadelta  v <- a v + (1 - a) g^2,   d = sqrt(m + eps) / sqrt(v + eps) * g,
              m <- a m + (1 - a) d^2,   w <- w - lr d
adam, adamax: Kingma and Ba, ICLR 2015, Algorithms 1 and 2; adamw: Loshchilov and Hutter, ICLR 2019,
Algorithm 2; adagrad: Duchi et al., JMLR 2011; rmsprop: Hinton 2012; adadelta: Zeiler 2012,
Algorithm 1. A client starts each round with a fresh optimizer state, unless
`local.keep_optimizer` is true.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fedexp.algorithms.local_training import LocalTraining
from fedexp.core import tree
from fedexp.core.private.torch_internals import copy_each
from fedexp.core.tree import Params, Tree

BETAS, EPS = (0.9, 0.999), 1e-8  # for the Adam family
ADAGRAD_EPS = 1e-10
RMSPROP_ALPHA = 0.99
ADADELTA_RHO, ADADELTA_EPS = 0.9, 1e-6
MEMORY = {
    "sgd": ("momentum",),
    "nesterov": ("momentum",),
    "adagrad": ("square",),
    "rmsprop": ("square",),
}
BOTH = ("mean", "square")  # parts of the state of all optimizers that are not in MEMORY


KEPT = "local.keep_optimizer"  # key of the optimizer state in the state of a client


def memory_of(params: Params, local: LocalTraining, kept: Tree = None) -> Tree:
    """Return the optimizer state before the first step: zeros, or a copy of a kept state.

    The tensors have the memory layout of the parameters, as fused steps require.

    kept: the state after the last step of an earlier round. None: there is none.
    """
    memory = {name: tree.zeros_like(params) for name in MEMORY.get(local.optimizer, BOTH)}
    return memory if kept is None else tree.map(lambda new, old: new.copy_(old), memory, kept)


def split_state(state: Tree) -> tuple[Tree, Tree]:
    """Split a client's state into (state of the algorithm, kept optimizer state or None)."""
    if KEPT not in state:
        return state, None
    return {key: value for key, value in state.items() if key != KEPT}, state[KEPT]


def clipped(grads: Params, bound: float) -> Params:
    """Return the gradients, scaled so that their total norm is at most `bound`.

    If `bound` is 0, the gradients are not changed. The scaling is the same as in torch's
    clip_grad_norm_.
    """
    if not bound:
        return grads
    scale = (bound / (tree.dot(grads, grads).sqrt() + 1e-6)).clamp(max=1)
    return {k: g * scale for k, g in grads.items()}


def step(
    params: Params,
    grads: Params,
    memory: Tree,
    lr: float | Tensor,
    local: LocalTraining,
    number: int | Tensor,
) -> tuple[Params, Tree]:
    """Return the parameters and the optimizer state after one step.

    memory: the optimizer state. number: the number of earlier steps in this round.
    """
    if local.optimizer == "adamw":
        params = {k: params[k] * (1 - lr * local.weight_decay) for k in params}
    else:
        grads = {k: grads[k] + local.weight_decay * params[k] for k in params}
    moves: Params = {}
    kept: Tree = {name: {} for name in memory}
    for k, gradient in grads.items():
        moves[k], new = _rule(
            gradient, {name: memory[name][k] for name in memory}, local, number + 1
        )
        for name in memory:
            kept[name][k] = new[name]
    return {k: params[k] - lr * moves[k] for k in params}, kept


def _rule(
    g: Tensor,
    memory: dict[str, Tensor],
    local: LocalTraining,
    count: int | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the direction of a parameter's step and the parameter's new optimizer state.

    The step subtracts lr times the direction. g: the gradient. count: the number of this step, from
    1.

    """
    name = local.optimizer
    if name in ("sgd", "nesterov"):
        momentum = local.momentum * memory["momentum"] + g
        return (g + local.momentum * momentum if name == "nesterov" else momentum), {
            "momentum": momentum
        }
    square = memory["square"]
    if name == "adagrad":
        square = square + g**2
        return g / (square.sqrt() + ADAGRAD_EPS), {"square": square}
    if name == "rmsprop":
        square = RMSPROP_ALPHA * square + (1 - RMSPROP_ALPHA) * g**2
        return g / (square.sqrt() + EPS), {"square": square}
    mean, (first, second) = memory["mean"], BETAS
    if name == "adadelta":
        square = ADADELTA_RHO * square + (1 - ADADELTA_RHO) * g**2
        move = (mean + ADADELTA_EPS).sqrt() / (square + ADADELTA_EPS).sqrt() * g
        return move, {"mean": ADADELTA_RHO * mean + (1 - ADADELTA_RHO) * move**2, "square": square}
    mean = first * mean + (1 - first) * g
    if name == "adamax":
        square = torch.maximum(second * square, g.abs() + EPS)
        return mean / square / (1 - power(first, count)), {"mean": mean, "square": square}
    square = second * square + (1 - second) * g**2
    size = (square / (1 - power(second, count))).sqrt() + EPS
    return mean / size / (1 - power(first, count)), {"mean": mean, "square": square}


def power(base: float, count: int | Tensor) -> float | Tensor:
    """Return base**count, in fp64 if count is a tensor.

    In fp32, 1 - 0.999**count would lose four digits.
    """
    return base ** (count.double() if isinstance(count, Tensor) else count)


@torch.no_grad()
def step_in_place(
    params: Params,
    grads: Params,
    memory: Tree,
    lr: float | Tensor,
    local: LocalTraining,
    number: int | Tensor,
) -> None:
    """Take the step of `step`, but change `params` and `memory` in place.

    For optimizers with fused kernels on every device, torch's kernels are used. They are called as
    functions instead of through `torch.optim.SGD` and `Adam`, because creating an optimizer object
    imports torch's compiler, which takes seconds.
    """
    values = list(params.values())
    gradients = [like(grads[k], v) for k, v in params.items()]
    kept: Any = {name: [leaves[k] for k in params] for name, leaves in memory.items()}
    shared: Any = {"fused": True, "maximize": False, "lr": lr, "weight_decay": local.weight_decay}
    if local.optimizer in ("sgd", "nesterov"):
        sgd(
            values,
            gradients,
            kept["momentum"] if local.momentum else [None] * len(values),
            momentum=local.momentum,
            dampening=0.0,
            nesterov=local.optimizer == "nesterov",
            **shared,
        )
    elif local.optimizer in ("adam", "adamw"):
        rule: Any = adamw if local.optimizer == "adamw" else adam
        counts = [_count(number, value) for value in values]
        shared |= {"amsgrad": False, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS}
        rule(values, gradients, kept["mean"], kept["square"], [], counts, **shared)
    else:
        moved, changed = step(params, grads, memory, lr, local, number)
        pairs = [(params[k], moved[k]) for k in params]
        pairs += [(memory[name][k], changed[name][k]) for name in memory for k in params]
        copy_each([old for old, _ in pairs], [new for _, new in pairs])


def _count(number: int | Tensor, value: Tensor) -> Tensor:
    """Return a new step counter on the device of `value`; torch increases it by 1."""
    if isinstance(number, Tensor):
        return number.to(torch.float32, copy=True)
    return torch.full((), float(number), device=value.device)


def like(value: Tensor, other: Tensor) -> Tensor:
    """Return `value` in the memory layout of `other`.

    The fused step processes both tensors in memory order without checking their layouts.
    """
    return value if value.stride() == other.stride() else torch.empty_like(other).copy_(value)
