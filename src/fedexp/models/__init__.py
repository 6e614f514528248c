"""Models: `forward` maps images [B, channels, height, width] or texts [B, length] to
Output(features, logits)."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.limits import Checked
from fedexp.core.tree import Params


class Output(NamedTuple):
    """The output of every fedexp model."""

    features: Tensor  # [B, D]: the input of the classifier (penultimate layer)
    logits: Tensor  # [B, C]
    # input and output [B, D, h, w] of the last stage, if the model keeps them
    maps: tuple[Tensor, ...] = ()


class Model(Checked, ABC, prefix="model."):
    """Base of the `model` group: the architecture's options, and what the engines need to know
    about it."""

    reads: ClassVar[str] = "images"  # or "text"
    has_neurons: ClassVar[bool] = False  # whether its network has `hidden_activations`

    @property
    @abstractmethod
    def mixes_examples(self) -> bool:
        """Return whether a layer mixes the examples of a batch, as batch norm does."""

    @property
    @abstractmethod
    def vectorises(self) -> bool:
        """Return whether clients can be trained together with torch.func.vmap.

        vmap must support every layer, and padding must not change any other example in training.
        Torch's batch norm is allowed. Dropout is not, because it draws from a generator that all
        clients would share.
        """

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
    """A model whose last stage of convolutions can be run separately with fewer channels
    (FedAlign)."""

    keeps_maps: bool  # if True, the model fills `Output.maps`

    def slim(self, params: Params, x: Tensor, width: float) -> Tensor:
        """Return the output [B, ., h, w] of the last stage, computed with fewer channels.

        Each convolution of the stage uses only the first `width` (a fraction) of its output
        channels, and the corresponding first input channels. x: the first channels of the stage's
        input. Batch norm, if any, uses batch statistics, and the scale and shift of the remaining
        channels.
        """


def slim_convolution(
    params: Params, convolution: str, norm: str, x: Tensor, width: float, **options: int
) -> Tensor:
    """Apply a convolution and its batch norm, if any, with fewer channels (see `Staged`).

    convolution, norm: their names in `params`. options: stride and padding of the convolution.
    """
    weight, bias = params[f"{convolution}.weight"], params.get(f"{convolution}.bias")
    channels = slim_channels(len(weight), width)
    weight = weight[:channels, : x.shape[1]]
    x = F.conv2d(x, weight, None if bias is None else bias[:channels], **options)
    if f"{norm}.weight" not in params:
        return x
    scale, shift = params[f"{norm}.weight"][:channels], params[f"{norm}.bias"][:channels]
    return F.batch_norm(x, None, None, scale, shift, training=True)


def slim_channels(channels: int, width: float) -> int:
    """Return the fraction `width` of a number of channels, rounded to a multiple of 8.

    If the result would be 0, return the unrounded fraction rounded to an integer, at least 1.
    """
    eights = int(channels * width / 8 + 0.5) * 8
    return eights or max(round(channels * width), 1)
