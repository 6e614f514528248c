"""FedSMOO: FedSpeed's proximal term, and ascent steps that are aligned between clients.

As in FedSAM, clients look for flat minima. Dual variables and a perturbation from the server make
the clients' ascent steps agree.

Y. Sun et al., "Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching
Global Consistency and Smooth Landscape", ICML 2023, Algorithm 1, as implemented in the authors'
code. h_k is defined as in FedSpeed, mu_k is a dual variable of client k, and s is the server's
perturbation; all start at 0:
    client   d = g(w) - mu_k - s,   e = rho d / ||d||,   mu_k <- mu_k + e - s,
             w <- w - lr * (g(w + e) + lambda_ * (w - w_global + h_k)),
             h_k <- h_k + (w_k - w_global)
    server   s <- rho m / ||m|| with m the mean of the mu_k,   h and w_global as in FedSpeed.
As a comment in the authors' code notes, s omits the clients' last perturbations, whose mean is
small. Both means use the weights set by `weighting` (uniform in the code). For `clip`, see
FedSpeed.
"""

from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.fedsam import ascent
from fedexp.algorithms.fedspeed import Proximal
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
)
from fedexp.core import tree
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree

DUAL = "dual."  # prefix of the names of mu_k among the trained parameters


class FedSMOO(Proximal):
    sends = ("params", "s")
    fresh_optimizer = "its clients also train a dual variable"

    rho: NonNegative  # radius of the ascent step

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return super().server_init(params, federation) | {"s": tree.zeros_like(params)}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return super().client_init(params, federation) | {"dual": tree.zeros_like(params)}

    def initial_params(self, net: Network, data: ClientData, ctx: Context) -> Params:
        return ctx.server["params"] | {DUAL + k: v for k, v in ctx.client["dual"].items()}

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Update the model and the dual variable mu_k, and return the loss at `params`."""
        model, dual = split_duals(params)
        shift = ctx.server["s"]

        def loss(p: Params) -> Tensor:
            return self.objective(net, p, batch, ctx)

        first, value = net.gradient(loss, model)
        e = ascent({k: first[k] - dual[k] - shift[k] for k in model}, self.rho)
        second, _ = net.gradient(loss, tree.add(model, e))
        grads = self.transform_grads(second, model, batch, ctx)
        own = {name: split_duals(leaves)[0] for name, leaves in memory.items()}
        model, own = optimizers.step(model, grads, own, ctx.lr, ctx.local, batch.step)
        dual = {DUAL + k: dual[k] + e[k] - shift[k] for k in dual}
        return model | dual, {name: leaves | own[name] for name, leaves in memory.items()}, value

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        model, dual = split_duals(params)
        message, state = super().finish(net, model, data, ctx)
        return message | {"dual": dual}, state | {"dual": dual}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        mean = tree.weighted_mean(messages["dual"], round.weights)
        return super().aggregate(server, messages, round) | {"s": ascent(mean, self.rho)}


def split_duals(params: Params) -> tuple[Params, Params]:
    """Split the trained parameters into (parameters of the model, dual variable mu_k)."""
    model = {k: v for k, v in params.items() if not k.startswith(DUAL)}
    return model, {k.removeprefix(DUAL): v for k, v in params.items() if k.startswith(DUAL)}
