"""LANDER: keep features of real and generated images close to embeddings of the class names.

As in TARGET, no example of an old task is kept. When a task begins, the server generates images of
the old classes from the old model. Clients distil the old model on these images. A loss pulls
features towards the embeddings, which do not change between tasks.

M.-T. Tran, T. Le, X.-M. Le, M. Harandi, D. Phung, "Text-Enhanced Data-free Approach for Federated
Class-Incremental Learning", CVPR 2024. The server generates the images x~ from theta_{t-1}, the
global model from the end of the previous task (see label_generator.py), and sends x~ and
theta_{t-1} to the clients. e_y is the embedding of class y's name (the anchor), and a(x) are the
features of x after a linear layer that maps them to the space of the embeddings. The bounding loss
is
    B = max(0, MSE(a(x), e_y) - r)   (MSE: the mean over the batch and the entries of an embedding).
A local step in task 1 minimises
    L = CE + ltc * B
and a local step in a task t > 1, with n_o old classes and n classes so far,
    L = cur * (CE + ltc * B) + pre * (L_d(x~) + MSE(a(x~), a_{t-1}(x~)))
    cur = alpha_cur (1 + 1 / alpha) / beta,   alpha = log2(n / 2 + 1)
    pre = alpha_pre alpha beta,               beta = sqrt(n_o / n),
where CE is over the classes of task t only. L_d is the distillation loss of continual.py, with
temperature T, over the earlier classes. a_{t-1} are the mapped features of theta_{t-1}. The weights
cur and pre shift from the new to the old classes as their number grows. The linear layer is
trained, averaged and sent with the model.

The embeddings come from a file, `embeddings=<file>`, with one row per class in the order of the
data set's classes; docs/guide/continual_learning.md describes how to create it. Without a file, a
run stops with an error. `embeddings=random` uses random vectors instead. Their width is that of the
features, and their entries have variance 1. The anchors then contain no information about the
meaning of the classes, and only LANDER's bounding loss and generator remain. The result of such a
run is not a result of LANDER; config.yaml and the first lines of the log record the option.

Checked against the authors' code (tmtuan1307/LANDER, methods/lander.py), which is the source of the
formulas; the equation numbers of the paper were not available. conf/algorithm/lander.yaml contains
the authors' values for CIFAR-100. In their code, the server generates 50 batches of 256 images and
keeps the batches from the tenth on, and clients use 10,000 of these images. In fedexp, the server
skips the first 9 batches and keeps the next 39, which are 9,984 images.

Differs from the released code: A client uses the images in the same order throughout a round; the
authors' code shuffles them in each pass. Images are neither cropped nor flipped, on clients or on
the server. The model has all C outputs from the start, and the losses exclude the outputs of later
tasks. The server weights clients by n_k, not equally. The model from the end of a task is the
average from its last round; the authors' code uses the model that was sent in the round with the
lowest training loss. The student's biases start at 0; in the authors' code, the biases of linear
layers and convolutions are drawn from N(0, 1). The images count as traffic in every round. The
method requires tasks with new classes.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms import label_text
from fedexp.algorithms.base import cross_entropies, masked_mean
from fedexp.algorithms.continual import distillation_loss, logits_of_members
from fedexp.algorithms.families import OwnModel
from fedexp.algorithms.generator import BETAS, Best, Statistics
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Network,
    Pixels,
    ServerNetwork,
)
from fedexp.algorithms.label_generator import (
    ADVERSARIAL,
    BATCH_NORM,
    LR_STATISTICS,
    MEAN,
    ONE_HOT,
    STD,
    TRUST,
    LabelGenerator,
    Student,
    draw_balanced_labels,
)
from fedexp.algorithms.target import DataFree
from fedexp.core.limits import CountFrom0, NonNegative, Positive
from fedexp.core.tree import Params, Tree
from fedexp.models import classifier_of

log = logging.getLogger("fedexp")


class LANDER(DataFree, OwnModel):
    sends = (*DataFree.sends, "anchors")
    needs_features = True
    needs_head = True

    # path of a file whose rows are the embeddings of the class names; random: random vectors
    embeddings: str | None
    radius: NonNegative  # r of the bounding loss, in the unit of squared embedding entries
    ltc: NonNegative  # weight of the bounding loss
    alpha_cur: Positive  # weight of the new task's losses
    alpha_pre: NonNegative  # weight of the distillation
    temperature: Positive  # temperature T of teacher and student
    warmup: CountFrom0  # number of batches that the server generates and discards first
    # number of student steps on the server after each kept batch of images; 0: no student
    student_steps: CountFrom0

    needs = replace(
        DataFree.needs,
        small="images and label embeddings (download)",
        data="generated (server), label embeddings",
    )

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        width = classifier_of(module).in_features
        return label_text.add_mapping(
            module, label_text.embeddings(self.embeddings, federation.num_classes, width).shape[1]
        )

    def fitted(self, module: nn.Module) -> "LANDER":
        if self.embeddings == label_text.RANDOM:
            log.warning(
                "algorithm.embeddings=random: the anchors are random vectors, not embeddings of"
                " class names"
            )
        return self

    def server_init(self, params: Params, federation: Federation) -> Tree:
        weight = params["mapping.weight"]
        rows = label_text.embeddings(self.embeddings, federation.num_classes, len(weight))
        return super().server_init(params, federation) | {
            "anchors": torch.from_numpy(rows).to(weight)
        }

    def make(self, net: ServerNetwork, server: Tree, pixels: Pixels, classes: Tensor) -> Tensor:
        """Generate the images as described in label_generator.py."""
        anchors, made, seen = server["anchors"], list[Tensor](), Statistics()
        generator = LabelGenerator(pixels.shape, self.width, anchors, self.batch_size).to(anchors)
        scale = [anchors.new_full((pixels.shape[0], 1, 1), v).requires_grad_() for v in (MEAN, STD)]
        student = Student(net, server["old"], classes, self.ltc)
        for number in range(self.warmup + self.batches):
            # indices into `classes`
            labels = draw_balanced_labels(len(classes), self.batch_size).to(anchors.device)
            wanted, best = classes[labels], Best()
            generator.renew()
            groups: list[Any] = [
                {"params": generator.parameters()},
                {"params": scale, "lr": LR_STATISTICS},
            ]
            optimizer = torch.optim.Adam(groups, self.lr_generator, BETAS)
            for _ in range(self.steps):
                values = generator(wanted)
                x = (values - scale[0]) / scale[1]
                output, layers = net.norm_inputs(server["old"], x)
                answers = output.logits[:, classes]
                outside = (F.mse_loss(output.features, anchors[wanted]) - self.radius).relu()
                loss = ONE_HOT * F.cross_entropy(answers, labels)
                loss = loss + BATCH_NORM * seen.distance(layers) + self.ltc * outside
                if student.trained >= TRUST:
                    loss = loss - ADVERSARIAL * student.difference(x, answers)
                best.offer(values, loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            seen.add(layers)
            if number >= self.warmup:
                made.append(best.images)
                if self.student_steps:
                    student.learn(torch.cat(made), pixels, self.student_steps)
        return torch.cat(made)

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        server = ctx.server
        features, logits, _ = net(params, batch.x)
        entropy = cross_entropies(logits_of_members(logits, server["new"]), batch.y)
        distance = ((features - server["anchors"].index_select(0, batch.y)) ** 2).mean(-1)
        bound = (masked_mean(distance, batch.mask) - self.radius).relu()
        learning = masked_mean(entropy, batch.mask) + self.ltc * bound
        if "old" not in server:
            return learning
        x, known = self.images(batch.step, ctx), server["known"]
        student, teacher = (net(model, x) for model in (params, server["old"]))
        answers, targets = (
            logits_of_members(output.logits, known) for output in (student, teacher)
        )
        kept = distillation_loss(answers, targets.detach(), self.temperature).mean()
        kept = kept + ((student.features - teacher.features.detach()) ** 2).mean()
        cur, pre = self.weights(known.sum(), known.sum() + server["new"].sum())
        return cur * learning + pre * kept

    def weights(self, old: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (cur, pre) of the losses on new examples and on generated images.

        old: the number of old classes. seen: the number of classes so far.

        """
        alpha, beta = (seen / 2 + 1).log2(), (old / seen).sqrt()
        return self.alpha_cur * (1 + 1 / alpha) / beta, self.alpha_pre * alpha * beta
