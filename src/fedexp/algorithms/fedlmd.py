"""FedLMD: clients distil the global model's predictions for the classes that are rare on them.

The server averages as in FedAvg.

J. Lu et al., "Federated Learning with Label-Masking Distillation", ACM Multimedia 2023, and the
authors' code, which is based on FedNTD's. A client's majority classes M_k are the classes with more
examples than the mean over all classes. For an example of class y, the loss is as follows, where
each softmax is of z / tau over the given classes:
    L = CE(z, y) + beta * tau^2 * KL(p || q),   q = softmax over c != y of the local model,
    p = softmax over c != y and c not in M_k of the received global model;
    teacher=false (FedLMD-Tf): p is uniform over these classes, and no teacher is evaluated.
If M_k contains every class c != y, the second term is 0.

Differs from the released code: To compute the uniform target, the code of FedLMD-Tf uses the batch
size B instead of the number of classes in M_k, so the target is negative for B > C. In fedexp, p
sums to 1.
"""

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.distillation import log_shares
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network
from fedexp.core.limits import NonNegative, Positive
from fedexp.core.tree import Params, Tree


class FedLMD(FedAvg):
    beta: NonNegative  # weight of the distillation loss; 0: FedAvg
    tau: Positive  # temperature
    teacher: bool  # False: uniform target instead of the global model's prediction

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
