"""AFCL and AFL: ridge regression on the features of a frozen backbone.

Clients do not train. Each client sends sums over the features of its examples, and the server
computes the classifier from the sums in closed form. The result equals that of joint training on
all examples, however they are divided among clients and tasks.

R. He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained
Models", CVPR 2025; J. Tang et al., "AFCL: Analytic Federated Continual Learning for Spatio-Temporal
Invariance of Non-IID Data", arXiv 2505.12245. X_k [n_k, D] are the features of client k's examples
in a task, without augmentation, and Y_k [n_k, C] their one-hot labels. The client sends
    G_k = X_k^T X_k   and   X_k^T Y_k,
and the server adds them to its sums G and X^T Y over clients and tasks. The classifier is
    W = argmin_W ||X W - Y||^2 + gamma ||W||^2 = (G + gamma I)^+ X^T Y
without bias, where X and Y contain all examples so far. With one task, the method is AFL. With
`paradigm=centralized`, it is analytic learning as in ACIL (H. Zhuang et al., NeurIPS 2022).

Differs from AFL's released code (ZHUANGHP/Analytic-federated-learning, afl.py): In that code,
clients send C_k = G_k + r I and W_k = C_k^-1 X_k^T Y_k. The server merges these pairs one after
another (the absolute aggregation law) and then removes the terms r I. The result W is the same with
gamma = 0 (see the tests), because X_k^T Y_k = C_k W_k. No code for AFCL was found, and only a
summary of the paper was available. The default gamma = 0.1 is taken from ACIL's code
(ZHUANGHP/Analytic-continual-learning, config.py).

The server uses only a client's first message in each task, so use rounds=1 participation=1. Clients
send float64 numbers.

The model has all C outputs from the start; the output of a class without examples is 0. Examples
that `scenario.replay` keeps are counted again in each later task. The training loss is reported as
0.
"""

import torch
from torch import Tensor, nn

from fedexp.algorithms import prototypes
from fedexp.algorithms.base import first_pass
from fedexp.algorithms.heads import BIAS, HEAD, WEIGHT
from fedexp.algorithms.interfaces import (
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
)
from fedexp.algorithms.mixins import OnePass
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree
from fedexp_continual.algorithms.grams import invert


class AFCL(OnePass):
    own_step = "its server computes the classifier in closed form"
    must_train = HEAD
    needs_features = True

    gamma: NonNegative  # weight of ||W||^2; 0: least squares, with the smallest W

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in HEAD and parameter.requires_grad)
        return module

    def server_init(self, params: Params, federation: Federation) -> Tree:
        classes, width = params[WEIGHT].shape
        like = params[WEIGHT].double()
        return {
            "params": params,
            "gram": like.new_zeros(width, width),
            "product": like.new_zeros(width, classes),
            # int64 [K]: the last task in which each client was counted
            "counted": torch.full((federation.num_clients,), -1, device=like.device),
        }

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        classes, width = params[WEIGHT].shape
        like = params[BIAS].double()
        gram, product = like.new_zeros(width, width), like.new_zeros(width, classes)
        for batch, mask in first_pass(data, ctx):
            rows = net(params, batch.x, mask).features.double() * mask[:, None]
            gram = gram + rows.T @ rows
            product = product + rows.T @ prototypes.one_hot(batch.y, like)
        return {"gram": gram, "product": product}, ctx.client

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        counted, task = server["counted"], round.federation.task
        clients = torch.tensor(list(round.clients), device=counted.device)
        new = (counted[clients] != task).double()
        sums = {k: server[k] + torch.tensordot(new, messages[k], 1) for k in ("gram", "product")}
        solution = solve(sums["gram"], sums["product"], self.gamma).T
        head = server["params"]
        params = {WEIGHT: solution.to(head[WEIGHT]), BIAS: torch.zeros_like(head[BIAS])}
        counts = {"counted": counted.index_fill(0, clients, task)}
        return server | sums | counts | {"params": params}


def solve(gram: Tensor, product: Tensor, gamma: float) -> Tensor:
    """Return the solution [D, C] of ridge regression from X^T X [D, D] and X^T Y [D, C]."""
    return invert(gram + gamma * torch.eye(len(gram)).to(gram)) @ product
