"""Triton kernel: the divergence of softened predictions and its gradient by the student in one
launch (see algorithms.divergence), where torch's operations are some forty, each too small for a
GPU."""

import torch
import triton
import triton.language as tl

ELEMENTS = 2048  # logits in one program, about


@triton.jit
def _log_softmax(logits, place, kept, scale):
    """Return log softmax of rows over the classes kept, times `scale` before it; -inf for the
    others."""
    z = tl.load(logits + place, kept, other=float("-inf")) * scale
    z = z - tl.max(z, 1)[:, None]
    return z - tl.log(tl.sum(tl.exp(z), 1))[:, None]


@triton.jit
def _divergence(
    teacher,
    student,
    keep,
    value,
    slope,
    rows,
    classes,
    scale,
    masked: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = tl.arange(0, width)
    place = row[:, None] * classes + column[None, :]
    there = (row < rows)[:, None] & (column < classes)[None, :]
    kept = there
    if masked:
        kept = there & (tl.load(keep + place, there, other=0) != 0)
    log_p, log_q = (
        _log_softmax(teacher, place, kept, scale),
        _log_softmax(student, place, kept, scale),
    )
    p, q = tl.exp(log_p), tl.exp(log_q)
    tl.store(value + row, tl.sum(tl.where(kept, p * (log_p - log_q), 0.0), 1), row < rows)
    tl.store(slope + place, tl.where(kept, (q - p) * scale, 0.0), there)


def divergence(
    teacher: torch.Tensor, student: torch.Tensor, keep: torch.Tensor | None, tau: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL(softmax(teacher / tau) || softmax(student / tau)) over the classes kept, [B], and
    its gradient by the student, [B, C]; in fp32. teacher, student: logits [B, C]; keep: bool [B,
    C], None = all."""
    teacher, student = teacher.contiguous(), student.contiguous()
    rows, classes = student.shape
    width = triton.next_power_of_2(classes)
    block = triton.next_power_of_2(max(ELEMENTS // width, 1))
    value, slope = student.new_empty(rows), torch.empty_like(student)
    mask = student if keep is None else keep.contiguous().view(torch.uint8)
    with torch.cuda.device_of(student):
        _divergence[(triton.cdiv(rows, block),)](
            *(
                teacher,
                student,
                mask,
                value,
                slope,
                rows,
                classes,
                1 / tau,
                keep is not None,
                block,
                width,
            )
        )
    return value, slope
