"""Interfaces of models.

The `forward` method of a model takes images [B, channels, height, width] or texts [B, length], and
returns `Output(features, logits)`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.limits import Checked
from fedexp.core.tree import Params


class Output(NamedTuple):
    """What a fedexp model returns for a batch."""

    features: Tensor  # [B, D]: the input of the classifier (penultimate layer)
    logits: Tensor  # [B, C]
    # input and output [B, D, h, w] of the last stage; empty unless `Staged.keeps_maps` is set
    maps: tuple[Tensor, ...] = ()


class Model(Checked, ABC, prefix="model."):
    """Base class of the models in the config group `model`.

    A subclass contains the options of an architecture and the properties that engines need to know.
    """

    reads: ClassVar[str] = "images"  # type of the inputs, "images" or "text"

    @property
    @abstractmethod
    def mixes_examples(self) -> bool:
        """Return whether an example's output depends on the other examples of its batch.

        This is the case with batch norm.
        """

    @property
    @abstractmethod
    def vectorises(self) -> bool | None:
        """Return whether several clients can be trained together with torch.func.vmap.

        If the result is None, a trial decides (fedexp.engine.vectorised.support). torch.func.vmap
        must support every layer, and the padding of a batch must not affect the training on its
        examples. PyTorch's batch norm is allowed. PyTorch's dropout is not allowed, because all
        clients would share one random generator.
        """

    @abstractmethod
    def build(self, shape: Any, num_classes: int) -> nn.Module:
        """Return a newly initialised network.

        shape: shape of the inputs (see `Data.shape`).

        Raises ConfigError if the network cannot process inputs of this shape.
        """


def classifier_of(module: nn.Module) -> nn.Linear:
    """Return the last layer of a fedexp model: the attribute `classifier`."""
    classifier = module.get_submodule("classifier")
    assert isinstance(classifier, nn.Linear)
    return classifier


@runtime_checkable
class Staged(Protocol):
    """A model whose last stage of convolutions can be run separately and with fewer channels.

    FedAlign requires this interface.
    """

    keeps_maps: bool  # if True, the model fills `Output.maps`

    def slim(self, params: Params, x: Tensor, width: float) -> Tensor:
        """Return the output [B, ., h, w] of the last stage, computed with fewer channels.

        Each convolution of the stage computes only the first output channels, and uses only the
        input channels that are available. Batch norm, if any, uses batch statistics and the scale
        and shift of these channels.

        params: parameters of the model.
        x: input of the stage. It may contain only the first channels.
        width: fraction of the output channels to compute.
        """


def slim_convolution(
    params: Params, convolution: str, norm: str, x: Tensor, width: float, **options: int
) -> Tensor:
    """Apply a convolution and its batch norm, if any, with fewer channels (see `Staged`).

    convolution, norm: names of the convolution and the batch norm in `params`.
    x: input, which may contain only the first channels.
    width: fraction of the output channels to compute.
    options: stride and padding of the convolution.
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
    """Return channels * width, rounded to a multiple of 8.

    If this is 0, return channels * width rounded to an integer, but at least 1.
    """
    eights = int(channels * width / 8 + 0.5) * 8
    return eights or max(round(channels * width), 1)
