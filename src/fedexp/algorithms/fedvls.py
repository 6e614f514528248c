"""FedVLS: clients distil the global model for the classes that they lack, and suppress logits.

The loss is calibrated by the client's shares of the classes, so its minority classes count more.
The server averages as in FedAvg.

K. Guo, Y. Ding, J. Liang, Z. Wang, R. He, T. Tan, "Exploring Vacant Classes in Label-Skewed
Federated Learning", AAAI 2025, Eq. (2)-(6) and Algorithm 1 of its appendix. p(c) is the share of
class c in the client's examples, O the set of its vacant classes (p(c) = 0), C the number of
classes, z the logits, and E the mean over a batch:
    L = L_cal + lambda L_dis + mu L_logit
    L_cal = -E log( p(y) exp(z_y) / sum_c p(c) exp(z_c) )
    L_dis = E KL(q_global || q_local),   q = softmax of z over the classes of O
    variant=paper      L_logit = sum_c p(c) log E( [y != c] exp(z_c) ),   mu = 1
    variant=released   L_logit = sum_c p(c) log E( [y != c] exp(z_c) / (C p(c)) + [y = c] ),
                       mu = 0.005.
The teacher is the received global model in eval mode, on the same augmented batch. With all classes
on a client, and with one vacant class, whose q is 1, L_dis is 0.

`released` is the loss of the authors' code (krumpguo/FedVLS at 7d8163f, in
system/flcore/clients/clientvls.py), which also adds 1e-9 to p(c) and 1 / C before a logarithm, so
that vacant classes take part in L_cal a little. Its L_logit has a lower bound for each class in the
batch. That of `paper` has none: a common shift of all logits lowers L without end, and runs on
digits with mu = 1 or 0.1 diverge.

Ambiguous in the paper: Eq. (3) is printed as E sum_O q_global log(q_local / q_global). This is
-KL, which would drive the models apart; the text and the code mean KL. In Eq. (4), the logarithm
for a batch whose examples are all of class c is -inf; here, this term of L_logit is 0. So a client
with one class only distils.

Differs from the released code: Its teacher is in train mode, and its clients train without weight
decay (the paper: 1e-5 for MNIST and CIFAR-10, 1e-4 for CIFAR-100 and TinyImageNet).
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies, masked_mean
from fedexp.algorithms.distillation import log_shares
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

EPS = 1e-9  # added to shares before a logarithm in the released code
ABSENT = -1e30  # log p of a vacant class; finite, because padding may have this label


class FedVLS(FedAvg):
    hint = "with algorithm.variant=paper, the loss has no lower bound; lower algorithm.mu"

    lambda_: NonNegative  # weight of vacant-class distillation
    mu: NonNegative  # weight of logit suppression
    variant: Literal["released", "paper"]

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        counts = federation.counts[client]
        return {"shares": counts / max(counts.sum(), 1)}

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        student = net(params, batch.x).logits
        teacher = net(ctx.server["params"], batch.x).logits.detach()
        shares = ctx.plan["shares"].to(student.dtype)
        losses = cross_entropies(student + self.log_prior(shares), batch.y)
        losses = losses + self.lambda_ * vacant_divergence(teacher, student, shares)
        return masked_mean(losses, batch.mask) + self.mu * self.suppression(student, batch, shares)

    def log_prior(self, shares: Tensor) -> Tensor:
        """Return what L_cal adds to the logits, [C]. shares: p, [C]."""
        if self.variant == "released":
            return (shares + EPS).log()
        return torch.where(shares > 0, shares.clamp(min=EPS).log(), ABSENT)

    def suppression(self, logits: Tensor, batch: Batch, shares: Tensor) -> Tensor:
        """Return L_logit of a batch, a scalar. logits: [B, C]; shares: p, [C]."""
        lowest = torch.finfo(logits.dtype).min  # finite, because 0 * -inf would be NaN
        rows = torch.ones_like(batch.y) if batch.mask is None else batch.mask
        is_label = torch.arange(logits.shape[-1], device=logits.device) == batch.y[:, None]
        if self.variant == "released":
            even = float(np.log(1 / logits.shape[-1] + EPS))
            entries = torch.where(is_label, 0.0, logits - self.log_prior(shares) + even)
            counted = rows[:, None] > 0
        else:
            entries, counted = logits, (rows[:, None] > 0) & ~is_label
        total = torch.where(counted, entries, lowest).logsumexp(0)
        value = total - rows.sum().clamp(min=1).to(logits.dtype).log()
        return (shares * torch.where(counted.any(0), value, 0.0)).sum()


def vacant_divergence(teacher: Tensor, student: Tensor, shares: Tensor) -> Tensor:
    """Return KL(q_global || q_local) over the vacant classes for each example, [B].

    teacher, student: logits [B, C]. shares: p, [C].
    """
    vacant = shares == 0
    target = log_shares(teacher, vacant)
    terms = target.exp() * (target - log_shares(student, vacant))
    return torch.where(vacant, terms, 0.0).sum(-1)
