"""Models: `forward` maps images [B, channels, height, width] or texts [B, length] to
Output(features, logits)."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from fedexp.core.limits import Checked
from fedexp.core.tree import Params


class Output(NamedTuple):
    """The output of every fedexp model."""

    features: Tensor  # [B, D]: the input of the classifier (penultimate layer)
    logits: Tensor  # [B, C]
    # input and output [B, D, h, w] of the last stage, where the model keeps them
    maps: tuple[Tensor, ...] = ()


class Model(Checked, ABC, prefix="model."):
    """Base of the `model` group: what a network is made of, and what the engines have to know of
    it."""

    reads: ClassVar[str] = "images"  # or text
    has_neurons: ClassVar[bool] = False  # its network has `hidden_activations`

    @property
    @abstractmethod
    def mixes_examples(self) -> bool:
        """Tell whether a layer looks across the batch, as batch norm does."""

    @property
    @abstractmethod
    def vectorises(self) -> bool:
        """Tell whether torch.func.vmap knows every layer and, in training, padding changes no other
        example: batch norm may be one of torch's, dropout may not, since it draws from a generator
        that all clients would share."""

    @abstractmethod
    def build(self, shape: Any, num_classes: int) -> nn.Module:
        """Return a freshly initialised network for data of `shape` (`Data.shape` of the kind that
        it reads).

        Raises ConfigError for a shape that it cannot read.
        """


def classifier_of(module: nn.Module) -> nn.Linear:
    """Return the last layer of a fedexp model, its attribute `classifier`."""
    classifier = module.get_submodule("classifier")
    assert isinstance(classifier, nn.Linear)
    return classifier


@runtime_checkable
class Staged(Protocol):
    """A model whose last stage of convolutions can be run alone and narrower (FedAlign)."""

    keeps_maps: bool  # set: `Output.maps` is filled

    def slim(self, params: Params, x: Tensor, width: float) -> Tensor:
        """Return the output [B, ., h, w] of the last stage with the first `width` of the output
        channels of every convolution in it, and the first of its input channels. x: the first
        channels of the stage's input. Batch norm, where there is any, takes batch statistics, and
        scale and shift of the channels that are left."""


def slim_channels(channels: int, width: float) -> int:
    """Return the share `width` of a number of channels, rounded to a multiple of 8 (few: to at
    least 1)."""
    eights = int(channels * width / 8 + 0.5) * 8
    return eights or max(round(channels * width), 1)
