"""Convolutions with fewer multiplications, for CPUs: Winograd's minimal filtering by the Toom-Cook
method.

Tiles of 4 x 4 outputs are interpolated from the products of two polynomials at 4 + k - 1 points, so
that a tile takes (4 + k - 1)^2 multiplications a channel pair instead of 16 k^2 (k = 5: 64 instead
of 400). All of it is matrix products. Rounding errors are a few times those of a direct
convolution: the points and the scales keep them small. Source: Lavin and Gray, Fast Algorithms for
Convolutional Neural Networks (CVPR 2016), section 4.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fedexp.core.private.of_torch import in_transform

TILE = 4  # outputs of a tile, per side
# and infinity; kernel side -> where polynomials meet
POINTS = {3: (0, 1, -1, 2, -2), 5: (0, 1, -1, 2, -2, 0.5, -0.5)}
# tiles, for which matrix products are efficient and what lies between them stays in the cache
AT_A_TIME = 128
# multiplications here and in a direct convolution; fewer are saved than it costs to move numbers
# about
PAYS = 0.65


class Conv2d(nn.Conv2d):
    """torch's layer, computed here where that can be done and pays."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if in_transform() or not self.pays(x):  # no transform knows it
            return super().forward(x)
        return conv2d(x, self.weight, self.bias, int(self.padding[0]))

    def pays(self, x: torch.Tensor) -> bool:
        """Return whether it can be computed here for x and should then be faster."""
        return self.fits and x.dim() == 4 and pays(x, self.weight, int(self.padding[0]))

    @cached_property
    def fits(self) -> bool:
        plain = (
            set(self.stride) == set(self.dilation) == {self.groups} == {1}
            and self.padding_mode == "zeros"
        )
        square = len(set(self.kernel_size)) == len(set(self.padding)) == 1 and not isinstance(
            self.padding, str
        )
        return plain and square and self.kernel_size[0] in POINTS


def convert(module: nn.Module) -> None:
    """Let the convolutions of any model be computed here; parameters and their names stay."""
    for part in module.modules():
        if type(part) is nn.Conv2d:
            # Not another module in its place: a layer that several modules share, its hooks and its
            # parametrisations stay what they are. torch.nn.utils.parametrize does the same.
            part.__class__ = Conv2d


def pays(x: torch.Tensor, weight: torch.Tensor, padding: int) -> bool:
    """Tell whether this should be faster: not for few channels, images smaller than a tile or
    single examples."""
    return Plan.of(x, weight, padding).saving < PAYS


def conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: int
) -> torch.Tensor:
    """torch.nn.functional.conv2d for square kernels of 3 or 5 and stride 1: x [N, C, H, W], weight
    [O, C, k, k], bias [O] -> [N, O, H', W'], channels-last. Differentiable once."""
    return Convolution.apply(x, weight, bias, padding)  # type: ignore[no-untyped-call,no-any-return]


def toom_cook(kernel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A^T [4, a], G [a, k] and B^T [a, a] in float64, a = 4 + k - 1: the 4 outputs of a filter g
    over data d [a] are A^T ((G g) * (B^T d))."""
    points, a = [float(p) for p in POINTS[kernel]], TILE + kernel - 1
    outputs, filters, data = np.zeros((TILE, a)), np.zeros((a, kernel)), np.zeros((a, a))
    for i, point in enumerate(points):
        others = [p for j, p in enumerate(points) if j != i]
        outputs[:, i] = point ** np.arange(TILE)
        filters[i] = point ** np.arange(kernel) / np.prod([point - p for p in others])
        data[i, :-1] = np.polynomial.polynomial.polyfromroots(others)
    outputs[-1, -1] = filters[-1, -1] = 1  # at infinity
    data[-1] = np.polynomial.polynomial.polyfromroots(points)
    # Rows of one size: a power of two moves between data and filter without a rounding error.
    scale = 2 ** np.round(np.log2(np.abs(data).sum(1) / np.abs(filters).sum(1)) / 2)
    return outputs, filters * scale[:, None], data / scale[:, None]


@cache
def transforms(kernel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the matrices of `toom_cook` for both sides of an image at once: [16, a a], [a a, k k]
    and [a a, a a]."""
    outputs, filters, data = (
        torch.from_numpy(np.kron(matrix, matrix)) for matrix in toom_cook(kernel)
    )
    return outputs.to(dtype), filters.to(dtype), data.to(dtype)


@dataclass(frozen=True)
class Plan:
    """Sizes of a convolution, of its tiles and of what lies between the steps."""

    n: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel: int
    padding: int

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor, padding: int) -> "Plan":
        n, channels, height, width = x.shape
        return cls(n, channels, height, width, len(weight), weight.shape[-1], padding)

    @property
    def saving(self) -> float:
        """Multiplications here (products; transforms of data, outputs and filters) / in a direct
        convolution."""
        c, o, points, taps = self.channels, self.out_channels, self.side**2, self.kernel**2
        tiles, outputs = (
            self.n * self.tiles[0] * self.tiles[1],
            self.n * self.out_size[0] * self.out_size[1],
        )
        return (
            points
            * (tiles * (c * o + points * c + TILE**2 * o) + taps * c * o)
            / max(outputs * taps * c * o, 1)
        )

    @cached_property
    def out_size(self) -> tuple[int, int]:
        grown = 2 * self.padding - self.kernel + 1
        return self.height + grown, self.width + grown

    @cached_property
    def tiles(self) -> tuple[int, int]:
        return -(-self.out_size[0] // TILE), -(-self.out_size[1] // TILE)

    @cached_property
    def side(self) -> int:
        """Return the side of the patch that a tile reads."""
        return TILE + self.kernel - 1

    @cached_property
    def chunk(self) -> int:
        """Return the number of images at a time."""
        return max(AT_A_TIME // (self.tiles[0] * self.tiles[1]), 1)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Return the first and the last + 1 of the images of each chunk."""
        for start in range(0, self.n, self.chunk):
            yield start, min(start + self.chunk, self.n)

    def room(self, like: torch.Tensor, points: int, channels: int) -> Callable[[int], torch.Tensor]:
        """Return memory for [points, N tiles, channels] of up to a chunk, taken once: the same
        cache lines every time. What it gives for N images is contiguous."""
        each = points * self.tiles[0] * self.tiles[1] * channels
        memory = like.new_empty(min(self.chunk, self.n) * each)
        return lambda images: memory[: images * each].view(points, -1, channels)


class Convolution(torch.autograd.Function):
    """U, V and M as in the paper: the filters, the data and their products at the points."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: int
    ) -> Any:
        plan = Plan.of(x, weight, padding)
        c, o, points, (rows, columns) = plan.channels, plan.out_channels, plan.side**2, plan.tiles
        inverse, of_filters, of_data = transforms(plan.kernel, x.dtype)
        U = (of_filters @ weight.permute(2, 3, 1, 0).reshape(plan.kernel**2, -1)).view(points, c, o)
        kept = any(ctx.needs_input_grad)
        cuts, products, outputs = (
            plan.room(x, *size) for size in ((points, c), (points, o), (TILE**2, o))
        )
        data = plan.room(x, points, c)
        padded = x.new_zeros(
            min(plan.chunk, plan.n),
            TILE * rows + plan.kernel - 1,
            TILE * columns + plan.kernel - 1,
            c,
        )
        out, transformed = x.new_empty(plan.n, rows, TILE, columns, TILE, o), []
        images = x.permute(0, 2, 3, 1)
        for start, stop in plan.chunks():
            count = stop - start
            patch = cut_patches(images[start:stop], padded[:count], cuts(count), plan)
            V = torch.empty_like(patch) if kept else data(count)
            torch.mm(of_data, patch.flatten(1), out=V.flatten(1))
            M = torch.bmm(V, U, out=products(count))
            Y = torch.mm(inverse, M.flatten(1), out=outputs(count).flatten(1))
            torch.add(apart(Y, count, plan), 0 if bias is None else bias, out=out[start:stop])
            transformed.append(V)
        if kept:
            ctx.plan = plan
            ctx.save_for_backward(U, *transformed)
        height, width = plan.out_size
        return out.view(plan.n, TILE * rows, TILE * columns, o)[:, :height, :width].permute(
            0, 3, 1, 2
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        plan, (U, *transformed) = ctx.plan, ctx.saved_tensors
        c, o, points, (rows, columns) = plan.channels, plan.out_channels, plan.side**2, plan.tiles
        inverse, of_filters, of_data = transforms(plan.kernel, grad.dtype)
        grad = grad.permute(0, 2, 3, 1)
        cuts, products, data, patches = (
            plan.room(grad, *size) for size in ((TILE**2, o), (points, o), (points, c), (points, c))
        )
        dU = torch.zeros_like(U)
        wanted = ctx.needs_input_grad[0]
        dx = grad.new_zeros(plan.n, rows + 1, TILE, columns + 1, TILE, c) if wanted else None
        for (start, stop), V in zip(plan.chunks(), transformed, strict=True):
            count = stop - start
            cut = cut_tiles(grad[start:stop], cuts(count), plan)
            dM = torch.mm(inverse.T, cut.flatten(1), out=products(count).flatten(1)).view(
                points, -1, o
            )
            torch.baddbmm(dU, V.transpose(1, 2), dM, out=dU)
            if dx is not None:
                dV = torch.bmm(dM, U.transpose(1, 2), out=data(count))
                add_patches(
                    dx[start:stop],
                    torch.mm(of_data.T, dV.flatten(1), out=patches(count).flatten(1)),
                    plan,
                )
        dweight = (
            (of_filters.T @ dU.flatten(1)).view(plan.kernel, plan.kernel, c, o).permute(3, 2, 0, 1)
        )
        if dx is not None:
            p = plan.padding
            dx = dx.view(plan.n, TILE * (rows + 1), TILE * (columns + 1), c)
            dx = dx[:, p : p + plan.height, p : p + plan.width].permute(0, 3, 1, 2)
        return dx, dweight, grad.sum((0, 1, 2)) if ctx.needs_input_grad[2] else None, None


def cut_patches(
    images: torch.Tensor, padded: torch.Tensor, into: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """Write what each tile reads of images [N, H, W, C] into [a a, N tiles, C]. padded: zeros
    around where they go."""
    p = plan.padding
    padded[:, p : p + plan.height, p : p + plan.width].copy_(images)
    image, row, column, channel = padded.stride()
    size = (plan.side, plan.side, len(padded), *plan.tiles, plan.channels)
    into.view(size).copy_(
        padded.as_strided(size, (row, column, image, TILE * row, TILE * column, channel))
    )
    return into


def add_patches(into: torch.Tensor, patches: torch.Tensor, plan: Plan) -> None:
    """Reverse `cut_patches`: add [a a, N tiles C] where they overlap. into: [N, rows + 1, 4,
    columns + 1, 4, C]."""
    rows, columns = plan.tiles
    by_offset = patches.view(plan.side, plan.side, len(into), rows, columns, plan.channels)
    for i in (0, 1):
        for j in (0, 1):
            part = by_offset[TILE * i : TILE * (i + 1), TILE * j : TILE * (j + 1)]
            height, width = part.shape[:2]
            into[:, i : i + rows, :height, j : j + columns, :width] += part.permute(
                2, 3, 0, 4, 1, 5
            )


def apart(tiles: torch.Tensor, count: int, plan: Plan) -> torch.Tensor:
    """Return the outputs [16, N tiles O] of `count` images as [N, rows, 4, columns, 4, O], a
    view."""
    return tiles.view(TILE, TILE, count, *plan.tiles, plan.out_channels).permute(2, 3, 0, 4, 1, 5)


def cut_tiles(grad: torch.Tensor, into: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Write the tiles of images [N, H', W', O], zero beyond their edges, into [16, N tiles, O]."""
    rows, columns = plan.tiles
    if plan.out_size != (TILE * rows, TILE * columns):
        whole = grad.new_zeros(len(grad), TILE * rows, TILE * columns, plan.out_channels)
        whole[:, : plan.out_size[0], : plan.out_size[1]] = grad
        grad = whole
    apart(into, len(grad), plan).copy_(
        grad.reshape(len(grad), rows, TILE, columns, TILE, plan.out_channels)
    )
    return into
