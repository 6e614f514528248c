"""ReLU of 2 x 2 max-pooling, which is a good part of a step of a small network: one fast way each
for CPU and CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from fedexp.core.private.of_torch import in_transform
from fedexp.core.triton_kernels import load_kernels, stacked_first

_twice: ContextVar[bool] = ContextVar("twice", default=False)


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """While the block runs, pooling is torch's own, whose gradient has a gradient, also on CUDA."""
    token = _twice.set(True)
    try:
        yield
    finally:
        _twice.reset(token)


def differentiable_once() -> bool:
    """Return whether a gradient without a gradient is enough."""
    return not _twice.get()


def pooled_convolution(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return pooled(layer(x)), for which a TorchFunctionMode may have one operation."""
    if has_torch_function((x,)):
        return handle_torch_function(pooled_convolution, (x,), layer, x)
    return pooled(layer(x))


def pooled(x: torch.Tensor) -> torch.Tensor:
    """ReLU of 2 x 2 max-pooling of x [N, C, H, W]: ReLU is monotone, so it commutes with max, 4
    times fewer of them."""
    if x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0:
        if x.device.type == "cuda" and differentiable_once() and kernels():
            return _Pooled.apply(x)[0]
        stacked = in_transform()
        ordinary = torch.is_grad_enabled() or stacked or x.device.type != "cpu"
        if not ordinary and x.is_contiguous(memory_format=torch.channels_last):
            return _maxima(x).relu_()
    return F.relu(F.max_pool2d(x, 2, 2))


def _maxima(x: torch.Tensor) -> torch.Tensor:
    """torch's pooling notes where each maximum was, which only a gradient needs: a third of the
    time without."""
    n, c, h, w = x.shape
    rows = x.permute(0, 2, 3, 1).view(n, h // 2, 2, w // 2, 2 * c)
    pairs = torch.maximum(rows[:, :, 0], rows[:, :, 1]).view(n, h // 2, w // 2, 2, c)
    return torch.maximum(pairs[..., 0, :], pairs[..., 1, :]).permute(0, 3, 1, 2)


@lru_cache
def kernels() -> Any:
    """Return the module of the kernels; None where Triton is missing or cannot compile."""
    return load_kernels("fedexp.models.pooling_kernels", _first_use, "pooling")


def _first_use(kernels: Any) -> None:
    kernels.spread(*kernels.pool(torch.zeros(1, 1, 2, 2, device="cuda")))


class _Pooled(Function):
    """x -> (pooled, places of the maxima)."""

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels().pool(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros as the gradient of the places
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: None) -> torch.Tensor | None:
        return None if grad is None else _Spread.apply(grad, *ctx.saved_tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, ...], x: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, int]]:
        y, where = _Pooled.apply(x.movedim(in_dims[0], 0).flatten(0, 1))
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in (y, where)), (0, 0)


class _Spread(Function):
    """Map the gradient of the pooled image to that of the image; a function of its own, so that
    vmap knows it."""

    @staticmethod
    def forward(grad: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return kernels().spread(grad, where)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
        raise NotImplementedError("the gradient of a gradient through pooling on CUDA")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], grad: torch.Tensor, where: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        first = (stacked_first(info, t, dim) for t, dim in zip((grad, where), in_dims, strict=True))
        return _Spread.apply(*(t.flatten(0, 1) for t in first)).unflatten(
            0, (info.batch_size, -1)
        ), 0
