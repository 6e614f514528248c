"""Code shared by the methods that train prompts of a frozen vision transformer.

The clients train prompts, keys and the head, and the server averages these parameters, weighted by
n_k, as in fed-mammoth. The loss is CE over the classes of the current task; the outputs for other
classes are excluded, and their rows of the head do not change. The query q of an image is the class
token of the frozen network without prompts. It is computed like a teacher's output: once per batch,
or only once per round and example if images are not augmented.

If no image of a client selects a prompt, the client does not change this prompt and its key. The
average therefore moves a prompt only by the weight of the clients that selected it. Set
local.weight_decay=0, as in the released codes: weight decay would also change prompts that are not
selected, and Adam turns even a small decay into full steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedexp.algorithms.base import cross_entropies
from fedexp.algorithms.heads import HEAD
from fedexp.algorithms.interfaces import (
    Batch,
    ClientData,
    Context,
    Federation,
    Network,
    TaskStart,
)
from fedexp.core.errors import ConfigError
from fedexp.core.limits import Limit
from fedexp.core.tree import Params, Tree
from fedexp_continual.algorithms.classes import NewClasses, logits_of_members
from fedexp_continual.models.lora import LowRank
from fedexp_continual.models.prompts import PROMPTS, QUERY, Prompted

Blocks = Annotated[
    tuple[int, ...],
    Limit(
        "a non-empty list of distinct numbers of blocks, from 0",
        lambda v: len(set(v)) == len(v) > 0 and min(v) >= 0,
    ),
]


class Prompting(NewClasses, ABC):
    """Base class for methods that train prompts."""

    sends: ClassVar[tuple[str, ...]] = ("params", "new")
    inputs = ("images",)
    needs_features = True
    must_train = HEAD
    own_step = "its server keeps the head of earlier tasks, but momentum would change it"

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        name = type(self).__name__
        if any(isinstance(part, LowRank) for part in module.modules()):
            raise ConfigError(f"model.lora.rank: must be 0, because {name} trains prompts only")
        return self.prompted(module, federation)

    @abstractmethod
    def prompted(self, module: nn.Module, federation: Federation) -> Prompted:
        """Return the model with prompts."""

    def client_setup(self, net: Network, data: ClientData, ctx: Context) -> Tree:
        return {"without": {PROMPTS: ctx.server["params"][PROMPTS][:0]}}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        query = net(ctx.setup["without"], batch.x).features
        seen = self.in_training(params, ctx) | {QUERY: query}
        logits = logits_of_members(net(seen, batch.x).logits, ctx.server["new"])
        return cross_entropies(logits, batch.y) + self.matching_loss(query, params, ctx)

    def in_training(self, params: Params, ctx: Context) -> Params:
        """Return the parameters of the model that processes training examples."""
        return params

    def matching_loss(self, query: Tensor, params: Params, ctx: Context) -> Tensor | float:
        """Return the loss that pulls keys towards the queries.

        query: [B, D]. Returns [B], one loss per example.
        """
        return 0.0

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take an optimizer step without changing the head's rows for classes of other tasks."""
        moved, memory, loss = super().local_step(net, params, memory, batch, ctx)
        return moved | changed_rows(ctx.server["new"], HEAD, moved, params), memory, loss


class TaskPrompts(Prompting, ABC):
    """Base class for methods in which each row of some parameters belongs to a task.

    The M rows are divided evenly among the tasks, in order. The rows of later tasks are zeros. When
    a task begins, the server draws initial values for the task's rows and marks these rows in the
    mask "current" [M]. Clients change only the rows of the current task.
    """

    sends = ("params", "new", "current")
    divided: ClassVar[tuple[str, ...]]  # names of the parameters that are divided among the tasks

    def server_init(self, params: Params, federation: Federation) -> Tree:
        current = rows_of_task(params["keys"], federation)
        empty = {name: torch.zeros_like(params[name]) for name in self.divided}
        started = params | changed_rows(current, self.divided, params, empty)
        return super().server_init(started, federation) | {"current": current}

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        """Return the server's state with new values for the rows of the new task."""
        params = server["params"]
        current = rows_of_task(params["keys"], start.federation)
        drawn = {name: self.draw(params[name].shape).to(params[name]) for name in self.divided}
        rows = changed_rows(current, self.divided, drawn, params)
        begun = super().begin_task(server, start)
        return begun | {"params": params | rows, "current": current}

    @abstractmethod
    def draw(self, shape: torch.Size) -> Tensor:
        """Return initial values for all rows of a parameter, from torch's global generator."""

    def local_step(
        self, net: Network, params: Params, memory: Tree, batch: Batch, ctx: Context
    ) -> tuple[Params, Tree, Tensor]:
        """Take an optimizer step without changing the rows of other tasks."""
        moved, memory, loss = super().local_step(net, params, memory, batch, ctx)
        rows = changed_rows(ctx.server["current"], self.divided, moved, params)
        return moved | rows, memory, loss


def rows_of_task(rows: Tensor, federation: Federation) -> Tensor:
    """Return a mask [M] of the rows of a parameter [M, ...] that belong to the current task."""
    owners = torch.arange(len(rows)) * len(federation.tasks) // len(rows)
    return (owners == federation.task).to(rows)


def changed_rows(mask: Tensor, names: Sequence[str], new: Params, old: Params) -> Params:
    """Return the named parameters, with new rows where the mask is 1 and old rows elsewhere.

    mask: [M], for parameters with M rows.

    """
    rows = {name: mask.view(-1, *[1] * (old[name].dim() - 1)) > 0 for name in names}
    return {name: torch.where(rows[name], new[name], old[name]) for name in names}
