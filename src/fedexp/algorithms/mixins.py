"""Base classes of algorithms whose clients do not train, or keep a part of the model."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
)
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.tree import Params, Tree


class OnePass(FedAvg):
    """Base class for algorithms and exchanges whose clients do not train.

    In `finish`, a client makes one pass over all its examples, without augmentation.
    """

    trains_model = False
    augments = False
    skips_batches = False
    fresh_optimizer = "its clients do not train"

    def epochs(self, local: LocalTraining) -> int:
        return 1

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Return the arguments unchanged, with the loss 0."""
        return params, memory, torch.zeros_like(ctx.steps)


class KeepsPart(FedAvg, ABC):
    """Base class for algorithms in which each client keeps a part of the model.

    This part starts with the values of the initial model.
    """

    fresh_optimizer = "the state of its clients is a part of the model"

    @abstractmethod
    def keeps(self, name: str) -> bool:
        """Return whether the client keeps this parameter or running statistic."""

    def kept_part(self, values: Params) -> Params:
        return {name: value for name, value in values.items() if self.keeps(name)}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return self.kept_part(params)

    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        return ctx.server["params"] | ctx.client

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {"params": params}, self.kept_part(params | net.buffers())

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        return server["params"] | state

    def counted(self, sent: Tree, up: bool) -> Tree:
        shared: Tree = {}
        for part in ("params", "buffers"):
            own = self.kept_part(sent[part])
            shared[part] = {k: v for k, v in sent[part].items() if k not in own}
        return sent | shared


class KeepsModel(KeepsPart):
    """Base class for algorithms and exchanges whose clients train a model that is never sent."""

    trains_model = False
    keeps_buffers = True

    def keeps(self, name: str) -> bool:
        return True

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {}, params | net.buffers()

    def counted(self, sent: Tree, up: bool) -> Tree:
        return {}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        return server
