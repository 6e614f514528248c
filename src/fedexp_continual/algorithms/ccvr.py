"""CCVR: the server calibrates the averaged model's classifier on virtual features.

Clients train as in FedAvg and then send the mean and covariance of the features of each class. The
server draws virtual features from these Gaussians and trains the classifier on them, because
heterogeneous data bias the classifier most.

M. Luo, F. Chen, D. Hu, Y. Zhang, J. Liang, J. Feng, "No Fear of Heterogeneity: Classifier
Calibration for Federated Learning with Non-IID Data", NeurIPS 2021. mu_k and S_k are the mean and
the covariance of the features that the averaged model computes for client k's n_k examples of a
class. For each class, the server combines them to
    mu = sum_k n_k mu_k / N,   N = sum_k n_k
    S  = (sum_k (n_k - 1) S_k + sum_k n_k mu_k mu_k^T - N mu mu^T) / (N - 1)
which are the mean and the covariance of all clients' features. The server draws `samples` virtual
features of each class from N(mu, S). It trains the classifier on them with cross-entropy and SGD
with momentum 0.9, starting from the average. The body does not change. Instead of mu_k and S_k,
clients send the sums of 1, f and f f^T over the features f of a class, in float64. The server
computes the same mu and S from these sums.

The paper calibrates once, after the last round. Here, every round ends with a calibration, so that
each reported accuracy is that of a calibrated model. This does not affect training, because clients
receive the uncalibrated average. In a second exchange, the cohort computes the sums in eval mode
without augmentation. If no client of the cohort has examples of a class, the server uses the latest
sums of this class, which were computed with an earlier model.

No code by the authors was found. The formulas were checked against smduan/Fed-CCVR
(fedavg/server.py). The defaults are those of LoRM's code, which has CCVR as a baseline
(aimagelab/fed-mammoth, _models/ccvr.py). Unlike fedexp, LoRM's code keeps one diagonal Gaussian per
client (with `covariance=diagonal`, fedexp keeps one per class), computes it with the local model,
continues training from the calibrated classifier, draws new features for each epoch, has a cosine
schedule, divides the logits by their norm, and trains only with the classes of the task.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms import heads, prototypes
from fedexp.algorithms.base import FedAvg, first_pass
from fedexp.algorithms.distillation import minibatches
from fedexp.algorithms.interfaces import (
    ClientData,
    Context,
    Federation,
    Network,
    ServerNetwork,
    ServerRound,
)
from fedexp.algorithms.mixins import OnePass
from fedexp.core import tree
from fedexp.core.limits import Count, Positive
from fedexp.core.tree import Params, Tree

MOMENTUM = 0.9


class CCVR(FedAvg):
    own_step = "its clients receive a different classifier from the tested one"
    must_train = heads.HEAD
    needs_features = True

    samples: Count  # number of virtual features per class
    epochs_on_server: Count  # passes over the virtual features
    batch_size: Count
    lr: Positive  # learning rate of the calibration
    covariance: Literal["full", "diagonal"]

    def server_init(self, params: Params, federation: Federation) -> Tree:
        weight = params[heads.WEIGHT]
        sums = class_sums(weight[:0], weight.T[:0], self.covariance)
        return {"params": params, "local": params, "sums": sums}

    def broadcast(self, server: Tree) -> Tree:
        return {"params": server["local"]}

    def exchanges(self, federation: Federation) -> Sequence[FedAvg]:
        return self, Sums(covariance=self.covariance)

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        new = super().aggregate(server, messages, round)
        return new | {"local": new["params"]}

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        head = heads.head(server["local"])
        if not tree.is_finite(server["sums"]):  # the run has diverged
            nan = {name: torch.full_like(value, torch.nan) for name, value in head.items()}
            return server | {"params": server["local"] | nan}
        x, y = self.virtual_features(server["sums"], round.rng)
        if len(y):
            head = self.calibrated(head, x.to(head[heads.WEIGHT]), y, round.rng)
        return server | {"params": server["local"] | head}

    def virtual_features(self, sums: Tree, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return virtual features [n, D], float64, and labels [n] of all classes with examples."""
        classes = sums["count"].nonzero()[:, 0]
        count, total, square = (sums[name][classes] for name in ("count", "sum", "square"))
        mean = total / count[:, None]
        noise = rng.standard_normal((len(classes), self.samples, mean.shape[1]))
        drawn = torch.from_numpy(noise).to(mean)
        if self.covariance == "diagonal":
            variance = (square - total * mean) / (count - 1).clamp(min=1)[:, None]
            drawn = drawn * variance.clamp(min=0).sqrt()[:, None]
        else:
            freedom = (count - 1).clamp(min=1)[:, None, None]
            spread = (square - total[:, :, None] * mean[:, None]) / freedom
            values, vectors = torch.linalg.eigh(spread)
            # A covariance of few examples has eigenvalues that are zero up to the rounding of
            # `square`. The square root would enlarge them from 1e-17 to 3e-9.
            size = (square / freedom).diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
            least = size * values.shape[1] * torch.finfo(values.dtype).eps
            values = torch.where(values > least, values, 0.0)
            # The symmetric square root. The eigenvectors alone would not do, because their signs
            # differ between a CPU and a GPU.
            drawn = drawn @ vectors * values.sqrt()[:, None] @ vectors.mT
        return (mean[:, None] + drawn).flatten(0, 1), classes.repeat_interleave(self.samples)

    def calibrated(self, head: Params, x: Tensor, y: Tensor, rng: np.random.Generator) -> Params:
        """Train a classifier on features x [n, D] with labels y [n], and return it."""
        head = {name: value.clone().requires_grad_() for name, value in head.items()}
        optimizer = torch.optim.SGD(head.values(), self.lr, MOMENTUM)
        for numbers in minibatches(rng, len(y), self.batch_size, self.epochs_on_server):
            index = torch.from_numpy(numbers).to(y.device)
            loss = F.cross_entropy(heads.logits(x[index], head), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {name: value.detach() for name, value in head.items()}


class Sums(OnePass):
    """Exchange in which clients send sums over their features, and the server adds them."""

    covariance: str

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        weight = params[heads.WEIGHT]
        features, members = [weight[:0]], [weight.T[:0]]
        for batch, mask in first_pass(data, ctx):
            features.append(net(params, batch.x, mask).features)
            members.append(prototypes.one_hot(batch.y, params[heads.BIAS]) * mask[:, None])
        return class_sums(torch.cat(features), torch.cat(members), self.covariance), ctx.client

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        new = tree.map(lambda leaf: leaf.sum(0), messages)
        held = new["count"] > 0
        for name, old in server["sums"].items():
            new[name] = torch.where(held.view(-1, *[1] * (old.dim() - 1)), new[name], old)
        return server | {"sums": new}


def class_sums(features: Tensor, members: Tensor, covariance: str) -> Tree:
    """Return the sums of 1, f and f f^T over the features f of each class, in float64.

    features: [n, D]; members: one-hot labels [n, C], 0 for padding. covariance: `full` or
    `diagonal`. "square" is the sum of f f^T, [C, D, D], or of f^2, [C, D], respectively.
    """
    f, members = features.double(), members.double()
    if covariance == "diagonal":
        square = members.T @ f**2
    else:
        square = torch.stack([(f * member[:, None]).T @ f for member in members.T])
    return {"count": members.sum(0), "sum": members.T @ f, "square": square}
