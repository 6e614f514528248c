"""FedPAC: clients align features with global class prototypes, and classifiers are personalised.

The server averages the bodies and the prototypes. It sends each client a combination of the
cohort's classifiers that gives more weight to clients with similar class statistics.

J. Xu, X. Tong, S.-L. Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023, Eq. (5), (7)-(13) and the authors' code. With features f, and with the
class shares p_k^c and class means mu_k^c of client k:
    client   trains the classifier alone for `head_epochs` epochs at `head_lr`, then the body alone
             for E epochs on CE + lambda * MSE(f(x), prototype of y), with the global prototype of
             class y, or the client's class mean if the server has no prototype of this class; the
             MSE is omitted until the server has prototypes
    server   averages the bodies, weighted by n_k, and the class means, weighted by class counts,
             which become the prototypes; for each client i of the round, it combines the classifier
             sum_k a_k head_k with  min_a a^T (diag(V) + D_i) a,  a >= 0, sum_k a_k = 1,
             D_i[j, k] = sum_c <h_i^c - h_j^c, h_i^c - h_k^c>,   h_k^c = p_k^c mu_k^c,
             V_k = (1 / n_k) (sum_c p_k^c E||f||^2 - sum_c (p_k^c)^2 ||mu_k^c||^2).
V and h are computed with the received body before training, on the augmented batches of the first
epoch. As in the authors' code (JianXu95/FedPAC, tools.py), weights below 0.001 are set to 0. If
rounding makes an eigenvalue of a matrix negative, all its eigenvalues below 0.01 are dropped. A
client without a batch (`local.drop_last`) has no V and h, so the others give it the weight 0. A
client receives its combined classifier when it next takes part. The reported accuracy is measured
with the averaged body and the mean classifier, weighted by n_k (FedKA's generic accuracy). The
personalised test uses the averaged body and the client's combined classifier, before training.

`head_lr` is constant over the rounds, as in the authors' code (methods/fedpac.py: 0.1 with momentum
0.5). Differs from the released code: In that code, the body's learning rate is also constant; in
fedexp, it follows `local.lr_decay`. With lr_decay=0.99, the ratio of head_lr to the body's rate
grows by a factor of 7.5 in 200 rounds. conf/algorithm/fedpac.yaml sets head_lr=0.01, because FedKA
uses this rate for all parameters. In addition, momentum 0.9 makes a step effectively 1 / (1 - 0.9)
= 10 times the learning rate (2 times with momentum 0.5).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

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
from fedexp.algorithms.phases import HeadThenBody
from fedexp.core import tree
from fedexp.core.limits import NonNegative, Positive
from fedexp.core.tree import Params, Tree

SMALLEST_EIGENVALUE, SMALLEST_WEIGHT = 0.01, 1e-3


class FedPAC(HeadThenBody):
    sends = ("params", "prototypes")
    needs_features = True

    lambda_: NonNegative  # weight of the alignment
    head_lr: Positive  # learning rate of the classifier

    def counted(self, sent: Tree, up: bool) -> Tree:
        """Return the values that count as traffic.

        Upload: the statistics are counted only for the client's classes. Download: the averaged
        classifier is not counted, because a client receives its combined classifier instead.
        """
        if up:
            own = {k: sent[k] for k in ("prototypes", "statistics")}
            return sent | prototypes.select_present(sent["statistics"]["count"], own)
        return sent | {
            "params": heads.body(sent["params"]),
            "prototypes": prototypes.select_present(
                sent["prototypes"]["known"], sent["prototypes"]
            ),
        }

    def rate_of_head(self, ctx: Context) -> float:
        return self.head_lr

    def server_init(self, params: Params, federation: Federation) -> Tree:
        head = heads.head(params)
        classes, width = head[heads.WEIGHT].shape
        like = head[heads.BIAS]
        everyone = tree.map(
            lambda leaf: leaf.expand(federation.num_clients, *leaf.shape).clone(), head
        )
        return {
            "params": params,
            "heads": everyone,
            "prototypes": prototypes.no_prototypes(classes, width, like),
        }

    def personal_broadcast(
        self, server: Tree, client: int, kept: Mapping[int, Tree], rng: np.random.Generator
    ) -> Tree:
        return tree.row(server["heads"], client)

    def personal_model(
        self, server: Tree, client: int, state: Tree, federation: Federation
    ) -> Params:
        """Return the global body with the client's combined classifier.

        Until the client first takes part, its classifier is the initial one.
        """
        return server["params"] | tree.row(server["heads"], client)

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        """Return the class statistics of the received body, and the prototypes to align with."""
        stats = self.statistics(net, ctx.server["params"], data, ctx)
        known = ctx.server["prototypes"]["known"]
        target = torch.where(known[:, None] > 0, ctx.server["prototypes"]["mean"], stats["mean"])
        return stats | {"target": target, "aligns": (known.sum() > 0).to(target.dtype)}

    def statistics(self, net: Network, params: Params, data: ClientData, ctx: Context) -> Tree:
        """Return the class statistics of a client's features in the first pass over the data.

        params: the model that computes the features. For the values, see `prototypes.statistics`.

        """
        passed = first_pass(data, ctx)
        return prototypes.statistics(net, params, passed, ctx.server["prototypes"]["mean"])

    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        return ctx.server["params"] | ctx.personal

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        features, logits, _ = net(params, batch.x)
        target = ctx.setup["target"].index_select(0, batch.y)
        aligned = ((features - target) ** 2).mean(-1) * ctx.setup["aligns"]
        return cross_entropies(logits, batch.y) + self.lambda_ * aligned

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        before = {k: ctx.setup[k] for k in ("count", "mean", "square")}
        after = self.statistics(net, params, data, ctx)["mean"]
        return {"params": params, "prototypes": after, "statistics": before}, ctx.client

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        counts = messages["statistics"]["count"]
        combination = combine(messages["statistics"])
        own, cohort = heads.head(messages["params"]), list(round.clients)
        everyone = {k: v.clone() for k, v in server["heads"].items()}
        for k, v in everyone.items():
            v[cohort] = torch.tensordot(combination.to(v), own[k], 1)
        known = prototypes.average_prototypes(server["prototypes"], messages["prototypes"], counts)
        return super().aggregate(server, messages, round) | {"heads": everyone, "prototypes": known}


def combine(statistics: Tree) -> Tensor:
    """Return the weights a [|S|, |S|]; row i combines the cohort's classifiers for client i.

    A client without examples has the weight 0, except in its own row. statistics: the clients'
    class statistics, "count" [|S|, C], "square" [|S|, C] and "mean" [|S|, C, D].
    """
    count, mean, square = (statistics[k].double().cpu() for k in ("count", "mean", "square"))
    known, sizes = count.sum(1) > 0, count.sum(1).clamp(min=1)
    share = count / sizes[:, None]
    variance = ((share * square).sum(1) - (share**2 * (mean**2).sum(-1)).sum(1)) / sizes
    h = (share[..., None] * mean).flatten(1)
    weights = np.zeros((len(h), len(h)))
    for i in range(len(h)):
        apart = h[i] - h
        chosen = [k for k in range(len(h)) if known[k] or k == i]
        matrix = (variance.diag() + apart @ apart.T).numpy()[np.ix_(chosen, chosen)]
        weights[i, chosen] = simplex_minimum(matrix, chosen.index(i))
    return torch.from_numpy(weights)


def simplex_minimum(matrix: np.ndarray, own: int) -> np.ndarray:
    """Return the weights a that minimise a^T M a subject to a >= 0 and sum a = 1.

    M is the matrix [|S|, |S|], and `own` is the index of the client. SciPy's SLSQP solves the
    problem, starting close to the weights that select only the client's own classifier. These
    weights are returned if the matrix is not finite because a client sent NaN or Inf.
    """
    from scipy.optimize import minimize  # slow to import, and no other algorithm needs it

    if not np.isfinite(matrix).all():
        return np.eye(len(matrix))[own]
    values, vectors = np.linalg.eigh(matrix)
    if values.min() < 0:
        values = np.where(values < SMALLEST_EIGENVALUE, 0.0, values)
        matrix = vectors @ np.diag(values) @ vectors.T
    scale = max(np.abs(matrix).max(), 1e-30)  # the solver's tolerance is absolute
    solution = minimize(
        lambda a: a @ matrix @ a / scale,
        np.eye(len(matrix))[own] * 0.5 + 0.5 / len(matrix),
        jac=lambda a: 2 * matrix @ a / scale,
        bounds=[(0.0, 1.0)] * len(matrix),
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones_like(a)},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    weights = np.where(solution.x < SMALLEST_WEIGHT, 0.0, solution.x)
    return weights / weights.sum()
