"""Residual networks: FedNTD's small ResNet, FedAlign's ResNet, and the ResNets of torchvision."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.errors import ConfigError, require, require_choice
from fedexp.core.limits import Count, Counts
from fedexp.core.tree import Params
from fedexp.models import Model, Output, slim_convolution
from fedexp.models.own import split_head

DEPTHS = (18, 34, 50, 101, 152)


def _normed(
    before: int, after: int, kernel: int, stride: int = 1, running: bool = True
) -> nn.Sequential:
    """Return a convolution without bias, followed by batch norm.

    With stride 1, the convolution does not change the image size.

    before, after: numbers of input and output channels.
    running: whether batch norm keeps running statistics. If False, it always uses batch statistics.
    """
    convolution = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after, track_running_stats=running))


def _shortcut(before: int, after: int, stride: int, running: bool = True) -> nn.Module:
    """Return the identity or, if the block changes the shape, a 1x1 convolution with batch norm."""
    if before == after and stride == 1:
        return nn.Identity()
    return _normed(before, after, 1, stride, running)


class CifarResNet(Model):
    """FedNTD's ResNet for CIFAR: a 3x3 stem without pooling, and one basic block per stage.

    Batch norm always uses batch statistics, also in evaluation, and keeps no running statistics.
    The model therefore has no buffers. Its test accuracy depends slightly on how the test set is
    split into batches.
    """

    mixes_examples = True  # batch norm
    vectorises = True

    widths: Counts  # number of channels per stage; each stage after the first halves the image size

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Return a newly initialised network for images of `shape` (channels, height, width).

        Raises ConfigError if the images are so small that the input of the last stage would be a
        single pixel. The batch statistics of a batch with one example would then be undefined.
        """
        _, height, width = shape
        smallest = 2 ** (len(self.widths) - 1) + 1
        if max(height, width) < smallest:
            raise ConfigError(
                f"model: a ResNet with {len(self.widths)} stages needs images of at least"
                f" {smallest} x {smallest} pixels, but the images have {height} x {width}; use a"
                " model for smaller images, such as model=cnn"
            )
        return CifarResNetModule(self.widths, shape[0], num_classes)


class CifarResNetModule(nn.Module):
    """The network that `CifarResNet.build` returns."""

    def __init__(self, widths: tuple[int, ...], channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = _normed(channels, widths[0], 3, running=False)
        before = (widths[0], *widths)
        self.stages = nn.ModuleList(
            _BasicBlock(before[stage], width, stride=1 if stage == 0 else 2)
            for stage, width in enumerate(widths)
        )
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Output:
        x = F.relu(self.stem(x))
        for stage in self.stages:
            x = stage(x)
        features = x.mean((2, 3))
        return Output(features, self.classifier(features))


class _BasicBlock(nn.Module):
    """A block of two 3x3 convolutions with a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = _normed(before, after, 3, stride, running=False)
        self.second = _normed(after, after, 3, running=False)
        self.shortcut = _shortcut(before, after, stride, running=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class TorchvisionResNet(Model):
    """torchvision's ResNet for ImageNet, with random weights or weights from a file.

    The stem has a 7x7 convolution with stride 2 and max-pooling. Batch norm keeps running
    statistics (buffers). At the last stage, images of at most 32 x 32 pixels have become a single
    pixel. PyTorch then rejects training batches with only one example.
    """

    mixes_examples = True  # batch norm
    vectorises = True

    depth: int  # number of layers: 18, 34, 50, 101 or 152
    # file with torchvision's weights for all layers except the last; None: random weights
    weights: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.depth", str(self.depth), map(str, DEPTHS))
        there = self.weights is None or Path(self.weights).is_file()
        wanted = "a file such as torchvision's resnet18-f37072fd.pth, or null"
        require(there, "model.weights", self.weights, wanted)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Return the network for images of `shape` (channels, height, width).

        The images may have any size.
        """
        from torchvision import models  # slow to import, and no other model needs it

        network = getattr(models, f"resnet{self.depth}")(weights=None, num_classes=num_classes)
        if shape[0] != 3:
            stem = network.conv1
            network.conv1 = nn.Conv2d(
                shape[0], stem.out_channels, kernel_size=7, stride=2, padding=3, bias=False
            )
            # the same initialisation as in torchvision
            nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        if self.weights is not None and not network.conv1.weight.is_meta:
            load_weights(network, self.weights, "fc", "torchvision's ResNet with this model.depth")
        return split_head(network, "fc")


def load_weights(network: nn.Module, path: str, head: str, of: str, found: Any = None) -> None:
    """Load a state dict in torchvision's format into all layers of a network except the last.

    path: value of model.weights, usually a file.
    head: name of the last layer.
    of: name of the network, for messages.
    found: the state dict. None: read it from the file.

    Raises ConfigError if the file is not a valid weights file or does not fit the network. Weights
    for colour images do not fit a network for grey images.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True) if found is None else found
    except Exception as error:  # torch raises many types for an invalid file
        raise ConfigError(
            f"model.weights={path}: is not a weights file ({type(error).__name__})"
        ) from error
    # also skip auxiliary classifiers, which the networks in fedexp do not have
    left_out = (f"{head}.", "aux1.", "aux2.", "AuxLogits.")
    own = {k: v for k, v in network.state_dict().items() if not k.startswith(left_out[0])}
    items = found.items() if isinstance(found, dict) else ()
    given = {k: v for k, v in items if not str(k).startswith(left_out)}
    # Files from PyTorch before 0.4.1 do not count batches.
    missing = {k for k in own.keys() - given.keys() if not k.endswith("num_batches_tracked")}
    wrong = {k for k in given if k not in own or getattr(given[k], "shape", 0) != own[k].shape}
    if missing or wrong:
        name = sorted(map(str, missing or wrong))[0]
        problem = "is missing" if missing else "does not fit the network"
        raise ConfigError(
            f"model.weights={path}: {name} {problem}; the file must be the state dict of {of},"
            " a network for colour images"
        )
    network.load_state_dict(given, strict=False)


class BottleneckResNet(Model):
    """FedAlign's ResNet for CIFAR: a 3x3 stem, and stages of bottleneck blocks with expansion 4.

    Batch norm keeps running statistics. With three stages and `blocks=6`, the network is ResNet-56.
    The weights of convolutions are drawn from a normal distribution with variance 2 / fan-out, as
    in FedAlign's code.
    """

    mixes_examples = True  # batch norm
    vectorises = True

    # number of inner channels per stage; each stage after the first halves the image size
    widths: Counts
    blocks: Count  # number of blocks per stage

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Return a newly initialised network for images of `shape` (channels, height, width).

        The images may have any size.
        """
        return BottleneckResNetModule(self.widths, self.blocks, shape[0], num_classes)


EXPANSION = 4


class BottleneckResNetModule(nn.Module):
    """The network that `BottleneckResNet.build` returns."""

    def __init__(
        self, widths: tuple[int, ...], blocks: int, channels: int, num_classes: int
    ) -> None:
        super().__init__()
        self.keeps_maps = False
        self.stem = _normed(channels, widths[0], 3)
        self.stages = nn.ModuleList()
        before = widths[0]
        for stage, width in enumerate(widths):
            made = []
            for block in range(blocks):
                made.append(_Bottleneck(before, width, stride=2 if stage and not block else 1))
                before = EXPANSION * width
            self.stages.append(nn.Sequential(*made))
        self.classifier = nn.Linear(before, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Output:
        x = before = F.relu(self.stem(x))
        for stage in self.stages:
            before, x = x, stage(x)
        features = x.mean((2, 3))
        return Output(features, self.classifier(features), (before, x) if self.keeps_maps else ())

    def slim(self, params: Params, x: Tensor, width: float) -> Tensor:
        """Apply the last stage with fewer channels (see `fedexp.models.Staged`)."""
        stage = len(self.stages) - 1
        blocks = self.stages[stage]
        assert isinstance(blocks, nn.Sequential)
        for number, block in enumerate(blocks):
            assert isinstance(block, _Bottleneck)
            x = block.slim(params, f"stages.{stage}.{number}", x, width)
        return x


class _Bottleneck(nn.Module):
    """A block of 1x1, 3x3 and 1x1 convolutions with a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.first = _normed(before, width, 1)
        self.second = _normed(width, width, 3, stride)
        self.third = _normed(width, EXPANSION * width, 1)
        self.shortcut = _shortcut(before, EXPANSION * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.second(F.relu(self.first(x))))
        return F.relu(self.third(inner) + self.shortcut(x))

    def slim(self, params: Params, name: str, x: Tensor, width: float) -> Tensor:
        """Apply the block with fewer channels (see `fedexp.models.Staged`).

        name: name of the block in `params`.
        """

        def layer(part: str, x: Tensor, **options: int) -> Tensor:
            convolution, norm = f"{name}.{part}.0", f"{name}.{part}.1"
            return slim_convolution(params, convolution, norm, x, width, **options)

        inner = F.relu(layer("first", x))
        inner = F.relu(layer("second", inner, stride=self.stride, padding=1))
        if not isinstance(self.shortcut, nn.Identity):
            x = layer("shortcut", x, stride=self.stride)
        return F.relu(layer("third", inner) + x)
