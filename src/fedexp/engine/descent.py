"""The update of the base's local step (`FedAvg.local_step`) in place, with torch's fused SGD: faster, and equal."""

from collections.abc import Sequence

import torch
from torch.optim.sgd import sgd

from fedexp.settings import LocalTraining


@torch.no_grad()
def descend(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum: Sequence[torch.Tensor],
    lr: float | torch.Tensor,
    local: LocalTraining,
) -> None:
    """One step of SGD with momentum and coupled weight decay; changes `params` and `momentum` (zeros at the start).

    The function, not `torch.optim.SGD`: making an optimizer object imports torch's compiler, which takes seconds.
    """
    buffers: list[torch.Tensor | None] = [*momentum] if local.momentum else [None] * len(params)
    sgd(
        list(params),
        [like(grad, parameter) for grad, parameter in zip(grads, params, strict=True)],
        buffers,
        fused=True,
        weight_decay=local.weight_decay,
        momentum=local.momentum,
        lr=lr,  # type: ignore[arg-type]
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`value` in the memory layout of `other`: the fused step walks both in memory order, unchecked."""
    return value if value.stride() == other.stride() else torch.empty_like(other).copy_(value)
