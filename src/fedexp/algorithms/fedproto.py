"""FedProto: clients send class means of their features instead of their models.

The server averages the class means to prototypes. Each client trains a personal model whose
features are pulled towards the prototypes.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype Learning
across Heterogeneous Clients", AAAI 2022, Algorithm 1. With the features f of client k's personal
model:
    client      minimises CE + lambda * MSE(f(x), C^y), where C^y is the server's prototype of the
                label y (no MSE term without a prototype; MSE: mean over the dimensions); then
                C_k^c = mean of f(x) over the client's examples of class c
    server      C^c <- mean of C_k^c over the clients that have class c, weighted by their number of
                examples of class c
    prediction  the class with the nearest prototype, argmin_c ||f(x) - C^c||.
A client's model starts as the initial model and stays on the client, including running statistics.
The personalised test uses a linear classifier with rows C^c and biases -||C^c||^2 / 2. It makes the
same predictions.

No client uses a generic model. The accuracy reported for the generic model is that of the mean of
the last cohort's models. Sending these models is not counted as traffic.
`evaluate=[global,personal]` also tests the personal models.

Differs from the released code (yuetan031/FedProto, lib/update.py, lib/utils.py): Prototypes are
computed after local training in eval mode, as in the paper's Eq. (3), over one epoch's augmented
batches. In the code, they are computed during the last epoch. With `weighting=uniform`, all clients
that have a class have equal weights, as in the code; otherwise, they are weighted by their number
of examples, as in the paper. (The paper's Eq. (6) also divides by the number of these clients, so
that its weights do not sum to 1; neither the code nor fedexp does.) If no client in a round has a
class, the prototype of this class does not change; in the code, all clients take part. The
prediction uses the nearest prototype among all known classes, not only among the client's classes.
In the code, clients may have different architectures; here, all clients have the same one.
"""

import torch

from fedexp.algorithms import heads, prototypes
from fedexp.algorithms.base import cross_entropies, first_pass
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
)
from fedexp.algorithms.mixins import KeepsPart
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

# bias of a class without a prototype; finite, so that products with it are defined
NEVER = -1e30


class FedProto(KeepsPart):
    sends = ("params", "prototypes")
    own_step = "it has no global model; each client has a personal model"
    must_train = heads.HEAD
    needs_features = True
    keeps_buffers = True

    lambda_: NonNegative  # weight of the distance to the prototypes

    def counted(self, sent: Tree, up: bool) -> Tree:
        if up:
            return prototypes.select_present(sent["count"], {k: sent[k] for k in ("mean", "count")})
        return prototypes.select_present(sent["prototypes"]["known"], sent["prototypes"])

    def server_init(self, params: Params, federation: Federation) -> Tree:
        classes, width = params[heads.WEIGHT].shape
        return {
            "params": params,
            "prototypes": prototypes.no_prototypes(classes, width, params[heads.BIAS]),
        }

    def keeps(self, name: str) -> bool:
        return True

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        features, logits, _ = net(params, batch.x)
        target, known = (
            ctx.server["prototypes"][k].index_select(0, batch.y) for k in ("mean", "known")
        )
        distance = ((features - target) ** 2).mean(-1) * known
        return cross_entropies(logits, batch.y) + self.lambda_ * distance

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        passed = first_pass(data, ctx)
        found = prototypes.statistics(net, params, passed, ctx.server["prototypes"]["mean"])
        message = {"params": params, "mean": found["mean"], "count": found["count"]}
        return message, params | net.buffers()

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        counts = messages["count"]
        weights = (counts > 0).to(counts) if round.federation.weighting == "uniform" else counts
        known = prototypes.average_prototypes(server["prototypes"], messages["mean"], weights)
        return super().aggregate(server, messages, round) | {"prototypes": known}

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the client's body with a classifier that selects the nearest prototype."""
        mean, known = server["prototypes"]["mean"], server["prototypes"]["known"]
        bias = torch.where(known > 0, -0.5 * (mean**2).sum(-1), NEVER)
        return state | {heads.WEIGHT: mean, heads.BIAS: bias}
