"""FedRS: clients scale down the scores of classes that they do not have.

Training then changes the classifier's weights for these classes less. The server averages as in
FedAvg.

X.-C. Li and D.-C. Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution
Non-IID Data", KDD 2021. The scores z_c of classes without examples on the client are multiplied by
alpha (0.5) before the softmax:
    L = -log softmax(a z)_y,   a_c = 1 if n_kc > 0, and alpha otherwise;
alpha = 1 is FedAvg. Differs from the paper: The paper's scores w_c^T h have no bias. Here, the
logit, including its bias, is multiplied by alpha, as in FedDecorr's code of FedRS.
"""

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network
from fedexp.core.limits import Share
from fedexp.core.tree import Params, Tree


class FedRS(FedAvg):
    alpha: Share  # factor of the scores of absent classes; 1: FedAvg

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        return {"factor": np.where(federation.counts[client] > 0, 1.0, self.alpha)}

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        logits = net(params, batch.x).logits
        return cross_entropies(logits * ctx.plan["factor"].to(logits.dtype), batch.y)
