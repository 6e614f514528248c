"""The classifier as a part of the parameters, for methods that treat it apart from the rest (the
body)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.tree import Params

WEIGHT, BIAS = "classifier.weight", "classifier.bias"  # of every fedexp model
HEAD = (WEIGHT, BIAS)


def head(params: Params) -> Params:
    return {name: params[name] for name in HEAD}


def body(params: Params) -> Params:
    return {name: value for name, value in params.items() if name not in HEAD}


def by_head(outputs: Tensor, rows: Tensor) -> Tensor:
    """Return the logits [B, C] of outputs [B, R] by rows [B, C] or [C]: that of class c is output
    rows[c]; -inf where that is -1."""
    rows = rows.expand(*outputs.shape[:-1], rows.shape[-1])
    return outputs.gather(-1, rows.clamp(min=0)).masked_fill(rows < 0, -torch.inf)


def logits(features: Tensor, head: Params) -> Tensor:
    """Return the logits [B, C] of features [B, D]."""
    return F.linear(features, head[WEIGHT], head[BIAS])
