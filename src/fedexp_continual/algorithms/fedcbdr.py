"""FedCBDR: clients replay important old examples; old and new classes have separate temperatures.

At the end of a task, the server draws the examples to keep, with probabilities that depend on the
features of all clients. In the loss, old and new classes have separate temperatures and weights.

Z. Qi et al., "Class-wise Balancing Data Replay for Federated Class-Incremental Learning", NeurIPS
2025 (arXiv 2507.07712), Eq. (1)-(9). X [n, D] contains the features that the global model computes
for all clients' examples of the task:
    X = U S V^T,   tau_j = ||row j of U||^2,   p_j = tau_j / sum tau       Eq. (2)-(6)
`samples` of the n examples are drawn with probabilities p. From then on, each client keeps the
drawn examples that belong to it. From task 2 on, the logits z of each batch of new and kept
examples are scaled with a temperature (task-aware temperature scaling):
    z'_c = z_c / tau_old for the classes of old tasks, z_c / tau_new for the others
    L    = omega_old * mean of CE(z') over old examples + omega_new * mean over new ones
(Eq. (7), (9)). In task 1, the loss is CE, Eq. (8). No code by the authors was found; the tests
implement the equations independently. The default values are the best ones in the paper's Fig. 4;
`samples` is the paper's 450 examples per task for CIFAR-10 in three tasks.

Interpretation: U has the min(n, D) columns of the thin decomposition. With the n columns of the
published Eq. (4), every tau_j would be 1. Columns with singular values below 1e-6 of the largest
are omitted. p is normalised over all clients, as in the paper's text; the published Eq. (6) sums
over one client. Examples are drawn without replacement, so that `samples` different examples are
kept. The weights 1 / sqrt(n_s p_x) that the text mentions appear in none of the training equations
and are not used.

The scores do not balance the classes on their own. With the features of model=cnn (D = 512,
CIFAR-10, 40 rounds of FedAvg; one model, means of 200 draws of 450), if three classes have 4,500,
450 and 50 images, then 373, 71 and 6 of them are kept. With equal p, the numbers are 405, 40 and 5;
with only the three largest directions, 406, 41 and 3; with only the ten largest, 377, 68 and 6. If
each class has 4,500 images, then 129, 180 and 142 are kept; with equal p, 150 each. In the paper's
experiments, the replay is balanced because one draw covers all clients, and all classes have the
same total size.

The random rotations P_k and Q of Eq. (1), which hide a client's features from the server, are
omitted. Q has no effect on U, and each client undoes its own rotation P_k, so U does not change.
The features that clients send at the end of a task do not count as traffic. The model has all C
outputs from the start, and future classes are treated as new classes. The weights of the average
are n_k, which includes kept examples; Algorithm 1 does not specify them.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.base import cross_entropies, masked_mean
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network
from fedexp.core.limits import Count, NonNegative, Positive
from fedexp.core.tree import Params
from fedexp_continual.algorithms.exemplars import Exemplars, Features, Kept, means_of_old_and_new

NEGLIGIBLE = 1e-6  # singular values below this fraction of the largest one are omitted


def leverage(features: Tensor) -> Tensor:
    """Return the leverage scores tau, float64 [n], of features [n, D].

    All scores are 1 if all features are 0.

    """
    left, values, _ = torch.linalg.svd(features.double(), full_matrices=False)
    if not values.max() > 0:
        return torch.ones_like(left[:, 0])
    return left[:, values > NEGLIGIBLE * values.max()].square().sum(1)


class FedCBDR(Exemplars):
    sends = ("params", "known")

    samples: Count  # number of examples kept per task, over all clients
    tau_old: Positive  # temperature for old classes
    tau_new: Positive
    omega_old: NonNegative  # weight of the old examples' loss
    omega_new: NonNegative
    selection: Literal["leverage", "random"]

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
        old, new = means_of_old_and_new(losses, is_old, batch.mask)
        return self.omega_old * old + self.omega_new * new
