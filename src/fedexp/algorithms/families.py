"""Optional bases of algorithms: what only some of them do, and the loop asks for by `isinstance`.

FedAvg (base.py) has the hooks that every algorithm may replace. An algorithm that does more names
one of these bases, such as `class FedRep(HeadThenBody, Personal)`. The part of continual methods
whose clients keep examples is in exemplars.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    Pixels,
    ServerNetwork,
    ServerRound,
)
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.tree import Params, Tree


class OwnModel(FedAvg):
    """Changes the model, or has to know its layers."""

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        """Return the model as this algorithm trains and tests it. Called with torch's generator
        seeded."""
        return module

    def fitted(self, module: nn.Module) -> Self:
        """Return the algorithm with what it has to know of the model, such as the names of its
        layers. Raises ConfigError for a model that it is not defined for."""
        return self


class OwnStart(FedAvg, ABC):
    """Clients do not start local training from the global model."""

    @abstractmethod
    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        """Return the parameters from which local training starts; running statistics among them
        replace the global model's."""


class OwnTraining(FedAvg):
    """Clients train on other examples, for other epochs or at another rate."""

    def training_part(
        self, federation: Federation, client: int
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Return the numbers of the examples that this client trains on; of several sets, each
        batch comes from one."""
        return federation.parts[client]

    def epochs(self, local: LocalTraining) -> int:
        """Return the number of passes over the local data in a round."""
        return local.epochs

    def local_lr(self, lr: float) -> float:
        """Return the learning rate of local training, from that of the round."""
        return lr

    def after(self, federation: Federation, local: LocalTraining) -> int:
        """Return the largest number of batches of another pass over the client's data that `finish`
        looks at (`base.fresh_pass`)."""
        return 0


class Prepared(FedAvg, ABC):
    """`client_setup` computes the same of every batch of the first pass."""

    @abstractmethod
    def prepare(self, net: Network, batch: Batch, mask: Tensor, ctx: Context) -> Tree:
        """Return what `client_setup` would of one batch, where it gives the same of every batch of
        the first pass, stacked: so an engine need not ask for the padding of shorter clients."""


class ServerTraining(FedAvg, ABC):
    """The server trains the aggregated model."""

    @abstractmethod
    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        """Return the server's state after work that follows aggregation, such as distillation;
        server["buffers"] has been averaged."""


class Personal(OwnStart, ABC):
    """Clients have models of their own."""

    @abstractmethod
    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the model that a client uses for itself, for the personalised test.

        Running statistics among its names replace the global model's. state: what the client keeps,
        from `client_init` before it first takes part. An algorithm without this hook has no
        personal models."""

    def personal_broadcast(
        self, server: Tree, client: int, kept: Mapping[int, Tree], rng: np.random.Generator
    ) -> Tree:
        """Return what the server sends to one client alone. `kept`: the states of all clients that
        have ever taken part, from which a server may use only what it was sent."""
        return {}

    def counted(self, sent: Tree, up: bool) -> Tree:
        """Return the part of what is sent that counts as traffic. The rest, such as what makes the
        generic model that is tested, is not sent by the method.

        sent: with up the messages of a cohort, leaves [|S|, ...], else the broadcast with what one
        client alone is sent under "personal"; both with the "buffers"."""
        return sent


class KeepsPart(Personal):
    """A part of the model stays with each client, which starts with the initial one."""

    @abstractmethod
    def keeps(self, name: str) -> bool:
        """Return whether a parameter or running statistic is the client's own."""

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


class MultiExchange(FedAvg):
    """A round has several exchanges, or clients with different roles."""

    def exchanges(self, federation: Federation) -> Sequence[FedAvg]:
        """Return the exchanges of a round: each sends, has the same cohort train, and aggregates,
        one after the other."""
        return (self,)

    def closing_exchanges(self, federation: Federation) -> Sequence[FedAvg]:
        """Return the exchanges with all clients at the end of a task that another follows."""
        return ()

    def roles(
        self, federation: Federation, clients: Sequence[int], rng: np.random.Generator
    ) -> Sequence[FedAvg]:
        """Return the algorithm whose client-side hooks each client of a cohort follows."""
        return [self] * len(clients)


class Continual(FedAvg):
    """The server prepares each task after the first."""

    def begin_task(self, server: Tree, initial: Params, federation: Federation) -> Tree:
        """Return the server's state at the start of a task after the first; `initial`: the initial
        model with its buffers."""
        return server


class TaskHeads(Continual, ABC):
    """Each task has its outputs of the model, which its test chooses."""

    @abstractmethod
    def heads(self, tasks: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Return which output of the model stands for a class in the test of a task, int [tasks,
        C], -1: not among the answers; None: output c stands for class c in every task. tasks: the
        classes of each."""


class Rehearsal(Continual, ABC):
    """The server needs the network at the start of a task."""

    @abstractmethod
    def rehearse(
        self,
        net: ServerNetwork,
        server: Tree,
        pixels: Pixels,
        federation: Federation,
        rng: np.random.Generator,
    ) -> Tree:
        """Return the server's state after work that follows `begin_task` and needs the network,
        such as making images of the old classes."""


def exchanges_of(algorithm: FedAvg, federation: Federation) -> Sequence[FedAvg]:
    """Return the exchanges of a round."""
    if isinstance(algorithm, MultiExchange):
        return algorithm.exchanges(federation)
    return (algorithm,)


def roles_of(
    algorithm: FedAvg, federation: Federation, clients: Sequence[int], rng: np.random.Generator
) -> Sequence[FedAvg]:
    """Return the algorithm that each client of a cohort follows."""
    if isinstance(algorithm, MultiExchange):
        return algorithm.roles(federation, clients, rng)
    return [algorithm] * len(clients)


def start_of(algorithm: FedAvg, net: Network, data: ClientData, ctx: Context) -> Params:
    """Return the parameters from which local training starts."""
    if isinstance(algorithm, OwnStart):
        return algorithm.initial_params(net, data, ctx)
    return ctx.server["params"]


def part_of(
    algorithm: FedAvg, federation: Federation, client: int
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Return the numbers of the examples that a client trains on, see `OwnTraining`."""
    if isinstance(algorithm, OwnTraining):
        return algorithm.training_part(federation, client)
    return federation.parts[client]


def epochs_of(algorithm: FedAvg, local: LocalTraining) -> int:
    """Return the number of passes over the local data in a round."""
    return algorithm.epochs(local) if isinstance(algorithm, OwnTraining) else local.epochs


def heads_of(algorithm: FedAvg, tasks: Sequence[Sequence[int]]) -> Tensor | None:
    """Return which output stands for a class in each task, int64 [T, C], see `TaskHeads`; None:
    output c stands for class c in every task."""
    heads = algorithm.heads(tasks) if isinstance(algorithm, TaskHeads) else None
    return None if heads is None else torch.from_numpy(heads)
