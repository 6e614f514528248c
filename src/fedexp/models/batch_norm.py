"""Batch normalisation of padded batches: padding counts in no statistic, and no gradient of one
reaches it.

S. Ioffe and C. Szegedy, "Batch Normalization", ICML 2015, Algorithm 1: mean and (biased) variance
of a channel over the n values of the batch; the running variance takes the unbiased one, var * n /
(n - 1), as torch has it. Here n counts the values of examples alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def leaving_out_padding(mask: torch.Tensor | None) -> AbstractContextManager[Any]:
    """Inside, F.batch_norm counts the rows with mask 1 alone. mask [B]: 1 = example, 0 = padding;
    None: all count."""
    return nullcontext() if mask is None else _Counting(mask)


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a layer normalises by the batch at hand in evaluation too."""
    return any(part.running_mean is None for part in module.modules() if isinstance(part, KINDS))


def keeps_statistics(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm with running statistics."""
    return isinstance(layer, KINDS) and layer.running_mean is not None


class _Counting(TorchFunctionMode):
    """Replaces F.batch_norm, which nn.BatchNorm1d, 2d and 3d call."""

    def __init__(self, mask: torch.Tensor):
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
        return (
            batch_norm(self.mask, *args, **kwargs)
            if function is F.batch_norm
            else function(*args, **kwargs)
        )


def batch_norm(
    mask: torch.Tensor,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute torch.nn.functional.batch_norm of input [B, C, ...] over the rows with mask [B] 1
    alone.

    Rows of padding are normalised too, by the statistics of the others. In training the running
    statistics [C] change in place. Differentiable once. Raises ValueError where the mask is not one
    of these rows.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if len(mask) != len(input):
        raise ValueError(
            f"batch norm of {len(input)} rows with a mask of {len(mask)}: give the network its mask"
        )
    wide = mask.dtype if input.dtype.itemsize < 4 else input.dtype  # of bf16, sums in fp32
    standard, mean, var, _ = _Standardised.apply(input, mask.to(wide), eps)
    if running_mean is not None and running_var is not None:
        count = mask.sum() * _values_of_a_row(input)
        unbiased = var * count / (count - 1).clamp(min=1)
        for running, now in ((running_mean, mean), (running_var, unbiased)):
            running.copy_((1 - momentum) * running + momentum * now)
    shape = (-1, *[1] * (input.dim() - 2))
    if weight is not None:
        standard = standard * weight.view(shape)
    if bias is not None:
        standard = standard + bias.view(shape)
    return standard.to(input.dtype)


def _values_of_a_row(x: torch.Tensor) -> int:
    """Return the number of values of a channel in one example."""
    return x[0, 0].numel()


class _Standardised(Function):
    """x [B, C, ...] -> (x less its mean, over its standard deviation; mean; variance; 1 / standard
    deviation, all [C]).

    Only the first has a gradient, for which little more than itself is kept.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, mask: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = x.flatten(2) if x.dim() > 2 else x[..., None]  # [B, C, P]
        share = mask / (mask.sum() * flat.shape[2]).clamp(min=1)
        wide = flat.to(mask.dtype)
        mean = _sum_over_rows(wide, share)
        centred = wide - mean[:, None]
        var = _sum_over_rows(centred.square(), share)
        scale = (var + eps).rsqrt()
        standard = (centred * scale[:, None]).to(x.dtype).view_as(x)
        return standard, mean, var, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, mask, _ = inputs
        standard, mean, var, scale = output
        ctx.mark_non_differentiable(mean, var, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(standard, mask, scale)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, *_: None
    ) -> tuple[torch.Tensor | None, None, None]:
        return None if grad is None else _Gradient.apply(grad, *ctx.saved_tensors), None, None


class _Gradient(Function):
    """The gradient of `_Standardised` by x; a function of its own, so that nothing takes it for one
    that has a gradient.

    z: the standardised values, 1 / s their scale, n the values that count, g the gradient by z of
    all rows. A row that counts gets (g - (sum g + z sum g z) / n) / s, a row of padding g / s: it
    is in no statistic.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: torch.Tensor, standard: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        g, z = (
            (value.flatten(2) if value.dim() > 2 else value[..., None]).to(mask.dtype)
            for value in (grad, standard)
        )
        ones = torch.ones_like(mask)
        total, along = _sum_over_rows(g, ones), _sum_over_rows(g * z, ones)
        share = (mask / (mask.sum() * z.shape[2]).clamp(min=1))[:, None, None]
        back = (g - share * (total[:, None] + z * along[:, None])) * scale[:, None]
        return back.to(grad.dtype).view(grad.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
        raise NotImplementedError(
            "the gradient of a gradient through batch normalisation of a padded batch"
        )


def _sum_over_rows(values: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Sum values [B, C, P], each row times its share [B], over rows and pixels: [C]."""
    return (share @ values.flatten(1)).view(values.shape[1:]).sum(1)
