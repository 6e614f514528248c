"""SCAFFOLD: control variates correct the gradients for client drift.

Each client keeps a control variate, an estimate of its own gradient, and the server keeps the mean
of all variates. In each step, a client subtracts its own variate from the gradient and adds the
mean.

S. P. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, Algorithm 1 with option II. All variates start at 0. They have one entry per trained
parameter; running statistics have no variate.
    gradient  g <- g - c_k + c, before weight decay and momentum
    client    c_k+ = c_k - c + (w_global - w_k) / (lr m_k)
    server    c <- c + (1 / K) * sum_S (c_k+ - c_k), so that c is the mean of the variates of all K
              clients
              w_global <- sum_k p_k w_k, as in FedNTD's code; for the paper's plain mean, use
              weighting=uniform. The global step size is 1.
Option `divisor`: m_k is tau_k, the number of steps (`steps`, as in the paper), or FedNova's a_k
(`effective`, as in FedNTD's released code). With momentum 0.9, `steps` makes the variates about 10
times too large, and training diverges quickly.

Option `variates`: `uniform` gives all clients the weight 1 / K in c, as in the paper and in
FedNTD's code, although that code weights models by n_k. At a fixed point of training, c is 0, so
training minimises the plain mean of the clients' objectives for any weights of the models.
`examples` uses n_k / n instead of 1 / K. With weighting=examples, a fixed point then minimises the
objective of FedAvg.
"""

from typing import ClassVar, Literal

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fednova import direction, effective_steps
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
)
from fedexp.core import tree
from fedexp.core.tree import Params, Tree


class Scaffold(FedAvg):
    sends = ("params", "c")

    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)

    divisor: Literal["steps", "effective"]
    # weights of the clients' variates in the server's variate
    variates: Literal["uniform", "examples"]

    @property
    def fresh_optimizer(self) -> str:  # type: ignore[override]
        effective = self.divisor == "effective"
        return "algorithm.divisor=effective assumes that momentum starts at 0" if effective else ""

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "c": tree.zeros_like(params)}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {"c": tree.zeros_like(params)}

    def transform_grads(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        return {k: grads[k] - ctx.client["c"][k] + ctx.server["c"][k] for k in grads}

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        steps = (
            ctx.steps if self.divisor == "steps" else effective_steps(ctx.steps, ctx.local.momentum)
        )
        moved = direction(ctx.server["params"], params, steps * ctx.lr)
        change = tree.subtract(moved, ctx.server["c"])
        # A client that took no step has computed no gradient and keeps its variate.
        change = {k: v * (ctx.steps > 0) for k, v in change.items()}
        new = {k: v + change[k] for k, v in ctx.client["c"].items()}
        return {"params": params, "change": change}, {"c": new}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        federation, change = round.federation, messages["change"]
        shares = torch.full_like(round.weights, 1 / federation.num_clients)
        if self.variates == "examples":
            sizes = [len(federation.parts[client]) for client in round.clients]
            shares = torch.as_tensor(sizes).to(shares) / sum(map(len, federation.parts))
        c = {k: v + torch.tensordot(shares, change[k], 1) for k, v in server["c"].items()}
        return super().aggregate(server, messages, round) | {"c": c}
