"""FedDyn: a linear and a quadratic term align the clients' stationary points with the server's.

Each client adds both terms to its loss. The server adds a correction to the average of the local
models.

D. A. E. Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1,
implemented as in the authors' code. h_k starts at 0 and sums w_k - w_global over the client's
participations (the paper's variable is -alpha times this sum):
    client   min_w  F_k(w) + alpha_k <h_k, w> + alpha_k / 2 ||w - w_global||^2,
             h_k <- h_k + (w_k - w_global)
    server   h <- h + (1 / K) * sum_S (w_k - w_global),   w_global <- mean of the w_k + h
The mean uses the weights set by `weighting` (uniform in the authors' code, n_k in FedNTD's code). h
does not include running statistics.

If `per_client_alpha` is true, alpha_k = alpha / (n_k K / n), as in the authors' code; otherwise
alpha_k = alpha, as in the paper. `clip` is the maximum norm of the whole gradient before weight
decay (10 in the authors' code); 0 means no clipping.

Differs from the released code: That code adds the term alpha_k * w of the gradient after clipping,
as weight decay. Here, this term is part of the clipped gradient.
"""

import numpy as np
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
from fedexp.algorithms.optimizers import clipped
from fedexp.core import tree
from fedexp.core.limits import NonNegative, Positive
from fedexp.core.tree import Params, Tree


class Corrected(FedAvg):
    """Base class for methods in which client k keeps h_k, the sum of its updates of the model.

    The server adds h, the mean of all clients' h_k, to the average of the local models.
    """

    own_step = "its server corrects the average, and the clients' penalties rely on this correction"

    clip: NonNegative  # maximum norm of the gradient; 0: no clipping

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "h": tree.zeros_like(params)}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {"h": tree.zeros_like(params)}

    def transform_grads(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        return clipped(grads, self.clip)

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        start, h = ctx.server["params"], ctx.client["h"]
        return {"params": params}, {"h": {k: h[k] + params[k] - start[k] for k in h}}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        start, trained = server["params"], messages["params"]
        changes = {k: trained[k] - start[k] for k in start}
        h = tree.added(server["h"], changes, 1 / round.federation.num_clients)
        return server | {"params": tree.add(tree.weighted_mean(trained, round.weights), h), "h": h}


class FedDyn(Corrected):
    alpha: Positive
    per_client_alpha: bool

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        sizes = [len(part) for part in federation.parts]
        factor = np.mean(sizes) / sizes[client] if self.per_client_alpha else 1.0
        return {"alpha": self.alpha * factor}

    def penalty(self, net: Network, params: Params, ctx: Context) -> Tensor:
        distance = tree.squared_distance(params, ctx.server["params"])
        alpha = ctx.plan["alpha"].to(distance.dtype)
        return alpha * (tree.dot(ctx.client["h"], params) + 0.5 * distance)
