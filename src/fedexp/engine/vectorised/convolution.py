"""Convolutions and linear layers of several clients, where each client has separate weights.

torch.func.vmap converts the convolutions of several clients to one grouped convolution with one
group per client. This module runs one ordinary convolution per client instead, on CUDA in several
streams at the same time. With ten clients, this took 0.5 to 1 times as long as a grouped
convolution on an H200 (benchmarks/RESULTS.md), and 0.92 times as long on a CPU.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedexp.core import tree
from fedexp.core.private.torch_internals import is_wrapped
from fedexp.engine.vectorised import pooled_convolutions
from fedexp.models import pooling

FEW_CHANNELS = 4  # maximum number of input channels for which `gradient_of_weights` is used
STREAMS = 16  # with more streams, a device rarely runs all of them at the same time

Pair = tuple[int, int]
One = Callable[..., Tensor]  # function of the tensors of one client
# the dimension of the clients in each input, or None if all clients share the input
Dims = tuple[Any, ...]


class PerClientLayers(TorchFunctionMode):
    """Mode that replaces F.conv2d by `convolve`, F.linear by `apply_linear`, and pooled
    convolutions by kernels for them."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is pooling.convolve_and_pool:
            if pooled_convolutions.applies(*args):
                return pooled_convolutions.convolve_and_pool(*args)
            with self:  # for the convolutions of the layers
                return pooling.in_layers(*args)
        return REPLACED.get(function, function)(*args, **(kwargs or {}))


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Compute F.conv2d, inside vmap with one convolution per client if possible.

    This requires that the input and the weight are both stacked and that the convolution has no
    dilation and no groups. The result then has first derivatives, but no second derivatives.
    """
    # Cast once for all clients. On CUDA inside vmap, torch 2.11 does not cast the bias of some
    # convolutions. torch has no autocast for the meta device.
    if not input.is_meta and torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    plain = not isinstance(padding, str) and {*_pair(dilation), groups} == {1}
    # If clients share the weights, such as those of a teacher, one convolution is enough.
    if plain and is_wrapped(input) and is_wrapped(weight) and input.dim() == 4:
        return _Convolution.apply(input, weight, bias, _pair(padding), _pair(stride))
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def apply_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear. Inside vmap on a GPU, F.linear would also multiply the bias by 1."""
    if bias is None or not (is_wrapped(input) and input.dim() == 2):
        return F.linear(input, weight, bias)
    if not input.is_meta and torch.is_autocast_enabled(input.device.type):
        bias = bias.to(torch.get_autocast_dtype(input.device.type))
    return input @ weight.mT + bias


REPLACED = {F.conv2d: convolve, F.linear: apply_linear}


def _pair(value: Any) -> Pair:
    """Return an option of a convolution, given as one int or two, as a pair of ints."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * 2 if len(values) == 1 else values  # type: ignore[return-value]


class _Convolution(Function):
    """F.conv2d without dilation and groups, and with one convolution per client under vmap."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: Pair,
        stride: Pair,
    ) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _, *ctx.shape = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:3]
        grads = iter(_Gradients.apply(grad, *ctx.saved_tensors, *ctx.shape, *wanted))
        return *(next(grads) if one else None for one in wanted), None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Dims,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: Pair,
        stride: Pair,
    ) -> tuple[Tensor, int]:
        function = partial(F.conv2d, stride=stride, padding=padding)
        dims = in_dims[:2] if bias is None else in_dims[:3]
        if None in dims:  # vmap within vmap, as in per-example gradients
            return vmap(function, in_dims[:3])(x, weight, bias), 0
        addend = None if bias is None else bias.movedim(dims[2], 0)[:, :, None, None]
        stacked = [x.movedim(dims[0], 0), weight.movedim(dims[1], 0)]
        return apply_per_client([function], stacked, addend)[0], 0


class _Gradients(Function):
    """The requested gradients of a convolution with respect to its input, weight and bias.

    A separate autograd function computes them, because it can define their behaviour under vmap.
    """

    @staticmethod
    def forward(
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        padding: Pair,
        stride: Pair,
        *wanted: bool,
    ) -> tuple[Tensor, ...]:
        return tuple(function(grad, x, weight) for function in gradients(padding, stride, *wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(
            "the vectorised engine does not support second derivatives of convolutions; set"
            " hardware.engine=sequential"
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Dims,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        padding: Pair,
        stride: Pair,
        *wanted: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        of_x, of_weight, of_bias = wanted
        dims = in_dims[:3]
        if None in dims:
            functions = gradients(padding, stride, *wanted)
            found = [vmap(function, dims)(grad, x, weight) for function in functions]
            return tuple(found), (0,) * len(found)
        grad, x, weight = (
            grad.movedim(dims[0], 0),
            x.movedim(dims[1], 0),
            weight.movedim(dims[2], 0),
        )
        few = x.shape[2] <= FEW_CHANNELS and x.dtype != torch.bfloat16
        functions = gradients(padding, stride, of_x, of_weight and not few, of_bias)
        found = list(apply_per_client(functions, [grad, x, weight]))
        if of_weight and few:
            found.insert(int(of_x), gradient_of_weights(grad, x, weight, padding, stride))
        return tuple(found), (0,) * len(found)


def gradients(padding: Pair, stride: Pair, of_x: bool, of_weight: bool, of_bias: bool) -> list[One]:
    """Return functions that compute the requested gradients.

    The arguments of each function are the gradient of the output, x and the weight.
    """

    def gradient(which: int, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ones, mask = (1, 1), [i == which for i in range(3)]
        sizes = [len(weight)]  # of the bias
        shape = (sizes, stride, padding, ones, False, (0, 0), 1)
        return torch.ops.aten.convolution_backward(grad, x, weight, *shape, mask)[which]

    wanted = (of_x, of_weight, of_bias)
    return [partial(gradient, which) for which in range(3) if wanted[which]]


def gradient_of_weights(
    grad: Tensor, x: Tensor, weight: Tensor, padding: Pair, stride: Pair = (1, 1)
) -> Tensor:
    """Compute the gradients of stacked weights with one matrix product per image.

    This is meant for inputs with few channels, such as images. The default algorithm of cuDNN adds
    in a nondeterministic order, and its deterministic algorithm took sixteen times as long on an
    H100 in fp32 and tf32 (in bf16, it is fast).

    grad: [S, B, O, H', W'], the gradient of the output.
    x: [S, B, C, H, W].
    weight: [S, O, C, h, w].
    """
    images, channels = x.flatten(0, 1), x.shape[2]
    (h, w), (top, left) = weight.shape[3:], padding
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, left, left, top, top))
    # [S * B, H', W', C, h, w], a view
    windows = padded.unfold(1, h, stride[0]).unfold(2, w, stride[1])
    patches = windows.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)
    each = grad.flatten(0, 1).flatten(2) @ patches
    total = each.unflatten(0, x.shape[:2]).sum(1)
    return total.unflatten(2, (h, w, channels)).permute(0, 1, 4, 2, 3)


def apply_per_client(
    functions: list[One], stacked: list[Tensor], addend: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Apply each function to the tensors of each client, on CUDA in several streams.

    stacked: the arguments of the functions, stacked along the first dimension.
    addend: a tensor [S, ...] to add to the results, or None.

    Returns the stacked results of each function.

    The side streams start when all earlier work on the main stream has finished, and later work on
    the main stream waits for the side streams. Therefore, each side can safely reuse memory that
    the other side frees. This is not true between two side streams, so the results, to which
    several side streams write, are allocated on the main stream.
    """
    device, count = stacked[0].device, len(stacked[0])
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None
    rooms: dict[int, Tensor] = {}

    def call(which: int, i: int) -> None:
        result = functions[which](*(value[i] for value in stacked))
        if which not in rooms:
            with torch.cuda.stream(here):
                rooms[which] = tree.empty_stack(result, count)
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
