"""Ditto: every client trains a personal model beside the global one, and is pulled towards it.

T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, Algorithm 1. The global model w is FedAvg's. With it as received, a
client of the round also trains its own model v_k,
    min_v  F_k(v) + lambda/2 ||v - w||^2,
on the same batches, from where its last participation left it (the initial model at first). v_k
stays on the client, with its running statistics. Checked against the authors' code
(litian96/ditto, flearn/trainers_MTL/ditto.py), which has the same two steps for each batch: the
order of the two does not matter, since neither model sees the other change. The code's lambda is 1,
or chosen from 0.1, 1 and 2 by each client; that choice is left out here. Deviations: the pull joins
the gradient before weight decay and momentum, which that code does not have; as many epochs for v_k
as for w; the server's weights are n_k, not equal ones. Accuracy is that of w: FedAvg's; the
training loss is that of the own models, with the pull. `evaluate=[global,personal]` tests the
clients' own models.
"""

from collections.abc import Sequence

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.families import KeepsPart, MultiExchange
from fedexp.algorithms.interfaces import (
    ClientData,
    Context,
    Federation,
    Needs,
    Network,
    ServerRound,
)
from fedexp.core import tree
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree


class Ditto(KeepsPart, MultiExchange):
    """Trains the clients' own models; a second exchange with the same clients is FedAvg."""

    trains_model = False
    keeps_buffers = True

    lambda_: NonNegative  # weight of the pull; with 0 nothing is shared

    needs = Needs(client_state="its own model", gradients=2)

    def exchanges(self, federation: Federation) -> Sequence[FedAvg]:
        return self, FedAvg()

    def counted(self, sent: Tree, up: bool) -> Tree:
        """Return nothing: the global model is sent once, for the exchange that trains it."""
        return {}

    def keeps(self, name: str) -> bool:
        return True

    def penalty(self, net: Network, params: Params, ctx: Context) -> torch.Tensor:
        return 0.5 * self.lambda_ * tree.squared_distance(params, ctx.server["params"])

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {}, params | net.buffers()

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        return server
