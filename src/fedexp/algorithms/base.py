"""FedAvg, and with it the hooks by which every other algorithm says what it does differently.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1:
each sampled client runs E epochs of SGD from the global model, the server averages the local models.
Weights: p_k proportional to n_k (FedNTD Eq. 2); `weighting=uniform` is the 1/|S_t| of FedNTD Algorithm 1.

Client-side hooks (begin .. finish) are pure and safe under torch.func.vmap: no `.item()`, no `if tensor`, no indexing
by boolean masks, no in-place writes to trees that they were given.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

from fedexp import tree
from fedexp.models import Output
from fedexp.settings import LocalTraining
from fedexp.tree import Params, Tree


class Network(Protocol):
    """A model as a function of its parameters. The received global model and other references run in eval mode."""

    def __call__(self, params: Params, x: torch.Tensor) -> Output: ...


class Batch(NamedTuple):
    """One local mini-batch."""

    x: torch.Tensor  # [B, channels, height, width], normalised and augmented
    y: torch.Tensor  # int64 [B]
    mask: torch.Tensor | None  # [B], 1 = example, 0 = padding; None: every row is an example
    step: int  # which local step of the round this is, from 0


class ClientData(Protocol):
    """One client's view of the training data during one round."""

    def batches(self) -> Iterator[Batch]:
        """The batches of this round in the order in which they are trained on."""

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Training examples by number, normalised and not augmented: (x [n, ...], y [n])."""


@dataclass(frozen=True)
class Federation:
    """What the server knows of its clients."""

    parts: tuple[np.ndarray, ...]  # client -> numbers of its training examples
    counts: np.ndarray  # int [K, C] training labels per client
    weighting: str  # examples | uniform

    @property
    def num_clients(self) -> int:
        return len(self.parts)

    @property
    def num_classes(self) -> int:
        return self.counts.shape[1]


@dataclass(frozen=True)
class Context:
    """Everything that a client-side hook may read."""

    server: Tree  # what the server sent, {"params": ..., ...}
    client: Tree  # what this client kept from its last participation
    plan: Tree  # what `plan` prepared for this round
    begin: Tree  # what `begin` computed for this round
    lr: float  # of this round
    steps: torch.Tensor  # scalar: local steps of this client in this round
    local: LocalTraining


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean of values [B] over the rows that are examples; 0 when there is none."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """The base of all algorithms: every hook with its FedAvg meaning."""

    def server_init(self, params: Params, info: Federation) -> Tree:
        """The server's state; `params` is the global model."""
        return {"params": params}

    def client_init(self, params: Params, info: Federation) -> Tree:
        """What one client keeps between rounds, before it first takes part. `params`: the initial global model."""
        return {}

    def plan(self, info: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Host side, before training: numpy arrays such as extra example numbers or roles of this round."""
        return {}

    def begin(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        """Constants of one client's round, such as outputs of a teacher on fixed inputs."""
        return {}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> torch.Tensor:
        """Loss of each example, [B], not reduced: the engine reduces and masks."""
        return F.cross_entropy(net(params, batch.x).logits, batch.y, reduction="none")

    def penalty(self, net: Network, params: Params, ctx: Context) -> torch.Tensor | float:
        """A scalar added to the mean of the example losses."""
        return 0.0

    def correct(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        """Changes the gradient before weight decay and momentum."""
        return grads

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> torch.Tensor:
        """What a local step descends: mean of the example losses plus the penalty; a scalar."""
        return masked_mean(self.example_loss(net, params, batch, ctx), batch.mask) + self.penalty(net, params, ctx)

    def local_step(
        self, net: Network, params: Params, momentum: Params, batch: Batch, ctx: Context
    ) -> tuple[Params, Params, torch.Tensor]:
        """One step of SGD with momentum and coupled weight decay; returns (params, momentum, loss)."""
        grads, loss = grad_and_value(lambda p: self.objective(net, p, batch, ctx))(params)
        grads, local = self.correct(grads, params, batch, ctx), ctx.local
        momentum = {k: local.momentum * momentum[k] + grads[k] + local.weight_decay * params[k] for k in params}
        return {k: params[k] - ctx.lr * momentum[k] for k in params}, momentum, loss

    def finish(self, net: Network, params: Params, data: ClientData, ctx: Context) -> tuple[Tree, Tree]:
        """After training: (message to the server, new client state)."""
        return {"params": params}, ctx.client

    def aggregate(self, server: Tree, messages: Tree, weights: torch.Tensor, info: Federation) -> Tree:
        """The new server state. messages: leaves [|S|, ...] in the order of the cohort; weights [|S|]."""
        return server | {"params": tree.weighted_mean(messages["params"], weights)}

    def refine(self, net: Network, server: Tree, messages: Tree, info: Federation) -> Tree:
        """Work on the server after aggregation, such as distillation."""
        return server
