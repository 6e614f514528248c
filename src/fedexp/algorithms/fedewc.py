"""FedEWC: elastic weight consolidation, with the Fisher information of all clients' data.

J. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017, Eq. (3), as the baseline of
CFeD (IJCAI 2022, section 5.3). With F^(s) the diagonal of the Fisher information of task s at theta_s, the model at its
end,
    L = CE + lambda / 2 sum_{s < t} sum_j F^(s)_j (w_j - theta_{s,j})^2.
F^(s) is the mean over task s's training examples of the squared gradient of log q(y|x), y the label: each client
computes it on its own examples at the end of the task, and the server averages with n_k: one more upload per task.
The sum over tasks is kept as one quadratic, P_j (w_j - a_j)^2 with P = sum_s F^(s) and a = sum_s F^(s) theta_s / P, the
same up to a constant. Examples are not augmented there.
Deviation from CFeD's released code, whose "Fisher information" is taken at the current model on the new task's examples
in every round, so that it protects nothing old.
`paradigm=centralized` (algorithm=ewc): EWC.
"""

import math
from dataclasses import dataclass

import torch

from fedexp import tree
from fedexp.algorithms.base import FedAvg, first_pass
from fedexp.algorithms.continual import TASKS
from fedexp.algorithms.contract import Batch, ClientData, Context, Federation, Needs, Network, ServerRound
from fedexp.algorithms.fisher import squares
from fedexp.errors import require
from fedexp.settings import LocalTraining
from fedexp.tree import Params, Tree


@dataclass(frozen=True, kw_only=True)
class FedEWC(FedAvg):
    scenarios = TASKS
    # The penalty is a quadratic of curvature lambda_ F_j; SGD with momentum m is stable up to 2 (1 + m) / lr.
    hint = (
        "SGD diverges where lr lambda_ F exceeds 2 (1 + momentum), F the largest Fisher information of a weight: use "
        "local.optimizer=adam or a smaller algorithm.lambda_"
    )

    lambda_: float  # weight of the penalty, >= 0; 0 is FedAvg

    def __post_init__(self) -> None:
        require(0 <= self.lambda_ < math.inf, "algorithm.lambda_", self.lambda_, "finite and at least 0")

    @property
    def needs(self) -> Needs:
        return Needs(server_state="P and a", down=2, small="|w| up at the end of a task")

    def broadcast(self, server: Tree) -> Tree:
        return {k: server[k] for k in ("params", "importance", "anchor") if k in server}

    def closing(self, info: Federation) -> "tuple[FedAvg, ...]":
        return (Fisher(),)

    def penalty(self, net: Network, params: Params, ctx: Context) -> torch.Tensor | float:
        if "anchor" not in ctx.server:
            return 0.0
        strength, anchor = ctx.server["importance"], ctx.server["anchor"]
        return (
            self.lambda_
            / 2
            * torch.stack([(strength[k] * (w - anchor[k]) ** 2).sum() for k, w in params.items()]).sum()
        )


@dataclass(frozen=True, kw_only=True)
class Fisher(FedAvg):
    """The exchange at the end of a task, in which nothing is trained."""

    trains_model = False
    augments = False

    def epochs(self, local: LocalTraining) -> int:
        return 1

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, torch.Tensor]:
        return params, memory, torch.zeros_like(ctx.steps)

    def finish(self, net: Network, params: Params, data: ClientData, ctx: Context) -> tuple[Tree, Tree]:
        """F of this client's examples at the global model, in eval mode."""
        total, number = tree.zeros_like(params), torch.zeros_like(ctx.steps)
        for batch, mask in first_pass(data, ctx, 1):
            found, count = squares(net, ctx.server["params"], batch, mask, "sample")
            total, number = {k: total[k] + found[k] for k in total}, number + count
        return {"fisher": {k: v / number.clamp(min=1) for k, v in total.items()}}, ctx.client

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        fisher, params = tree.weighted_mean(messages["fisher"], round.weights), server["params"]
        before = server.get("importance", tree.zeros_like(params))
        anchor, importance = server.get("anchor", params), {k: before[k] + fisher[k] for k in params}
        # a moves towards theta_t by the share of F^(t) in P; where both are 0 it has no meaning.
        share = {k: fisher[k] / torch.where(importance[k] > 0, importance[k], 1.0) for k in params}
        moved = {k: anchor[k] + share[k] * (params[k] - anchor[k]) for k in params}
        return server | {"importance": importance, "anchor": moved}
