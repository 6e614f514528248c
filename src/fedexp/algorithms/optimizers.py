"""The update of a local step, twice: as a pure function (the definition) and in place with torch's fused kernels.

SGD with momentum and coupled weight decay, or Adam (Kingma and Ba, ICLR 2015, Algorithm 1, with torch's defaults and
coupled weight decay). What an optimizer remembers is fresh at the start of a client's round.
"""

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedexp.core import tree
from fedexp.core.settings import LocalTraining
from fedexp.core.tree import Params, Tree

BETAS, EPS = (0.9, 0.999), 1e-8


def memory_of(params: Params, local: LocalTraining) -> Tree:
    """Return the optimizer's state (its memory) before the first step."""
    if local.optimizer == "sgd":
        return {"momentum": tree.zeros_like(params)}
    return {"mean": tree.zeros_like(params), "square": tree.zeros_like(params)}


def step(
    params: Params,
    grads: Params,
    memory: Tree,
    lr: float | torch.Tensor,
    local: LocalTraining,
    number: int | torch.Tensor,
) -> tuple[Params, Tree]:
    """Return (params, memory) after one step; `number`: how many came before it in this round."""
    grads = {k: grads[k] + local.weight_decay * params[k] for k in params}
    if local.optimizer == "sgd":
        momentum = {k: local.momentum * memory["momentum"][k] + grads[k] for k in params}
        return {k: params[k] - lr * momentum[k] for k in params}, {"momentum": momentum}
    (first, second), count = BETAS, number + 1
    mean = {k: first * memory["mean"][k] + (1 - first) * grads[k] for k in params}
    square = {k: second * memory["square"][k] + (1 - second) * grads[k] ** 2 for k in params}
    size = {k: (square[k] / (1 - second**count)).sqrt() + EPS for k in params}
    moved = {k: params[k] - lr / (1 - first**count) * mean[k] / size[k] for k in params}
    return moved, {"mean": mean, "square": square}


@torch.no_grad()
def step_in_place(
    params: Params,
    grads: Params,
    memory: Tree,
    lr: float | torch.Tensor,
    local: LocalTraining,
    number: int | torch.Tensor,
) -> None:
    """Do the same step in place: change `params` and `memory`.

    Functions, not `torch.optim.SGD` and `Adam`: making an optimizer object imports torch's compiler, which takes
    seconds.
    """
    values = list(params.values())
    gradients = [like(grads[k], v) for k, v in params.items()]
    if local.optimizer == "sgd":
        buffers: list[torch.Tensor | None] = [memory["momentum"][k] for k in params]
        sgd(
            values,
            gradients,
            buffers if local.momentum else [None] * len(values),
            fused=True,
            weight_decay=local.weight_decay,
            momentum=local.momentum,
            lr=lr,  # type: ignore[arg-type]
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        return
    adam(
        values,
        gradients,
        [memory["mean"][k] for k in params],
        [memory["square"][k] for k in params],
        [],
        [_count(number, v) for v in values],
        fused=True,
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=lr,
        weight_decay=local.weight_decay,
        eps=EPS,
        maximize=False,
    )


def _count(number: int | torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a step counter of its own, on the device of a parameter: torch adds 1 to it."""
    if isinstance(number, torch.Tensor):
        return number.to(torch.float32, copy=True)
    return torch.full((), float(number), device=value.device)


def like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `value` in the memory layout of `other`: the fused step walks both in memory order, unchecked."""
    return value if value.stride() == other.stride() else torch.empty_like(other).copy_(value)
