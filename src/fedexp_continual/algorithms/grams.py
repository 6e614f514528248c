"""Gram matrices of layer inputs: the server uses them to merge linear layers (RegMean, LoRM)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.algorithms.base import first_pass
from fedexp.algorithms.interfaces import ClientData, Context, Network
from fedexp.core.tree import Params
from fedexp.models import Output

Widths = Mapping[str, int]  # name of a layer -> number of its inputs


def watch_inputs(module: nn.Module, widths: Widths) -> nn.Module:
    """Make a model return the inputs of some layers as well, and return the model.

    The field `maps` of the model's output then contains the inputs, sorted by the names of the
    layers. widths: the layers' names and numbers of inputs.
    """
    for name, width in widths.items():
        layer: Any = module.get_submodule(name)
        layer.watched = width
        layer.register_forward_pre_hook(keep_inputs)
    module.register_forward_hook(return_inputs)
    return module


def keep_inputs(layer: Any, inputs: tuple[Tensor, ...]) -> None:
    layer.seen = inputs[0]


def return_inputs(module: nn.Module, inputs: tuple[Tensor, ...], output: Output) -> Output:
    """Add the inputs of the watched layers to an output. Layers that did not run have zeros."""
    maps = []
    for _, layer in sorted(module.named_modules()):
        if "watched" in vars(layer):
            missing = output.logits.new_zeros(len(output.logits), vars(layer)["watched"])
            maps.append(vars(layer).pop("seen", missing))
    return output._replace(maps=tuple(maps))


def gram_matrices(
    net: Network, params: Params, data: ClientData, ctx: Context, widths: Widths
) -> Params:
    """Return the Gram matrix X^T X [n, n], float64, of the inputs of each watched layer.

    X [N, n] contains the inputs of one layer, with one row per example or, in a transformer, one
    row per token. The examples are those in the batches of the client's first epoch. In float32,
    the pseudo-inverse of a singular matrix would enlarge rounding errors to weights. params: the
    model. widths: as in `watch_inputs`.
    """
    like = next(iter(params.values()))
    grams = {
        name: like.new_zeros(width, width, dtype=torch.float64)
        for name, width in sorted(widths.items())
    }
    for batch, mask in first_pass(data, ctx):
        maps = net(params, batch.x, mask).maps
        for name, inputs in zip(grams, maps, strict=True):
            rows = (inputs * mask.view(-1, *[1] * (inputs.dim() - 1))).flatten(0, -2).double()
            grams[name] = grams[name] + rows.T @ rows
    return grams


def damp(grams: Tensor, factor: float) -> Tensor:
    """Return matrices [..., n, n] with their off-diagonal entries multiplied by a factor."""
    return factor * grams + (1 - factor) * torch.diag_embed(grams.diagonal(dim1=-2, dim2=-1))


def invert(matrix: Tensor) -> Tensor:
    """Return the pseudo-inverse of a symmetric matrix [n, n], in float64.

    If the matrix is not finite, all entries of the result are nan, so the run ends as diverged.
    """
    if not matrix.isfinite().all():
        return torch.full_like(matrix, torch.nan, dtype=torch.float64)
    return torch.linalg.pinv(matrix.double(), hermitian=True)


def merge_down(parts: Tensor, grams: Tensor) -> Tensor:
    """Return the matrix [m, n] whose outputs are closest to the outputs of the clients' matrices.

    The sum of the squared differences is minimised. parts: the clients' matrices, [S, m, n]. grams:
    the Gram matrices of the clients' inputs, [S, n, n].
    """
    return ((parts.double() @ grams.double()).sum(0) @ invert(grams.sum(0))).to(parts)
