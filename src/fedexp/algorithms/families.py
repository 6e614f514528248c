"""Optional bases of algorithms, for hooks that only some algorithms need.

FedAvg (base.py) declares the hooks that every algorithm may override. An algorithm that needs more
inherits from one or more of these bases, as in `class FedRep(HeadThenBody, Personal)`. The training
loop checks for the bases with `isinstance`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

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
    ServerNetwork,
    ServerRound,
)
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core.tree import Params, Tree


class OwnModel(FedAvg):
    """Base class for algorithms that change the model or need to know its layers."""

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        """Return the model in the form that this algorithm trains and tests.

        PyTorch's random number generator is seeded before the call.
        """
        return module

    def fitted(self, module: nn.Module) -> Self:
        """Return a copy of the algorithm that stores properties of the model, such as layer names.

        Raises ConfigError if the algorithm is not defined for this model.
        """
        return self


class OwnStart(FedAvg, ABC):
    """Base class for algorithms whose local training does not start from the global model."""

    @abstractmethod
    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        """Return the parameters from which local training starts.

        If the parameters include running statistics, these replace the global model's.
        """


class OwnTraining(FedAvg):
    """Base class for algorithms that choose examples, epochs or learning rate of local training."""

    def training_part(
        self, federation: Federation, client: int
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Return the indices of the examples that this client trains on.

        If the result is a tuple of several arrays, each batch contains examples from only one of
        them.
        """
        return federation.parts[client]

    def epochs(self, local: LocalTraining) -> int:
        """Return the number of passes over the local data per round."""
        return local.epochs

    def local_lr(self, lr: float) -> float:
        """Return the learning rate of local training, given the round's learning rate."""
        return lr

    def extra_batches(self, federation: Federation, local: LocalTraining) -> int:
        """Return the maximum number of batches of the extra pass that `base.fresh_pass` yields."""
        return 0


class OnePass(OwnTraining):
    """Base class for algorithms and exchanges whose clients do not train.

    In `finish`, a client makes one pass over its examples, without augmentation.
    """

    trains_model = False
    augments = False
    fresh_optimizer = "its clients do not train"

    def epochs(self, local: LocalTraining) -> int:
        return 1

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Return the arguments unchanged, with the loss 0."""
        return params, memory, torch.zeros_like(ctx.steps)


class Prepared(FedAvg, ABC):
    """Base class for algorithms whose `client_setup` computes one result for each batch."""

    @abstractmethod
    def prepare(self, net: Network, batch: Batch, mask: Tensor, ctx: Context) -> Tree:
        """Return the result for one batch of the first pass over the client's data.

        `client_setup` must return the stacked results for all batches of the first pass. Engines
        rely on this: they compute the results batch by batch and skip the padding of clients that
        have fewer batches.
        """


class ServerTraining(FedAvg, ABC):
    """Base class for algorithms whose server trains the aggregated model."""

    @abstractmethod
    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        """Train the aggregated model further, and return the server's new state.

        server: the state after aggregation, with averaged "buffers".
        """


class Personal(OwnStart, ABC):
    """Base class for algorithms whose clients have personal models."""

    # whether the algorithm has no global model; the clients' models are then tested instead, and
    # the results are means over all clients
    tests_clients: ClassVar[bool] = False

    @abstractmethod
    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the client's personal model, which the personalised test evaluates.

        If the model includes running statistics, these replace the global model's. state: the
        client's state, or the result of `client_init` if the client has not taken part yet.
        """

    def personal_broadcast(
        self, server: Tree, client: int, kept: Mapping[int, Tree], rng: np.random.Generator
    ) -> Tree:
        """Return what the server sends only to this client.

        kept: the states of all clients that have taken part so far. The server may use only what
        clients have sent to it.
        """
        return {}

    def counted(self, sent: Tree, up: bool) -> Tree:
        """Return the part of the transmitted tree that counts as traffic.

        The rest is not sent in the published method, but only in fedexp, for example to build a
        generic model for testing.

        sent: if `up` is true, the messages of a cohort, with leaves of shape [|S|, ...]; otherwise
        the broadcast, with the client's personal broadcast under "personal". Both include
        "buffers".
        """
        return sent


class KeepsPart(Personal):
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


class MultiExchange(FedAvg):
    """Base class for algorithms with several exchanges per round or several client roles."""

    fresh_optimizer = "its clients train for several purposes"

    def exchanges(self, federation: Federation) -> Sequence[FedAvg]:
        """Return the exchanges of a round in the order in which they take place.

        In each exchange, the server sends a broadcast, the same cohort trains, and the server
        aggregates the messages.
        """
        return (self,)

    def closing_exchanges(self, federation: Federation) -> Sequence[FedAvg]:
        """Return additional exchanges, in which all clients take part at the end of a task.

        They are not run after the last task.
        """
        return ()

    def roles(
        self, federation: Federation, clients: Sequence[int], rng: np.random.Generator
    ) -> Sequence[FedAvg]:
        """Return one algorithm for each client of the cohort. It provides the client-side hooks."""
        return [self] * len(clients)


class TaskHeads(FedAvg, ABC):
    """Base class for algorithms whose model has separate outputs for each task.

    When a task is tested, only the outputs of this task are used.
    """

    @abstractmethod
    def heads(self, tasks: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Return, for each task and class, the index of the output that predicts it, int [T, C].

        An index of -1 excludes the class from the predictions for this task. If the result is None,
        output c predicts class c in every task. tasks: the classes of each task.
        """


def exchanges_of(algorithm: FedAvg, federation: Federation) -> Sequence[FedAvg]:
    """Return the exchanges of a round of any algorithm (see `MultiExchange`)."""
    if isinstance(algorithm, MultiExchange):
        return algorithm.exchanges(federation)
    return (algorithm,)


def roles_of(
    algorithm: FedAvg, federation: Federation, clients: Sequence[int], rng: np.random.Generator
) -> Sequence[FedAvg]:
    """Return the algorithm that each client of a cohort follows (see `MultiExchange`)."""
    if isinstance(algorithm, MultiExchange):
        return algorithm.roles(federation, clients, rng)
    return [algorithm] * len(clients)


def training_part_of(
    algorithm: FedAvg, federation: Federation, client: int
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Return the indices of the examples that a client trains on (see `OwnTraining`)."""
    if isinstance(algorithm, OwnTraining):
        return algorithm.training_part(federation, client)
    return federation.parts[client]


def epochs_of(algorithm: FedAvg, local: LocalTraining) -> int:
    """Return the number of passes over the local data per round."""
    return algorithm.epochs(local) if isinstance(algorithm, OwnTraining) else local.epochs


def heads_of(algorithm: FedAvg, tasks: Sequence[Sequence[int]]) -> Tensor | None:
    """Return the result of `TaskHeads.heads` as a tensor, int64 [T, C].

    If the result is None, output c predicts class c in every task.
    """
    heads = algorithm.heads(tasks) if isinstance(algorithm, TaskHeads) else None
    return None if heads is None else torch.from_numpy(heads)
