"""FedLwF: Learning without Forgetting in each client's local training.

Clients distil the model from the end of the previous task on their new examples. The server
averages as in FedAvg.

Z. Li, D. Hoiem, "Learning without Forgetting", ECCV 2016, as used as a baseline in CFeD (IJCAI
2022, section 5.3). On the new task's examples,
    L = CE + lambda_d L_d,
where L_d is the distillation loss of continual.py with the teacher theta_{t-1}, the global model
from the end of the previous task. In task 1, FedLwF is FedAvg. With `paradigm=centralized`
(algorithm=lwf), FedLwF is LwF.

Differs from the released code of CFeD (lianziqt/CFeD, update.py and train_eval_fed.py): The teacher
runs in eval mode. In the released code, the teacher runs in training mode with dropout and batch
statistics, and its outputs are computed once per round. The server weights client k by n_k; in the
released code, all clients have equal weights. A client trains on all its examples, in a new order
in each epoch. In the released code, a client trains on the first 80 % of its examples in a fixed
order, without the last partial batch.
"""

import torch

from fedexp.algorithms.base import cross_entropies
from fedexp.algorithms.continual import Remembering, distillation_loss
from fedexp.algorithms.interfaces import Batch, Context, Network
from fedexp.core.limits import NonNegative, Positive
from fedexp.core.tree import Params


class FedLwF(Remembering):
    lambda_d: NonNegative  # weight of the distillation loss; 0: FedAvg
    temperature: Positive  # temperature T of teacher and student

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        student = net(params, batch.x).logits
        loss = cross_entropies(student, batch.y)
        if "old" not in ctx.server:
            return loss
        teacher = net(ctx.server["old"], batch.x).logits.detach()
        return loss + self.lambda_d * distillation_loss(student, teacher, self.temperature)
