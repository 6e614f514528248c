"""How stacked convolutions are computed: each client has weights of its own, so no ordinary convolution fits.

torch.func.vmap turns them into one convolution of as many groups as clients. The alternative here writes the patches
out (im2col) and multiplies matrices, one batched product for all clients: more memory, but shapes that every GPU
library computes at full speed, whatever the number of input channels of a group.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from fedexp.engine.network import FunctionalNetwork
from fedexp.errors import require_choice
from fedexp.models import Output
from fedexp.tree import Params

CONVOLUTIONS = ("auto", "grouped", "unfold")


def unfolds(convolution: str, device: torch.device) -> bool:
    """Whether patches are written out; `auto`: on CUDA devices (expected to be faster there, not measured)."""
    require_choice("hardware.convolution", convolution, CONVOLUTIONS)
    return convolution == "unfold" or (convolution == "auto" and device.type == "cuda")


class UnfoldingNetwork:
    """The same network; inside vmap its stacked convolutions are matrix products."""

    def __init__(self, net: FunctionalNetwork):
        self.net = net

    def __call__(self, params: Params, x: torch.Tensor) -> Output:
        with _Unfolding():
            return self.net(params, x)

    def gradient(self, function: Callable[[Params], torch.Tensor], params: Params) -> tuple[Params, torch.Tensor]:
        return self.net.gradient(function, params)

    def slim(self, params: Params, x: torch.Tensor, width: float) -> torch.Tensor:
        with _Unfolding():
            return self.net.slim(params, x, width)

    def buffers(self) -> Params:
        return self.net.buffers()


class _Unfolding(TorchFunctionMode):
    """Replaces F.conv2d where input and weight are both stacked and the convolution is a plain one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.conv2d:
            call = _plain(*args, **kwargs)
            if call is not None:
                return convolve(*call)
        return function(*args, **kwargs)


def _plain(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[int, int]] | None:
    """The arguments of `convolve`, or None where torch's own convolution is to be used."""
    if isinstance(padding, str):
        return None
    pads, ones = _pair(padding), _pair(stride) + _pair(dilation) + (groups,)
    # Weights that are not stacked (a teacher's) are shared by all clients: one ordinary convolution.
    stacked = all(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (input, weight))
    fits = input.dim() == 4 and all(p < k for p, k in zip(pads, weight.shape[2:], strict=True))
    return (input, weight, bias, pads) if stacked and fits and set(ones) == {1} else None


def _pair(value: Any) -> tuple[int, int]:
    """An int or one or two ints, as convolutions take them, as two."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * 2 if len(values) == 1 else values  # type: ignore[return-value]


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
) -> torch.Tensor:
    """F.conv2d(x [B, C, H, W], weight [O, C, h, w], bias [O], padding=padding), padding smaller than the kernel."""
    if torch.is_autocast_enabled(x.device.type):  # before the patches are written, not after
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    y, _ = _Convolution.apply(x, weight, padding)
    return y if bias is None else y + bias[:, None, None]


def _patches(x: torch.Tensor, size: tuple[int, int], padding: tuple[int, int]) -> torch.Tensor:
    """[B, C, H, W] -> [B, H', W', h * w * C], written in one pass; rows of patches are contiguous in memory.

    Not F.unfold, which on CUDA launches a kernel for every example.
    """
    (h, w), (top, left) = size, padding
    image = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, top, top))
    windows = image.unfold(1, h, 1).unfold(2, w, 1)  # [B, H', W', C, h, w], a view
    return windows.permute(0, 1, 2, 4, 5, 3).flatten(3)


def _multiply(patches: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Patches [B, H', W', h * w * C] and weight [O, C, h, w] -> [B, O, H', W'], channels-last in memory."""
    rows = patches.flatten(0, 2) @ weight.permute(2, 3, 1, 0).flatten(0, 2)
    return rows.unflatten(0, patches.shape[:3]).permute(0, 3, 1, 2)


class _Convolution(Function):
    """Without bias. Returns the patches too: only inputs and outputs can be kept for the backward pass under vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, padding):
        patches = _patches(x, weight.shape[2:], padding)
        return _multiply(patches, weight), patches

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, weight, ctx.padding = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros as the gradient of the patches
        ctx.save_for_backward(weight, output[1])

    @staticmethod
    def backward(ctx, grad, _):
        weight, patches = ctx.saved_tensors
        out, channels, h, w = weight.shape
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # Stride 1: the gradient is itself a convolution, with the kernels turned round.
            around = (h - 1 - ctx.padding[0], w - 1 - ctx.padding[1])
            grad_x = _multiply(_patches(grad, (h, w), around), weight.flip(2, 3).transpose(0, 1))
        if ctx.needs_input_grad[1]:
            rows = grad.permute(1, 0, 2, 3).flatten(1) @ patches.flatten(0, 2)
            grad_weight = rows.view(out, h, w, channels).permute(0, 3, 1, 2)
        return grad_x, grad_weight, None
