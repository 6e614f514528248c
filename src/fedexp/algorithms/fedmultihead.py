"""FedMultiHead: one head per task on a shared body, tested with the head of each example's task.

The upper bound of CFeD (IJCAI 2022, section 5.3): it is told the task at test. With disjoint
classes the heads are rows of the classifier; where tasks share their labels each has C rows of its
own. Training sees the rows of the current task only, and the server puts the others back as they
were, whatever the optimizer did to them (weight decay), so that inactive heads stay untouched.
`paradigm=centralized` (algorithm=multihead): multi-head training.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedexp.algorithms.base import cross_entropies
from fedexp.algorithms.continual import TASKS
from fedexp.algorithms.families import OwnModel, TaskHeads
from fedexp.algorithms.heads import HEAD, by_head
from fedexp.algorithms.interfaces import Batch, Context, Federation, Needs, Network, ServerRound
from fedexp.core.tree import Params, Tree
from fedexp.models import classifier_of


class FedMultiHead(OwnModel, TaskHeads):
    sends = ("params", "rows")
    own_step = "its server restores the heads of other tasks, which a momentum would move"
    scenarios = TASKS
    separate_tasks = True
    must_train = HEAD

    needs = Needs(
        server_state="which head is in use", small="C numbers down", data="the task at test"
    )

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
        """Return the outputs of the current task's head for all classes, int64 [C]."""
        return torch.from_numpy(self.heads(federation.tasks)[federation.task]).to(
            next(iter(params.values())).device
        )

    def begin_task(self, server: Tree, initial: Params, federation: Federation) -> Tree:
        return server | {"rows": self.rows_of(federation, server["params"])}

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
