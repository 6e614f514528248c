"""Functions that separate the parameters of the classifier (head) from all others (body)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.tree import Params

WEIGHT, BIAS = "classifier.weight", "classifier.bias"  # parameter names in all fedexp models
HEAD = (WEIGHT, BIAS)


def head(params: Params) -> Params:
    return {name: params[name] for name in HEAD}


def body(params: Params) -> Params:
    return {name: value for name, value in params.items() if name not in HEAD}


def by_head(outputs: Tensor, rows: Tensor) -> Tensor:
    """Return the class logits [B, C] of a model with several heads.

    outputs: the model's outputs, [B, R]. rows: [C] or, for each example, [B, C]. The logit of class
    c is output rows[c], or -inf if rows[c] is -1.
    """
    rows = rows.expand(*outputs.shape[:-1], rows.shape[-1])
    return outputs.gather(-1, rows.clamp(min=0)).masked_fill(rows < 0, -torch.inf)


def logits(features: Tensor, head: Params) -> Tensor:
    """Return the logits [B, C] that a head computes for features [B, D]."""
    return F.linear(features, head[WEIGHT], head[BIAS])
