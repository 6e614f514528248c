"""FedDecorr: clients add a penalty on correlations between the feature dimensions.

Under label skew, the features of local models collapse to few dimensions. The penalty counteracts
this. The server averages as in FedAvg.

Y. Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning", ICLR 2023, and the authors' code. Z [n, d] contains the features of a batch, with each
dimension standardised by its mean and standard deviation (eps 1e-8, divisor n - 1), and C = Z^T Z:
    variant=released   L = CE + beta / n * mean over i != j of C_ij^2
    variant=paper      L = CE + beta / d^2 * sum over i != j of K_ij^2,   K = C / (n - 1).
K is the correlation matrix. The paper's sum includes its diagonal, which is always 1. The penalty
of `released` is about n times that of `paper`; the authors' beta of 0.1 is for `released`. For a
batch of one example, both penalties are 0.
"""

from typing import Literal

from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies, masked_mean
from fedexp.algorithms.interfaces import Batch, Context, Network
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params

EPS = 1e-8  # added to the variance under the square root


class FedDecorr(FedAvg):
    needs_features = True

    beta: NonNegative  # weight of the decorrelation; 0 is FedAvg
    variant: Literal["released", "paper"]

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        features, logits, _ = net(params, batch.x)
        loss = masked_mean(cross_entropies(logits, batch.y), batch.mask)
        return loss + self.beta * decorrelation(features, batch.mask, self.variant)


def decorrelation(features: Tensor, mask: Tensor | None, variant: str) -> Tensor:
    """Return the decorrelation penalty of a batch, a scalar: the second term of L divided by beta.

    features: [B, d]; mask: [B], 1 for examples and 0 for padding, or None.
    """
    rows = features.new_ones(len(features)) if mask is None else mask.to(features.dtype)
    n, d = rows.sum(), features.shape[-1]
    centred = (features - (features * rows[:, None]).sum(0) / n.clamp(min=1)) * rows[:, None]
    variance = (centred**2).sum(0) / (n - 1).clamp(min=1)
    z = centred / (EPS + variance).sqrt()
    products = z.T @ z
    outside = (products**2).sum() - (products.diagonal() ** 2).sum()
    if variant == "paper":
        return outside / (n - 1).clamp(min=1) ** 2 / d**2
    return outside / max(d * (d - 1), 1) / n.clamp(min=1)
