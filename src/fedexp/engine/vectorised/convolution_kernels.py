"""Triton kernels: the stacked convolutions of many clients as one launch, without patches written out.

Each program of a kernel multiplies a tile of the patches of one client by a tile of its weights (implicit GEMM); the
client is a dimension of the grid. Patches are numbered k = (row of the kernel, column, channel), channels fastest, as
images lie in memory. Sums are taken in fp32, in an order that does not depend on the run.
Tried in Triton's interpreter, not yet on a GPU: an option (`hardware.convolution=kernels`), never the default.
"""

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 64, 32, 32  # of a tile: pixels (or output channels), channels (or patch values), what is summed
SPLITS = 16  # at most: parts of the sum over pixels in the gradient of weights, added afterwards


@triton.jit
def _patch(k, channels, width: tl.constexpr):
    """Return (row of the kernel, column, channel) of numbers k of patch values."""
    place = k // channels
    return place // width, place % width, k % channels


@triton.jit
def _pixel(m, height, width):
    """Return (image, row, column) of numbers m of pixels."""
    return m // (width * height), (m // width) % height, m % width


@triton.jit
def _forward(
    x, w, bias, y, x0, x1, x2, x3, x4, w0, w1, w2, w3, w4, y0, y1, y2, y3, y4,
    batch, channels, outputs, height, width, out_height, out_width, top, left, down, across,
    kernel_height: tl.constexpr, kernel_width: tl.constexpr, biased: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    image, i, j = _pixel(m, out_height, out_width)
    there, count = m < batch * out_height * out_width, kernel_height * kernel_width * channels
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, count, depth):
        k = start + tl.arange(0, depth)
        dy, dx, c = _patch(k, channels, kernel_width)
        row, column = i[:, None] * down - top + dy[None, :], j[:, None] * across - left + dx[None, :]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        inside = inside & there[:, None] & (k < count)[None, :]
        a = tl.load(x + client * x0 + image[:, None] * x1 + c[None, :] * x2 + row * x3 + column * x4, inside, other=0.0)
        b = tl.load(
            w + client * w0 + n[None, :] * w1 + c[:, None] * w2 + dy[:, None] * w3 + dx[:, None] * w4,
            (k < count)[:, None] & (n < outputs)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=precision)
    if biased:
        total += tl.load(bias + client * outputs + n, n < outputs, other=0.0).to(tl.float32)[None, :]
    target = y + client * y0 + image[:, None] * y1 + n[None, :] * y2 + i[:, None] * y3 + j[:, None] * y4
    tl.store(target, total.to(y.dtype.element_ty), there[:, None] & (n < outputs)[None, :])


@triton.jit
def _of_input(
    g, w, x, g0, g1, g2, g3, g4, w0, w1, w2, w3, w4, x0, x1, x2, x3, x4,
    batch, channels, outputs, height, width, out_height, out_width, top, left, down, across,
    kernel_height: tl.constexpr, kernel_width: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Sum, for each pixel of the input, over the pixels of the output in whose window it lies."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    image, i, j = _pixel(m, height, width)
    there, count = m < batch * height * width, kernel_height * kernel_width * outputs
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, count, depth):
        k = start + tl.arange(0, depth)
        dy, dx, o = _patch(k, outputs, kernel_width)
        row, column = i[:, None] + top - dy[None, :], j[:, None] + left - dx[None, :]
        inside = (row >= 0) & (column >= 0) & (row % down == 0) & (column % across == 0)
        row, column = row // down, column // across
        inside = inside & (row < out_height) & (column < out_width) & there[:, None] & (k < count)[None, :]
        a = tl.load(g + client * g0 + image[:, None] * g1 + o[None, :] * g2 + row * g3 + column * g4, inside, other=0.0)
        b = tl.load(
            w + client * w0 + o[:, None] * w1 + n[None, :] * w2 + dy[:, None] * w3 + dx[:, None] * w4,
            (k < count)[:, None] & (n < channels)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=precision)
    target = x + client * x0 + image[:, None] * x1 + n[None, :] * x2 + i[:, None] * x3 + j[:, None] * x4
    tl.store(target, total.to(x.dtype.element_ty), there[:, None] & (n < channels)[None, :])


@triton.jit
def _of_weight(
    g, x, out, g0, g1, g2, g3, g4, x0, x1, x2, x3, x4,
    batch, channels, outputs, height, width, out_height, out_width, top, left, down, across, splits, part,
    kernel_height: tl.constexpr, kernel_width: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Sum over the pixels of one part of the output; out: contiguous [clients, splits, outputs, patch values]."""
    client, split = (tl.program_id(2) // splits).to(tl.int64), tl.program_id(2) % splits
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    dy, dx, c = _patch(n, channels, kernel_width)
    pixels, count = batch * out_height * out_width, kernel_height * kernel_width * channels
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, part, depth):
        offset = start + tl.arange(0, depth)
        k = split * part + offset
        there = (k < pixels) & (offset < part)
        image, i, j = _pixel(k, out_height, out_width)
        a = tl.load(
            g + client * g0 + image[None, :] * g1 + m[:, None] * g2 + i[None, :] * g3 + j[None, :] * g4,
            there[None, :] & (m < outputs)[:, None],
            other=0.0,
        )
        row, column = i[:, None] * down - top + dy[None, :], j[:, None] * across - left + dx[None, :]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        b = tl.load(
            x + client * x0 + image[:, None] * x1 + c[None, :] * x2 + row * x3 + column * x4,
            inside & there[:, None] & (n < count)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=precision)
    target = out + ((client * splits + split) * outputs + m[:, None]) * count + n[None, :]
    tl.store(target, total, (m < outputs)[:, None] & (n < count)[None, :])


Pair = tuple[int, int]


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Pair, stride: Pair
) -> torch.Tensor:
    """Convolve x [S, B, C, H, W] with weight [S, O, C, h, w], and bias [S, O]: [S, B, O, H', W'], channels last."""
    clients, batch, _, height, width = x.shape
    kernel = weight.shape[3:]
    out = [(s + 2 * p - k) // d + 1 for s, p, k, d in zip((height, width), padding, kernel, stride, strict=True)]
    y = _channels_last(x, clients, batch, weight.shape[1], *out)
    biased = bias is not None
    grid = (triton.cdiv(batch * out[0] * out[1], ROWS), triton.cdiv(weight.shape[1], COLUMNS), clients)
    _forward[grid](
        *(x, weight, bias.contiguous() if bias is not None else x, y, *x.stride(), *weight.stride(), *y.stride()),
        *(*_sizes(x, weight), *out, *padding, *stride, *kernel, biased, _precision(x), ROWS, COLUMNS, DEPTH),
    )
    return y


def gradient_of_input(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, padding: Pair, stride: Pair
) -> torch.Tensor:
    """Return the gradient of `forward` by x, from that of its output [S, B, O, H', W']."""
    clients, batch, channels, height, width = x.shape
    found = _channels_last(x, *x.shape)
    grid = (triton.cdiv(batch * height * width, ROWS), triton.cdiv(channels, COLUMNS), clients)
    _of_input[grid](
        *(grad, weight, found, *grad.stride(), *weight.stride(), *found.stride(), *_sizes(x, weight)),
        *(*grad.shape[3:], *padding, *stride, *weight.shape[3:], _precision(x), ROWS, COLUMNS, DEPTH),
    )
    return found


def gradient_of_weight(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, padding: Pair, stride: Pair
) -> torch.Tensor:
    """Return the gradient of `forward` by the weights, from that of its output [S, B, O, H', W']."""
    (clients, batch), (outputs, channels, *kernel) = x.shape[:2], weight.shape[1:]
    pixels, count = batch * grad.shape[3] * grad.shape[4], channels * kernel[0] * kernel[1]
    splits = max(min(SPLITS, pixels // (8 * DEPTH)), 1)
    part = triton.cdiv(pixels, splits)
    parts = torch.empty(clients, splits, outputs, *kernel, channels, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(outputs, ROWS), triton.cdiv(count, COLUMNS), clients * splits)
    _of_weight[grid](
        *(grad, x, parts, *grad.stride(), *x.stride(), *_sizes(x, weight), *grad.shape[3:], *padding, *stride),
        *(splits, part, *kernel, _precision(x), ROWS, COLUMNS, DEPTH),
    )
    return parts.sum(1).to(weight.dtype).permute(0, 1, 4, 2, 3)


def _sizes(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    """Return batch, channels, output channels, height and width."""
    return x.shape[1], x.shape[2], weight.shape[1], x.shape[3], x.shape[4]


def _precision(x: torch.Tensor) -> str:
    """Return how products of fp32 are taken; of other types they are exact."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _channels_last(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an empty [S, B, C, H, W] with channels fastest in memory."""
    clients, batch, channels, height, width = shape
    return like.new_empty(clients, batch, height, width, channels).permute(0, 1, 4, 2, 3)
