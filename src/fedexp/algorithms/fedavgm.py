"""FedAvgM: the server applies momentum to the change of the averaged model.

Clients train as in FedAvg.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019. With v = 0 at the start, the server's step is
    v <- beta * v + (w_global - sum_k p_k w_k),   w_global <- w_global - v.
Only parameters have momentum; running statistics of batch norm are averaged as in FedAvg. MOON's
code multiplies the difference by (1 - beta). This is a different algorithm and is not implemented.
"""

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Federation, ServerRound
from fedexp.core import tree
from fedexp.core.limits import ShareBelow1
from fedexp.core.tree import Params, Tree


class FedAvgM(FedAvg):
    own_step = "it is equivalent to algorithm=fedavg server.optimizer=sgd server.momentum=0.7"

    beta: ShareBelow1  # momentum; 0 is FedAvg

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "v": tree.zeros_like(params)}

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        start, mean = server["params"], tree.weighted_mean(messages["params"], round.weights)
        v = {k: self.beta * server["v"][k] + start[k] - mean[k] for k in start}
        return server | {"params": tree.subtract(start, v), "v": v}
