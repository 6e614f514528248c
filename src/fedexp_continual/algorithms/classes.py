"""Code shared by methods for tasks with new classes."""

from typing import ClassVar

from torch import Tensor

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.continual import class_masks
from fedexp.algorithms.interfaces import Federation, TaskStart
from fedexp.core.tree import Params, Tree

NEVER = -1e30  # logit of an excluded class; finite, because 0 times infinity is nan


class NewClasses(FedAvg):
    """Base class for methods that need tasks with new classes.

    The server keeps the masks of `class_masks`.
    """

    scenarios: ClassVar[tuple[str, ...]] = ("class_incremental",)
    separate_tasks = True

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params} | class_masks(params, federation)

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        begun = super().begin_task(server, start)
        return begun | class_masks(start.initial, start.federation)


def logits_of_members(logits: Tensor, member: Tensor) -> Tensor:
    """Return logits [B, C], in which all classes with `member` [C] = 0 have the value NEVER."""
    return logits.masked_fill(member == 0, NEVER)
