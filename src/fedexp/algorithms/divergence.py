"""The divergence between the softened predictions of a teacher and a student."""

import torch
import torch.nn.functional as F
from torch import Tensor


def kl_divergence(teacher: Tensor, student: Tensor, tau: float, keep: Tensor | None) -> Tensor:
    """Return KL(softmax(teacher / tau) || softmax(student / tau)) of each example, [B].

    teacher, student: logits [B, C]; keep: the classes over which the divergence is computed, bool
    [B, C], or None for all classes. No gradient flows to the teacher.
    """
    # Excluded logits get the dtype's lowest value, because 0 * -inf would be NaN.
    low = torch.finfo(student.dtype).min
    rows = [
        t / tau if keep is None else torch.where(keep, t / tau, low)
        for t in (teacher.detach(), student)
    ]
    log_p, log_q = (F.log_softmax(t, dim=-1) for t in rows)
    terms = log_p.exp() * (log_p - log_q)
    return (terms if keep is None else torch.where(keep, terms, 0.0)).sum(-1)
