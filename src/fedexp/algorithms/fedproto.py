"""FedProto: clients send class means of their features, not their models.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype Learning
across Heterogeneous Clients", AAAI 2022, Algorithm 1. With f the features of client k's own model:
    client   min CE + lambda * MSE(f(x), C^y), where the server has a prototype C^y of the label
             (MSE: the mean over the dimensions); then C_k^c = mean of f(x) over its examples of
             class c
    server   C^c <- mean of C_k^c over the clients that hold class c, weighted by their examples of
             it
    answer   the class whose prototype is nearest, argmin_c ||f(x) - C^c||.
A client's model starts as the initial one and stays on the client, with running statistics of its
own. The answer is that of a linear classifier with rows C^c and biases -||C^c||^2 / 2, which is
what the personalised test is given. Checked against the authors' code (yuetan031/FedProto,
lib/update.py, lib/utils.py). Deviations from it: prototypes are taken after local training in eval
mode, as in the paper's Eq. (3), over one pass (augmented like it), not in the course of the last
epoch; with `weighting=uniform` all clients that hold a class count the same, as in the code, else
by examples as in the paper; classes that no client of a round holds keep their prototype (there all
clients take part); the nearest prototype is sought among all known classes, not among the client's
own. There all clients have models of different kinds; here of one kind. No client uses a generic
model. The accuracy of one is that of the mean of the last cohort's models, which nobody uses and
which is not counted as traffic; `evaluate=[global,personal]` tests the clients' own
models.
"""

import torch

from fedexp.algorithms import heads, prototypes
from fedexp.algorithms.base import cross_entropies, first_pass
from fedexp.algorithms.families import KeepsPart
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Needs,
    Network,
    ServerRound,
)
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

# bias of a class without a prototype; finite, so that no product with it is undefined
NEVER = -1e30


class FedProto(KeepsPart):
    sends = ("params", "prototypes")
    own_step = "it has no global model, each client has its own"
    must_train = heads.HEAD
    needs_features = True
    keeps_buffers = True

    lambda_: NonNegative  # weight of the distance to the prototypes

    needs = Needs(
        client_state="its own model",
        server_state="prototypes",
        up=-1,
        down=-1,
        small="a prototype per class each way, class counts up",
        forward_passes=1,
    )

    def counted(self, sent: Tree, up: bool) -> Tree:
        if up:
            return prototypes.of_present(sent["count"], {k: sent[k] for k in ("mean", "count")})
        return prototypes.of_present(sent["prototypes"]["known"], sent["prototypes"])

    def server_init(self, params: Params, federation: Federation) -> Tree:
        classes, width = params[heads.WEIGHT].shape
        return {
            "params": params,
            "prototypes": prototypes.unknown(classes, width, params[heads.BIAS]),
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
        passed = first_pass(data, ctx, ctx.local.epochs)
        found = prototypes.statistics(net, params, passed, ctx.server["prototypes"]["mean"])
        message = {"params": params, "mean": found["mean"], "count": found["count"]}
        return message, params | net.buffers()

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        counts = messages["count"]
        weights = (counts > 0).to(counts) if round.federation.weighting == "uniform" else counts
        known = prototypes.combined(server["prototypes"], messages["mean"], weights)
        return super().aggregate(server, messages, round) | {"prototypes": known}

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the client's own body with a classifier that answers with the nearest
        prototype."""
        mean, known = server["prototypes"]["mean"], server["prototypes"]["known"]
        bias = torch.where(known > 0, -0.5 * (mean**2).sum(-1), NEVER)
        return state | {heads.WEIGHT: mean, heads.BIAS: bias}
