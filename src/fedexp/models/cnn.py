"""The convolutional network of McMahan et al. (2017) in the variants that the forgetting papers
train."""

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Count, Counts, Limit
from fedexp.core.private.torch_internals import in_transform
from fedexp.core.tree import Params
from fedexp.models import Model, Output, slim_convolution


class CNN(Model):
    """Convolutions, each followed by 2x2 max-pooling and ReLU, then fully connected layers and a
    classifier.

    The fully connected part adapts to the image size.
    """

    vectorises = True  # torch.func.vmap knows all layers
    has_neurons = True  # hidden_activations

    channels: Counts  # output channels of each convolution
    kernel: Count  # side length of the convolution kernels, pixels
    padding: int  # zero padding of the convolutions on every side, pixels
    hidden: Counts  # width of each fully connected layer; the last one gives the features
    unit_features: Annotated[
        int | None, Limit("at least 2, or null", lambda n: n is None or n >= 2)
    ] = None
    """D: add a layer without ReLU whose outputs are normalised to the unit sphere in D dimensions
    and are the features (FedNTD appendix N, which does not publish its network); None: no such
    layer."""
    batch_norm: bool = False
    """Add batch norm (Ioffe and Szegedy, ICML 2015) after each convolution, which then has no
    bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0 <= self.padding < self.kernel
        require(fits, "model.padding", self.padding, "at least 0 and less than model.kernel")

    @property
    def mixes_examples(self) -> bool:
        """Return whether a layer mixes the examples of a batch; only batch norm does."""
        return self.batch_norm

    @property
    def smallest_image(self) -> int:
        """Return the smallest side length in pixels that leaves one pixel after the last
        pooling."""
        side = 1
        for _ in self.channels:
            side = 2 * side + self.kernel - 1 - 2 * self.padding
        return side

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Return a freshly initialised network for images of `shape` (channels, height, width).

        Raises ConfigError when the image is too small for the convolutions.
        """
        _, height, width = shape
        if min(height, width) < self.smallest_image:
            raise ConfigError(
                f"model: {len(self.channels)} convolutions of kernel {self.kernel} and padding"
                f" {self.padding}, each with pooling, need images of at least {self.smallest_image}"
                f" x {self.smallest_image} pixels; the images have {height} x {width}"
            )
        return CNNModule(self, shape, num_classes)


class CNNModule(nn.Module):
    """The network that `CNN.build` returns."""

    def __init__(self, spec: CNN, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.keeps_maps = False
        self.padding = spec.padding
        width, *size = shape
        self.convolutions = nn.ModuleList()
        for out in spec.channels:
            bias = not spec.batch_norm
            self.convolutions.append(
                nn.Conv2d(width, out, spec.kernel, padding=spec.padding, bias=bias)
            )
            size = [(side + 2 * spec.padding - spec.kernel + 1) // 2 for side in size]
            width = out
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(out) if spec.batch_norm else nn.Identity() for out in spec.channels
        )
        width *= size[0] * size[1]
        self.hidden = nn.ModuleList()
        for out in spec.hidden:
            self.hidden.append(nn.Linear(width, out))
            width = out
        self.unit = None if spec.unit_features is None else nn.Linear(width, spec.unit_features)
        self.classifier = nn.Linear(spec.unit_features or width, num_classes)

    def hidden_activations(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the post-ReLU outputs [B, D] of all fully connected layers; the features are the
        last.

        x: images [B, C, H, W]. These are the neurons of FedNTD's weight alignment (Table 2, Eq.
        19).
        """
        return self._connected(self._convolved(x)[-1])

    def _convolved(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input and output of the last convolution with its pooling and ReLU."""
        before = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            before, x = x, pool(norm(convolution(x)))
        return before, x

    def _connected(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.flatten(1)
        activations = []
        for layer in self.hidden:
            x = F.relu(layer(x))
            activations.append(x)
        return tuple(activations)

    def slim(self, params: Params, x: Tensor, width: float) -> Tensor:
        """Apply the last convolution with fewer channels (see `fedexp.models.Staged`)."""
        last = len(self.convolutions) - 1
        name, norm = f"convolutions.{last}", f"norms.{last}"
        return pool(slim_convolution(params, name, norm, x, width, padding=self.padding))

    def forward(self, x: Tensor) -> Output:
        maps = self._convolved(x)
        features = self._connected(maps[-1])[-1]
        if self.unit is not None:
            features = F.normalize(self.unit(features), dim=-1)
        return Output(features, self.classifier(features), maps if self.keeps_maps else ())


def pool(x: Tensor) -> Tensor:
    """Return the ReLU of the 2x2 max-pooling of x [N, C, H, W].

    ReLU is monotone and commutes with max, so pooling first leaves 4 times fewer values for ReLU.
    """
    if x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0:
        ordinary = torch.is_grad_enabled() or in_transform() or x.device.type != "cpu"
        if not ordinary and x.is_contiguous(memory_format=torch.channels_last):
            return _maxima(x).relu_()
    return F.relu(F.max_pool2d(x, 2, 2))


def _maxima(x: Tensor) -> Tensor:
    """Return the 2x2 max-pooling without the positions of the maxima.

    Only a gradient needs these positions. Without them, pooling takes a third of the time.
    """
    n, c, h, w = x.shape
    rows = x.permute(0, 2, 3, 1).view(n, h // 2, 2, w // 2, 2 * c)
    pairs = torch.maximum(rows[:, :, 0], rows[:, :, 1]).view(n, h // 2, w // 2, 2, c)
    return torch.maximum(pairs[..., 0, :], pairs[..., 1, :]).permute(0, 3, 1, 2)
