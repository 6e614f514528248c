"""Hooks for algorithms whose rounds have another shape than FedAvg's; most algorithms need none of
them.

FedAvg inherits these defaults: one exchange a round in which all clients of the cohort do the same,
`local.epochs` passes over the local data, and nothing that is special to a task of a scenario.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self, cast

import numpy as np
import torch
from torch import nn

from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Features,
    Federation,
    Network,
    Pixels,
    ServerNetwork,
)
from fedexp.core.settings import LocalTraining
from fedexp.core.tree import Params, Tree

if TYPE_CHECKING:
    from fedexp.algorithms.base import FedAvg


class RoundStructure:
    """Base of FedAvg: which exchanges a round has, who takes which part in them, how long, and what
    a task changes."""

    # --- tasks of a scenario

    def heads(self, tasks: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Return which output of the model stands for a class in the test of a task, int [tasks,
        C], -1: not among the answers; None: output c stands for class c in every task. tasks: the
        classes of each."""
        return None

    def begin_task(self, server: Tree, initial: Params, info: Federation) -> Tree:
        """Return the server's state at the start of a task after the first; `initial`: the initial
        model with its buffers."""
        return server

    def rehearse(
        self,
        net: ServerNetwork,
        server: Tree,
        pixels: Pixels,
        info: Federation,
        rng: np.random.Generator,
    ) -> Tree:
        """Return the server's state after work that follows `begin_task` and needs the network,
        such as making images of the old classes."""
        return server

    def keep_examples(
        self,
        server: Tree,
        features: Features,
        before: Federation,
        info: Federation,
        rng: np.random.Generator,
    ) -> Tree:
        """Return the server's state after the choice of the examples that clients keep of the task
        that has ended; it follows `begin_task`. features: those of training examples by number, [n,
        D], under the global model, as each client computes them of its own; before: the facts of
        that task."""
        return server

    def with_kept(self, server: Tree, info: Federation) -> Federation:
        """Return the facts of the task that is trained on, with the examples that clients have kept
        among theirs."""
        return info

    # --- personal models

    def personal_model(self, server: Tree, client: int, state: Tree, info: Federation) -> Params:
        """Return the model that a client uses for itself, for the personalised test.

        Running statistics among its names replace the global model's. state: what the client keeps,
        from `client_init` before it first takes part. An algorithm without this hook has no
        personal models."""
        return server["params"]

    keeps_buffers: ClassVar[bool] = (
        False  # its clients keep running statistics: `client_init` gets the initial ones too
    )

    def fitted(self, module: nn.Module) -> Self:
        """Return the algorithm with what it has to know of the model, such as the names of its
        layers. Raises ConfigError for a model that it is not defined for."""
        return self

    def counted(self, sent: Tree, up: bool) -> Tree:
        """Return the part of what is sent that counts as traffic. The rest, such as what makes the
        generic model that is tested, is not sent by the method.

        sent: with up the messages of a cohort, leaves [|S|, ...], else the broadcast with what one
        client alone is sent under "personal"; both with the "buffers"."""
        return sent

    # --- exchanges and roles, on the host

    def exchanges(self, info: Federation) -> "Sequence[FedAvg]":
        """Return the exchanges of a round: each sends, has the same cohort train, and aggregates,
        one after the other."""
        return (cast("FedAvg", self),)

    def closing_exchanges(self, info: Federation) -> "Sequence[FedAvg]":
        """Return the exchanges with all clients at the end of a task that another follows."""
        return ()

    def roles(
        self, info: Federation, clients: Sequence[int], rng: np.random.Generator
    ) -> "Sequence[FedAvg]":
        """Return the algorithm whose client-side hooks each client of a cohort follows."""
        return [cast("FedAvg", self)] * len(clients)

    # --- local training: how long, at which rate, and what an engine may do of it

    def epochs(self, local: LocalTraining) -> int:
        """Return the number of passes over the local data in a round."""
        return local.epochs

    def local_lr(self, lr: float) -> float:
        """Return the learning rate of local training, from that of the round."""
        return lr

    def after(self, info: Federation, local: LocalTraining) -> int:
        """Return the largest number of batches of another pass over the client's data that `finish`
        looks at (`base.fresh_pass`)."""
        return 0

    def prepare(self, net: Network, batch: Batch, mask: torch.Tensor, ctx: Context) -> Tree:
        """Return what `client_setup` would of one batch, where it gives the same of every batch of
        the first pass, stacked: so an engine need not ask for the padding of shorter clients."""
        return {}
