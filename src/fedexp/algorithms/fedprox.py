"""FedProx: a proximal term keeps local models close to the global model.

Clients add the term to their loss. The server averages as in FedAvg.

T. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. Eq. (2):
    min_w  F_k(w) + mu/2 * ||w - w_global||^2
Differs from the paper: In the paper, clients may stop early at inexactness gamma. Here, every
client trains for E epochs, as in the experiments of FedNTD (Table 5) and FedKA.
"""

import torch

from fedexp.algorithms.base import Context, FedAvg, Network
from fedexp.core import tree
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params


class FedProx(FedAvg):
    mu: NonNegative  # weight of the proximal term; 0: FedAvg

    def penalty(self, net: Network, params: Params, ctx: Context) -> torch.Tensor:
        return 0.5 * self.mu * tree.squared_distance(params, ctx.server["params"])
