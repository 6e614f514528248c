"""FedLC: each client calibrates the logit of a class by its number of examples of the class.

In the loss, each class has a margin that is larger for rarer classes. The server averages as in
FedAvg.

J. Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML
2022. For a client with n_c examples of class c,
    L = -log( exp(z_y - tau n_y^(-1/4)) / sum_c exp(z_c - tau n_c^(-1/4)) ).
No code by the authors was found. Two other implementations (KarhouTam/FL-bench, and
bytedance/FedDecorr in approach/fedlogitcal.py) use this formula. The published sum is over c != y,
which leaves the loss without a lower bound; fedexp and these two implementations sum over all
classes. A class without examples has an infinite margin, so it is excluded from the sum. FL-bench
sets n_c = 1e-8 for such a class, which is nearly equivalent.
"""

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

INFINITE = 1e30  # margin of an absent class; finite, because padding may have this label


class FedLC(FedAvg):
    tau: NonNegative  # scale of the margins; 0: FedAvg

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        counts = federation.counts[client]
        margin = self.tau * np.maximum(counts, 1) ** -0.25
        return {"margin": np.where(counts > 0, margin, INFINITE * (self.tau > 0))}

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        logits = net(params, batch.x).logits
        return cross_entropies(logits - ctx.plan["margin"].to(logits.dtype), batch.y)
