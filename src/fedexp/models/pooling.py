"""Convolutions followed by 2x2 max-pooling with ReLU, in the fastest way for the device."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from fedexp.core.private.torch_internals import in_transform

# a convolution, and the layer between it and pooling, such as batch norm or nn.Identity
PooledStage = tuple[nn.Conv2d, nn.Module]


def convolve_and_pool(x: Tensor, stages: Sequence[PooledStage]) -> Tensor:
    """Apply convolutions to x [N, C, H, W], each followed by a layer and `pool`.

    The convolutions have the same padding, and no stride, dilation or groups. A mode
    (torch.overrides.TorchFunctionMode) may replace this function by a faster one. Layers such as
    batch norm must run in all modes, but a mode is off while it passes a call on.
    """
    plain = all(isinstance(layer, nn.Identity) for _, layer in stages)
    if plain and has_torch_function((x,)):
        return handle_torch_function(convolve_and_pool, (x,), x, stages)
    return in_layers(x, stages)


def in_layers(x: Tensor, stages: Sequence[PooledStage]) -> Tensor:
    """Do the same as `convolve_and_pool`, one layer after the other."""
    for convolution, norm in stages:
        x = pool(norm(convolution(x)))
    return x


def pool(x: Tensor) -> Tensor:
    """Apply 2x2 max-pooling and ReLU to x [N, C, H, W].

    The order does not matter, because ReLU is monotonic. If pooling comes first, ReLU has only a
    quarter of the values to process.
    """
    if torch.is_grad_enabled() or in_transform():
        if x.device.type == "cuda":
            return F.relu(ScatteredMaxPool.apply(x)[0])
        return F.relu(F.max_pool2d(x, 2, 2))
    even = x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0
    if even and x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last):
        return _maxima(x).relu_()
    return F.relu(F.max_pool2d(x, 2, 2))


def _maxima(x: Tensor) -> Tensor:
    """Apply 2x2 max-pooling without storing the positions of the maxima.

    The positions are needed only for gradients. Pooling without them takes a third of the time.
    """
    n, c, h, w = x.shape
    rows = x.permute(0, 2, 3, 1).view(n, h // 2, 2, w // 2, 2 * c)
    pairs = torch.maximum(rows[:, :, 0], rows[:, :, 1]).view(n, h // 2, w // 2, 2, c)
    return torch.maximum(pairs[..., 0, :], pairs[..., 1, :]).permute(0, 3, 1, 2)


class ScatteredMaxPool(Function):
    """2x2 max-pooling of x [N, C, H, W] whose gradient is written by one scatter operation.

    The result is the pair (maxima, positions), both [N, C, H // 2, W // 2]. On CUDA with channels
    last, training was 1.1 to 1.2 times as fast as with torch's own gradient; on a CPU, it was
    slower (benchmarks/RESULTS.md).
    """

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x, 2, 2, return_indices=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.size = inputs[0].shape[-2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (positions,) = ctx.saved_tensors
        return _Scatter.apply(grad, positions, *ctx.size)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        x = x.movedim(in_dims[0], 0)
        pair = ScatteredMaxPool.apply(x.flatten(0, 1))
        return tuple(each.unflatten(0, x.shape[:2]) for each in pair), (0, 0)


class _Scatter(Function):
    """Write values [N, C, h, w] to their positions in images [N, C, H, W] of zeros."""

    @staticmethod
    def forward(values: Tensor, positions: Tensor, height: int, width: int) -> Tensor:
        (n, c), pixels = values.shape[:2], height * width
        out = values.new_zeros(n, pixels, c)
        out.scatter_(1, _by_pixel(positions), _by_pixel(values))
        return out.view(n, height, width, c).permute(0, 3, 1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        found = _by_pixel(grad).gather(1, _by_pixel(positions))
        h, w = positions.shape[-2:]
        return found.unflatten(1, (h, w)).permute(0, 3, 1, 2), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], values: Tensor, positions: Tensor, *size: int
    ) -> tuple[Tensor, int]:
        stacked = []
        for each, dim in zip((values, positions), in_dims, strict=False):
            own = each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            stacked.append(own.flatten(0, 1))
        images = _Scatter.apply(*stacked, *size)
        return images.unflatten(0, (info.batch_size, -1)), 0


def _by_pixel(x: Tensor) -> Tensor:
    """Return x [N, C, H, W] as [N, H * W, C]."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
