"""FedCurv: a quadratic penalty on changes of parameters that matter to the other clients.

After training, each client computes the diagonal of its Fisher information, a measure of how
important each parameter is for the client's data. The server averages the models and adds up the
clients' Fisher information.

N. Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", 2019, Eq. (3)-(5).
u_j is the diagonal of client j's Fisher information, computed on its data at its trained parameters
w_j, and v_j = u_j * w_j. The sums are over all clients j that have taken part so far, with their
latest values. Client k adds to its loss
    lambda * ( <P_k, w^2> - 2 <Q_k, w> ),   P_k = sum_{j != k} u_j,   Q_k = sum_{j != k} v_j,
which equals lambda * sum_{j != k} (w - w_j)^T diag(u_j) (w - w_j) up to a constant. There is no
penalty in the first round. The server keeps and sends the sums over all clients. A client keeps its
u_k and v_k, subtracts them from the sums, and uploads their changes. This gives the same penalty as
sending every u_j and v_j to all clients, at the cost that the paper states (two models each way).

The option `estimator` selects how u is computed. With `batch`, as in FedNTD's released code, u is
the mean over mini-batches of the squared gradient of the batch's mean cross-entropy for the given
labels. With `sample`, the gradient of each example is squared. This is the textbook definition of
the diagonal. The result of `sample` is larger by a factor of about the batch size, so a suitable
lambda depends on the estimator. As in FedNTD's code, the gradients are computed in eval mode in an
extra pass after training. For this pass, the examples are shuffled and augmented again. The pass
stops after the batch in which the number of examples exceeds `samples`.

Differs from FedNTD's released code: That code subtracts a client's u_k and v_k from the sums in
place. The next clients of the cohort therefore lack the terms of all clients before them, too.
"""

from typing import Literal

import torch

from fedexp.algorithms.base import FedAvg, fresh_pass
from fedexp.algorithms.fisher import squared_gradients
from fedexp.algorithms.interfaces import (
    ClientData,
    Context,
    Federation,
    Network,
    ServerRound,
)
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core import tree
from fedexp.core.limits import CountFrom0, NonNegative
from fedexp.core.tree import Params, Tree


class FedCurv(FedAvg):
    sends = ("params", "u", "v")

    lambda_: NonNegative  # weight of the penalty; 0 is FedAvg
    # the pass for the Fisher information stops once it has used more than this number of examples
    samples: CountFrom0
    estimator: Literal["batch", "sample"]

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "u": tree.zeros_like(params), "v": tree.zeros_like(params)}

    def client_init(self, params: Params, federation: Federation) -> Tree:
        return {"u": tree.zeros_like(params), "v": tree.zeros_like(params)}

    def extra_batches(self, federation: Federation, local: LocalTraining) -> int:
        return min(-(-federation.largest // local.batch_size), self.samples // local.batch_size + 1)

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        return {k: tree.subtract(ctx.server[k], ctx.client[k]) for k in ("u", "v")}

    def penalty(self, net: Network, params: Params, ctx: Context) -> torch.Tensor:
        p, q = ctx.setup["u"], ctx.setup["v"]
        # 2 <w, P w - Q> - <P w, w> equals the penalty. If every w except the first is detached, the
        # gradient is still 2 (P w - Q), and autograd takes less than half the time.
        still = {k: w.detach() for k, w in params.items()}
        scaled = {k: p[k] * w for k, w in still.items()}
        return self.lambda_ * (
            2 * tree.dot(params, tree.subtract(scaled, q)) - tree.dot(scaled, still)
        )

    def finish(
        self, net: Network, params: Params, data: ClientData, ctx: Context
    ) -> tuple[Tree, Tree]:
        u = self.fisher(net, params, data, ctx)
        new = {"u": u, "v": {k: u[k] * params[k] for k in u}}
        return {"params": params} | {k: tree.subtract(new[k], ctx.client[k]) for k in new}, new

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        return super().aggregate(server, messages, round) | {
            k: tree.added(server[k], messages[k]) for k in ("u", "v")
        }

    def fisher(self, net: Network, params: Params, data: ClientData, ctx: Context) -> Params:
        """Return the diagonal u_k of the client's Fisher information.

        If `estimator` is `sample`, u_k is a mean over examples; otherwise, it is a mean over
        batches.
        """
        seen, parts = torch.zeros_like(ctx.steps), torch.zeros_like(ctx.steps)
        total = tree.zeros_like(params)
        for batch, mask in fresh_pass(data, ctx):
            counts = ((mask.sum() > 0) & (seen <= self.samples)).to(seen.dtype)
            found, number = squared_gradients(net, params, batch, mask, self.estimator)
            total = {k: total[k] + counts * found[k] for k in total}
            parts, seen = parts + counts * number, seen + mask.sum()
        return {k: v / parts.clamp(min=1) for k, v in total.items()}
