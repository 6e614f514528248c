"""FedRoD: a shared body, a generic classifier with a balanced loss, and a personal classifier.

The balanced loss compensates for the client's class imbalance, so that the generic model treats all
classes alike. The personal classifier adapts the predictions to the client.

H.-Y. Chen, W.-L. Chao, "On Bridging Generic and Personalized Federated Learning for Image
Classification", ICLR 2022, Eq. (5)-(7), in the linear form. For a client with n_c training examples
of class c:
    body and generic classifier: balanced softmax
        -log( n_y^gamma e^{z_y} / sum_c n_c^gamma e^{z_c} )
    personal classifier: CE of z + z_personal, where z and the features are constants.
The server averages the body and the generic classifier. The personal classifier starts at 0 and
stays on its client. The reported accuracy is that of the generic model (the paper's G-FL). This
model is tested without the class counts n_c. The personalised test (P-FL) adds the client's latest
personal classifier to the generic one, on the averaged body.
"""

import numpy as np
import torch

from fedexp.algorithms import heads
from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import Batch, ClientData, Context, Federation, Network
from fedexp.core import tree
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

PERSONAL = "personal."  # prefix of the names of the personal classifier's parameters
# replaces log 0 for absent classes; finite, because padding may have such a label
ABSENT = -1e30


class FedRoD(FedAvg):
    fresh_optimizer = "its clients also train a personal head"
    must_train = heads.HEAD
    needs_features = True

    # exponent of the class counts; with 0, the generic model is trained as in FedAvg
    gamma: NonNegative

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return tree.zeros_like(heads.head(params))

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        counts = federation.counts[client]
        log = np.log(np.maximum(counts, 1))
        return {"prior": np.where(counts > 0, self.gamma * log, ABSENT * (self.gamma > 0))}

    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        return ctx.server["params"] | {PERSONAL + k: v for k, v in ctx.client.items()}

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        features, logits, _ = net(params, batch.x)
        balanced = cross_entropies(logits + ctx.plan["prior"].to(logits.dtype), batch.y)
        personal = heads.logits(features.detach(), {k: params[PERSONAL + k] for k in heads.HEAD})
        return balanced + cross_entropies(logits.detach() + personal, batch.y)

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the body with the sum of both classifiers (the paper's P-FL).

        The logits of this model are the sum of the generic and the personal logits.
        """
        params = server["params"]
        return params | {k: params[k] + state[k] for k in heads.HEAD}

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        own = {k: params[PERSONAL + k] for k in heads.HEAD}
        return {"params": {k: v for k, v in params.items() if not k.startswith(PERSONAL)}}, own
