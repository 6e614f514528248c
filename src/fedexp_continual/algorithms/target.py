"""TARGET: the server generates images of the old classes, and clients distil the old model on them.

No example of an old task is kept; the generated images take their place.

J. Zhang, C. Chen, W. Zhuang, L. Lyu, "TARGET: Federated Class-Continual Learning via Exemplar-Free
Distillation", ICCV 2023. When a task begins, the server trains a generator against theta_{t-1}, the
global model from the end of the previous task (see generator.py). The server then sends theta_{t-1}
and the images x~ with the model. In a task t > 1, each local step uses a batch of the client's
examples and a batch of the same number of images:
    L = CE over the classes of task t alone + kd * L_d(x~) over the classes of the earlier tasks,
where L_d is defined in continual.py, with temperature T, as in the authors' code. In task 1, the
loss is CE over the task's classes.

Checked against the authors' code (methods/target.py): the losses, the generator with its two
optimizers, and the matching of statistics. conf/algorithm/target.yaml contains the authors' values
for CIFAR-100, with kd = 25, T = 2 and 2,560 images. With these values, the code never trains its
student, because the student's warm-up is 20 batches but only 10 are generated. The adversarial term
needs the student, so it is never used. fedexp therefore omits the student and this term.

Differs from the released code: A client uses the images in the same order throughout a round; the
authors' code shuffles them in each pass. A batch of images has the size of the local batch; the
authors' code divides all images among the steps of an epoch. Images are neither cropped nor
flipped, on clients or on the server. The model has all C outputs from the start, and the losses
exclude the outputs of later tasks; the authors' code adds outputs with each task. Models without
running statistics, such as model=cnn, have no statistics to match. The server weights clients by
n_k, not equally. The images count as traffic in every round. The method requires tasks with new
classes.
"""

import copy
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import cross_entropies, masked_mean
from fedexp.algorithms.continual import Remembering, distillation_loss
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Network,
    Pixels,
    ServerNetwork,
    TaskStart,
)
from fedexp.core.limits import Count, Limit, NonNegative, Positive
from fedexp.core.tree import Params, Tree
from fedexp_continual.algorithms.classes import NewClasses, logits_of_members
from fedexp_continual.algorithms.generator import (
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


class DataFree(NewClasses, Remembering, ABC):
    """Base class of methods that distil the previous task's model on generated images.

    The server generates images of the old classes at the start of a task, and sends them to the
    clients.
    """

    sends: ClassVar[tuple[str, ...]] = ("params", "old", "new", "known", "images", "scale")
    inputs = ("images",)

    batches: Count  # number of batches of images that the server generates per task
    # number of images per batch
    batch_size: Annotated[int, Limit("at least 2", lambda images: images >= 2)]
    steps: Count  # number of generator steps: per batch, or per task in MFCL
    lr_generator: Positive
    # number of channels in the generator's last layers; earlier layers have twice as many
    width: Count

    def host_plan(self, federation: Federation, client: int, rng: np.random.Generator) -> Tree:
        """Return the order in which a client uses the generated images."""
        return (
            {}
            if federation.task == 0
            else {"order": rng.permutation(self.batches * self.batch_size)}
        )

    def begin_task(self, server: Tree, start: TaskStart) -> Tree:
        server, pixels = super().begin_task(server, start), start.pixels
        assert pixels is not None, "inputs are images"
        seed = int(start.rng("rehearsal").integers(2**63 - 1))
        net, classes = start.network(server), start.federation.classes_before()
        images = self.images_of(net, server, pixels, classes, seed)
        like = server["new"]
        scale = {"mean": like.new_tensor(pixels.mean), "std": like.new_tensor(pixels.std)}
        return server | {"images": images, "scale": scale}

    def images_of(
        self, net: ServerNetwork, server: Tree, pixels: Pixels, classes: list[int], seed: int
    ) -> Tensor:
        """Return generated images of `classes`, uint8 [n, channels, height, width].

        n = batches * batch_size. seed: the seed of all random draws.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(net, server, pixels, torch.tensor(classes).to(server["new"].device))

    @abstractmethod
    def make(self, net: ServerNetwork, server: Tree, pixels: Pixels, classes: Tensor) -> Tensor:
        """Generate the images that `images_of` returns, with torch's global random generator."""

    def images(self, step: int, ctx: Context) -> Tensor:
        """Return the normalised images that a client uses in a local step.

        The images are used in the order of the client's plan, and again from the first image after
        the last one.
        """
        order, scale = ctx.plan["order"], ctx.server["scale"]
        places = rows_of_step(step, len(order), ctx)
        stored = ctx.server["images"].index_select(0, order.index_select(0, places))
        values = stored.to(scale["mean"].dtype) / 255
        return (values - scale["mean"][:, None, None]) / scale["std"][:, None, None]


class TARGET(DataFree):
    kd: NonNegative  # weight of the distillation loss
    temperature: Positive  # temperature T of teacher and student

    def make(self, net: ServerNetwork, server: Tree, pixels: Pixels, classes: Tensor) -> Tensor:
        """Generate the images as described in generator.py."""
        like = server["new"]
        generator, seen, made = Generator(pixels.shape, self.width).to(like), Statistics(), []
        outer = torch.optim.Adam(generator.parameters(), self.lr_generator * self.steps, BETAS)
        for _ in range(self.batches):
            z = torch.randn(self.batch_size, LATENT).to(like).requires_grad_()
            # indices into `classes`
            labels = torch.randint(len(classes), (self.batch_size,)).to(like.device)
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
        logits = logits_of_members(net(params, batch.x).logits, ctx.server["new"])
        loss = masked_mean(cross_entropies(logits, batch.y), batch.mask)
        if "old" not in ctx.server:
            return loss
        x, known = self.images(batch.step, ctx), ctx.server["known"]
        student, teacher = (
            logits_of_members(net(model, x).logits, known) for model in (params, ctx.server["old"])
        )
        return (
            loss + self.kd * distillation_loss(student, teacher.detach(), self.temperature).mean()
        )


def rows_of_step(step: int, total: int, ctx: Context) -> Tensor:
    """Return the indices of the rows that a local step uses, int64 [min(batch size, total)].

    Consecutive steps use consecutive rows and continue at the first row after the last one. total:
    the number of rows.
    """
    count, device = min(ctx.local.batch_size, total), ctx.steps.device
    numbers = torch.arange(count, device=device)
    return (torch.as_tensor(step, device=device) * count + numbers) % total
