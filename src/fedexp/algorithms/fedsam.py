"""FedSAM: clients take the gradient at the worst point near their model, which leads to flat
minima.

Z. Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022,
Algorithm 1, and D. Caldarola et al., "Improving Generalization in Federated Learning by Seeking
Flat Minima", ECCV 2022:
    e = rho * g(w) / ||g(w)||,   w <- w - lr * g(w + e),   both gradients of the same batch.
Weight decay and momentum act on the second gradient alone. Two gradients a step: about twice the
time of FedAvg. Running statistics of batch norm see both passes, as in the released code.
"""

from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Batch, Context, Needs, Network
from fedexp.core import tree
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

SMALLEST = 1e-12  # added to the norm of a gradient


def ascent(grads: Params, rho: float) -> Params:
    """Return the perturbation rho * g / ||g||, the norm over all parameters together; 0 where the
    gradient is 0."""
    scale = rho / (tree.dot(grads, grads).clamp(min=SMALLEST**2).sqrt() + SMALLEST)
    return {k: scale * g for k, g in grads.items()}


class FedSAM(FedAvg):
    rho: NonNegative  # radius of the neighbourhood; 0 is FedAvg

    needs = Needs(gradients=2)

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take one step with the gradient at the ascended point; the loss returned is that at
        `params`."""

        def loss(p: Params) -> Tensor:
            return self.objective(net, p, batch, ctx)

        first, value = net.gradient(loss, params)
        second, _ = net.gradient(loss, tree.add(params, ascent(first, self.rho)))
        grads = self.transform_grads(self.mixed(first, second), params, batch, ctx)
        params, memory = optimizers.step(params, grads, memory, ctx.lr, ctx.local, batch.step)
        return params, memory, value

    def mixed(self, first: Params, second: Params) -> Params:
        """Return the gradient of the step, from those before and after the ascent."""
        return second
