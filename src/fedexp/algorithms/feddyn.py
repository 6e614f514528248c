"""FedDyn: a linear and a quadratic term that align the clients' stationary points with the
server's.

D. A. E. Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1,
in the form of the authors' code. g_k, 0 at first, sums up w_k - w_global over the client's
participations (the paper's h_k is -alpha g_k):
    client   min_w  F_k(w) + alpha_k <g_k, w> + alpha_k / 2 ||w - w_global||^2,   g_k <- g_k + (w_k
    - w_global) server   g <- g + (1 / K) * sum_S (w_k - w_global),   w_global <- mean of the w_k +
    g
The mean follows `weighting` (uniform in the authors' code, n_k in FedNTD's). Running statistics
never enter g. Switches: `per_client_alpha`: alpha_k = alpha / (n_k K / n), as in the authors' code,
else alpha_k = alpha (the paper); `clip`: bound of the norm of the whole gradient before weight
decay, 10 in the authors' code; 0 = none. There the part alpha_k * w of the gradient is added after
clipping, as weight decay; here it is in what is clipped.
"""

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Needs,
    Network,
    ServerRound,
)
from fedexp.core import tree
from fedexp.core.limits import NonNegative, Positive
from fedexp.core.tree import Params, Tree


def clipped(grads: Params, bound: float) -> Params:
    """Return the gradients scaled so that the norm of all together is at most `bound`, as torch's
    clip_grad_norm_ does."""
    scale = (bound / (tree.dot(grads, grads).sqrt() + 1e-6)).clamp(max=1)
    return {k: g * scale for k, g in grads.items()}


def moved(total: Params, params: Params, ctx: Context) -> Params:
    """Return the sum of a client's changes with that of this round, w_k - w_global."""
    return {k: total[k] + params[k] - ctx.server["params"][k] for k in total}


def corrected_mean(server: Tree, name: str, trained: Params, round: ServerRound) -> Tree:
    """Return the new parameters of the server and, under its name, the mean over all clients of
    their sums of changes, which is added to them. trained: leaves [|S|, ...]."""
    start = server["params"]
    total = tree.added(
        server[name], {k: trained[k] - start[k] for k in start}, 1 / round.federation.num_clients
    )
    mean = tree.weighted_mean(trained, round.weights)
    return {"params": {k: mean[k] + total[k] for k in mean}, name: total}


class FedDyn(FedAvg):
    own_step = "its server adds a correction to the average, which the clients' penalties rely on"

    alpha: Positive
    clip: NonNegative  # bound of the gradient's norm; 0: none
    per_client_alpha: bool

    needs = Needs(client_state="sum of changes g_k", server_state="mean of all g_k")

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "g": tree.zeros_like(params)}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {"g": tree.zeros_like(params)}

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        sizes = [len(part) for part in federation.parts]
        return {
            "alpha": self.alpha * (np.mean(sizes) / sizes[client] if self.per_client_alpha else 1.0)
        }

    def penalty(self, net: Network, params: Params, ctx: Context) -> torch.Tensor:
        distance = tree.squared_distance(params, ctx.server["params"])
        alpha = ctx.plan["alpha"].to(distance.dtype)
        return alpha * (tree.dot(ctx.client["g"], params) + 0.5 * distance)

    def transform_grads(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        return clipped(grads, self.clip) if self.clip else grads

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {"params": params}, {"g": moved(ctx.client["g"], params, ctx)}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        return server | corrected_mean(server, "g", messages["params"], round)
