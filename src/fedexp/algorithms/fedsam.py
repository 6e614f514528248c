"""FedSAM: clients use the gradient at the worst point near their model to find flat minima.

The server averages as in FedAvg.

Z. Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022,
Algorithm 1, and D. Caldarola et al., "Improving Generalization in Federated Learning by Seeking
Flat Minima", ECCV 2022:
    e = rho * g(w) / ||g(w)||,   w <- w - lr * g(w + e),   both gradients from the same batch.
Weight decay and momentum apply only to the second gradient. A step computes two gradients, so
training takes about twice as long as FedAvg. Running statistics of batch norm are updated in both
passes, as in the released code.
"""

from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Batch, Context, Network
from fedexp.core import tree
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

SMALLEST = 1e-12  # added to the norm of a gradient


def ascent(grads: Params, rho: float) -> Params:
    """Return the perturbation rho * g / ||g||, or 0 if the gradient g is 0.

    The norm is taken over all parameters together.
    """
    scale = rho / (tree.dot(grads, grads).clamp(min=SMALLEST**2).sqrt() + SMALLEST)
    return {k: scale * g for k, g in grads.items()}


class FedSAM(FedAvg):
    # radius of the neighbourhood; 0: FedAvg, but running statistics are updated twice per step
    rho: NonNegative

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take one step with the gradient at the perturbed point; return the loss at `params`."""

        def loss(p: Params) -> Tensor:
            return self.objective(net, p, batch, ctx)

        first, value = net.gradient(loss, params)
        second, _ = net.gradient(loss, tree.add(params, ascent(first, self.rho)))
        grads = self.transform_grads(self.combine_gradients(first, second), params, batch, ctx)
        params, memory = optimizers.step(params, grads, memory, ctx.lr, ctx.local, batch.step)
        return params, memory, value

    def combine_gradients(self, first: Params, second: Params) -> Params:
        """Return the gradient for the optimizer from the gradients before and after the ascent."""
        return second
