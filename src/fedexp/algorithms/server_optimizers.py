"""Server optimizers (config node `server`): they use the change by aggregation as a gradient.

S. J. Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (FedOpt), Algorithm 2. x are the
global model's parameters. Delta is the change that the algorithm's aggregation makes to x; for
FedAvg, it is the weighted mean of x_k - x:
    sgd                  m <- momentum * m + Delta,              x <- x + lr * m
    adam, yogi, adagrad  m <- beta1 * m + (1 - beta1) * Delta,   x <- x + lr * m / (sqrt(v) + tau),
        adagrad            v <- v + Delta^2
        yogi               v <- v - (1 - beta2) * Delta^2 * sign(v - Delta^2)
        adam               v <- beta2 * v + (1 - beta2) * Delta^2
Initially m = 0 and v = tau^2 (the paper requires v >= tau^2). The bias of m and v is not corrected.
sgd with lr=1 and momentum=0 gives exactly the results of FedAvg; with lr=1 and a momentum, it is
FedAvgM. Running statistics are averaged as in FedAvg.
"""

from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor

from fedexp.core import tree
from fedexp.core.errors import require
from fedexp.core.limits import Checked, Positive, PositiveOrNone, ShareBelow1, ShareBelow1OrNone
from fedexp.core.tree import Params, Tree

STATE = "server_optimizer"  # name of the optimizer's state within the server's state
# values from the paper's experiments (section 5)
BETA1 = {"adam": 0.9, "yogi": 0.9, "adagrad": 0.0}


class ServerOptimizer(Checked, prefix="server."):
    """The optimizer that moves the global model in the direction of the aggregated model.

    If `optimizer` is None, the aggregated model becomes the global model without a change.
    """

    optimizer: Literal["sgd", "adam", "yogi", "adagrad", None] = None
    lr: PositiveOrNone = None  # None: 1 for sgd, 0.1 for the others
    momentum: ShareBelow1 = 0.0  # for sgd
    beta1: ShareBelow1OrNone = None  # None: 0.9, or 0 for adagrad
    beta2: ShareBelow1 = 0.99  # for adam and yogi
    tau: Positive = 1e-3  # for the adaptive optimizers; a larger value makes them less adaptive

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer is None:
            for field in fields(self):
                value, key = getattr(self, field.name), f"server.{field.name}"
                allowed = value == field.default
                require(allowed, key, value, "omitted unless server.optimizer is set")
        allowed = self.momentum == 0 or self.optimizer in (None, "sgd")
        wanted = f"0 with server.optimizer={self.optimizer}; set server.beta1 instead"
        require(allowed, "server.momentum", self.momentum, wanted)

    def begin(self, params: Params) -> Tree:
        """Return the optimizer's initial state; the dict is empty if there is no optimizer."""
        if self.optimizer is None:
            return {}
        memory = {"m": tree.zeros_like(params)}
        if self.optimizer != "sgd":
            memory["v"] = {k: torch.full_like(p, self.tau**2) for k, p in params.items()}
        return {STATE: memory}

    def step(self, before: Tree, after: Tree) -> Tree:
        """Return the server's state after the optimizer step.

        before: the state before the round. after: the state after the algorithm's aggregation.

        """
        if self.optimizer is None:
            return after
        start, end, memory = before["params"], after["params"], before[STATE]
        delta = tree.subtract(end, start)
        if self.optimizer == "sgd":
            lr = 1.0 if self.lr is None else self.lr
            m = {k: self.momentum * memory["m"][k] + d for k, d in delta.items()}
            # Start from the aggregated model, so that it does not change with lr=1 and momentum=0.
            return after | {
                "params": {k: end[k] + (lr * m[k] - d) for k, d in delta.items()},
                STATE: {"m": m},
            }
        beta1, lr = (
            BETA1[self.optimizer] if self.beta1 is None else self.beta1,
            0.1 if self.lr is None else self.lr,
        )
        m = {k: beta1 * memory["m"][k] + (1 - beta1) * d for k, d in delta.items()}
        v = {k: self._square(memory["v"][k], d**2) for k, d in delta.items()}
        params = {k: start[k] + lr * m[k] / (v[k].sqrt() + self.tau) for k in start}
        return after | {"params": params, STATE: {"m": m, "v": v}}

    def _square(self, v: Tensor, square: Tensor) -> Tensor:
        if self.optimizer == "adagrad":
            return v + square
        if self.optimizer == "yogi":
            return v - (1 - self.beta2) * square * (v - square).sign()
        return self.beta2 * v + (1 - self.beta2) * square
