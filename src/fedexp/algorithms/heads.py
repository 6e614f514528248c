"""The classifier as a part of the parameters, for methods that treat it apart from the rest (the body)."""

import torch
import torch.nn.functional as F

from fedexp.tree import Params

WEIGHT, BIAS = "classifier.weight", "classifier.bias"  # of every fedexp model
HEAD = (WEIGHT, BIAS)


def head(params: Params) -> Params:
    return {name: params[name] for name in HEAD}


def logits(features: torch.Tensor, head: Params) -> torch.Tensor:
    """features [B, D] -> [B, C]."""
    return F.linear(features, head[WEIGHT], head[BIAS])
