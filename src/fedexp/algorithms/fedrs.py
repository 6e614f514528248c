"""FedRS: the softmax of classes that a client does not have is restricted, so that their weights
are not pushed away.

X.-C. Li and D.-C. Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution
Non-IID Data", KDD 2021: the scores of the classes without examples on the client are multiplied by
alpha (0.5) before the softmax. Deviation: the paper's scores w_c^T h have no bias; the logit with
its bias is scaled here, as in the implementation that comes with FedDecorr. alpha = 1 is FedAvg.
"""

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network
from fedexp.core.limits import Share
from fedexp.core.tree import Params, Tree


class FedRS(FedAvg):
    alpha: Share  # factor of the scores of absent classes; 1 is FedAvg

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        return {"factor": np.where(federation.counts[client] > 0, 1.0, self.alpha)}

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        logits = net(params, batch.x).logits
        return cross_entropies(logits * ctx.plan["factor"].to(logits.dtype), batch.y)
