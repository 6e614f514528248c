"""FedLC: logits are calibrated by how many examples of each class the client has.

J. Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML
2022. With n_c the client's examples of class c,
    L = -log( exp(z_y - tau n_y^(-1/4)) / sum_c exp(z_c - tau n_c^(-1/4)) ).
No code of the authors was found; two others' implementations (KarhouTam/FL-bench, and
bytedance/FedDecorr in approach/fedlogitcal.py) have this form. The sum that the paper prints runs
over c != y, where the loss has no lower bound; theirs, as here, runs over all classes. A class
without examples has an infinite margin, so it is not in the sum (FL-bench takes n_c = 1e-8, which
is nearly that).
"""

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.interfaces import Batch, Context, Federation, Network
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

INFINITE = 1e30  # margin of an absent class; finite, since it may be the label of a row of padding


class FedLC(FedAvg):
    tau: NonNegative  # size of the margins; 0 is FedAvg

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        counts = federation.counts[client]
        margin = self.tau * np.maximum(counts, 1) ** -0.25
        return {"margin": np.where(counts > 0, margin, INFINITE * (self.tau > 0))}

    def example_loss(
        self, net: Network, params: Params, batch: Batch, ctx: Context
    ) -> torch.Tensor:
        logits = net(params, batch.x).logits
        return cross_entropies(logits - ctx.plan["margin"].to(logits.dtype), batch.y)
