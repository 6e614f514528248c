"""Treat a network's parameters as points and directions in a vector space."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fedexp.core import tree
from fedexp.core.rng import torch_seed
from fedexp.core.tree import Params


def flatten(params: Params) -> torch.Tensor:
    """Concatenate all parameters into one vector [P], in order."""
    return torch.cat([value.reshape(-1) for value in params.values()])


def unflatten(vector: torch.Tensor, like: Params) -> Params:
    """Split a vector [P] into tensors with the names, shapes and dtypes of `like`.

    This is the inverse of `flatten`.
    """
    parts = vector.split([value.numel() for value in like.values()])
    return {
        name: part.reshape(value.shape).to(value)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }


def move(origin: Params, steps: Sequence[tuple[float, Params]]) -> Params:
    """Return origin + sum_i s_i d_i for steps (s_i, d_i)."""
    return {name: value + sum(s * d[name] for s, d in steps) for name, value in origin.items()}


def gaussian(params: Params, seed: int, number: int) -> Params:
    """Return an independent standard normal number for each parameter.

    The same seed and number give the same direction on every device.
    """
    generator = torch.Generator().manual_seed(torch_seed(seed, "direction", number))
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        for name, value in params.items()
    }


def relative_to(params: Params, direction: Params) -> Params:
    """Return d with d_i <- d_i sqrt(mean_j w_ij^2) for each tensor i of the parameters w.

    The direction is thereby measured in units of each tensor's root mean square.
    """
    return tree.map(lambda d, w: d * w.square().mean().sqrt(), direction, params)


def filter_normalised(direction: Params, params: Params) -> Params:
    """Return d with d_ij <- d_ij ||w_ij|| / ||d_ij|| for each filter j of each layer i.

    Parameters that are vectors (biases, batch norm) become 0 (Li et al., "Visualizing the Loss
    Landscape of Neural Nets", NeurIPS 2018, section 4). A filter produces one output. Its weights
    are a row of a tensor [outputs, ...]. Filters of d that are zero remain zero.
    """

    def normalised(d: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() < 2:
            return torch.zeros_like(weight)
        lengths = weight.flatten(1).norm(dim=1, keepdim=True)
        return (lengths * F.normalize(d.flatten(1), dim=1)).view(weight.shape)

    return tree.map(normalised, direction, params)


def plane_through(models: Sequence[Params]) -> tuple[Params, Params, torch.Tensor]:
    """Return the plane through three models w_0, w_1, w_2.

    The result consists of orthonormal directions u, v and the models' positions [3, 2]. u points
    along w_1 - w_0. v points along the part of w_2 - w_0 that is orthogonal to u. w_0 is at (0, 0).
    See Garipov et al., "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", NeurIPS
    2018, section 3. Raises ValueError if the models lie on a line.
    """
    origin, *others = (flatten(model).double() for model in models)
    first, second = (other - origin for other in others)
    length = float(first.norm())
    if length == 0:
        raise ValueError("two of the models are equal")
    u = first / length
    along = float(second @ u)
    rest = second - along * u
    height = float(rest.norm())
    if height <= 1e-5 * second.norm():
        raise ValueError("the three models lie on a line")
    positions = torch.tensor([[0, 0], [length, 0], [along, height]], dtype=torch.float64)
    return unflatten(u, models[0]), unflatten(rest / height, models[0]), positions
