"""MOON: clients pull their features towards the global model's and away from their last model's.

This contrastive loss reduces client drift. The server averages as in FedAvg.

Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021, Eq. (3)-(4), with sim =
cosine:
    L = CE + mu * l_con
    l_con = -log( e^{sim(h, h_global)/tau} / (e^{sim(h, h_global)/tau} + e^{sim(h, h_prev)/tau}) ).
h, h_global and h_prev are the features of the same augmented batch from the local model, the global
model and the previous local model. The last two run in eval mode. The previous model is the model
that this client trained in its last participation, possibly many rounds ago, with its running
statistics.

Before a client's first participation, the previous model is the initial global model, as in
FedNTD's code. MOON's code has no negative pair in round 1; in later rounds, the previous model of a
client that has not trained is a randomly initialised model of that client. With `projection=0`, the
features are the input of the classifier, as in FedNTD and FedKA. With `projection=n`, the model has
MOON's projection head (d -> d, ReLU, d -> n) before the classifier; MOON uses n = 256.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import Batch, ClientData, Context, Federation, Network
from fedexp.core.limits import CountFrom0, NonNegative, Positive
from fedexp.core.tree import Params, Tree
from fedexp.models import Output, classifier_of


class Moon(FedAvg):
    needs_features = True
    keeps_buffers = True

    mu: NonNegative  # weight of the contrastive loss; 0: FedAvg
    tau: Positive  # temperature
    projection: CountFrom0  # number of outputs of the projection head; 0: no projection head

    @property
    def needs_head(self) -> bool:  # type: ignore[override]
        return self.projection > 0

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        return (
            Projected(module, self.projection, federation.num_classes)
            if self.projection
            else module
        )

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {"previous": params}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        features, logits, _ = net(params, batch.x)
        others = [
            net(model, batch.x).features.detach()
            for model in (ctx.server["params"], ctx.client["previous"])
        ]
        similar = (
            torch.stack([F.cosine_similarity(features, other, dim=-1) for other in others], -1)
            / self.tau
        )
        return cross_entropies(logits, batch.y) - self.mu * F.log_softmax(similar, -1)[:, 0]

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {"params": params}, {"previous": params | net.buffers()}


class Projected(nn.Module):
    """A model with a projection head before its classifier; its features are the head's outputs."""

    def __init__(self, body: nn.Module, outputs: int, num_classes: int):
        super().__init__()
        width = classifier_of(body).in_features
        body.classifier = nn.Identity()
        self.body = body
        self.projection = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
        )
        self.classifier = nn.Linear(outputs, num_classes)

    def forward(self, x: Tensor) -> Output:
        features = self.projection(self.body(x).features)
        return Output(features, self.classifier(features))
