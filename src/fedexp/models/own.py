"""Turn any nn.Module that returns logits into a model that fedexp can train.

Algorithms that use features, or that treat the classifier separately, need to know the last layer,
called the head. If the name of the head is given (`head: fc`), the head is separated from the
network and becomes the attribute `classifier`, as in fedexp's built-in models. The inputs of the
head are the features.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.errors import ConfigError, nearest, reason_of, require
from fedexp.data.datasets import Dataset
from fedexp.data.types import Data, DataSource, ImageData
from fedexp.models import Model, Output


class OwnModel(Model):
    """Base class for models whose network is any nn.Module that returns logits [B, C].

    Subclasses implement `network`.
    """

    # assumed to be True, but ignored if the network has no batch norm
    mixes_examples: ClassVar[bool] = True
    # None: a trial decides; False is needed only if layers other than batch norm mix examples
    vectorises: ClassVar[bool | None] = None

    # name of the last layer, which must be linear; None: features and head are unknown
    head: str | None = None
    # names of modules or parameters that are not trained; backbone: everything except the head
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head != "", "model.head", repr(self.head), "the name of a layer, or null")

    @abstractmethod
    def network(self, shape: Any, num_classes: int) -> nn.Module:
        """Return a newly initialised network.

        shape: shape of the inputs, such as (channels, height, width) for images (see `Data.shape`).
        """

    def build(self, shape: Any, num_classes: int) -> nn.Module:
        """Return the network. If `head` is given, the head becomes the attribute `classifier`.

        Raises ConfigError if the head is not the last layer, or if a part to freeze does not exist.
        """
        return self.finish(self.network(shape, num_classes), self.head, shape, num_classes)

    def adjust(self, network: nn.Module, head: str | None) -> None:
        """Change the layers of a network in place, and freeze the parts that are not trained."""
        freeze_parts(network, self.freeze, head)

    def finish(
        self,
        network: nn.Module,
        head: str | None,
        shape: Any,
        num_classes: int,
        reading: "Reading | None" = None,
    ) -> "Headed | LogitsOnly":
        """Freeze parts of a network, and separate its head from the backbone.

        head: name of the head, or None if it is unknown.
        reading: module that converts the inputs before they enter the network, or None.
        """
        self.adjust(network, head)
        if head is None:
            return LogitsOnly(network, reading)
        layer = dict(network.named_modules()).get(head)
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"model.head={head}: {describe_head(network, head)}")
        if layer.out_features != num_classes:
            raise ConfigError(
                f"model.head={head}: this layer has {layer.out_features} outputs, but must have"
                f" {num_classes}, one per class"
            )
        if layer.weight.is_meta or not is_image_shape(shape):
            return split_head(network, head, reading)
        x = torch.ones(2, *shape)
        expected = compute_logits(network, x, reading)
        split = split_head(network, head, reading)
        if not has_same_output(split, x, expected):
            raise ConfigError(
                f"model.head={head}: must be the last layer, but the network changes the output of"
                " this layer"
            )
        return split


def split_head(network: nn.Module, head: str, reading: "Reading | None" = None) -> "Headed":
    """Separate the last layer, named `head`, from the rest of a network."""
    layer = network.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    parent, _, own = head.rpartition(".")
    setattr(network.get_submodule(parent), own, nn.Identity())
    return Headed(network, layer, reading)


def is_image_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and [type(side) for side in shape] == [int] * 3


@torch.no_grad()
def compute_logits(network: nn.Module, x: Tensor, reading: "Reading | None") -> Any:
    """Return the output of a network in eval mode for inputs x.

    Raises ConfigError if the network cannot process x.
    """
    network.eval()
    try:
        return network(x if reading is None else reading(x))
    except Exception as error:
        raise unreadable_input(x, error) from error
    finally:
        network.train()


@torch.no_grad()
def has_same_output(split: "Headed", x: Tensor, expected: Any) -> bool:
    """Return whether a network with a separate head returns the expected logits for inputs x.

    The features must also have the shape [B, D].
    """
    split.eval()
    try:
        features, logits, _ = split(x)
    except Exception:
        return False
    finally:
        split.train()
    return isinstance(expected, Tensor) and torch.equal(expected, logits) and features.dim() == 2


def unreadable_input(x: Tensor, error: Exception) -> ConfigError:
    """Return the error to raise if a network fails on inputs x [B, ...]."""
    size = " x ".join(map(str, x.shape[1:]))
    kind = "images of {} (channels x height x width)" if x.dim() == 4 else "examples of {} numbers"
    return ConfigError(f"model: its network cannot process {kind.format(size)}: {reason_of(error)}")


def describe_head(network: nn.Module, head: str | None) -> str:
    """Return the part of an error message that explains what the head must be."""
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    shown = ", ".join(names[-8:]) or "none"
    hint = nearest(head, names) if head is not None else ""
    return f"must be the name of the last layer, a linear layer{hint}; linear layers: {shown}"


def freeze_parts(network: nn.Module, parts: Iterable[str], head: str | None) -> None:
    """Freeze parts of a network: set requires_grad=False for their parameters.

    parts: names of parameters or modules; `backbone` selects everything except the head.

    Raises ConfigError for an unknown name.
    """
    parameters = dict(network.named_parameters())
    modules = dict(network.named_modules())
    for part in parts:
        chosen = [name for name in parameters if f"{name}.".startswith(f"{part}.")]
        if part == "backbone" and not chosen and head is not None:
            chosen = [name for name in parameters if not name.startswith(f"{head}.")]
        if not chosen:
            top = ", ".join(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise ConfigError(
                f"model.freeze={part}: the network has no module or parameter with this name"
                f"{nearest(part, [*modules, *parameters])}; its top-level names are: {top}"
            )
        for name in chosen:
            parameters[name].requires_grad_(False)


class Reading(nn.Module):
    """Convert images to the inputs that a backbone expects.

    Grey images are repeated to three channels. The images are then resized and normalised.
    """

    def __init__(
        self,
        size: tuple[int, int] | None,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        interpolation: str = "bilinear",
    ):
        """Store the backbone's image size and normalisation.

        size: height and width in pixels; None: keep the size of the images.
        mean, std: mean and standard deviation per channel, on the scale 0..1, that were used to
        train the weights; None: keep the data set's normalisation.
        """
        super().__init__()
        self.size, self.mean, self.std, self.interpolation = size, mean, std, interpolation
        self.scale: list[float] | None = None
        self.shift: list[float] = []

    def set_data_normalisation(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Store the mean and standard deviation that normalised the data set.

        mean, std: one value per channel, for one or three channels.
        """
        if self.mean is None or self.std is None:
            return
        means, stds = (list(values) * (3 // len(values)) for values in (mean, std))
        self.scale = [own / theirs for own, theirs in zip(stds, self.std, strict=True)]
        self.shift = [
            (own - theirs) / s for own, theirs, s in zip(means, self.mean, self.std, strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if self.size is not None and tuple(x.shape[2:]) != self.size:
            x = F.interpolate(
                x, self.size, mode=self.interpolation, align_corners=False, antialias=True
            )
        if self.scale is not None:
            values = torch.tensor([self.scale, self.shift], dtype=x.dtype, device=x.device)
            scale, shift = values[..., None, None]
            x = x * scale + shift
        return x


def pass_normalisation(module: nn.Module, source: Data | DataSource) -> None:
    """Pass the data set's mean and standard deviation to a network that normalises its input.

    This must be done before an algorithm adapts the network.

    source: the data set or its data. It is loaded if it does not have these values as options.
    """
    reading = getattr(module, "reading", None)
    if not isinstance(reading, Reading):
        return
    if isinstance(source, DataSource) and not isinstance(source, Dataset):
        source = source.load()
    if isinstance(source, Dataset | ImageData):
        reading.set_data_normalisation(source.normalise.mean, source.normalise.std)


class Headed(nn.Module):
    """A network with a separate head. The features are the inputs of the head."""

    def __init__(self, backbone: nn.Module, classifier: nn.Linear, reading: Reading | None = None):
        super().__init__()
        self.reading = reading
        self.backbone = backbone
        self.classifier = classifier

    def forward(self, x: Tensor) -> Output:
        features = self.backbone(x if self.reading is None else self.reading(x))
        return Output(features, self.classifier(features))


class LogitsOnly(nn.Module):
    """A network that returns only logits, because its head is unknown."""

    def __init__(self, network: nn.Module, reading: Reading | None = None):
        super().__init__()
        self.reading = reading
        self.network = network

    def forward(self, x: Tensor) -> Output:
        logits = self.network(x if self.reading is None else self.reading(x))
        # algorithms that use features have already been rejected
        return Output(None, logits)  # type: ignore[arg-type]
