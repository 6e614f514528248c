"""Models built from any nn.Module that returns logits, with what fedexp's algorithms need.

Algorithms that use features or treat the classifier separately need to know the last layer, the
head. If it is named (`head: fc`), it is removed from the network and called `classifier`, as in
fedexp's built-in models; its inputs are the features.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.errors import ConfigError, nearest, require
from fedexp.models import Model, Output
from fedexp.models.lora import LoRA


class OwnModel(Model):
    """Base for a model whose `network` is any nn.Module that returns logits [B, C]."""

    # applies only if the network has batch norm, which the run looks up
    mixes_examples: ClassVar[bool] = True
    # True: the network has neither batch normalisation nor dropout
    vectorises: ClassVar[bool] = False

    # name of the last layer, which is linear; None: features and head are not known
    head: str | None = None
    # modules or parameters that are not trained; backbone: all except the head
    freeze: tuple[str, ...] = ()
    lora: LoRA = field(default_factory=LoRA)  # low-rank adapters, if any

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head != "", "model.head", repr(self.head), "the name of a layer, or null")

    @abstractmethod
    def network(self, shape: Any, num_classes: int) -> nn.Module:
        """Return a freshly initialised network for data of `shape`.

        shape: (channels, height, width) for images; see `Data.shape`.
        """

    def build(self, shape: Any, num_classes: int) -> nn.Module:
        """Return the network, separated into features and head if the head is named.

        Raises ConfigError if the head is not the last layer or a part to freeze does not exist.
        """
        return self.finish(self.network(shape, num_classes), self.head, shape, num_classes)

    def finish(
        self,
        network: nn.Module,
        head: str | None,
        shape: Any,
        num_classes: int,
        reading: "Reading | None" = None,
    ) -> "Headed | LogitsOnly":
        """Freeze parts of a network, insert adapters and separate its head from the rest.

        reading: a module that processes the input first.
        """
        freeze_parts(network, self.freeze, head)
        if self.lora.rank:
            self.lora.adapt(network, head)
        if head is None:
            return LogitsOnly(network, reading)
        layer = dict(network.named_modules()).get(head)
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"model.head={head}: {describe_head(network, head)}")
        if layer.out_features != num_classes:
            raise ConfigError(
                f"model.head={head}: has {layer.out_features} outputs; must have {num_classes}, one"
                " per class"
            )
        if layer.weight.is_meta or not is_image_shape(shape):
            return split_head(network, head, reading)
        x = torch.ones(2, *shape)
        expected = compute_logits(network, x, reading)
        split = split_head(network, head, reading)
        if not has_same_output(split, x, expected):
            raise ConfigError(
                f"model.head={head}: is not the last layer; the network changes the output of this"
                " layer"
            )
        return split


def split_head(network: nn.Module, head: str, reading: "Reading | None" = None) -> "Headed":
    """Separate the last layer from a network."""
    layer = network.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    parent, _, own = head.rpartition(".")
    setattr(network.get_submodule(parent), own, nn.Identity())
    return Headed(network, layer, reading)


def is_image_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and [type(side) for side in shape] == [int] * 3


@torch.no_grad()
def compute_logits(network: nn.Module, x: Tensor, reading: "Reading | None") -> Any:
    """Return the output of a network in eval mode for x.

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
    """Return whether the separated head, applied to its features [B, D], returns the expected
    logits."""
    split.eval()
    try:
        features, logits, _ = split(x)
    except Exception:
        return False
    finally:
        split.train()
    return isinstance(expected, Tensor) and torch.equal(expected, logits) and features.dim() == 2


def unreadable_input(x: Tensor, error: Exception) -> ConfigError:
    """Return the error for a network that fails on examples x [B, ...]."""
    size = " x ".join(map(str, x.shape[1:]))
    kind = "images of {} (channels x height x width)" if x.dim() == 4 else "examples of {} numbers"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"model: its network cannot process {kind.format(size)}: {reason}")


def describe_head(network: nn.Module, head: str | None) -> str:
    """Return a description of a valid head, with the network's candidates."""
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    shown = ", ".join(names[-8:]) or "none"
    hint = nearest(head, names) if head is not None else ""
    return f"must be the name of the last layer, a linear layer{hint}; linear layers: {shown}"


def freeze_parts(network: nn.Module, parts: Iterable[str], head: str | None) -> None:
    """Set requires_grad=False for the given parameters or for all parameters of the given modules.

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
                f"model.freeze={part}: the network has no such part"
                f"{nearest(part, [*modules, *parameters])}; parts: {top}"
            )
        for name in chosen:
            parameters[name].requires_grad_(False)


class Reading(nn.Module):
    """Convert images to the input of a backbone: three channels (grey is repeated), size and
    normalisation."""

    def __init__(
        self,
        size: tuple[int, int] | None,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        interpolation: str = "bilinear",
    ):
        """Store the backbone's image size and normalisation.

        size: height and width in pixels; None: unchanged. mean, std: per channel on the scale 0..1,
        as in the training of the weights; None: keep the data set's normalisation.
        """
        super().__init__()
        self.size, self.mean, self.std, self.interpolation = size, mean, std, interpolation
        self.scale: list[float] | None = None
        self.shift: list[float] = []

    def set_data_normalisation(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Store the data set's normalisation, (pixel - mean) / std, of one channel or three."""
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
            scale, shift = (x.new_tensor(v).view(-1, 1, 1) for v in (self.scale, self.shift))
            x = x * scale + shift
        return x


class Headed(nn.Module):
    """A network with a separate head, so that the head's input can be returned."""

    def __init__(self, backbone: nn.Module, classifier: nn.Linear, reading: Reading | None = None):
        super().__init__()
        self.reading = reading
        self.backbone = backbone
        self.classifier = classifier

    def forward(self, x: Tensor) -> Output:
        features = self.backbone(x if self.reading is None else self.reading(x))
        return Output(features, self.classifier(features))


class LogitsOnly(nn.Module):
    """A network that returns only logits; its features and head are not known."""

    def __init__(self, network: nn.Module, reading: Reading | None = None):
        super().__init__()
        self.reading = reading
        self.network = network

    def forward(self, x: Tensor) -> Output:
        logits = self.network(x if self.reading is None else self.reading(x))
        # fedexp refuses algorithms that read features before this point
        return Output(None, logits)  # type: ignore[arg-type]
