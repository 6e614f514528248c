"""Triton kernels: the stacked convolutions of many clients as one launch, without patches written
out.

Each program of a kernel multiplies a tile of the patches of one client by a tile of its weights
(implicit GEMM); the client is a dimension of the grid. Patches are numbered k = (row of the kernel,
column, channel), channels fastest, as images lie in memory. Sums are taken in fp32, in an order
that does not depend on the run. 2 x 2 max-pooling with ReLU after a convolution is done in the same
launch (`pool`), so that no image of full size is written: a tile has the four pixels of each of its
windows. The places of the maxima are as in models.pooling_kernels, and the gradients read the
gradient of the pooled image through them. Tried in Triton's interpreter and compiled for an H100,
not yet run on a GPU: so an option and never the default (`hardware.convolution=kernels`).
"""

import torch
import triton
import triton.language as tl

ROWS, DEPTH = 64, 32  # of a tile: pixels (or output channels), what is summed
COLUMNS = (32, 64)  # channels (or patch values); the larger where there are more than 32
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
def _in_windows(m, height, width):
    """Return the same, of pixels that are numbered window by window, each row by row; height and
    width are even."""
    image, i, j = _pixel(m // 4, height // 2, width // 2)
    return image, 2 * i + (m % 4) // 2, 2 * j + m % 2


@triton.jit
def _largest(values):
    """values [windows, 4, n] -> ReLU of the maxima [windows, n] and their places, 4 where ReLU
    gives 0; NaN stays."""
    undefined = tl.max((values != values).to(tl.int32), 1) > 0
    best, place = tl.max(values, 1, return_indices=True, return_indices_tie_break_left=True)
    clipped = (best <= 0) & (undefined == 0)
    best = tl.where(undefined, float("nan"), tl.where(clipped, 0.0, best))
    return best, tl.where(clipped, 4, place)


@triton.jit
def _gradient(g, where, image, o, row, column, g0, g1, g2, g3, pool: tl.constexpr, mask):
    """Return the gradient of the convolution's output at pixels; `g` and `where` begin at the
    client, both with strides g0 to g3; with `pool` they are of the pooled image."""
    if pool:
        offset = image * g0 + o * g1 + (row // 2) * g2 + (column // 2) * g3
        place = tl.load(where + offset, mask, other=4).to(tl.int32)
        # all of them: then neighbours come with one instruction
        value = tl.load(g + offset, mask, other=0.0)
        return tl.where(place == (row % 2) * 2 + column % 2, value, 0.0)
    else:
        return tl.load(g + image * g0 + o * g1 + row * g2 + column * g3, mask, other=0.0)


@triton.jit
def _forward(
    x,
    w,
    bias,
    y,
    where,
    x0,
    x1,
    x2,
    x3,
    x4,
    w0,
    w1,
    w2,
    w3,
    w4,
    y0,
    y1,
    y2,
    y3,
    y4,
    batch,
    channels,
    outputs,
    height,
    width,
    out_height,
    out_width,
    top,
    left,
    down,
    across,
    kernel_height: tl.constexpr,
    kernel_width: tl.constexpr,
    biased: tl.constexpr,
    pool: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * rows + tl.arange(0, rows)
    n = tl.program_id(1) * columns + tl.arange(0, columns)
    if pool:
        image, i, j = _in_windows(m, out_height, out_width)
    else:
        image, i, j = _pixel(m, out_height, out_width)
    there, count = m < batch * out_height * out_width, kernel_height * kernel_width * channels
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, count, depth):
        k = start + tl.arange(0, depth)
        dy, dx, c = _patch(k, channels, kernel_width)
        row, column = (
            i[:, None] * down - top + dy[None, :],
            j[:, None] * across - left + dx[None, :],
        )
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        inside = inside & there[:, None] & (k < count)[None, :]
        a = tl.load(
            x + client * x0 + image[:, None] * x1 + c[None, :] * x2 + row * x3 + column * x4,
            inside,
            other=0.0,
        )
        b = tl.load(
            w
            + client * w0
            + n[None, :] * w1
            + c[:, None] * w2
            + dy[:, None] * w3
            + dx[:, None] * w4,
            (k < count)[:, None] & (n < outputs)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=precision)
    if biased:
        total += tl.load(bias + client * outputs + n, n < outputs, other=0.0).to(tl.float32)[
            None, :
        ]
    if pool:
        best, place = _largest(tl.reshape(total, [rows // 4, 4, columns]))
        m = tl.program_id(0) * (rows // 4) + tl.arange(0, rows // 4)
        there = m < batch * (out_height // 2) * (out_width // 2)
        image, i, j = _pixel(m, out_height // 2, out_width // 2)
        target = (
            client * y0 + image[:, None] * y1 + n[None, :] * y2 + i[:, None] * y3 + j[:, None] * y4
        )
        there = there[:, None] & (n < outputs)[None, :]
        tl.store(y + target, best.to(y.dtype.element_ty), there)
        tl.store(where + target, place.to(tl.uint8), there)
    else:
        target = (
            y
            + client * y0
            + image[:, None] * y1
            + n[None, :] * y2
            + i[:, None] * y3
            + j[:, None] * y4
        )
        tl.store(target, total.to(y.dtype.element_ty), there[:, None] & (n < outputs)[None, :])


@triton.jit
def _of_input(
    g,
    where,
    w,
    x,
    g0,
    g1,
    g2,
    g3,
    g4,
    w0,
    w1,
    w2,
    w3,
    w4,
    x0,
    x1,
    x2,
    x3,
    x4,
    batch,
    channels,
    outputs,
    height,
    width,
    out_height,
    out_width,
    top,
    left,
    down,
    across,
    kernel_height: tl.constexpr,
    kernel_width: tl.constexpr,
    pool: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Sum, for each pixel of the input, over the pixels of the output in whose window it lies."""
    client = tl.program_id(2).to(tl.int64)
    g, where = g + client * g0, where + client * g0
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
        inside = (
            inside
            & (row < out_height)
            & (column < out_width)
            & there[:, None]
            & (k < count)[None, :]
        )
        a = _gradient(
            g, where, image[:, None], o[None, :], row, column, g1, g2, g3, g4, pool, inside
        )
        b = tl.load(
            w
            + client * w0
            + o[:, None] * w1
            + n[None, :] * w2
            + dy[:, None] * w3
            + dx[:, None] * w4,
            (k < count)[:, None] & (n < channels)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=precision)
    target = (
        x + client * x0 + image[:, None] * x1 + n[None, :] * x2 + i[:, None] * x3 + j[:, None] * x4
    )
    tl.store(target, total.to(x.dtype.element_ty), there[:, None] & (n < channels)[None, :])


@triton.jit
def _of_weight(
    g,
    where,
    x,
    out,
    g0,
    g1,
    g2,
    g3,
    g4,
    x0,
    x1,
    x2,
    x3,
    x4,
    batch,
    channels,
    outputs,
    height,
    width,
    out_height,
    out_width,
    top,
    left,
    down,
    across,
    splits,
    part,
    kernel_height: tl.constexpr,
    kernel_width: tl.constexpr,
    pool: tl.constexpr,
    precision: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """Sum over the pixels of one part of the output; out: contiguous [clients, splits, outputs,
    patch values]."""
    client, split = (tl.program_id(2) // splits).to(tl.int64), tl.program_id(2) % splits
    g, where = g + client * g0, where + client * g0
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
        inside = there[None, :] & (m < outputs)[:, None]
        a = _gradient(
            g,
            where,
            image[None, :],
            m[:, None],
            i[None, :],
            j[None, :],
            g1,
            g2,
            g3,
            g4,
            pool,
            inside,
        )
        row, column = (
            i[:, None] * down - top + dy[None, :],
            j[:, None] * across - left + dx[None, :],
        )
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
    """Convolve x [S, B, C, H, W] with weight [S, O, C, h, w], and bias [S, O]: [S, B, O, H', W'],
    channels last."""
    out = _size(x, weight, padding, stride)
    y = _channels_last(x, *x.shape[:2], weight.shape[1], *out)
    _convolve(x, weight, bias, y, None, out, padding, stride)
    return y


def forward_pooled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Pair, stride: Pair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ReLU of 2 x 2 max-pooling of `forward`, and the places of the maxima (uint8); both [S,
    B, O, H'/2, W'/2], rounded down."""
    height, width = (size // 2 for size in _size(x, weight, padding, stride))
    y = _channels_last(x, *x.shape[:2], weight.shape[1], height, width)
    where = torch.empty_like(y, dtype=torch.uint8)
    _convolve(x, weight, bias, y, where, (2 * height, 2 * width), padding, stride)
    return y, where


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    where: torch.Tensor | None,
    out: Pair,
    padding: Pair,
    stride: Pair,
) -> None:
    biased, pool = bias is not None, where is not None
    columns = _columns(weight.shape[1])
    grid = (
        triton.cdiv(x.shape[1] * out[0] * out[1], ROWS),
        triton.cdiv(weight.shape[1], columns),
        x.shape[0],
    )
    with torch.cuda.device_of(x):
        _forward[grid](
            *(
                x,
                weight,
                bias.contiguous() if bias is not None else x,
                y,
                y if where is None else where,
            ),
            *(
                *x.stride(),
                *weight.stride(),
                *y.stride(),
                *_sizes(x, weight),
                *out,
                *padding,
                *stride,
            ),
            *(*weight.shape[3:], biased, pool, _precision(x), ROWS, columns, DEPTH),
        )


def gradient_of_input(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: Pair,
    stride: Pair,
    where: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of `forward` by x, from that of its output [S, B, O, H', W']. where: the
    places of the maxima, where `grad` is the gradient of `forward_pooled`."""
    clients, batch, channels, height, width = x.shape
    found = _channels_last(x, *x.shape)
    grad, places, out = _with_places(grad, where)
    columns = _columns(channels)
    grid = (triton.cdiv(batch * height * width, ROWS), triton.cdiv(channels, columns), clients)
    with torch.cuda.device_of(x):
        _of_input[grid](
            *(
                grad,
                places,
                weight,
                found,
                *grad.stride(),
                *weight.stride(),
                *found.stride(),
                *_sizes(x, weight),
                *out,
            ),
            *(
                *padding,
                *stride,
                *weight.shape[3:],
                where is not None,
                _precision(x),
                ROWS,
                columns,
                DEPTH,
            ),
        )
    return found


def gradient_of_weight(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: Pair,
    stride: Pair,
    where: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient by the weights; see `gradient_of_input`."""
    (clients, batch), (outputs, channels, *kernel) = x.shape[:2], weight.shape[1:]
    grad, places, out = _with_places(grad, where)
    pixels, count = batch * out[0] * out[1], channels * kernel[0] * kernel[1]
    splits = max(min(SPLITS, pixels // (8 * DEPTH)), 1)
    part = triton.cdiv(pixels, splits)
    parts = torch.empty(
        clients, splits, outputs, *kernel, channels, dtype=torch.float32, device=x.device
    )
    columns = _columns(count)
    grid = (triton.cdiv(outputs, ROWS), triton.cdiv(count, columns), clients * splits)
    with torch.cuda.device_of(x):
        _of_weight[grid](
            *(
                grad,
                places,
                x,
                parts,
                *grad.stride(),
                *x.stride(),
                *_sizes(x, weight),
                *out,
                *padding,
                *stride,
            ),
            *(splits, part, *kernel, where is not None, _precision(x), ROWS, columns, DEPTH),
        )
    return parts.sum(1).to(weight.dtype).permute(0, 1, 4, 2, 3)


def _with_places(
    grad: torch.Tensor, where: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, Pair]:
    """Return a gradient and the places of the maxima in the same layout, and the size of the
    convolution's output."""
    if where is None:
        return grad, grad, (grad.shape[3], grad.shape[4])
    if grad.stride() != where.stride():
        grad = torch.empty_like(where, dtype=grad.dtype).copy_(grad)
    return grad, where, (2 * grad.shape[3], 2 * grad.shape[4])


def _size(x: torch.Tensor, weight: torch.Tensor, padding: Pair, stride: Pair) -> Pair:
    """Return height and width of the output."""
    height, width = (
        (size + 2 * p - k) // step + 1
        for size, p, k, step in zip(x.shape[3:], padding, weight.shape[3:], stride, strict=True)
    )
    return height, width


def _sizes(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    """Return batch, channels, output channels, height and width."""
    return x.shape[1], x.shape[2], weight.shape[1], x.shape[3], x.shape[4]


def _columns(count: int) -> int:
    return COLUMNS[count > COLUMNS[0]]


def _precision(x: torch.Tensor) -> str:
    """Return how products of fp32 are taken; of other types they are exact."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _channels_last(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an empty [S, B, C, H, W] with channels fastest in memory."""
    clients, batch, channels, height, width = shape
    return like.new_empty(clients, batch, height, width, channels).permute(0, 1, 4, 2, 3)
