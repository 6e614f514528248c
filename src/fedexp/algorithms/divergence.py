"""The divergence of a student's softened prediction from a teacher's."""

import torch
import torch.nn.functional as F
from torch import Tensor


def kl_divergence(teacher: Tensor, student: Tensor, tau: float, keep: Tensor | None) -> Tensor:
    """Return KL(softmax(teacher / tau) || softmax(student / tau)) over the classes kept: [B]. No
    gradient goes to the teacher.

    teacher, student: logits [B, C]; keep: bool [B, C], None = all classes.
    """
    # The dtype's least value, not -inf: exp gives 0 and 0 * (finite) is 0, where 0 * -inf would be
    # NaN.
    low = torch.finfo(student.dtype).min
    rows = [
        t / tau if keep is None else torch.where(keep, t / tau, low)
        for t in (teacher.detach(), student)
    ]
    log_p, log_q = (F.log_softmax(t, dim=-1) for t in rows)
    terms = log_p.exp() * (log_p - log_q)
    return (terms if keep is None else torch.where(keep, terms, 0.0)).sum(-1)
