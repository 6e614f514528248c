"""A network inside vmap whose stacked convolutions are computed in one of the ways of
`convolution`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fedexp.core.errors import require_choice
from fedexp.core.private.of_torch import is_wrapped
from fedexp.core.tree import Params
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.vectorised.convolution import convolve
from fedexp.models import Output

CONVOLUTIONS = ("auto", "grouped", "streams")


def stacked_way(convolution: str, device: torch.device) -> str:
    """Return how stacked convolutions are computed; `auto`: by streams on CUDA devices, where that
    was the fastest."""
    require_choice("hardware.convolution", convolution, CONVOLUTIONS)
    if convolution != "auto":
        return convolution
    return "streams" if device.type == "cuda" else "grouped"


class StackedNetwork:
    """A network like the given one; inside vmap its stacked convolutions are computed in one of the
    ways here."""

    def __init__(self, net: FunctionalNetwork, way: str):
        self.net, self.way = net, way

    def __call__(self, params: Params, x: torch.Tensor, mask: torch.Tensor | None = None) -> Output:
        with _Replaced(self.way):
            return self.net(params, x, mask)

    def in_training(
        self, params: Params, buffers: Params, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> Output:
        with _Replaced(self.way):
            return self.net.in_training(params, buffers, x, mask)

    def gradient(
        self, function: Callable[[Params], torch.Tensor], params: Params, moves: bool = True
    ) -> tuple[Params, torch.Tensor]:
        return self.net.gradient(function, params, moves)

    def slim(
        self, params: Params, x: torch.Tensor, width: float, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        with _Replaced(self.way):
            return self.net.slim(params, x, width, mask)

    def buffers(self) -> Params:
        return self.net.buffers()


class _Replaced(TorchFunctionMode):
    """Replaces F.conv2d where input and weight are both stacked and neither dilation nor groups are
    asked for."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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
) -> (
    tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[int, int], tuple[int, int]] | None
):
    """Return the arguments of `convolve`, or None where torch's own convolution is to be used."""
    if isinstance(padding, str):
        return None
    # Weights that are not stacked (a teacher's) are shared by all clients: one ordinary
    # convolution.
    stacked = all(is_wrapped(t) for t in (input, weight))
    plain = stacked and input.dim() == 4 and {*_pair(dilation), groups} == {1}
    return (input, weight, bias, _pair(padding), _pair(stride)) if plain else None


def _pair(value: Any) -> tuple[int, int]:
    """Return the one or two ints that convolutions accept, as two."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * 2 if len(values) == 1 else values  # type: ignore[return-value]
