"""How stacked convolutions are computed: each client has weights of its own, so no ordinary convolution fits.

torch.func.vmap turns them into one convolution of as many groups as clients. The alternative here is an ordinary
convolution for every client, each on a CUDA stream of its own, so that they share the device: what a library does best,
many at a time. `python -m benchmarks.convolutions` compares them, and matrix products of patches with both.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedexp import tree
from fedexp.engine.network import FunctionalNetwork
from fedexp.errors import require_choice
from fedexp.models import Output
from fedexp.tree import Params

CONVOLUTIONS = ("auto", "grouped", "streams")
STREAMS = 16  # more than that are rarely at work on one device at the same time

One = Callable[..., torch.Tensor]  # of the tensors of one client


def uses_streams(convolution: str, device: torch.device) -> bool:
    """Whether clients convolve one by one; `auto`: on CUDA devices, where it was the fastest."""
    require_choice("hardware.convolution", convolution, CONVOLUTIONS)
    return convolution == "streams" or (convolution == "auto" and device.type == "cuda")


class StreamsNetwork:
    """The same network; inside vmap its stacked convolutions are one for each client."""

    def __init__(self, net: FunctionalNetwork):
        self.net = net

    def __call__(self, params: Params, x: torch.Tensor) -> Output:
        with _OneByOne():
            return self.net(params, x)

    def gradient(self, function: Callable[[Params], torch.Tensor], params: Params) -> tuple[Params, torch.Tensor]:
        return self.net.gradient(function, params)

    def slim(self, params: Params, x: torch.Tensor, width: float) -> torch.Tensor:
        with _OneByOne():
            return self.net.slim(params, x, width)

    def buffers(self) -> Params:
        return self.net.buffers()


class _OneByOne(TorchFunctionMode):
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
    # Weights that are not stacked (a teacher's) are shared by all clients: one ordinary convolution.
    stacked = all(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (input, weight))
    ones = _pair(stride) + _pair(dilation) + (groups,)
    return (input, weight, bias, _pair(padding)) if stacked and input.dim() == 4 and set(ones) == {1} else None


def _pair(value: Any) -> tuple[int, int]:
    """An int or one or two ints, as convolutions take them, as two."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * 2 if len(values) == 1 else values  # type: ignore[return-value]


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
) -> torch.Tensor:
    """F.conv2d(x [B, C, H, W], weight [O, C, h, w], bias [O], padding=padding); differentiable once."""
    if torch.is_autocast_enabled(x.device.type):  # before the clients part, not in each
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    y = _Convolution.apply(x, weight, padding)
    return y if bias is None else y + bias[:, None, None]


class _Convolution(Function):
    """Without bias."""

    @staticmethod
    def forward(x, weight, padding):
        return F.conv2d(x, weight, padding=padding)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad):
        of_x, of_weight, _ = ctx.needs_input_grad
        grads = list(_Gradients.apply(grad, *ctx.saved_tensors, ctx.padding, of_x, of_weight))
        return grads.pop(0) if of_x else None, grads.pop(0) if of_weight else None, None

    @staticmethod
    def vmap(info, in_dims, x, weight, padding):
        (y,), (dim,) = _batched([partial(F.conv2d, padding=padding)], in_dims[:2], x, weight)
        return y, dim


class _Gradients(Function):
    """Of a convolution by its input and by its weights, those that are asked for; a function of its own, so that vmap
    knows how to compute it."""

    @staticmethod
    def forward(grad, x, weight, padding, *wanted):
        return tuple(function(grad, x, weight) for function in _gradients(padding, *wanted))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("the gradient of a gradient: use hardware.convolution=grouped")

    @staticmethod
    def vmap(info, in_dims, grad, x, weight, padding, *wanted):
        return _batched(_gradients(padding, *wanted), in_dims[:3], grad, x, weight)


def _gradients(padding: tuple[int, int], of_x: bool, of_weight: bool) -> list[One]:
    """Functions of (gradient of the output, x, weight)."""

    def gradient(which: int, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ones, mask = (1, 1), [i == which for i in range(3)]
        return torch.ops.aten.convolution_backward(grad, x, weight, None, ones, padding, ones, False, (0, 0), 1, mask)[
            which
        ]

    return [partial(gradient, which) for which, wanted in enumerate((of_x, of_weight)) if wanted]


def _batched(
    functions: list[One], in_dims: tuple[int | None, ...], *inputs: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """(what each function gives, its stacked dimension): client by client where all inputs are stacked, else (such as
    in per-example gradients, vmap within vmap) as torch has it."""
    if None in in_dims:
        outputs = tuple(vmap(function, in_dims)(*inputs) for function in functions)
    else:
        stacked = [value.movedim(dim, 0) for value, dim in zip(inputs, in_dims, strict=True)]  # type: ignore[arg-type]
        outputs = side_by_side(functions, stacked)
    return outputs, (0,) * len(outputs)


def side_by_side(functions: list[One], stacked: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each function of each slice of the first dimension, on CUDA on streams; the results of a function stacked.

    The streams begin when all that was launched so far is done, and what is launched next waits for them. So memory that
    one side gives back is used by the other only when it is free, without the allocator being told of it. That does not
    hold between two streams, so what they share is allocated outside of them.
    """
    device, count = stacked[0].device, len(stacked[0])
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None
    rooms: dict[int, torch.Tensor] = {}

    def call(which: int, i: int) -> None:
        result = functions[which](*(value[i] for value in stacked))
        if which not in rooms:
            with torch.cuda.stream(here):
                rooms[which] = tree.room_for(result, count)
        rooms[which][i].copy_(result)

    tasks = [(which, i) for i in range(count) for which in range(len(functions))]
    streams = [] if here is None else _streams(device)[: len(tasks)]
    for stream in streams:
        stream.wait_stream(here)  # type: ignore[arg-type]
    try:
        for number, task in enumerate(tasks):
            with torch.cuda.stream(streams[number % len(streams)] if streams else None):
                call(*task)
    finally:
        for stream in streams:
            here.wait_stream(stream)  # type: ignore[union-attr]
    return tuple(rooms[which] for which in range(len(functions)))


@lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]
