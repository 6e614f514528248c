"""Stacked convolutions with the 2 x 2 max-pooling and ReLU after them as one operation, by the
Triton kernels.

The definition is torch's own operations one after the other, which also serves where clients share
an input.
"""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.func import vmap

from fedexp.engine.vectorised.convolution import (
    Dims,
    cast,
    gradients,
    gradients_by_kernels,
    kernels,
)

Pair = tuple[int, int]


def convolve_and_pool(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Pair,
    stride: Pair = (1, 1),
) -> torch.Tensor:
    """Return models.pooling.pooled(F.conv2d(x [B, C, H, W], weight [O, C, h, w], bias [O]));
    differentiable once."""
    return _Pooled.apply(*cast(x, weight, bias), padding, stride)[0]


class _Pooled(Function):
    """(x, weight, bias) -> (pooled, places of the maxima: 0 to 3, row by row of a window, 4 where
    ReLU gives 0)."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        padding: Pair,
        stride: Pair,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.conv2d(x, weight, bias, stride, padding)
        best, index = F.max_pool2d(y, 2, 2, return_indices=True)
        width = y.shape[-1]
        place = index // width % 2 * 2 + index % width % 2
        return F.relu(best), torch.where(best <= 0, 4, place).to(torch.uint8)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _, *ctx.shape = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros as the gradient of the places
        ctx.save_for_backward(output[1], x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        wanted = ctx.needs_input_grad[:3]
        found = iter(_Gradients.apply(grad, *ctx.saved_tensors, *ctx.shape, *wanted))
        return *(next(found) if one else None for one in wanted), None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Dims,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        padding: Pair,
        stride: Pair,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, int]]:
        if None in (in_dims[:2] if bias is None else in_dims[:3]):
            return vmap(_Pooled.forward, in_dims)(x, weight, bias, padding, stride), (0, 0)
        x, weight = x.movedim(in_dims[0], 0), weight.movedim(in_dims[1], 0)
        bias = None if bias is None else bias.movedim(in_dims[2], 0)
        return kernels().forward_pooled(x, weight, bias, padding, stride), (0, 0)


class _Gradients(Function):
    """The gradients by input, weights and bias, those that are asked for; a function of its own, so
    that vmap knows how to compute it."""

    @staticmethod
    def forward(
        grad: torch.Tensor,
        where: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        padding: Pair,
        stride: Pair,
        *wanted: bool,
    ) -> tuple[torch.Tensor, ...]:
        sizes = zip(x.shape[2:], padding, weight.shape[2:], stride, strict=True)
        height, width = ((size + 2 * p - k) // step + 1 for size, p, k, step in sizes)
        full = spread(grad, where)
        full = F.pad(full, (0, width - full.shape[-1], 0, height - full.shape[-2]))
        return tuple(function(full, x, weight) for function in gradients(padding, stride, *wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise NotImplementedError("the gradient of a gradient: use hardware.convolution=grouped")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Dims,
        grad: torch.Tensor,
        where: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        padding: Pair,
        stride: Pair,
        *wanted: bool,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        if None in in_dims[:4]:
            found = vmap(_Gradients.forward, in_dims)(
                grad, where, x, weight, padding, stride, *wanted
            )
            return found, (0,) * len(found)
        grad, where, x, weight = (
            value.movedim(dim, 0)
            for value, dim in zip((grad, where, x, weight), in_dims, strict=False)
        )
        parts = gradients_by_kernels(grad, x, weight, padding, stride, wanted, where)
        return tuple(parts), (0,) * len(parts)


def spread(grad: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Map the gradient [N, C, h, w] of maxima to that of the image: [N, C, 2 h, 2 w], zero but at
    their places."""
    places = torch.arange(4, device=grad.device).view(2, 1, 2)  # [row, 1, column] of a window
    here = where[..., :, None, :, None] == places
    return torch.where(here, grad[..., :, None, :, None], 0.0).flatten(-4, -3).flatten(-2)
