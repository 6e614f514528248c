"""Generate images from a classifier, without data, as in TARGET (J. Zhang et al., ICCV 2023).

A generator G learns to make images that the classifier, called the teacher, recognises. The details
follow TARGET's released code. G maps noise z to images. t are the teacher's logits on G(z) for the
classes that it knows, and y are labels drawn at random from these classes. For each batch of
images, z and G are trained to minimise
    ONE_HOT * CE(t, y) + BATCH_NORM * sum_l (||mu_l - m_l|| + ||var_l - v_l||).
The sum is over the teacher's batch norm layers l with running statistics m_l and v_l. mu_l and
var_l are moving averages of the mean and variance of the layer's input: this batch has weight 1/10,
and the average over the earlier batches has weight 9/10 (MOMENTUM). For each batch, Adam takes
`steps` steps on z and on a copy of G. The sum of the copy's gradients is then used for one Adam
step on G (first-order MAML) with `steps` times the learning rate. The images from the step with the
lowest loss are kept, with 8 bits per value.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedexp.algorithms.interfaces import Pixels

LATENT, BETAS, LR_LATENT = 256, (0.5, 0.999), 0.01  # size of z; Adam's betas; learning rate of z
ONE_HOT, BATCH_NORM, MOMENTUM = 0.5, 10.0, 0.9  # the authors' values for CIFAR-100


class Generator(nn.Module):
    """Network that makes images [n, channels, height, width] from noise [n, LATENT].

    Pixels have values from 0 to 1. The network starts from a quarter of the image size and doubles
    the size twice.
    """

    def __init__(self, shape: tuple[int, int, int], width: int):
        super().__init__()
        channels, self.height, self.width = shape
        self.start = (2 * width, math.ceil(self.height / 4), math.ceil(self.width / 4))
        self.first = nn.Linear(LATENT, math.prod(self.start))
        self.blocks = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.blocks(self.first(z).view(-1, *self.start))[..., : self.height, : self.width]


def normalised(values: Tensor, pixels: Pixels) -> Tensor:
    """Normalise images [n, channels, height, width] with values from 0 to 1, as models expect."""
    mean, std = (values.new_tensor(each)[:, None, None] for each in (pixels.mean, pixels.std))
    return (values - mean) / std


@dataclass
class Statistics:
    """Moving averages, over generated batches, of the mean and variance of batch norm inputs."""

    before: list[Tensor] = field(default_factory=list)  # [2, channels] for each layer

    def after(self, layers: list[tuple[Tensor, ...]]) -> list[Tensor]:
        """Return the moving averages after another batch; layers: the result of `norm_inputs`."""
        now = [torch.stack(layer[:2]) for layer in layers]
        if not self.before:
            return now
        pairs = zip(self.before, now, strict=True)
        return [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in pairs]

    def distance(self, layers: list[tuple[Tensor, ...]]) -> Tensor | float:
        """Return the sum over l in the generator's loss, without the factor BATCH_NORM.

        layers: the result of `norm_inputs`.
        """
        total: Tensor | float = 0.0
        for (mean, var), layer in zip(self.after(layers), layers, strict=True):
            total = total + (layer[2] - mean).norm() + (layer[3] - var).norm()
        return total

    def add(self, layers: list[tuple[Tensor, ...]]) -> None:
        """Update the moving averages with the statistics of a batch.

        layers: the result of `norm_inputs` in the last generator step for this batch.
        """
        self.before = [average.detach() for average in self.after(layers)]


@dataclass
class Best:
    """The images from the step with the lowest loss."""

    images: Tensor = field(default_factory=lambda: torch.empty(0))  # uint8
    lowest: float = math.inf

    def offer(self, values: Tensor, loss: Tensor) -> None:
        """Keep the images `values`, from 0 to 1, if `loss` is the lowest loss so far."""
        found = float(loss.detach())
        if not len(self.images) or found < self.lowest:
            self.images, self.lowest = (values.detach() * 255).to(torch.uint8), found
