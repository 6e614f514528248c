"""LANDER: features of real and generated images stay close to embeddings of the class names.

M.-T. Tran, T. Le, X.-M. Le, M. Harandi, D. Phung, "Text-Enhanced Data-free Approach for Federated
Class-Incremental Learning", CVPR 2024. As in TARGET, no example of an old task is kept. When a task
begins, the server generates images x~ of the old classes from theta_{t-1}, the global model at the
end of the last task (see label_generator.py), and sends both. e_y is the embedding of class y's
name (the anchor), and a(x) are the features of x after a linear layer to the space of the
embeddings. The bounding loss is
    B = max(0, MSE(a(x), e_y) - r)   (MSE: the mean over the batch and the numbers of an embedding),
A local step in task 1 minimises
    L = CE + ltc * B
and a local step in a task t > 1, with n_o old classes and n classes so far,
    L = cur * (CE + ltc * B) + pre * (L_d(x~) + MSE(a(x~), a_{t-1}(x~)))
    cur = alpha_cur (1 + 1 / alpha) / beta,   alpha = log2(n / 2 + 1)
    pre = alpha_pre alpha beta,               beta = sqrt(n_o / n),
where CE is over the classes of task t only, and L_d (continual.py, temperature T) over the earlier
classes. The linear layer is trained, averaged and sent with the model.

The embeddings come from a file, `embeddings=<file>`, with one row per class in the order of the
data set's classes; docs/guide/continual_learning.md describes how to create it. A run without a
file is refused. `embeddings=random` uses random vectors instead, with the width of the features and
entries of variance 1. The anchors then contain no information about the classes' meaning, and only
the bounds and the generator of LANDER remain. Such a run is not a result of LANDER; the option is
recorded in config.yaml and in the run's first lines.

Checked against the authors' code (tmtuan1307/LANDER, methods/lander.py), which is the source of the
formulas; the numbers of the paper's equations were not available. Its values for CIFAR-100 are in
conf/algorithm/lander.yaml. In the code, the server makes 50 batches of 256 images and keeps those
from the tenth on, and clients use 10,000 of them. Here the first 9 batches are skipped and the next
39 are kept, 9,984 images.

Deviations: A client uses the images in the same order throughout a round; the code shuffles them in
each pass. Images are neither cropped nor flipped, on clients or on the server. The model has all C
outputs from the start, and the losses exclude those of later tasks. Weights are n_k, not equal. The
model at the end of a task is the average of its last round; the code uses the model that was sent
in the round with the lowest training loss, before that round's average. The student's biases start
at 0; in the code, those of linear layers and convolutions start at N(0, 1). The images count as
sent in every round. The method requires tasks with new classes.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms import label_text
from fedexp.algorithms.base import cross_entropies, masked_mean
from fedexp.algorithms.continual import distillation_loss
from fedexp.algorithms.families import OwnModel
from fedexp.algorithms.generator import BETAS, Best, Statistics
from fedexp.algorithms.interfaces import (
    Batch,
    Context,
    Federation,
    Needs,
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
from fedexp.algorithms.target import DataFree, logits_of_members
from fedexp.core.limits import CountFrom0, NonNegative, Positive
from fedexp.core.tree import Params, Tree
from fedexp.models import classifier_of

log = logging.getLogger("fedexp")


class LANDER(DataFree, OwnModel):
    sends = (*DataFree.sends, "anchors")
    needs_features = True
    needs_head = True

    # file with one embedding per class name, one row per class; random: no text
    embeddings: str | None
    radius: NonNegative  # r of the bounding loss, in units of an embedding's squared entries
    ltc: NonNegative  # weight of the bounding loss
    alpha_cur: Positive  # weight of the new task's losses
    alpha_pre: NonNegative  # weight of the distillation
    warmup: CountFrom0  # number of batches that the server generates before those that it keeps
    # number of student steps on the server after each batch of images; 0: no student
    student_steps: CountFrom0

    needs = Needs(
        server_state="old model, generated images",
        down=1,
        small="images and label embeddings down",
        data="generated (server), label embeddings",
        work="generated images with a teacher in each step",
        server_work="a generator for each task",
    )

    def adapt(self, module: nn.Module, federation: Federation) -> nn.Module:
        width = classifier_of(module).in_features
        return label_text.add_mapping(
            module, label_text.embeddings(self.embeddings, federation.num_classes, width).shape[1]
        )

    def fitted(self, module: nn.Module) -> "LANDER":
        if self.embeddings == label_text.RANDOM:
            log.warning(
                "algorithm.embeddings=random: the anchors are random vectors, no embeddings of"
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
        """See label_generator.py."""
        anchors, made, seen = server["anchors"], list[Tensor](), Statistics()
        generator = LabelGenerator(pixels.shape, self.width, anchors, self.batch_size).to(anchors)
        scale = [anchors.new_full((pixels.shape[0], 1, 1), v).requires_grad_() for v in (MEAN, STD)]
        student = Student(net, server["old"], classes, self.ltc)
        for number in range(self.warmup + self.batches):
            # positions in the list of classes
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
        """Return the weights cur and pre for the numbers of old classes and of all classes so
        far."""
        alpha, beta = (seen / 2 + 1).log2(), (old / seen).sqrt()
        return self.alpha_cur * (1 + 1 / alpha) / beta, self.alpha_pre * alpha * beta
