"""Variants of McMahan et al.'s (2017) convolutional network that papers on forgetting use."""

from typing import Annotated, Any

import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Count, Counts, Limit
from fedexp.core.tree import Params
from fedexp.models import Model, Output, slim_convolution
from fedexp.models.pooling import convolve_and_pool, pool


class CNN(Model):
    """A network of convolutions, fully connected layers and a classifier.

    Each convolution is followed by 2x2 max-pooling and ReLU. The first fully connected layer adapts
    to the image size.
    """

    vectorises = True  # torch.func.vmap supports all layers

    channels: Counts  # number of output channels of each convolution
    kernel: Count  # side length of the convolution kernels, pixels
    padding: int  # zero padding of the convolutions on every side, pixels
    hidden: Counts  # width of each fully connected layer; the last one gives the features
    unit_features: Annotated[
        int | None, Limit("at least 2, or null", lambda n: n is None or n >= 2)
    ] = None
    """If not None, add a layer with this number of outputs and without ReLU. Its outputs are
    normalised to length 1 and used as the features. This follows FedNTD, appendix N, which does not
    describe its network."""
    batch_norm: bool = False
    """Whether to add batch norm (Ioffe and Szegedy, ICML 2015) after each convolution. The
    convolutions then have no bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0 <= self.padding < self.kernel
        require(fits, "model.padding", self.padding, "at least 0 and less than model.kernel")

    @property
    def mixes_examples(self) -> bool:
        """Return whether the network has batch norm, the only layer that mixes examples."""
        return self.batch_norm

    @property
    def smallest_image(self) -> int:
        """Return the smallest side length of images that the network accepts, in pixels.

        At this size, one pixel remains after the last pooling.
        """
        side = 1
        for _ in self.channels:
            side = 2 * side + self.kernel - 1 - 2 * self.padding
        return side

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Return a newly initialised network for images of `shape` (channels, height, width).

        Raises ConfigError if the images are too small for the convolutions.
        """
        _, height, width = shape
        if min(height, width) < self.smallest_image:
            raise ConfigError(
                f"model: {len(self.channels)} convolutions with kernel size {self.kernel}, padding"
                f" {self.padding} and pooling need images of at least {self.smallest_image} x"
                f" {self.smallest_image} pixels, but the images have {height} x {width}"
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
        """Return the outputs [B, D] of all fully connected layers after ReLU.

        FedNTD's weight alignment uses them as neurons (Table 2, Eq. 19). The outputs of the last
        layer are the features.

        x: images [B, C, H, W].
        """
        return self._connected(self._convolved(x)[-1])

    def _convolved(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of the last convolution after `pool`.

        With `keeps_maps`, return the input of the last convolution before it.
        """
        stages: list[Any] = list(zip(self.convolutions, self.norms, strict=True))
        if not self.keeps_maps:
            return (convolve_and_pool(x, stages),)
        before = convolve_and_pool(x, stages[:-1])
        return before, convolve_and_pool(before, stages[-1:])

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
