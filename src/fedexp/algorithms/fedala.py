"""FedALA: a client starts from a learned mixture of its last classifier and the global one.

The mixing weights adapt the global classifier to the client's data. Each client learns them on its
examples before local training. The server averages the local models as in FedAvg.

J. Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
2023, Eq. (3)-(6) and the authors' code. As in FedKA's Table 9, only the last p = 2 tensors (weight
and bias of the classifier) are mixed:
    theta = theta_old + (theta_global - theta_old) * W;  all other layers are the global model's
    W <- clip(W - eta * (d loss / d theta) * (theta_global - theta_old), 0, 1).
theta_old is the classifier from the end of the client's last training. W starts at 1, is learned on
mini-batches from a fraction `part` of the local data, and is kept by the client between rounds. The
first time that a client learns W, it makes up to `max_passes` passes over this fraction. The passes
stop early if the losses on the last batch of the latest 10 passes have a population standard
deviation below `threshold`. In later rounds, the client makes one pass. A client that has not
trained before starts from the global model. The reported accuracy is that of the averaged model
(FedKA's generic accuracy).

Differs from the released code (TsingZ0/FedALA, system/flcore/servers/serverALA.py): In that code,
all clients mix in every round, even if they are not sampled; here, only the cohort mixes. The
personalised test therefore mixes the new global classifier with the W that the client learned last.
The examples from which W is learned are not augmented, and the model runs in eval mode, so that
their features are computed only once. p is not an option, because with more layers the features
would have to be recomputed in each step.
"""

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value

from fedexp.algorithms import heads
from fedexp.algorithms.base import FedAvg, cross_entropies, masked_mean, padded_numbers
from fedexp.algorithms.interfaces import ClientData, Context, Federation, Network
from fedexp.core import tree
from fedexp.core.limits import Count, NonNegative, Positive, PositiveShare
from fedexp.core.tree import Params, Tree

LAST = 10  # number of losses whose standard deviation is checked


class FedALA(FedAvg):
    must_train = heads.HEAD
    needs_features = True

    eta: Positive  # step size for learning W
    part: PositiveShare  # fraction of the local data used for learning W
    threshold: NonNegative  # learning W stops if the last losses' standard deviation is smaller
    max_passes: Count

    def client_init(self, params: Params, federation: Federation) -> Tree:
        head = heads.head(params)
        return {
            "head": head,
            "W": tree.map(torch.ones_like, head),
            "rounds": head[heads.BIAS].new_zeros(()),
        }

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        part = federation.parts[client]
        chosen = rng.permutation(part)[: max(int(self.part * len(part)), 1)]
        return padded_numbers(chosen, max(int(self.part * federation.largest), 1))

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        """Learn the weights W that mix the client's last classifier with the global one."""
        x, y = data.take(ctx.plan["numbers"])
        mask = ctx.plan["mask"].to(ctx.steps.dtype)
        return {"W": self.learn(net(ctx.server["params"], x, mask).features, y, mask, ctx)}

    def learn(self, features: Tensor, y: Tensor, mask: Tensor, ctx: Context) -> Params:
        old = ctx.client["head"]
        gap = tree.subtract(heads.head(ctx.server["params"]), old)
        rounds = ctx.client["rounds"]

        def loss(head: Params, rows: slice) -> Tensor:
            losses = cross_entropies(heads.logits(features[rows], head), y[rows])
            return masked_mean(losses, mask[rows])

        W, recent = ctx.client["W"], torch.zeros(LAST, dtype=features.dtype, device=features.device)
        size, on = ctx.local.batch_size, rounds > 0
        for number in range(self.max_passes):
            value = recent[-1]
            for start in range(0, len(y), size):
                rows = slice(start, start + size)
                active = on & (mask[rows].sum() > 0)
                mixed = {k: old[k] + gap[k] * W[k] for k in W}
                grads, now = grad_and_value(loss)(mixed, rows)
                W = {
                    k: torch.where(active, (v - self.eta * grads[k] * gap[k]).clamp(0, 1), v)
                    for k, v in W.items()
                }
                value = torch.where(active, now, value)
            recent = torch.cat([recent[1:], value[None]])
            on = on & (rounds == 1)  # one pass from the second time on
            if number >= LAST:
                on = on & (recent.std(correction=0) >= self.threshold)
        return W

    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        return mix_models(ctx.server["params"], ctx.client, ctx.setup["W"])

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the global body with a classifier mixed by the client's latest weights W."""
        return mix_models(server["params"], state, state["W"])

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        new = {"head": heads.head(params), "W": ctx.setup["W"], "rounds": ctx.client["rounds"] + 1}
        return {"params": params}, new


def mix_models(params: Params, client: Tree, W: Params) -> Params:
    """Return the global model. If the client has trained before, mix the classifier.

    client: the client's state. W: the mixing weights.

    """
    old, trained = client["head"], client["rounds"] > 0
    mixed = {k: old[k] + (params[k] - old[k]) * W[k] for k in old}
    return params | {k: torch.where(trained, mixed[k], params[k]) for k in mixed}
