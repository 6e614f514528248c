"""TARGET: the server makes images of the old classes from the old model, and clients distil the old
model on them.

J. Zhang, C. Chen, W. Zhuang, L. Lyu, "TARGET: Federated Class-Continual Learning via Exemplar-Free
Distillation", ICCV
2023. No example of an old task is kept. When a task begins, the server trains a generator against
      the global model at the end of the last task, theta_{t-1} (see generator.py), and sends
      theta_{t-1} and the images x~ with the model. In a task t > 1 each local step takes a batch of
      the client's examples and one of as many images:
    L = CE over the classes of task t alone + kd * L_d(x~) over the classes of the tasks before,
L_d with temperature T as in continual.py, which is the code's. In task 1: CE over its classes
alone. Checked against the authors' code (methods/target.py): losses, generator, its two optimizers
and the matching of statistics. Their values for CIFAR-100 are those of conf/algorithm/target.yaml,
with kd = 25 and T = 2; 2,560 images. At these values their student is never trained, so that the
adversarial term, which needs it, is never counted: it has a warm-up of 20 batches, and there are
10. Student and term are left out here. Deviations: a client goes through the images in one order in
a round, where the code shuffles them with every pass; a batch of images has the size of the local
batch, there it divides all images among the steps of an epoch; neither the generated images nor the
clients' copies of them are cropped and flipped; the model has all C outputs from the start, of
which those of later tasks are left out of every loss, where the code adds outputs with a task;
models without running statistics, such as model=cnn, have no statistics to match; weights are n_k,
not equal ones. The images are counted as sent in every round. Only where tasks bring new classes.
"""

import numpy as np
import torch
import torch.nn.functional as F

from fedexp.algorithms import generator
from fedexp.algorithms.base import masked_mean
from fedexp.algorithms.continual import Remembering, distillation_loss
from fedexp.algorithms.families import Rehearsal
from fedexp.algorithms.feddmc import member
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Needs,
    Network,
    Pixels,
    ServerNetwork,
)
from fedexp.core.errors import require
from fedexp.core.limits import Count, NonNegative, Positive
from fedexp.core.tree import Params, Tree

NEVER = -1e30  # logit of a class that is left out; finite, so that no product with it is undefined


class DataFree(Remembering, Rehearsal):
    """Base of the methods whose server makes images of the old classes, on which clients distil the
    old model."""

    scenarios = ("class_incremental",)
    separate_tasks = True
    inputs = ("images",)

    temperature: Positive  # T of teacher and student
    batches: Count  # of images that the server makes for a task
    batch_size: int  # images in each
    steps: Count  # of the generator for each batch
    lr_generator: Positive
    width: Count  # channels of the generator's last layers; twice as many before

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.batch_size >= 2, "algorithm.batch_size", self.batch_size, "at least 2")

    def server_init(self, params: Params, federation: Federation) -> Tree:
        return {"params": params, "new": member(federation.tasks[0], federation, params)}

    def begin_task(self, server: Tree, initial: Params, federation: Federation) -> Tree:
        old, new = (
            member(classes, federation, initial)
            for classes in (federation.classes_before(), federation.tasks[federation.task])
        )
        return super().begin_task(server, initial, federation) | {"known": old, "new": new}

    def broadcast(self, server: Tree) -> Tree:
        return {
            k: v
            for k, v in server.items()
            if k in ("params", "old", "new", "known", "images", "scale")
        }

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Return the order in which a client goes through the images."""
        return (
            {}
            if federation.task == 0
            else {"order": rng.permutation(self.batches * self.batch_size)}
        )

    def images(self, step: int, ctx: Context) -> torch.Tensor:
        """Return the images of a local step, in the order of the client's plan and from its
        beginning again."""
        order, scale = ctx.plan["order"], ctx.server["scale"]
        count = min(ctx.local.batch_size, len(order))
        places = (
            torch.as_tensor(step, device=order.device) * count
            + torch.arange(count, device=order.device)
        ) % len(order)
        stored = ctx.server["images"].index_select(0, order.index_select(0, places))
        values = stored.to(scale["mean"].dtype) / 255
        return (values - scale["mean"][:, None, None]) / scale["std"][:, None, None]


class TARGET(DataFree):
    kd: NonNegative  # weight of the distillation

    @property
    def needs(self) -> Needs:
        return Needs(
            server_state="old model, generated images",
            down=1,
            small="images down",
            data="generated (server)",
            work="generated images with a teacher in each step",
            server_work="a generator for each task",
        )

    def rehearse(
        self,
        net: ServerNetwork,
        server: Tree,
        pixels: Pixels,
        federation: Federation,
        rng: np.random.Generator,
    ) -> Tree:
        made = generator.images_of(
            net,
            server["old"],
            federation.classes_before(),
            pixels,
            seed=int(rng.integers(2**63 - 1)),
            batches=self.batches,
            batch_size=self.batch_size,
            steps=self.steps,
            lr=self.lr_generator,
            width=self.width,
        )
        return server | {"images": made, "scale": scale_of(pixels, server["new"])}

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> torch.Tensor:
        logits = only(net(params, batch.x).logits, ctx.server["new"])
        loss = masked_mean(F.cross_entropy(logits, batch.y, reduction="none"), batch.mask)
        if "old" not in ctx.server:
            return loss
        x, known = self.images(batch.step, ctx), ctx.server["known"]
        student, teacher = (
            only(net(model, x).logits, known) for model in (params, ctx.server["old"])
        )
        return (
            loss + self.kd * distillation_loss(student, teacher.detach(), self.temperature).mean()
        )


def only(logits: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """Return logits [B, C] without the classes with member [C] = 0."""
    return logits.masked_fill(member == 0, NEVER)


def scale_of(pixels: Pixels, like: torch.Tensor) -> Tree:
    """Return mean and standard deviation of each channel, with which clients normalise the
    images."""
    return {"mean": like.new_tensor(pixels.mean), "std": like.new_tensor(pixels.std)}
