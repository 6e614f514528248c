"""LANDER's server phase: images generated from a classifier and embeddings of the class names.

M.-T. Tran et al., CVPR 2024, and its released code (methods/lander.py, methods/generator.py). The
generator G maps the embeddings e_y of labels y to images. It consists of batch norm, a linear
layer, and the convolutions of TARGET's generator. The linear layer is redrawn from N(0, 1) for each
batch; every ten images of a batch have a separate layer. The images (G(e_y) - m) / s are passed to
the teacher, which computes logits t and mapped features a, and to a student, which computes logits
z. For each batch, `steps` steps of Adam minimise over G, m and s
    ONE_HOT * CE(t, y) + BATCH_NORM * (distance of statistics, see generator.py)
    + ltc * max(0, MSE(a, e_y) - r) - mean of KL(softmax(t) || softmax(z)) where argmax t = argmax z
The last term makes images on which student and teacher differ. Each batch uses a fresh optimizer. m
and s, the "learnable data statistics", have one value per channel and are not reset between
batches. The first `warmup` batches are discarded. For all other batches, the images from the step
with the lowest loss are kept, with 8 bits per value.

After each kept batch, the student takes `student_steps` steps of SGD on all images kept so far,
which are shuffled in each pass and normalised like the data set. Its loss is
    T^2 KL(softmax(t / T) || softmax(z / T)) + ltc * MSE(mapped features of student, of teacher),
    T = STUDENT_T.
The last term of the generator's loss is used only after the student has been trained `TRUST` times.
Labels are balanced: each class appears equally often, and the remaining labels are random. All
logits are restricted to the classes that the teacher knows.
"""

import math
from collections.abc import Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.algorithms.generator import LATENT, Generator, normalised
from fedexp.algorithms.interfaces import Pixels, ServerNetwork
from fedexp.core.tree import Params

ROWS = 10  # number of images that share a random linear layer
ONE_HOT, BATCH_NORM, ADVERSARIAL = 0.5, 1.0, 1.0  # from this line on, the authors' values
LR_STATISTICS, MEAN, STD = 0.01, 0.5, 0.2  # learning rate and initial values of m and s
STUDENT_T, STUDENT_BATCH, TRUST = 20.0, 128, 3
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 2e-4  # training of the student


class LabelGenerator(Generator):
    """Network from labels [n] to images [n, channels, height, width] with values from 0 to 1.

    n must be at most `count`.
    """

    def __init__(self, shape: tuple[int, int, int], width: int, anchors: Tensor, count: int):
        super().__init__(shape, width)
        self.anchors = anchors
        self.norm = nn.BatchNorm1d(anchors.shape[1])
        self.noisy = nn.ModuleList(
            nn.Linear(anchors.shape[1], LATENT) for _ in range(math.ceil(count / ROWS))
        )

    def renew(self) -> None:
        """Redraw the weights of the random linear layers."""
        for layer in self.noisy:
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, labels: Tensor) -> Tensor:
        parts = self.norm(self.anchors[labels]).split(ROWS)
        return super().forward(
            torch.cat([layer(part) for layer, part in zip(self.noisy, parts, strict=False)])
        )


class Student:
    """The student that distils the teacher on the images generated so far.

    While images are generated, `net` contains the student's parameters.

    """

    def __init__(self, net: ServerNetwork, teacher: Params, known: Tensor, ltc: float):
        self.net, self.teacher, self.known, self.ltc = net, teacher, known, ltc
        fresh = {name: initial_values(name, teacher[name]) for name in net.params}
        net.load(fresh, {name: value for name, value in teacher.items() if name not in fresh})
        self.trained = 0  # number of calls of `learn`

    def learn(self, images: Tensor, pixels: Pixels, steps: int) -> None:
        """Train the student for a number of steps on images, uint8 [n, channels, height, width].

        n must be greater than 1.

        """
        self.trained += 1
        optimizer = torch.optim.SGD(
            self.net.params.values(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        dtype = next(iter(self.net.params.values())).dtype
        for numbers in islice(shuffled(len(images)), steps):
            x = normalised(images[numbers.to(images.device)].to(dtype) / 255, pixels)
            with torch.no_grad():
                taught = self.net(self.teacher, x)
            own = self.net(self.net.params, x)
            answers, targets = ((each.logits[:, self.known] / STUDENT_T) for each in (own, taught))
            loss = STUDENT_T**2 * F.kl_div(
                answers.log_softmax(1), targets.softmax(1), reduction="batchmean"
            )
            loss = loss + self.ltc * F.mse_loss(own.features, taught.features)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def difference(self, x: Tensor, taught: Tensor) -> Tensor:
        """Return the mean KL divergence of the student's predictions from the teacher's, a scalar.

        Images for which student and teacher predict different classes contribute 0. x: the
        normalised images; taught: the teacher's logits. The student runs in eval mode.
        """
        logits = self.net(self.net.snapshot() | self.net.buffers(), x).logits[:, self.known]
        agrees = (logits.argmax(1) == taught.argmax(1)).to(logits)
        apart = F.kl_div(logits.log_softmax(1), taught.softmax(1), reduction="none").sum(1)
        return (apart * agrees).mean()


def shuffled(count: int) -> Iterator[Tensor]:
    """Yield batches of indices endlessly, in a new order in each pass.

    Batches with a single example are skipped.
    """
    while True:
        yield from (part for part in torch.randperm(count).split(STUDENT_BATCH) if len(part) > 1)


def initial_values(name: str, value: Tensor) -> Tensor:
    """Return initial values for a parameter of the student, with the shape of `value`.

    Matrices and kernels use Glorot initialisation, batch norm scales are drawn around 1, and biases
    are 0.
    """
    if value.dim() > 1:
        return nn.init.xavier_normal_(torch.empty(value.shape)).to(value)
    if name.endswith("weight"):
        return torch.empty(value.shape).normal_(1, 0.02).to(value)
    return torch.zeros_like(value)


def draw_balanced_labels(classes: int, count: int) -> Tensor:
    """Return int64 [count] class indices: each class equally often, the rest at random."""
    return torch.cat(
        [torch.arange(classes).repeat(count // classes), torch.randint(classes, (count % classes,))]
    )
