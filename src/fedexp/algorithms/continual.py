"""Common part of the methods for continual learning: the global model at the end of the last task
as a teacher.

CFeD: Y. Ma et al., "Continual Federated Learning Based on Knowledge Distillation", IJCAI 2022. Its
Eq. (3)-(4), for student logits z and teacher logits z':
    L_d = - sum_i y'_i log y_i,   y = softmax(z / T),   y' = softmax(z' / T)
(Eq. (4) takes the T-th root of probabilities and normalises, which is softmax(z / T)); no factor
T^2.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F

from fedexp.algorithms.families import Continual
from fedexp.algorithms.interfaces import Federation
from fedexp.core.tree import Params, Tree

TASKS = ("class_incremental", "domain_incremental", "rotations")


def distillation_loss(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return L_d of each example, [B], of logits [B, C]."""
    return -((teacher / temperature).softmax(-1) * F.log_softmax(student / temperature, -1)).sum(-1)


class Remembering(Continual):
    """Base that keeps theta_{t-1}, with its running statistics, and sends it with the model; in
    task 1 there is none."""

    scenarios: ClassVar[tuple[str, ...]] = TASKS

    def begin_task(self, server: Tree, initial: Params, federation: Federation) -> Tree:
        return server | {"old": server["params"] | server["buffers"]}

    def broadcast(self, server: Tree) -> Tree:
        return {k: server[k] for k in ("params", "old") if k in server}
