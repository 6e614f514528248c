"""Maxima of filters over the windows of a text, whose gradient reads of each text and filter the
one best window."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from fedexp.core.private.of_torch import in_transform


def maxima(windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the maximum over the windows of each filter, [B, F].

    windows: [B, W, K], for each text its W windows of K numbers; weight: [F, K]; bias: [F].
    """
    if not torch.is_grad_enabled():
        return F.linear(windows, weight, bias).amax(1)
    if windows.device.type == "cpu" and windows.dtype == weight.dtype and not in_transform():
        return _Maxima.apply(windows, weight, bias)
    return F.linear(windows, weight, bias).max(1).values


class _Maxima(Function):
    """One of W windows gives a filter its maximum and alone has a gradient; products with the
    others are spared.

    Both gradients are sums of rows with weights, for which torch has `embedding_bag`: one of the B
    best windows of a filter, one of the filters that found their maximum in a window. Where the
    gradient is to have a gradient, it is computed by ordinary operations.
    """

    @staticmethod
    def forward(
        ctx: Any, windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        # autocast's are bf16, of which max is slow
        products = F.linear(windows, weight, bias).to(windows.dtype)
        values, places = products.max(1)
        ctx.save_for_backward(windows, weight, places)
        return values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        windows, weight, places = ctx.saved_tensors
        batch, number, _ = windows.shape
        if torch.is_grad_enabled():
            each = torch.zeros_like(places[:, None], dtype=grad.dtype).expand(-1, number, -1)
            each = each.scatter(1, places[:, None], grad[:, None])
            return each @ weight, torch.einsum("bwf,bwk->fk", each, windows), grad.sum(0)
        rows = places + number * torch.arange(batch)[:, None]
        of_windows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_windows = _by_row(rows, grad, weight, batch * number).view_as(windows)
        if ctx.needs_input_grad[1]:
            best, parts = rows.t().contiguous(), grad.t().contiguous()  # [F, B]
            of_weight = F.embedding_bag(
                best, windows.flatten(0, 1), per_sample_weights=parts, mode="sum"
            )
        return of_windows, of_weight, grad.sum(0)


def _by_row(
    rows: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, number: int
) -> torch.Tensor:
    """Return for each of so many rows the sum of grad * weight[filter] over the filters [B, F] that
    name it."""
    named, order = rows.flatten().sort(stable=True)
    begins = torch.searchsorted(named, torch.arange(number))
    filters = order % weight.shape[0]
    return F.embedding_bag(
        filters, weight, begins, per_sample_weights=grad.flatten()[order], mode="sum"
    )
