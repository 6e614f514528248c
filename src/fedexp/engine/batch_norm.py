"""Batch normalisation of padded batches: padding affects neither statistics nor gradients.

The statistics are those of S. Ioffe and C. Szegedy, "Batch Normalization", ICML 2015, Algorithm 1:
the mean and the (biased) variance of a channel over the n values of the batch. As in torch, the
running variance is updated with the unbiased variance, var * n / (n - 1). In this module, n does
not include padding.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a network has batch normalisation.

    Such a network needs training batches of at least two examples.
    """
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a layer of the network normalises by batch statistics even in eval mode."""
    return any(part.running_mean is None for part in module.modules() if isinstance(part, KINDS))


def has_running_statistics(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm layer with running statistics."""
    return isinstance(layer, KINDS) and layer.running_mean is not None


def ignore_padding(mask: Tensor | None) -> AbstractContextManager[Any]:
    """Return a context in which F.batch_norm ignores padding.

    mask: [B], 1 for examples and 0 for padding. None: the batch has no padding.
    """
    return nullcontext() if mask is None else _MaskedBatchNorm(mask)


class _MaskedBatchNorm(TorchFunctionMode):
    """Mode in which nn.BatchNorm1d, 2d and 3d call `batch_norm` instead of F.batch_norm."""

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
    """Compute torch.nn.functional.batch_norm with statistics that exclude padding.

    Padding is normalised with the statistics of the examples. In training, the running statistics
    [C] are updated in place.

    mask: [B], 1 for examples and 0 for padding.
    input: [B, C, ...].

    Raises ValueError if the mask does not have one value per row.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if len(mask) != len(input):
        raise ValueError(
            f"batch normalisation: the mask has {len(mask)} values, but the input has {len(input)}"
            " rows; pass the mask of the batch to the network"
        )
    wide = mask.dtype if input.dtype.itemsize < 4 else input.dtype  # sum bf16 values in fp32
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
    """Return the weighted sum of the values over rows and pixels, [C].

    values: [B, C, P], for B rows, C channels and P pixels.
    share: [B], the weight of each row.
    """
    # Under autocast, the product would be rounded to bf16. torch has no autocast for meta tensors.
    device = values.device.type
    exact = nullcontext() if values.is_meta else torch.autocast(device, enabled=False)
    with exact:
        return (share @ values.flatten(1)).view(values.shape[1:]).sum(1)
