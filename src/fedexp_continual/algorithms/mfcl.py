"""MFCL: train the classifier on all classes, with generated images of the old ones.

As in TARGET, no example of an old task is kept. When a task begins, the server trains a generator
against the old model, and clients train on its images.

S. Babakniya, Z. Fabian, C. He, M. Soltanolkotabi, S. Avestimehr, "A Data-Free Approach to Mitigate
Catastrophic Forgetting in Federated Class Incremental Learning for Vision Tasks", NeurIPS 2023
(arXiv 2311.07784). theta_{t-1} = (f', W', b') is the global model from the end of the previous
task: its features, and the weight and bias of its classifier. For each of `steps` steps of Adam,
the server draws noise z ~ N(0, I). It trains the generator G to minimise
    CE(o / CONTENT_T, argmax o) + ENTROPY * (1 + sum_k p_k log p_k / log K)
    + BATCH_NORM * mean_l KL(N(m_l, v_l) || N(mu_l, var_l)) + SMOOTH * MSE(G(z), blurred G(z)),
where o are the logits of theta_{t-1} on G(z) for the K old classes, and p is the mean of
softmax(o) over the batch. mu_l and var_l are the mean and variance of the input of batch norm layer
l, and m_l and v_l are its running statistics. The KL divergence is averaged over channels.

The generated images x~ have the labels y~ that theta_{t-1} predicts among the old classes. In a
task t > 1, each local step uses a batch (x, y) of the client's examples and a batch of images, and
minimises
    CE(x, y) over the classes of task t alone
    + ft * CE(x and x~, y and y~) over all classes so far, with features that have no gradient
    + kd * the mean over x and x~ of ||W'_old (f - f')||^2 / K.
W'_old are the rows of W' for the old classes, and f are the features of the model being trained.
The difference of the logits W' f + b' and W' f' + b' is W' (f - f'). In task 1, the loss is CE over
the task's classes.

The source of the formulas is the authors' code (SaraBabakN/MFCL-NeurIPS23, commit 40d1681,
clients/MFCL.py and clients/helper.py). The text of the paper was not available. The code's main.py
never adds outputs for new classes and does not run unchanged. conf/algorithm/mfcl.yaml contains the
authors' values for CIFAR-100; `batches` has no counterpart in the code. Because CONTENT_T is 1000,
the first term of the generator's loss hardly depends on the images.

Differs from the released code: The server generates batches * batch_size images per task, with 8
bits per value, and clients reuse them; in the authors' code, clients generate 128 new images in
each step. A batch of images has the size of the local batch. The generator is that of generator.py:
a sigmoid and the data set's normalisation take the place of tanh and batch norm at its end, and
other batch norm layers use PyTorch's default eps; the authors' code uses 0.8. It starts anew in
each task; the authors' code continues to train it. Noise has 256 entries, not 1,000. The features
of the second term are those of the first; the authors' code computes them again, which updates the
running statistics twice. The model has all C outputs from the start, and the losses exclude the
outputs of later tasks. Models without running statistics, such as model=cnn, have no statistics to
match. The server weights clients by n_k, not equally. The images count as traffic in every round.
The method requires tasks with new classes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms import heads
from fedexp.algorithms.base import cross_entropies, masked_mean
from fedexp.algorithms.interfaces import Batch, Context, Network, Pixels, ServerNetwork
from fedexp.core.limits import NonNegative
from fedexp.core.tree import Params, Tree
from fedexp_continual.algorithms.classes import logits_of_members
from fedexp_continual.algorithms.generator import LATENT, Generator, normalised
from fedexp_continual.algorithms.target import DataFree

CONTENT_T, ENTROPY, BATCH_NORM, SMOOTH = 1000.0, 1.0, 50.0, 0.001  # the authors' values
SMALLEST_VARIANCE = 1e-8  # added to both variances of the KL divergence


class MFCL(DataFree):
    must_train = heads.HEAD
    needs_features = True

    ft: NonNegative  # weight of the loss that trains only the classifier
    kd: NonNegative  # weight of the distillation loss

    def make(self, net: ServerNetwork, server: Tree, pixels: Pixels, classes: Tensor) -> Tensor:
        """Train the generator in `steps` steps, and generate all images with it."""
        like = server["new"]
        generator = Generator(pixels.shape, self.width).to(like)
        optimizer = torch.optim.Adam(generator.parameters(), self.lr_generator)
        for _ in range(self.steps):
            x = normalised(generator(self.noise(like)), pixels)
            output, layers = net.norm_inputs(server["old"], x)
            loss = generator_loss(output.logits[:, classes], layers, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        generator.eval()
        with torch.no_grad():
            made = [generator(self.noise(like)) for _ in range(self.batches)]
        return (torch.cat(made) * 255).to(torch.uint8)

    def noise(self, like: Tensor) -> Tensor:
        """Return noise [batch_size, LATENT] with the type and device of `like`."""
        return torch.randn(self.batch_size, LATENT).to(like)

    def objective(self, net: Network, params: Params, batch: Batch, ctx: Context) -> Tensor:
        server, rows = ctx.server, len(batch.y)
        if "old" not in server:
            return new_task_loss(net(params, batch.x).logits, batch, server["new"])
        old, known, made = server["old"], server["known"], self.images(batch.step, ctx)
        x = torch.cat([batch.x, made])
        mask = None if batch.mask is None else torch.cat([batch.mask, known.new_ones(len(made))])
        student, teacher = net(params, x, mask), net(old, x, mask)
        predicted = logits_of_members(teacher.logits[rows:], known).argmax(-1)
        tuned = heads.logits(student.features.detach(), heads.head(params))
        tuned = logits_of_members(tuned, known + server["new"])
        tuning = masked_mean(cross_entropies(tuned, torch.cat([batch.y, predicted])), mask)
        difference = F.linear(student.features - teacher.features, old[heads.WEIGHT]) * known
        distillation = masked_mean((difference**2).sum(-1), mask) / known.sum()
        loss = new_task_loss(student.logits[:rows], batch, server["new"])
        return loss + self.ft * tuning + self.kd * distillation


def new_task_loss(logits: Tensor, batch: Batch, new: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch over the classes with `new` [C] = 1."""
    return masked_mean(cross_entropies(logits_of_members(logits, new), batch.y), batch.mask)


def generator_loss(logits: Tensor, layers: list[tuple[Tensor, ...]], images: Tensor) -> Tensor:
    """Return the generator's loss for a batch of images.

    logits: the old model's logits for the old classes, [n, K]. layers: the statistics that
    `norm_inputs` returns. images: normalised, [n, channels, height, width].
    """
    content = F.cross_entropy(logits / CONTENT_T, logits.argmax(1))
    smooth = F.mse_loss(images, blurred(images))
    loss = content + ENTROPY * imbalance(logits.softmax(1).mean(0)) + SMOOTH * smooth
    if not layers:
        return loss
    return loss + BATCH_NORM * torch.stack([divergence(*layer) for layer in layers]).mean()


def imbalance(shares: Tensor) -> Tensor:
    """Return 0 for equal shares [K] of the classes, and 1 if one class has all."""
    logs = shares.clamp(min=torch.finfo(shares.dtype).tiny).log()
    return 1 + (shares * logs).sum() / math.log(max(len(shares), 2))


def divergence(mean: Tensor, var: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
    """Return KL(N(running statistics) || N(mean, var)), averaged over channels.

    All arguments have the shape [channels].
    """
    var, running_var = var + SMALLEST_VARIANCE, running_var + SMALLEST_VARIANCE
    ratio = (running_var + (running_mean - mean) ** 2) / var
    return ((var / running_var).log() + ratio - 1).mean() / 2


def blurred(images: Tensor) -> Tensor:
    """Smooth images [n, channels, height, width] with a 5 x 5 Gaussian kernel.

    The kernel is proportional to exp(-(distance / 2)^2), as in the authors' code, and images are
    continued by reflection. Height and width must be at least 3.
    """
    height, width = (blur(size).to(images) for size in images.shape[2:])
    return height.T @ images @ width


def blur(size: int) -> Tensor:
    """Return the matrix [size, size] that smooths a row of pixels.

    Entry (i, j) is the weight of pixel i in smoothed pixel j. A product with this matrix has a
    deterministic gradient on GPUs; that of padding by reflection is not deterministic.
    """
    kernel = (-((torch.arange(-2, 3, dtype=torch.float64) / 2) ** 2)).exp()
    pixels = torch.eye(size, dtype=torch.float64)
    padded = F.pad(pixels[None], (2, 2), mode="reflect")[0]
    return padded.unfold(1, len(kernel), 1) @ (kernel / kernel.sum())
