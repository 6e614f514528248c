"""TARGET: the server makes images of the old classes from the old model, and clients distil the old
model on them.

J. Zhang, C. Chen, W. Zhuang, L. Lyu, "TARGET: Federated Class-Continual Learning via Exemplar-Free
Distillation", ICCV 2023. No example of an old task is kept. When a task begins, the server trains a
generator against the global model at the end of the last task, theta_{t-1} (see generator.py), and
sends theta_{t-1} and the images x~ with the model. In a task t > 1 each local step takes a batch of
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

import copy
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import cross_entropies, masked_mean, rows_of_step
from fedexp.algorithms.continual import NewClasses, Remembering, distillation_loss
from fedexp.algorithms.families import Rehearsal
from fedexp.algorithms.generator import (
    BATCH_NORM,
    BETAS,
    LATENT,
    LR_LATENT,
    ONE_HOT,
    Best,
    Generator,
    Statistics,
    normalised,
)
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Needs,
    Network,
    Pixels,
    ServerNetwork,
)
from fedexp.core.limits import Count, Limit, NonNegative, Positive
from fedexp.core.tree import Params, Tree

NEVER = -1e30  # logit of a class that is left out; finite, so that no product with it is undefined


class DataFree(NewClasses, Remembering, Rehearsal, ABC):
    """Base of the methods whose server makes images of the old classes, on which clients distil the
    old model."""

    sends: ClassVar[tuple[str, ...]] = ("params", "old", "new", "known", "images", "scale")
    inputs = ("images",)

    temperature: Positive  # T of teacher and student
    batches: Count  # of images that the server makes for a task
    batch_size: Annotated[int, Limit("at least 2", lambda images: images >= 2)]  # images in each
    steps: Count  # of the generator for each batch
    lr_generator: Positive
    width: Count  # channels of the generator's last layers; twice as many before

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Return the order in which a client goes through the images."""
        return (
            {}
            if federation.task == 0
            else {"order": rng.permutation(self.batches * self.batch_size)}
        )

    def rehearse(
        self,
        net: ServerNetwork,
        server: Tree,
        pixels: Pixels,
        federation: Federation,
        rng: np.random.Generator,
    ) -> Tree:
        seed, classes = int(rng.integers(2**63 - 1)), federation.classes_before()
        images = self.images_of(net, server, pixels, classes, seed)
        like = server["new"]
        scale = {"mean": like.new_tensor(pixels.mean), "std": like.new_tensor(pixels.std)}
        return server | {"images": images, "scale": scale}

    def images_of(
        self, net: ServerNetwork, server: Tree, pixels: Pixels, classes: list[int], seed: int
    ) -> Tensor:
        """Return images that the old model takes for these classes, uint8 [n, channels, height,
        width] with n = batches * batch_size. seed: of all that is drawn."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(net, server, pixels, torch.tensor(classes).to(server["new"].device))

    @abstractmethod
    def make(self, net: ServerNetwork, server: Tree, pixels: Pixels, classes: Tensor) -> Tensor:
        """Return the images of `images_of`, drawn by torch's generator."""

    def images(self, step: int, ctx: Context) -> Tensor:
        """Return the images of a local step, in the order of the client's plan and from its
        beginning again."""
        order, scale = ctx.plan["order"], ctx.server["scale"]
        places = rows_of_step(step, ctx.local.batch_size, len(order), order)
        stored = ctx.server["images"].index_select(0, order.index_select(0, places))
        values = stored.to(scale["mean"].dtype) / 255
        return (values - scale["mean"][:, None, None]) / scale["std"][:, None, None]


class TARGET(DataFree):
    kd: NonNegative  # weight of the distillation

    needs = Needs(
        server_state="old model, generated images",
        down=1,
        small="images down",
        data="generated (server)",
        work="generated images with a teacher in each step",
        server_work="a generator for each task",
    )

    def make(self, net: ServerNetwork, server: Tree, pixels: Pixels, classes: Tensor) -> Tensor:
        """See generator.py."""
        like = server["new"]
        generator, seen, made = Generator(pixels.shape, self.width).to(like), Statistics(), []
        outer = torch.optim.Adam(generator.parameters(), self.lr_generator * self.steps, BETAS)
        for _ in range(self.batches):
            z = torch.randn(self.batch_size, LATENT).to(like).requires_grad_()
            labels = torch.randint(len(classes), (self.batch_size,)).to(like.device)  # their places
            inner, best = copy.deepcopy(generator), Best()
            groups: list[Any] = [{"params": inner.parameters()}, {"params": z, "lr": LR_LATENT}]
            optimizer = torch.optim.Adam(groups, self.lr_generator, BETAS)
            outer.zero_grad()
            for _ in range(self.steps):
                values = inner(z)
                output, layers = net.norm_inputs(server["old"], normalised(values, pixels))
                matches = F.cross_entropy(output.logits[:, classes], labels)
                loss = ONE_HOT * matches + BATCH_NORM * seen.distance(layers)
                best.offer(values, loss)
                optimizer.zero_grad()
                loss.backward()
                for own, copied in zip(generator.parameters(), inner.parameters(), strict=True):
                    assert copied.grad is not None
                    own.grad = copied.grad.clone() if own.grad is None else own.grad + copied.grad
                optimizer.step()
            outer.step()
            seen.add(layers)
            made.append(best.images)
        return torch.cat(made)

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        logits = only(net(params, batch.x).logits, ctx.server["new"])
        loss = masked_mean(cross_entropies(logits, batch.y), batch.mask)
        if "old" not in ctx.server:
            return loss
        x, known = self.images(batch.step, ctx), ctx.server["known"]
        student, teacher = (
            only(net(model, x).logits, known) for model in (params, ctx.server["old"])
        )
        return (
            loss + self.kd * distillation_loss(student, teacher.detach(), self.temperature).mean()
        )


def only(logits: Tensor, member: Tensor) -> Tensor:
    """Return logits [B, C] without the classes with member [C] = 0."""
    return logits.masked_fill(member == 0, NEVER)
