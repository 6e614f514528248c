"""Functions for methods that treat the classifier (head) separately from the rest (body)."""

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
    """Return the logits [B, C] of the outputs [B, R] selected by `rows`, [B, C] or [C].

    The logit of class c is output rows[c], or -inf if rows[c] is -1.
    """
    rows = rows.expand(*outputs.shape[:-1], rows.shape[-1])
    return outputs.gather(-1, rows.clamp(min=0)).masked_fill(rows < 0, -torch.inf)


def logits(features: Tensor, head: Params) -> Tensor:
    """Return the logits [B, C] for features [B, D]."""
    return F.linear(features, head[WEIGHT], head[BIAS])
