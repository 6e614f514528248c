"""FedKD: clients distil the global model's predictions for all classes (KD in FedNTD's Table 12).

The server averages as in FedAvg. The loss is that of G. Hinton et al. 2015, as used by FedNTD in
Eq. (3) and appendix Eq. (17):
    L = CE + beta * tau^2 * KL( softmax(z_global / tau) || softmax(z / tau) )
The teacher is the received global model on the same augmented batch. Table 12 does not use the loss
(1 - beta) CE + beta KD of Eq. (3). The method is FedNTD with lambda_=0.
"""

import torch

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.distillation import kl_divergence
from fedexp.algorithms.interfaces import Batch, Context, Network
from fedexp.core.limits import NonNegative, Positive
from fedexp.core.tree import Params


class FedKD(FedAvg):
    beta: NonNegative  # weight of the distillation; 0 is FedAvg
    tau: Positive  # temperature

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        student = net(params, batch.x).logits
        teacher = net(ctx.server["params"], batch.x).logits.detach()
        loss = cross_entropies(student, batch.y)
        return loss + self.beta * self.tau**2 * kl_divergence(teacher, student, self.tau)
