"""FedSpeed: a proximal term whose bias is corrected, and a gradient from an ascended point.

Y. Sun et al., "FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization
Accuracy", ICLR 2023, Algorithm 1, in the form of the authors' code. h_k, 0 at first, sums up w_k -
w_global over the client's participations (the paper's correction is -h_k / lambda_paper; `lambda_`
here is 1 / lambda_paper):
    client   g = (1 - alpha) g(w) + alpha g(w + rho g(w) / ||g(w)||),
             w <- w - lr * (g + lambda_ * (w - w_global + h_k)),   h_k <- h_k + (w_k - w_global)
    server   h <- h + (1 / K) * sum_S (w_k - w_global),   w_global <- mean of the w_k + h
The mean follows `weighting` (uniform in the authors' code). alpha is 1 in the code. `clip` bounds
the norm of the whole gradient before weight decay, 10 in the code; there the part lambda_ * w is
added after clipping, here it is in what is clipped. Running statistics never enter h.
"""

from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.feddyn import clipped, corrected_mean, moved
from fedexp.algorithms.fedsam import ascent, plus
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Needs,
    Network,
    ServerRound,
)
from fedexp.core import tree
from fedexp.core.limits import NonNegative, Share
from fedexp.core.tree import Params, Tree


class FedSpeed(FedAvg):
    own_step = "its server adds a correction to the average, which the clients' penalties rely on"

    rho: NonNegative  # radius of the ascent
    lambda_: NonNegative  # weight of the proximal term
    alpha: Share  # share of the ascended gradient
    clip: NonNegative  # bound of the gradient's norm; 0: none

    needs = Needs(client_state="sum of changes h_k", server_state="mean of all h_k", gradients=2)

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "h": tree.zeros_like(params)}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {"h": tree.zeros_like(params)}

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take one step with the gradient above; the loss returned is that at `params`."""

        def loss(p: Params) -> Tensor:
            return self.objective(net, p, batch, ctx)

        first, value = net.gradient(loss, params)
        second, _ = net.gradient(loss, plus(params, ascent(first, self.rho)))
        mixed = {k: (1 - self.alpha) * first[k] + self.alpha * second[k] for k in params}
        grads = proximal(mixed, params, ctx, self.lambda_, self.clip)
        params, memory = optimizers.step(params, grads, memory, ctx.lr, ctx.local, batch.step)
        return params, memory, value

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        return {"params": params}, {"h": moved(ctx.client["h"], params, ctx)}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        return server | corrected_mean(server, "h", messages["params"], round)


def proximal(grads: Params, params: Params, ctx: Context, lambda_: float, clip: float) -> Params:
    """Return the gradient with lambda_ * (w - w_global + h_k) added, then clipped."""
    start, h = ctx.server["params"], ctx.client["h"]
    grads = {k: g + lambda_ * (params[k] - start[k] + h[k]) for k, g in grads.items()}
    return clipped(grads, clip) if clip else grads
