"""Flashback: distillation on clients and server, weighted by label counts.

Clients distil the global model. The server distils the local models and the previous global model
into their average. For each class, a teacher is weighted by the number of examples that it was
trained on.

M. Aljahdali et al., "Flashback: Understanding and Mitigating Forgetting in Federated Learning",
arXiv 2402.05558, Eq. (3), Algorithm 1. For teachers i with label counts mu_i [C] and a student with
label counts nu [C]:
    alpha_i^c = mu_i^c / (nu^c + sum_j mu_j^c),  0/0 := 0
    L = CE + sum_i sum_c alpha_i^c P_i^c log(P_i^c / Q^c),
    P_i, Q = softmax of the logits (no temperature)
The second term is not a Kullback-Leibler divergence and may be negative; it is not clamped.

On the client, the teacher is the global model with counts pi, and nu = mu_k are the client's
counts. The server trains sum_k p_k w_k on a labelled public set. Its teachers are the local models
with counts mu_k and the previous global model with counts pi. The student's counts are nu = pi, so
pi appears twice in alpha. The server trains for E_s epochs with SGD, the clients' settings and a
fresh momentum buffer. Then the number of participations r_k of each client of the cohort increases
by 1, and pi <- pi + gamma mu_k for each client of the cohort with gamma r_k <= 1. To avoid rounding
errors, r_k is compared with the largest integer r with gamma r <= 1. As pi starts at 0, clients do
not distil in round 1.

Options: `on_clients` and `on_server` enable distillation on the clients and on the server. Differs
from the paper: Clients send mu_k (C numbers) in each round instead of once. A client that took no
step in a round (`local.drop_last`) has learned no class and sends zeros. Public examples are not
augmented, so the teachers' outputs are computed only once per round.
"""

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms import distillation
from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerNetwork,
    ServerRound,
)
from fedexp.core.limits import Count, PositiveShare
from fedexp.core.tree import Params, Tree


def class_weights(teachers: Tensor, student: Tensor) -> Tensor:
    """Return the weights alpha [T, C], given the label counts of teachers [T, C] and student [C].

    The weight is 0 for a class that no model was trained on.
    """
    total = student + teachers.sum(0)
    return torch.where(total > 0, teachers / torch.where(total > 0, total, 1.0), 0.0)


def distillation_targets(alpha: Tensor, teachers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the teachers' part of the distillation term: (entropy, weight), [n, C] each.

    The term is sum_i sum_c alpha P (log P - log Q) = sum_c entropy^c - sum_c weight^c log Q^c, so
    the teachers' outputs are summed only once. alpha: [T, C]. teachers: the teachers' logits, [T,
    n, C].
    """
    log_p = F.log_softmax(teachers, -1)
    weighted = alpha[:, None] * log_p.exp()
    return (weighted * log_p).sum(0), weighted.sum(0)


def distillation_term(entropy: Tensor, weight: Tensor, student: Tensor) -> Tensor:
    """Return the distillation term of each example, [n].

    entropy, weight: the result of `distillation_targets`. student: the student's logits, [n, C].

    """
    return (entropy - weight * F.log_softmax(student, -1)).sum(-1)


class Flashback(FedAvg):
    sends = ("params", "pi")

    gamma: PositiveShare  # share of a client's counts that each participation adds to pi
    epochs_on_server: Count  # E_s, passes over the public set
    on_clients: bool
    on_server: bool

    @property
    def needs_public(self) -> int:  # type: ignore[override]
        return int(self.on_server)

    @property
    def counted_participations(self) -> int:
        """Return how often a client's counts are added to pi: the largest r with gamma * r <= 1."""
        return math.floor(1 / self.gamma + 1e-9)

    def server_init(self, params: Params, federation: Federation) -> Tree:
        like = next(iter(params.values()))
        return {
            "params": params,
            "pi": like.new_zeros(federation.num_classes),
            "r": like.new_zeros(federation.num_clients),
        }

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        return {"counts": federation.counts[client]}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        student = net(params, batch.x).logits
        loss = cross_entropies(student, batch.y)
        if not self.on_clients:
            return loss
        teacher = net(ctx.server["params"], batch.x).logits.detach()
        pi = ctx.server["pi"]
        alpha = class_weights(pi[None], ctx.plan["counts"].to(pi.dtype))
        return loss + distillation_term(*distillation_targets(alpha, teacher[None]), student)

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {"params": params, "counts": ctx.plan["counts"] * (ctx.steps > 0)}, ctx.client

    def refine(self, net: ServerNetwork, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        pi, counts = server["pi"], messages["counts"].to(server["pi"].dtype)
        if self.on_server:
            server = self.distil(net, server, messages, counts, round)
        cohort = torch.as_tensor(np.asarray(round.clients), device=pi.device)
        r = server["r"].index_add(0, cohort, torch.ones_like(pi[:1]).expand(len(cohort)))
        counted = (r[cohort] <= self.counted_participations).to(pi.dtype)
        return server | {"r": r, "pi": pi + self.gamma * (counted[:, None] * counts).sum(0)}

    def distil(
        self,
        net: ServerNetwork,
        server: Tree,
        messages: Tree,
        counts: Tensor,
        round: ServerRound,
    ) -> Tree:
        public, pi, local = round.public, server["pi"], round.local
        assert public is not None
        old = round.previous["params"] | round.previous["buffers"]
        logits = public.logits([*distillation.local_models(messages, round.buffers), old])
        entropy, weight = distillation_targets(
            class_weights(torch.cat([counts, pi[None]]), pi), logits
        )

        def loss(student: Tensor, labels: Tensor, numbers: np.ndarray) -> Tensor:
            chosen = torch.as_tensor(numbers, device=student.device)
            return (
                F.cross_entropy(student, labels)
                + distillation_term(entropy[chosen], weight[chosen], student).mean()
            )

        sgd = replace(local, optimizer="sgd")
        batches = distillation.minibatches(
            round.rng, len(public), local.batch_size, self.epochs_on_server
        )
        return distillation.distil(net, server, public, batches, loss, sgd, round.lr)
