"""Models: `forward` maps images [B, channels, height, width] to Output(features, logits)."""

from typing import NamedTuple

import torch


class Output(NamedTuple):
    """What every fedexp model returns."""

    features: torch.Tensor  # [B, D]: the input of the classifier (penultimate layer)
    logits: torch.Tensor  # [B, C]
