"""FedGKD: clients distil the mean of the latest global models.

The server averages local models as in FedAvg. It also sends the teacher: the mean of the last
global models.

D. Yao et al., "FedGKD: Toward Heterogeneous Federated Learning via Global Knowledge Distillation",
IEEE Trans. on Computers 73 (1), 2024, implemented as in the authors' code:
    L = CE + gamma * tau^2 * KL(softmax(z_teacher / tau) || softmax(z / tau)).
The teacher's parameters are the mean of the last `models` global models, including the received
one. With `models=1`, the teacher is the received model, and no separate teacher is sent, as in the
code (CGCL-codes/FedGKD, pcode/masters/master_fedgkd.py). The first round has no distillation. In
early rounds, the mean is over the global models so far.

Differs from the released code: The teacher uses the running statistics of the received global
model, not their mean. The server weights clients by n_k, not equally. FedGKD-VOTE, which weights
the single models' predictions by a validation loss on the server, is not implemented.
"""

import torch

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.distillation import kl_divergence
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network, ServerRound
from fedexp.core import tree
from fedexp.core.limits import Count, NonNegative, Positive
from fedexp.core.tree import Params, Tree


class FedGKD(FedAvg):
    gamma: NonNegative  # weight of the distillation; 0 is FedAvg
    tau: Positive  # temperature
    models: Count  # number of global models that the teacher averages

    def server_init(self, params: Params, federation: Federation) -> Tree:
        past = tree.map(lambda leaf: leaf.new_zeros(self.models - 1, *leaf.shape), params)
        return {"params": params, "past": past, "known": next(iter(params.values())).new_zeros(())}

    def broadcast(self, server: Tree) -> Tree:
        share = server["known"].clamp(min=1, max=self.models)
        sent = {"params": server["params"], "distils": (server["known"] > 0).to(share.dtype)}
        if self.models > 1:
            sent["teacher"] = {
                k: (server["past"][k].sum(0) + leaf) / share for k, leaf in server["params"].items()
            }
        return sent

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        student = net(params, batch.x).logits
        model = ctx.server.get("teacher", ctx.server["params"])
        teacher = net(model, batch.x).logits.detach()
        distance = self.tau**2 * kl_divergence(teacher, student, self.tau) * ctx.server["distils"]
        return cross_entropies(student, batch.y) + self.gamma * distance

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        # Store the model that was sent in this round, because `server.optimizer` may still change
        # the new average. The initial model is never part of the teacher.
        sent = tree.map(lambda leaf: leaf * (server["known"] > 0), server["params"])
        past = {k: torch.cat([leaf, sent[k][None]])[1:] for k, leaf in server["past"].items()}
        return super().aggregate(server, messages, round) | {
            "past": past,
            "known": server["known"] + 1,
        }
