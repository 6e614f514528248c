"""FedDMC: clients distil an old and a new model into one student on unlabelled examples.

The old model knows the classes of earlier tasks, and the new model those of the current task.

J. Zhang et al., "Class-incremental Learning via Deep Model Consolidation", WACV 2020, Eq. (2)-(4),
as used as a baseline by CFeD (IJCAI 2022, section 5.3). Task 1 is trained with FedAvg. A round of
task t > 1 has two exchanges with the same clients, and the server averages after each of them. The
old model is the model from the end of the previous task.

In the first exchange, clients train the new model with CE over the task's classes only. At the
start of the task, the new model is the run's initial model (`new_model=initial`) or the old model
(`new_model=old`). Its training continues from round to round within the task.

In the second exchange, a student is trained on each client's surrogate examples (FedDMC_full: on
the whole set) for `epochs_factor` times E epochs at `rate_factor` times the learning rate, with
    L = 1/C' sum_c (z_c - t_c)^2 over the C' classes seen so far,
where z_c are the student's logits. The targets t_c are the old model's logits for the old classes
and the new model's logits for the new classes; the mean of each group is subtracted. In each round,
the student starts from the run's initial model (`student=initial`) or from the global model
(`student=global`).

The option `targets` selects the targets of the student. `split` is the form above. `added` is the
form of CFeD's released code: the mean over all C outputs is subtracted from each model's outputs,
the targets are the sums of both models' outputs, and L is over all C classes. The new model then
learns with CE over all C classes. The method requires tasks with new classes. With
`paradigm=centralized`, the method is DMC (algorithm=dmc). As in CFeD's released code (rounds=1),
the student and the new model then start from the old model, and the consolidation uses the same
number of epochs and the same learning rate as the training of the new model.

Differs from CFeD's released code: In that code, each client initialises its student randomly in
each round (all layers except the embeddings); here, all students start from the run's initial
model. The code also reinitialises the new model at the start of each round, even in task 1.
This part of the released code stops with an error. Weights are n_k, and clients use all of their
examples in a new order in each epoch, as in cfed.py.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg, cross_entropies
from fedexp.algorithms.continual import Remembering, class_masks
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Network,
    ServerRound,
    TaskStart,
)
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core import tree
from fedexp.core.limits import Count, Positive
from fedexp.core.tree import Params, Tree


def centre(logits: Tensor, member: Tensor) -> Tensor:
    """Subtract the mean over the member classes from their logits, and set other logits to 0.

    logits: [B, C]. member: [C], 1 for a member class and 0 for any other class.
    """
    return (logits - (logits * member).sum(-1, keepdim=True) / member.sum()) * member


class FedDMC(Remembering):
    own_step = "its consolidated model does not start from the server's model"
    scenarios = ("class_incremental",)
    separate_tasks = True
    needs_surrogate = True

    targets: Literal["split", "added"]
    student: Literal["initial", "global"]
    new_model: Literal["initial", "old"]
    epochs_factor: Count  # number of consolidation epochs, as a multiple of E
    rate_factor: Positive  # learning rate of the consolidation, as a multiple of the round's rate
    whole_set: bool  # whether each client has all surrogate examples (FedDMC_full)

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        initial, masks = start.initial, class_masks(start.initial, start.federation)
        begun = super().begin_task(server, start)
        return begun | {
            "new": begun["old"] if self.new_model == "old" else initial,
            "initial": initial,
            "old_classes": masks["known"],
            "new_classes": masks["new"],
        }

    def exchanges(self, federation: Federation) -> Sequence[FedAvg]:
        if federation.task == 0:
            return (self,)
        shared = {
            name: getattr(self, name)
            for name in ("targets", "student", "epochs_factor", "rate_factor", "whole_set")
        }
        return NewModel(targets=self.targets), Consolidation(**shared)


def split_models(model: Params, server: Tree) -> Tree:
    """Return a model as the server sends it: split into "params" and "buffers"."""
    return {part: {k: model[k] for k in server[part]} for part in ("params", "buffers")}


class NewModel(FedAvg):
    """First exchange of a round: clients train the new model."""

    trains_model = False

    targets: str

    def broadcast(self, server: Tree) -> Tree:
        return split_models(server["new"], server) | {"new_classes": server["new_classes"]}

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits = net(params, batch.x).logits
        if self.targets == "split":
            logits = logits.masked_fill(ctx.server["new_classes"] == 0, -torch.inf)
        return cross_entropies(logits, batch.y)

    def aggregate(self, server: Tree, messages: Tree, round: ServerRound) -> Tree:
        params = tree.weighted_mean(messages["params"], round.weights)
        return server | {"new": params | tree.average_buffers(round.buffers, round.weights)}


class Consolidation(FedAvg):
    """Second exchange of a round: clients train the student on surrogate examples."""

    targets: str
    student: str
    epochs_factor: int
    rate_factor: float
    whole_set: bool

    def broadcast(self, server: Tree) -> Tree:
        start = (
            split_models(server["initial"], server)
            if self.student == "initial"
            else {"params": server["params"]}
        )
        return start | {k: server[k] for k in ("old", "new", "old_classes", "new_classes")}

    def epochs(self, local: LocalTraining) -> float:
        return self.epochs_factor * super().epochs(local)

    def local_lr(self, lr: float) -> float:
        return self.rate_factor * lr

    def training_part(
        self, federation: Federation, client: int
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        return federation.unlabelled if self.whole_set else federation.surrogate[client]

    def example_loss(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        teachers = [net(ctx.server[which], batch.x).logits.detach() for which in ("old", "new")]
        members = [ctx.server["old_classes"], ctx.server["new_classes"]]
        if self.targets == "added":
            members = [torch.ones_like(members[0])] * 2
        target = sum(centre(*pair) for pair in zip(teachers, members, strict=True))
        seen = (members[0] + members[1]).clamp(max=1)
        return ((net(params, batch.x).logits - target) ** 2 * seen).sum(-1) / seen.sum()
