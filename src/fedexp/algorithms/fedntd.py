"""FedNTD: clients distil the global model's predictions for all classes except the label.

This preserves what the global model knows about classes that a client does not have. The server
averages as in FedAvg.

G. Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022. Eq. (10)-(11): L = CE(q, y) + beta * L_NTD, where, for the classes c != y,
    q~(c) = exp(z_c / tau) / sum_{c' != y} exp(z_c' / tau)
    L_NTD = tau^2 * KL(q~_global || q~_local)
The teacher is the received global model, evaluated on the same augmented batch. With two classes,
L_NTD is identically 0.

Appendix Eq. (17)-(18): `lambda_` interpolates between distillation over all classes and
distillation over the not-true classes,
    (1 - lambda) * L_KD + lambda * L_NTD,   L_KD = tau^2 * KL(q_global || q_local).
Appendix Table 14: `distance=mse` replaces L_NTD by the squared error of the not-true logits,
without tau.

Further options: The published Eq. (10)-(11) have no factor tau^2, but the authors' code has it; see
`tau_squared`. The paper does not state how the MSE is reduced. The range of beta with the best
results (0.001 to 0.1) suggests a sum over classes and examples; see `mse_reduction`.
"""

from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.distillation import kl_divergence
from fedexp.algorithms.interfaces import Batch, Context, Network
from fedexp.core.errors import require
from fedexp.core.limits import NonNegative, Positive, Share
from fedexp.core.tree import Params


class FedNTD(FedAvg):
    beta: NonNegative  # weight of the distillation loss; 0: FedAvg
    tau: Positive  # temperature
    lambda_: Share  # 1: not-true distillation; 0: distillation over all classes
    distance: Literal["kl", "mse"]
    tau_squared: bool  # whether to multiply the KL by tau^2
    # reduction over the not-true classes and the examples of a batch
    mse_reduction: Literal["sum", "mean"]

    def __post_init__(self) -> None:
        super().__post_init__()
        mse_needs = self.distance == "kl" or self.lambda_ == 1
        require(
            mse_needs,
            "algorithm.lambda_",
            self.lambda_,
            "1 if algorithm.distance=mse (FedNTD's Table 14 has no distillation over all classes)",
        )

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        student = net(params, batch.x).logits
        teacher = net(ctx.server["params"], batch.x).logits.detach()
        loss = cross_entropies(student, batch.y)
        if self.distance == "mse":
            return loss + self.beta * self.squared_error(teacher, student, batch)
        return loss + self.beta * self.distillation(teacher, student, batch.y)

    def distillation(self, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        """Return the distillation loss of Eq. (17)-(18) for each example, [B].

        Terms whose weight is 0 are not computed.
        """
        scale = self.tau**2 if self.tau_squared else 1.0
        terms = [
            weight * scale * kl_divergence(teacher, student, self.tau, without)
            for weight, without in ((1 - self.lambda_, None), (self.lambda_, labels))
            if weight > 0
        ]
        return reduce(torch.add, terms)

    def squared_error(self, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        """Return the squared error of Table 14 for each example, [B].

        The loss of a batch is the mean of these values. They are scaled so that this mean equals
        the reduction `mse_reduction`.
        """
        not_true = torch.arange(student.shape[-1], device=student.device) != batch.y[:, None]
        total = torch.where(not_true, (teacher - student) ** 2, 0.0).sum(-1)
        if self.mse_reduction == "mean":
            return total / (student.shape[-1] - 1)
        return total * (len(total) if batch.mask is None else batch.mask.sum())
