"""FedMultiHead: one head per task on a shared body; each test example uses the head of its task.

CFeD (IJCAI 2022, section 5.3) uses this method as an upper bound, because the task of each test
example is known. If the tasks' classes are disjoint, the head of a task consists of the
classifier's rows for its classes. If the tasks share labels, each task has C rows of its own.
Clients train only the rows of the current task. The server restores all other rows after each
round, so that they do not change, even with weight decay. With `paradigm=centralized`
(algorithm=multihead), FedMultiHead is multi-head training.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.continual import TASKS
from fedexp.algorithms.heads import HEAD, by_head
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Network,
    ServerRound,
    TaskStart,
)
from fedexp.core.tree import Params, Tree
from fedexp.models import classifier_of


class FedMultiHead(FedAvg):
    sends = ("params", "rows")
    own_step = "its server restores the heads of other tasks, but momentum would change them"
    scenarios = TASKS
    separate_tasks = True
    must_train = HEAD

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        rows, classifier = int(self.heads(federation.tasks).max()) + 1, classifier_of(module)
        if rows != classifier.out_features:
            module.classifier = nn.Linear(classifier.in_features, rows)
        return module

    def heads(self, tasks: Sequence[Sequence[int]]) -> np.ndarray:
        num_classes = 1 + max(c for classes in tasks for c in classes)
        disjoint = sum(map(len, tasks)) == len({c for classes in tasks for c in classes})
        rows = np.full((len(tasks), num_classes), -1, dtype=np.int64)
        for task, classes in enumerate(tasks):
            rows[task, list(classes)] = (
                list(classes) if disjoint else task * num_classes + np.asarray(classes)
            )
        return rows

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "rows": self.rows_of(federation, params)}

    def rows_of(self, federation: Federation, params: Params) -> Tensor:
        """Return the classifier's row for each class of the current task, int64 [C]; -1: none."""
        return torch.from_numpy(self.heads(federation.tasks)[federation.task]).to(
            next(iter(params.values())).device
        )

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        return server | {"rows": self.rows_of(start.federation, server["params"])}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits = by_head(net(params, batch.x).logits, ctx.server["rows"])
        return cross_entropies(logits, batch.y)

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        new, rows = super().aggregate(server, messages, round), server["rows"]
        active = rows[rows >= 0]
        restored = {
            k: server["params"][k].index_copy(0, active, new["params"][k][active]) for k in HEAD
        }
        return new | {"params": new["params"] | restored}
