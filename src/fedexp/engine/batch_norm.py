"""Batch normalisation of padded batches: padding counts in no statistic, and no gradient of one
reaches it.

S. Ioffe and C. Szegedy, "Batch Normalization", ICML 2015, Algorithm 1: mean and (biased) variance
of a channel over the n values of the batch; the running variance takes the unbiased one, var * n /
(n - 1), as torch has it. Here n counts the values of examples alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a network has batch normalisation, which needs batches of at least two
    examples."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a layer normalises by the batch at hand in evaluation too."""
    return any(part.running_mean is None for part in module.modules() if isinstance(part, KINDS))


def keeps_statistics(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm with running statistics."""
    return isinstance(layer, KINDS) and layer.running_mean is not None


def leaving_out_padding(mask: Tensor | None) -> AbstractContextManager[Any]:
    """Inside, F.batch_norm counts the rows with mask 1 alone. mask [B]: 1 = example, 0 = padding;
    None: all count."""
    return nullcontext() if mask is None else _Counting(mask)


class _Counting(TorchFunctionMode):
    """Replaces F.batch_norm, which nn.BatchNorm1d, 2d and 3d call."""

    def __init__(self, mask: Tensor):
        super().__init__()
        self.mask = mask

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm:
            return batch_norm(self.mask, *args, **kwargs)
        return function(*args, **kwargs)


def batch_norm(
    mask: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute torch.nn.functional.batch_norm of input [B, C, ...] over the rows with mask [B] 1
    alone.

    Rows of padding are normalised too, by the statistics of the others. In training the running
    statistics [C] change in place. Raises ValueError where the mask is not one of these rows.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if len(mask) != len(input):
        raise ValueError(
            f"batch norm of {len(input)} rows with a mask of {len(mask)}: give the network its mask"
        )
    wide = mask.dtype if input.dtype.itemsize < 4 else input.dtype  # of bf16, sums in fp32
    values = input.to(wide).flatten(2) if input.dim() > 2 else input.to(wide)[..., None]
    count = mask.to(wide).sum() * values.shape[2]
    share = mask.to(wide) / count.clamp(min=1)
    mean = _sum_over_rows(values, share)
    centred = values - mean[:, None]
    var = _sum_over_rows(centred.square(), share)
    if running_mean is not None and running_var is not None:
        unbiased = var * count / (count - 1).clamp(min=1)
        for running, now in ((running_mean, mean), (running_var, unbiased)):
            running.copy_((1 - momentum) * running + momentum * now.detach())
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    result = centred * scale[:, None]
    if bias is not None:
        result = result + bias[:, None]
    return result.view(input.shape).to(input.dtype)


def _sum_over_rows(values: Tensor, share: Tensor) -> Tensor:
    """Sum values [B, C, P], each row times its share [B], over rows and pixels: [C]."""
    return (share @ values.flatten(1)).view(values.shape[1:]).sum(1)
