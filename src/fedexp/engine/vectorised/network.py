"""The network that the hooks of one client see, inside vmap."""

from collections.abc import Callable

import torch
from torch.func import grad_and_value

from fedexp.algorithms.base import Batch, Network
from fedexp.core.tree import Params
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.vectorised.convolution import ClientByClient
from fedexp.models import Output


class ClientNetwork(Network):
    """A network with the running statistics of one client, as engine.network.LiveNetwork is in the
    sequential engine.

    The tree that `gradient` differentiates by runs in train mode, which moves the running
    statistics; any other goes through the network in eval mode. Nothing that came from outside is
    changed: `buffers` has what training made of it.
    """

    def __init__(self, net: FunctionalNetwork, buffers: Params, reference: Params | None = None):
        """Take over a network and the client's running statistics. reference: those with which
        models in eval mode are called; None: those that `net` holds, of the received model."""
        self.net, self._buffers, self._reference = net, buffers, reference or {}
        self._moving: Params | None = None
        self._batch: Batch | None = None

    def show(self, batch: Batch) -> Batch:
        """Remember the batch that the client works on, whose padding is known by its images."""
        self._batch = batch
        return batch

    def __call__(self, params: Params, x: torch.Tensor, mask: torch.Tensor | None = None) -> Output:
        if mask is None and self._batch is not None and x is self._batch.x:
            mask = self._batch.mask
        with ClientByClient():
            if params is not self._moving:
                # the very tree where it can be, which `net` may hold
                whole = self._reference | params if self._reference else params
                return self.net(whole, x, mask)
            moved = {name: value.clone() for name, value in self._buffers.items()}
            output = self.net.in_training(params, moved, x, mask)
        self._buffers = moved if mask is None else _where(mask.sum() > 0, moved, self._buffers)
        return output

    def gradient(
        self, function: Callable[[Params], torch.Tensor], params: Params, moves: bool = True
    ) -> tuple[Params, torch.Tensor]:
        def scored(moving: Params) -> tuple[torch.Tensor, Params]:
            self._moving = moving
            return function(moving), self._buffers

        before = self._buffers
        grads, (value, self._buffers) = grad_and_value(scored, has_aux=True)(params)
        self._moving = None
        if not moves:
            self._buffers = before
        return grads, value

    def slim(
        self, params: Params, x: torch.Tensor, width: float, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        with ClientByClient():
            return self.net.slim(params, x, width, mask)

    def buffers(self) -> Params:
        return self._buffers


def _where(any_example: torch.Tensor, moved: Params, before: Params) -> Params:
    """Return the running statistics after a batch, which is no batch where it has no example."""
    return {name: torch.where(any_example, value, before[name]) for name, value in moved.items()}
