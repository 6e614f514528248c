"""Computation of stacked convolutions: each client has weights of its own, so no ordinary
convolution fits.

torch.func.vmap turns them into one convolution of as many groups as clients. An alternative here is
an ordinary convolution for every client, each on a CUDA stream of its own, so that they share the
device: what a library does best, many at a time. `python -m benchmarks.convolutions` compares both
with matrix products of patches.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.func import vmap

from fedexp.core import tree

FEW_CHANNELS = 4  # of the input, at most, where weights get their gradient in another way
STREAMS = 16  # more than that are rarely at work on one device at the same time

One = Callable[..., torch.Tensor]  # of the tensors of one client
Dims = tuple[Any, ...]  # of the clients in each input: an int, or None where all clients share it


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
) -> torch.Tensor:
    """Compute F.conv2d(x [B, C, H, W], weight [O, C, h, w], bias [O]) with padding and stride;
    differentiable once."""
    return _Convolution.apply(*cast(x, weight, bias), padding, stride)


def cast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors as autocast has a convolution's inputs: before the clients part, not in
    each."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if t is None else t.to(dtype) for t in tensors)


class _Convolution(Function):
    """F.conv2d of plain convolutions."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        padding: tuple[int, int],
        stride: tuple[int, int],
    ) -> torch.Tensor:
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _, *ctx.shape = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        grads = iter(_Gradients.apply(grad, *ctx.saved_tensors, *ctx.shape, *wanted))
        return *(next(grads) if one else None for one in wanted), None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Dims,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        padding: tuple[int, int],
        stride: tuple[int, int],
    ) -> tuple[torch.Tensor, int]:
        function, dims = partial(F.conv2d, stride=stride, padding=padding), in_dims[:3]
        if bias is not None and None in dims:
            return vmap(function, dims)(x, weight, bias), 0
        if bias is not None:
            bias = bias.movedim(dims[2], 0)[:, :, None, None]
        (y,), (dim,) = _batched([function], dims[:2], x, weight, addend=bias)
        return y, dim


class _Gradients(Function):
    """The gradients of a convolution by its input, weights and bias, those that are asked for; a
    function of its own, so that vmap knows how to compute it."""

    @staticmethod
    def forward(
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        padding: tuple[int, int],
        stride: tuple[int, int],
        *wanted: bool,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(function(grad, x, weight) for function in gradients(padding, stride, *wanted))

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
        x: torch.Tensor,
        weight: torch.Tensor,
        padding: tuple[int, int],
        stride: tuple[int, int],
        *wanted: bool,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        of_x, of_weight, of_bias = wanted
        dims = in_dims[:3]
        few = (
            None not in dims
            and x.movedim(dims[1], 0).shape[2] <= FEW_CHANNELS
            and x.dtype != torch.bfloat16
        )
        grads = list(
            _batched(
                gradients(padding, stride, of_x, of_weight and not few, of_bias),
                dims,
                grad,
                x,
                weight,
            )[0]
        )
        if of_weight and few:
            grad, x, weight = (
                value.movedim(dim, 0) for value, dim in zip((grad, x, weight), dims, strict=True)
            )
            grads.insert(int(of_x), gradient_of_weights(grad, x, weight, padding, stride))
        return tuple(grads), (0,) * len(grads)


def gradients(
    padding: tuple[int, int], stride: tuple[int, int], of_x: bool, of_weight: bool, of_bias: bool
) -> list[One]:
    """Return the functions of (gradient of the output, x, weight)."""

    def gradient(
        which: int, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ones, mask = (1, 1), [i == which for i in range(3)]
        sizes = [len(weight)]  # of the bias
        shape = (sizes, stride, padding, ones, False, (0, 0), 1)
        return torch.ops.aten.convolution_backward(grad, x, weight, *shape, mask)[which]

    return [
        partial(gradient, which)
        for which, wanted in enumerate((of_x, of_weight, of_bias))
        if wanted
    ]


def gradient_of_weights(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
) -> torch.Tensor:
    """Compute stacked grad [S, B, O, H', W'], x [S, B, C, H, W], weight [S, O, C, h, w] -> [S, O,
    C, h, w], by matrix products of patches, one for each image.

    For few channels, as images have: cuDNN's way adds in any order, and the one that does not took
    sixteen times as long (H100, fp32 and tf32; in bf16 it has a good one).
    """
    images, channels = x.flatten(0, 1), x.shape[2]
    (h, w), (top, left) = weight.shape[3:], padding
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, left, left, top, top))
    # [S * B, H', W', C, h, w], a view
    windows = padded.unfold(1, h, stride[0]).unfold(2, w, stride[1])
    patches = windows.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)
    each = grad.flatten(0, 1).flatten(2) @ patches
    return (
        each.unflatten(0, x.shape[:2]).sum(1).unflatten(2, (h, w, channels)).permute(0, 1, 4, 2, 3)
    )


def _batched(
    functions: list[One],
    in_dims: tuple[int | None, ...],
    *inputs: torch.Tensor,
    addend: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return (what each function gives, its stacked dimension): client by client where all inputs
    are stacked, else (such as in per-example gradients, vmap within vmap) as torch has it, without
    the addend."""
    if None in in_dims:
        outputs = tuple(vmap(function, in_dims)(*inputs) for function in functions)
    else:
        stacked = [value.movedim(dim, 0) for value, dim in zip(inputs, in_dims, strict=True)]  # type: ignore[arg-type]
        outputs = side_by_side(functions, stacked, addend)
    return outputs, (0,) * len(outputs)


def side_by_side(
    functions: list[One], stacked: list[torch.Tensor], addend: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Apply each function to each slice of the first dimension, on CUDA on streams; return the
    results of a function stacked, with the slices of the addend added.

    The streams begin when all that was launched so far is done, and what is launched next waits for
    them. So memory that one side gives back is used by the other only when it is free, without the
    allocator being told of it. That does not hold between two streams, so what they share is
    allocated outside of them.
    """
    device, count = stacked[0].device, len(stacked[0])
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None
    rooms: dict[int, torch.Tensor] = {}

    def call(which: int, i: int) -> None:
        result = functions[which](*(value[i] for value in stacked))
        if which not in rooms:
            with torch.cuda.stream(here):
                rooms[which] = tree.room_for(result, count)
        if addend is None:
            rooms[which][i].copy_(result)
        else:
            torch.add(result, addend[i], out=rooms[which][i])

    calls = [(which, i) for i in range(count) for which in range(len(functions))]
    streams = [] if here is None else _streams(device)[: len(calls)]
    for stream in streams:
        stream.wait_stream(here)  # type: ignore[arg-type]
    try:
        for number, arguments in enumerate(calls):
            with torch.cuda.stream(streams[number % len(streams)] if streams else None):
                call(*arguments)
    finally:
        for stream in streams:
            here.wait_stream(stream)  # type: ignore[union-attr]
    return tuple(rooms[which] for which in range(len(functions)))


@lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]
