"""The divergence of a student's softened prediction from a teacher's: its definition, and one
kernel of it for CUDA."""

from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.autograd import Function

from fedexp.core.triton_kernels import load_kernels, stacked_first
from fedexp.models.pooling import differentiable_once


def kl_divergence(
    teacher: torch.Tensor, student: torch.Tensor, tau: float, keep: torch.Tensor | None
) -> torch.Tensor:
    """Return KL(softmax(teacher / tau) || softmax(student / tau)) over the classes kept: [B]. No
    gradient goes to the teacher.

    teacher, student: logits [B, C]; keep: bool [B, C], None = all classes.
    """
    teacher = teacher.detach()
    fits = (
        student.device.type == "cuda" and student.dtype == torch.float32 and differentiable_once()
    )
    if fits and kernels() is not None:
        return _Divergence.apply(teacher, student, keep, tau)[0]
    return _defined(teacher, student, tau, keep)


def _defined(
    teacher: torch.Tensor, student: torch.Tensor, tau: float, keep: torch.Tensor | None
) -> torch.Tensor:
    # The dtype's least value, not -inf: exp gives 0 and 0 * (finite) is 0, where 0 * -inf would be
    # NaN.
    low = torch.finfo(student.dtype).min
    rows = [
        t / tau if keep is None else torch.where(keep, t / tau, low) for t in (teacher, student)
    ]
    log_p, log_q = (F.log_softmax(t, dim=-1) for t in rows)
    terms = log_p.exp() * (log_p - log_q)
    return (terms if keep is None else torch.where(keep, terms, 0.0)).sum(-1)


@lru_cache
def kernels() -> Any:
    """Return the module of the kernel; None where Triton is missing or does not give torch's
    numbers here."""
    return load_kernels("fedexp.algorithms.divergence_kernels", _first_use, "the distillation loss")


def _first_use(kernels: Any) -> None:
    """Compare value and gradient of a small example with torch's."""
    teacher = torch.linspace(-3, 3, 12, device="cuda").view(3, 4)
    student, keep = teacher.flip(0, 1).square(), teacher < 2
    p, q = (torch.where(keep, each / 2.0, -torch.inf).softmax(-1) for each in (teacher, student))
    exact = _defined(teacher, student, 2.0, keep), (q - p) / 2.0
    torch.testing.assert_close(
        kernels.divergence(teacher, student, keep, 2.0), exact, rtol=1e-4, atol=1e-5
    )


class _Divergence(Function):
    """(teacher, student, keep) -> (divergence, its gradient by the student), by the kernel."""

    @staticmethod
    def forward(
        teacher: torch.Tensor, student: torch.Tensor, keep: torch.Tensor | None, tau: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels().divergence(teacher, student, keep, tau)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)  # the gradient gets none
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        return None, None if grad is None else _Scaled.apply(grad, *ctx.saved_tensors), None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        teacher: torch.Tensor,
        student: torch.Tensor,
        keep: torch.Tensor | None,
        tau: float,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, int]]:
        flat = [
            None if t is None else stacked_first(info, t, dim).flatten(0, 1)
            for t, dim in zip((teacher, student, keep), in_dims, strict=False)
        ]
        return tuple(
            t.unflatten(0, (info.batch_size, -1)) for t in _Divergence.apply(*flat, tau)
        ), (0, 0)


class _Scaled(Function):
    """The gradient of each row times a number; a function of its own, since it has no gradient."""

    @staticmethod
    def forward(grad: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return grad[..., None] * slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
        raise NotImplementedError("the gradient of a gradient through a divergence on CUDA")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], grad: torch.Tensor, slope: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        return _Scaled.apply(
            *(stacked_first(info, t, dim) for t, dim in zip((grad, slope), in_dims, strict=True))
        ), 0
