"""Models: `forward` maps images [B, channels, height, width] or texts [B, length] to Output(features, logits)."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from fedexp.core.tree import Params


class Output(NamedTuple):
    """The output of every fedexp model."""

    features: torch.Tensor  # [B, D]: the input of the classifier (penultimate layer)
    logits: torch.Tensor  # [B, C]
    maps: tuple[torch.Tensor, ...] = ()  # input and output [B, D, h, w] of the last stage, where the model keeps them


def classifier_of(module: nn.Module) -> nn.Linear:
    """Return the last layer of a fedexp model, its attribute `classifier`."""
    classifier = module.get_submodule("classifier")
    assert isinstance(classifier, nn.Linear)
    return classifier


@runtime_checkable
class Staged(Protocol):
    """A model whose last stage of convolutions can be run alone and narrower (FedAlign)."""

    keeps_maps: bool  # set: `Output.maps` is filled

    def slim(self, params: Params, x: torch.Tensor, width: float) -> torch.Tensor:
        """Return the output [B, ., h, w] of the last stage on its input x, with the first `width` of the channels of
        every convolution in it, and batch norm (where there is any) on batch statistics without scale and shift."""


def slim_channels(channels: int, width: float) -> int:
    """Return the share `width` of a number of channels, rounded to a multiple of 8 (few: to at least 1)."""
    eights = int(channels * width / 8 + 0.5) * 8
    return eights or max(round(channels * width), 1)
