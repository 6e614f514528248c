"""FedSpeed: a bias-corrected proximal term, and gradients after an ascent step.

The proximal term limits client drift, and the ascent step leads to flat minima. The server corrects
the average as in FedDyn.

Y. Sun et al., "FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization
Accuracy", ICLR 2023, Algorithm 1, as implemented in the authors' code. h_k starts at 0; each time
that client k takes part, w_k - w_global is added to it. The paper's correction is -h_k /
lambda_paper, and `lambda_` here is 1 / lambda_paper:
    client   g = (1 - alpha) g(w) + alpha g(w + rho g(w) / ||g(w)||),
             w <- w - lr * (g + lambda_ * (w - w_global + h_k)),   h_k <- h_k + (w_k - w_global)
    server   h <- h + (1 / K) * sum_S (w_k - w_global),   w_global <- mean of the w_k + h
The mean of the w_k uses the weights set by `weighting` (uniform in the authors' code). `clip`
bounds the norm of the whole gradient before weight decay. The authors use alpha = 1 and clip = 10.
h does not include running statistics.

Differs from the released code: That code adds the term lambda_ * w after clipping; here, the term
is part of the clipped gradient.
"""

from fedexp.algorithms.feddyn import Corrected
from fedexp.algorithms.fedsam import FedSAM
from fedexp.algorithms.interfaces import Batch, Context
from fedexp.core.limits import NonNegative, Share
from fedexp.core.tree import Params


class Proximal(Corrected):
    """Base class of algorithms with a proximal term that pulls clients towards w_global - h_k."""

    lambda_: NonNegative  # weight of the proximal term

    def transform_grads(self, grads: Params, params: Params, batch: Batch, ctx: Context) -> Params:
        start, h = ctx.server["params"], ctx.client["h"]
        pulled = {k: g + self.lambda_ * (params[k] - start[k] + h[k]) for k, g in grads.items()}
        return super().transform_grads(pulled, params, batch, ctx)


class FedSpeed(FedSAM, Proximal):
    alpha: Share  # weight of the gradient after the ascent step

    def combine_gradients(self, first: Params, second: Params) -> Params:
        return {k: (1 - self.alpha) * first[k] + self.alpha * second[k] for k in first}
