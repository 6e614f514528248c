"""Find out whether the vectorised engine can train a network."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedexp.core import tree
from fedexp.core.errors import reason_of
from fedexp.core.rng import seeded
from fedexp.core.tree import Params
from fedexp.engine.batch_norm import KINDS
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.vectorised.clients import ClientNetwork

CLIENTS = 2


def find_obstacle(module: nn.Module, x: Tensor) -> str | None:
    """Return why the vectorised engine cannot train a network, or None if it can.

    In a trial, two clients compute a gradient in train mode and logits in eval mode. The trial runs
    on the meta device and computes only shapes, so it takes little time and memory.

    module: the network, which is not changed.
    x: inputs [B, ...], whose values are not read.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "running_mean", None) is not None and not isinstance(layer, KINDS):
            return describe(name, layer, "has running statistics, but is not nn.BatchNorm1d to 3d")
    network, active = on_meta(module), [""]  # names of the modules that run, the innermost last

    def leave(*_: object) -> None:
        if states() != before:  # vmap only notices draws from torch's generators
            raise RuntimeError("random numbers of Python or NumPy")
        active.pop()

    for name, layer in network.named_modules():
        layer.register_forward_pre_hook(lambda *_, name=name: active.append(name))
        layer.register_forward_hook(leave)
    try:
        with seeded(0):
            before = states()
            try_step(network, torch.empty_like(x, device="meta"))
    except Exception as error:  # the network may be a user's
        reason = reason_of(error)
        what = f"is not supported by torch.func.vmap: {reason}"
        if "random" in reason:
            what = "draws random numbers in training"
        return describe(active[-1], module.get_submodule(active[-1]), what)
    return None


def states() -> tuple[Any, ...]:
    """Return the states of the global generators of Python and NumPy."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 (what users call)
    _, keys, *others = numpy
    return random.getstate(), keys.tolist(), others


def describe(name: str, layer: nn.Module, what: str) -> str:
    return f"{f'the layer {name}' if name else 'the network'} ({type(layer).__name__}) {what}"


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a network on the meta device, without copying its parameters."""
    memo: dict[int, Tensor] = {}
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for weight in module.parameters():
        there = torch.empty_like(weight, device="meta")
        memo[id(weight)] = nn.Parameter(there, weight.requires_grad)
    return copy.deepcopy(module, memo)


def try_step(network: nn.Module, x: Tensor) -> None:
    """Compute gradients and logits of CLIENTS clients together, on the same inputs x [B, ...]."""
    net = FunctionalNetwork(network, "fp32")

    def step(params: Params, buffers: Params, x: Tensor, mask: Tensor) -> tuple[Params, Tensor]:
        client = ClientNetwork(net, buffers)
        grads, _ = client.gradient(lambda p: client(p, x, mask).logits.sum(), params)
        return grads, client(params, x).logits

    with torch.device("meta"):
        values = net.parameters(), net.buffers(), x, torch.ones(len(x))
        vmap(step)(*tree.map(lambda leaf: torch.stack([leaf] * CLIENTS), values))
