"""FedExP: the server takes a larger step if the clients' updates differ more.

Clients train as in FedAvg. If updates point in different directions, the mean of the updates is
short, and the server extrapolates beyond the average of the local models.

D. Jhunjhunwala, S. Wang, G. Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation",
ICLR 2023, Algorithm 1. With the updates D_k = w_k - w_global, their weights p_k (sum 1) and their
mean D,
    eta = max(1, sum_k p_k ||D_k||^2 / (2 (||D||^2 + eps))),   w_global <- w_global + eta * D.
In the paper, p_k = 1 / |S|. In the authors' code and here, p_k is the weight of client k in
FedAvg's average. The algorithm is named fedexp_step to distinguish it from this program. Running
statistics of batch norm are averaged, not extrapolated.

Differs from the released code: That code multiplies eps by |S| and, in each round, by the square of
the learning rate's decay. It evaluates the mean of the last two global models; fedexp evaluates the
last one.
"""

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import ServerRound
from fedexp.core import tree
from fedexp.core.limits import Positive
from fedexp.core.tree import Tree


class FedExPStep(FedAvg):
    own_step = "it computes the size of the server's step itself"

    eps: Positive  # added to the squared norm of the mean update

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        start, stacked = server["params"], messages["params"]
        update = tree.subtract(tree.weighted_mean(stacked, round.weights), start)
        squares = torch.stack(
            [((stacked[k] - start[k]) ** 2).reshape(len(stacked[k]), -1).sum(1) for k in start]
        ).sum(0)
        share = (round.weights / round.weights.sum()).to(squares)
        eta = ((share * squares).sum() / (2 * (tree.dot(update, update) + self.eps))).clamp(min=1)
        return server | {"params": {k: start[k] + eta * update[k] for k in start}}
