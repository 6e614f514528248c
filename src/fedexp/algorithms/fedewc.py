"""FedEWC: elastic weight consolidation with the Fisher information of all clients' data.

At the end of a task, each client computes how important each parameter is for its examples. In
later tasks, a quadratic penalty keeps important parameters close to their old values.

J. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017, Eq. (3),
as used as a baseline by CFeD (IJCAI 2022, section 5.3). F^(s) is the diagonal of task s's Fisher
information at theta_s, the model at the end of the task:
    L = CE + lambda / 2 sum_{s < t} sum_j F^(s)_j (w_j - theta_{s,j})^2.
F^(s) is the mean over task s's training examples of the squared gradient of log q(y|x), where y is
the label. Each client computes F^(s) on all its examples without augmentation; the server averages
the results with the weights n_k. This takes one additional upload per task. The sum over tasks is
stored as one quadratic P_j (w_j - a_j)^2 with P = sum_s F^(s) and a = sum_s F^(s) theta_s / P,
which equals the sum up to a constant.

`fisher=released` follows CFeD's released code instead. In each round of task t > 1, each client
uses its own penalty:
    L = CE + lambda / 2 sum_j G_j (w_j - w^g_j)^2,   G = (d/dw mean_{b,b'} log q(y_b' | x_b))^2,
where w^g is the model that it received. The mean is over all pairs of examples in a batch and over
all batches of the new task, in training mode. This keeps a client close to the global model and
does not protect earlier tasks. The code skips the last partial batch; here, its pairs are
included. With `paradigm=centralized` (algorithm=ewc), the method is EWC.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import FedAvg, first_pass
from fedexp.algorithms.continual import TASKS
from fedexp.algorithms.fisher import squared_gradients
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
)
from fedexp.algorithms.mixins import OnePass
from fedexp.core import tree
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree


class FedEWC(FedAvg):
    sends = ("params", "importance", "anchor")
    scenarios = TASKS
    # The penalty is quadratic with curvature lambda_ F_j; SGD with momentum m is stable for
    # curvatures up to 2 (1 + m) / lr.
    hint = (
        "SGD diverges if lr * lambda_ * F exceeds 2 * (1 + momentum), where F is the largest"
        " Fisher information of a weight; use local.optimizer=adam or a smaller algorithm.lambda_"
    )

    lambda_: NonNegative  # weight of the penalty; 0 is FedAvg
    fisher: Literal["old_tasks", "released"]

    def closing_exchanges(self, federation: Federation) -> "tuple[FedAvg, ...]":
        return (Fisher(),) if self.fisher == "old_tasks" else ()

    def roles(
        self, federation: Federation, clients: Sequence[int], rng: np.random.Generator
    ) -> "Sequence[FedAvg]":
        if self.fisher == "released" and federation.task > 0:
            return [Released(lambda_=self.lambda_)] * len(clients)
        return super().roles(federation, clients, rng)

    def penalty(self, net: Network, params: Params, ctx: Context) -> Tensor | float:
        if "anchor" not in ctx.server:
            return 0.0
        return self.lambda_ / 2 * quadratic(ctx.server["importance"], params, ctx.server["anchor"])


def quadratic(strength: Params, params: Params, anchor: Params) -> Tensor:
    """Return the penalty sum_j strength_j (w_j - anchor_j)^2 over all parameters w_j."""
    return torch.stack(
        [(strength[k] * (w - anchor[k]) ** 2).sum() for k, w in params.items()]
    ).sum()


class Released(FedAvg):
    """Client that uses the penalty of `fisher=released` from the second task on."""

    lambda_: float

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        """Return the weights G of the penalty as "fisher".

        G is computed on this client's examples with the received model in training mode.
        """
        params = ctx.server["params"]
        total, pairs = tree.zeros_like(params), torch.zeros_like(ctx.steps)
        for batch, mask in first_pass(data, ctx):

            def likelihood(p: Params, batch: Batch = batch, mask: Tensor = mask) -> Tensor:
                # [b, b']
                logs = F.log_softmax(net(p, batch.x, mask).logits, -1).index_select(1, batch.y)
                return (logs * mask[:, None] * mask).sum()

            grads, _ = net.gradient(likelihood, params)
            total, pairs = tree.add(total, grads), pairs + mask.sum() ** 2
        return {"fisher": {k: (v / pairs.clamp(min=1)) ** 2 for k, v in total.items()}}

    def penalty(self, net: Network, params: Params, ctx: Context) -> Tensor | float:
        return self.lambda_ / 2 * quadratic(ctx.setup["fisher"], params, ctx.server["params"])


class Fisher(OnePass):
    """Exchange at the end of a task: the server adds Fisher information to the penalty."""

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        """Return the Fisher information's diagonal as the message, and the unchanged client state.

        The diagonal is computed on this client's examples with the global model in eval mode.
        """
        total, number = tree.zeros_like(params), torch.zeros_like(ctx.steps)
        for batch, mask in first_pass(data, ctx):
            found, count = squared_gradients(net, ctx.server["params"], batch, mask, "sample")
            total, number = tree.add(total, found), number + count
        return {"fisher": {k: v / number.clamp(min=1) for k, v in total.items()}}, ctx.client

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        fisher, params = tree.weighted_mean(messages["fisher"], round.weights), server["params"]
        before = server.get("importance", tree.zeros_like(params))
        anchor, importance = server.get("anchor", params), tree.add(before, fisher)
        # a moves towards theta_t by the fraction F^(t) / P, which is set to 0 where P is 0
        share = {k: fisher[k] / torch.where(importance[k] > 0, importance[k], 1.0) for k in params}
        moved = {k: anchor[k] + share[k] * (params[k] - anchor[k]) for k in params}
        return server | {"importance": importance, "anchor": moved}
