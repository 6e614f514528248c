"""Code shared by continual-learning methods: the previous task's model, and masks of classes.

The distillation loss is that of CFeD (Y. Ma et al., "Continual Federated Learning Based on
Knowledge Distillation", IJCAI 2022, Eq. (3)-(4)). For student logits z and teacher logits z',
    L_d = - sum_i y'_i log y_i,   y = softmax(z / T),   y' = softmax(z' / T)
The paper's Eq. (4) takes the T-th root of the probabilities and normalises the result, which equals
softmax(z / T). The loss has no factor T^2.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Federation, TaskStart
from fedexp.core.tree import Params, Tree

TASKS = ("class_incremental", "domain_incremental")


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the distillation loss L_d of each example, [B], for logits [B, C]."""
    return -((teacher / temperature).softmax(-1) * F.log_softmax(student / temperature, -1)).sum(-1)


class Remembering(FedAvg):
    """Base class for methods that keep the model from the end of the previous task.

    From the second task on, the server sends this old model theta_{t-1}, including its running
    statistics, together with the global model.
    """

    scenarios: ClassVar[tuple[str, ...]] = TASKS
    sends: ClassVar[tuple[str, ...]] = ("params", "old")

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        return super().begin_task(server, start) | {"old": server["params"] | server["buffers"]}


def class_masks(params: Params, federation: Federation) -> Tree:
    """Return masks [C] of classes, on the device of `params`.

    "new" is 1 for the classes of the current task. From the second task on, "known" is 1 for the
    classes of the earlier tasks.
    """
    classes = {"new": federation.tasks[federation.task]}
    if federation.task:
        classes["known"] = tuple(federation.classes_before())
    like = next(iter(params.values()))
    numbers = torch.arange(federation.num_classes)
    return {
        name: torch.isin(numbers, torch.tensor(members)).to(like)
        for name, members in classes.items()
    }
