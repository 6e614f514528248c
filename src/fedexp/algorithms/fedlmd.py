"""FedLMD: distil what the global model knows about classes with few examples on a client.

J. Lu et al., "Federated Learning with Label-Masking Distillation", ACM Multimedia 2023, and the
authors' code, which stands on FedNTD's. The majority classes M_k of a client are those with more
examples than its classes have on average. For an example of class y, with z / tau over the classes
that are kept,
    L = CE(z, y) + beta * tau^2 * KL(p || q),   q = softmax over c != y of the local model,
    p = softmax over c != y and c not in M_k of the received global model;
    teacher=false (FedLMD-Tf): p is uniform over these classes, and no teacher is evaluated.
Where no class is kept (c != y and not in M_k), there is nothing to distil, and the second term is
0. Deviations: the released code of FedLMD-Tf counts the rows of the batch where it means the
classes of M_k, which makes its uniform target negative for B > C; here p sums to 1.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import Batch, Context, Federation, Needs, Network
from fedexp.core.limits import NonNegative, Positive
from fedexp.core.tree import Params, Tree


class FedLMD(FedAvg):
    beta: NonNegative  # weight of the distillation; 0 is FedAvg
    tau: Positive  # temperature
    teacher: bool  # false: a uniform target instead of the global model's answer

    @property
    def needs(self) -> Needs:
        return Needs(teachers=int(self.teacher))

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        counts = federation.counts[client]
        return {"minority": (counts <= counts.mean()).astype(np.float64)}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        student = net(params, batch.x).logits
        not_true = torch.arange(student.shape[-1], device=student.device) != batch.y[:, None]
        kept = not_true & (ctx.plan["minority"] > 0)
        if self.teacher:
            target = log_shares(net(ctx.server["params"], batch.x).logits.detach() / self.tau, kept)
        else:
            target = log_shares(torch.zeros_like(student), kept)
        terms = target.exp() * (target - log_shares(student / self.tau, not_true))
        distance = torch.where(kept, terms, 0.0).sum(-1)
        return cross_entropies(student, batch.y) + self.beta * self.tau**2 * distance


def log_shares(logits: Tensor, kept: Tensor) -> Tensor:
    """Return the logarithm of the softmax over the classes kept; [B, C], of no meaning elsewhere
    but finite."""
    return F.log_softmax(torch.where(kept, logits, torch.finfo(logits.dtype).min), dim=-1)
