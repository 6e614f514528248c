"""Triton kernels: 2 x 2 max-pooling with ReLU, and its gradient, as one pass over memory each (see
models.pooling).

Both go through the elements of the pooled image in their order in channels-last memory. The place
of a maximum is 0 to 3, row by row of its window, or 4 where ReLU sets it to zero, so that no
gradient goes there.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements of the pooled image in one program


@triton.jit
def _corner(i, channels, width):
    """Return the place in memory where the window of pooled element i begins; `width`: of the
    pooled image."""
    row, place = i // (width * channels), i % (width * channels)
    column, channel = place // channels, place % channels
    return (4 * row * width + 2 * column) * channels + channel


@triton.jit
def _load(source, there):
    value = tl.load(source, there)
    if value.dtype.is_bf16():
        return value.to(tl.float32)  # exact; not every machine compares bf16
    else:
        return value


@triton.jit
def _pool(x, y, where, count, channels, width, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there, corner = i < count, _corner(i, channels, width)
    best = _load(x + corner, there)
    place = tl.zeros([block], tl.int32)
    for k in tl.static_range(1, 4):
        value = _load(x + corner + ((k // 2) * 2 * width + k % 2) * channels, there)
        # the first of equal ones; NaN stays, as in torch
        better = (value > best) | (value != value)
        best, place = tl.where(better, value, best), tl.where(better, k, place)
    clipped = best <= 0
    tl.store(y + i, tl.where(clipped, 0.0, best), there)
    tl.store(where + i, tl.where(clipped, 4, place).to(tl.uint8), there)


@triton.jit
def _spread(grad, where, out, count, channels, width, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there, corner = i < count, _corner(i, channels, width)
    value, place = _load(grad + i, there), tl.load(where + i, there).to(tl.int32)
    for k in tl.static_range(4):
        target = out + corner + ((k // 2) * 2 * width + k % 2) * channels
        tl.store(target, tl.where(place == k, value, 0.0), there)


def pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, C, H, W], H and W even -> ReLU of the maxima and their places (uint8), both [N, C, H/2,
    W/2]."""
    x = x.contiguous(memory_format=torch.channels_last)
    n, channels, height, width = x.shape
    y = _channels_last(x, n, channels, height // 2, width // 2)
    where = torch.empty_like(y, dtype=torch.uint8)
    _launch(_pool, x, y, where, y.numel(), channels, width // 2)
    return y, where


def spread(grad: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return the gradient [N, C, H/2, W/2] of the maxima at their places: [N, C, H, W]."""
    grad, where = (t.contiguous(memory_format=torch.channels_last) for t in (grad, where))
    n, channels, height, width = grad.shape
    out = _channels_last(grad, n, channels, 2 * height, 2 * width)
    _launch(_spread, grad, where, out, grad.numel(), channels, width)
    return out


def _channels_last(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _launch(
    kernel: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    count: int,
    channels: int,
    width: int,
) -> None:
    with torch.cuda.device_of(a):
        kernel[(triton.cdiv(count, BLOCK),)](a, b, c, count, channels, width, block=BLOCK)
