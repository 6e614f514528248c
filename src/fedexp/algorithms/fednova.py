"""FedNova: each client's change is divided by its effective number of steps before averaging.

Clients train as in FedAvg. Without the division, clients that take more steps would have a larger
influence on the global model.

J. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020. For SGD with momentum rho ("heavy-ball", section 4.2), the effective
number of steps a_k is the sum of the weights that all gradients of tau_k steps have in the client's
change:
    a_k = (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho),      rho = 0: a_k = tau_k
    d_k = (w_global - w_k) / (lr a_k),   w_global <- w_global - lr * (sum_k p_k a_k) * sum_k p_k d_k
The learning rate lr is constant within a round and cancels. If all clients have the same number of
examples, they have the same a_k, and FedNova is FedAvg. For adaptive optimizers, a_k is tau_k.
Running statistics of batch norm are averaged as in FedAvg.

Option `variant`: In FedNTD's tables, the results of FedNova and FedAvg differ even for clients of
equal size, so they are not results of plain FedNova. FedNTD's released code adds variance reduction
across clients to each gradient g, before weight decay:
    ccvr         g <- g + (d_mean - d_k), with d_k from the client's last participation (0 before
                 its first);
                 after each round, with n = sum of n_k over all clients,
                 d_mean <- (1 - sum_S n_k / n) d_mean + sum_S (n_k / n) d_k,
                 or 1 / K for K clients in place of n_k / n with weighting=uniform
    ccvr_frozen  like ccvr, but with d_mean = 0 in all rounds, as in FedNTD's released code.
"""

from typing import Literal

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
from fedexp.algorithms.local_training import OPTIMIZERS
from fedexp.core import tree
from fedexp.core.tree import Params, Tree


def effective_steps(steps: Tensor, momentum: float) -> Tensor:
    """Return the effective number a_k of tau_k = `steps` SGD steps with rho = `momentum` < 1."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class FedNova(FedAvg):
    sends = ("params", "d")
    fresh_optimizer = "its effective number of steps assumes that momentum starts at 0"

    variant: Literal["plain", "ccvr", "ccvr_frozen"]

    @property
    def optimizers(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the allowed optimizers.

        A direction d_k from an adaptive optimizer has a different scale from a gradient and cannot
        correct it, so the variants `ccvr` and `ccvr_frozen` allow only SGD. The paper gives no a_k
        for Nesterov's momentum.
        """
        return (
            ("sgd",) if self.corrects else tuple(name for name in OPTIMIZERS if name != "nesterov")
        )

    @property
    def corrects(self) -> bool:
        return self.variant != "plain"

    def server_init(self, params: Params, federation: Federation) -> Tree:
        mean = {"d": tree.zeros_like(params)} if self.variant == "ccvr" else {}
        return {"params": params} | mean

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {"d": tree.zeros_like(params)} if self.corrects else {}

    def transform_grads(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        if not self.corrects:
            return grads
        grads = tree.subtract(grads, ctx.client["d"])
        return (
            {k: grads[k] + ctx.server["d"][k] for k in grads} if self.variant == "ccvr" else grads
        )

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        a = effective_steps(ctx.steps, ctx.local.momentum if ctx.local.optimizer == "sgd" else 0.0)
        message = {"params": params, "a": a}
        if not self.corrects:
            return message, ctx.client
        return message, {"d": direction(ctx.server["params"], params, a * ctx.lr)}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        start, shares = server["params"], round.weights / round.weights.sum()
        a = messages["a"].clamp(min=1)  # a client that took no step has not moved
        mean, weights = tree.weighted_mean(messages["params"], shares / a), (shares / a).sum()
        scale = (shares * messages["a"]).sum() * weights  # tau_eff * sum_k p_k / a_k
        server = server | {"params": {k: start[k] + scale * (mean[k] - start[k]) for k in start}}
        if self.variant != "ccvr":
            return server
        part = round.weights.sum() / float(round.federation.weights.sum())
        moved = {k: (start[k] - mean[k]) * weights / round.lr for k in start}  # sum_k p_k d_k
        return server | {"d": {k: (1 - part) * v + part * moved[k] for k, v in server["d"].items()}}


def direction(start: Params, end: Params, divisor: Tensor) -> Params:
    """Return the mean direction of a client's steps, (start - end) / divisor.

    start, end: the model before and after local training. divisor: lr times the number of steps.
    The direction is 0 if the client took no step.

    """
    return {k: (start[k] - end[k]) / torch.where(divisor > 0, divisor, 1.0) for k in start}
