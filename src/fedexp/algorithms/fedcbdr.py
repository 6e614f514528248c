"""FedCBDR: clients keep the examples of old tasks that count most among those of all clients, and
learn them sharper.

Z. Qi et al., "Class-wise Balancing Data Replay for Federated Class-Incremental Learning", NeurIPS
2025 (arXiv 2507.07712), Eq. (1)-(9). Global-perspective data replay, when task i has ended: with X
the features of all clients' examples of it under the global model, [n, D],
    X = U S V^T,   tau_j = ||row j of U||^2,   p_j = tau_j / sum tau       Eq. (2)-(6)
and `samples` of the n examples are drawn with probabilities p; each client keeps those that are its
own, from then on. Task-aware temperature scaling, from task 2 on, in each batch of new examples and
kept ones,
    z'_c = z_c / tau_old for the classes of old tasks, z_c / tau_new for the others
    L    = omega_old * mean of CE(z') over old examples + omega_new * mean over new ones
(Eq. (7), (9)), and CE in task 1, Eq. (8). No code of the authors was found; the tests write the
equations again.
Values: the best of the paper's Fig. 4, and its 450 examples of a task for CIFAR-10 in three tasks.
Readings: U has the min(n, D) columns of the thin decomposition, since with the n columns that Eq.
(4) prints every tau_j is 1; columns of singular values below 1e-6 of the largest are left out. p is
normalised over all clients, as the text has it, where Eq. (6) prints the sum over one. Scores do
not balance classes: with the features of model=cnn (D = 512, CIFAR-10, 40 rounds of FedAvg; one
model, means of 200 draws of 450) 4,500, 450 and 50 images of three classes give 373, 71 and 6
(equal p: 405, 40 and 5; the three or ten largest directions alone: 406, 41 and 3, 377, 68 and 6),
and 4,500 of each give 129, 180 and 142 (equal p: 150 each). Balanced replay in the paper's
experiments comes from one draw over all clients, whose classes are equally large together. Examples
are drawn without replacement, so that `samples` different ones are kept; the weights 1 / sqrt(n_s
p_x) of the text enter no equation of the training. Left out: the random rotations P_k and Q of Eq.
(1), by which a client hides its features from the server. Q changes nothing, and P_k is undone by
its client, which alone knows it: U is the same. The features that clients send at the end of a task
are not counted in the traffic. Deviations: the model has all C outputs from the start, those of
classes to come count as new ones; weights are n_k, kept examples among them, where Algorithm 1 does
not say which.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.base import cross_entropies, masked_mean
from fedexp.algorithms.exemplars import Exemplars, Kept
from fedexp.algorithms.interfaces import Batch, Context, Features, Federation, Needs, Network
from fedexp.core.limits import Count, NonNegative, Positive
from fedexp.core.tree import Params

NEGLIGIBLE = 1e-6  # part of the largest singular value


def leverage(features: Tensor) -> Tensor:
    """Return the leverage scores tau [n] of features [n, D], float64; all 1 where every feature is
    0."""
    left, values, _ = torch.linalg.svd(features.double(), full_matrices=False)
    if not values.max() > 0:
        return torch.ones_like(left[:, 0])
    return left[:, values > NEGLIGIBLE * values.max()].square().sum(1)


class FedCBDR(Exemplars):
    sends = ("params", "known")

    samples: Count  # of each task, over all clients
    tau_old: Positive  # temperature of old classes
    tau_new: Positive
    omega_old: NonNegative  # weight of old examples
    omega_new: NonNegative
    selection: Literal["leverage", "random"]

    needs = Needs(
        server_state="which examples are kept",
        small="C numbers down; features up at the end of a task",
        data="kept examples of old tasks (clients)",
        work="a forward pass of all clients at the end of a task",
    )

    def choose(
        self,
        kept: Kept,
        own: Kept,
        features: Features,
        federation: Federation,
        rng: np.random.Generator,
    ) -> list[np.ndarray]:
        every = np.concatenate(own)
        by_score = self.selection == "leverage"
        scores = leverage(features(every)).cpu().numpy() if by_score else np.ones(len(every))
        possible = int((scores > 0).sum())
        drawn = rng.choice(
            every, min(self.samples, possible), replace=False, p=scores / scores.sum()
        )
        return [
            np.union1d(before, part[np.isin(part, drawn)])
            for before, part in zip(kept, own, strict=True)
        ]

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits = net(params, batch.x).logits
        if "known" not in ctx.server:
            return masked_mean(cross_entropies(logits, batch.y), batch.mask)
        known = ctx.server["known"]
        scaled = logits / (known * self.tau_old + (1 - known) * self.tau_new)
        losses = cross_entropies(scaled, batch.y)
        is_old = known.index_select(0, batch.y)
        present = torch.ones_like(is_old) if batch.mask is None else batch.mask.to(is_old.dtype)
        old, new = (masked_mean(losses, present * part) for part in (is_old, 1 - is_old))
        return self.omega_old * old + self.omega_new * new
