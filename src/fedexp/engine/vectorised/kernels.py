"""Triton kernels for convolutions with bias, ReLU and 2x2 max-pooling, for several clients at once.

Only `pooled_convolutions` imports this module, because Triton is not installed everywhere.

Images are stored with the channels last. Products have fp32 accumulators. No kernel uses atomic
operations, so results do not depend on the order in which programs run: where several programs
contribute to a sum, each writes its part, and the parts are added in a fixed order.

A *place* is the position (0 to 3) of the maximum in its 2x2 window, or DEAD if ReLU returned 0.

Names of the arguments: s is a client, D the number of output channels, K the side length of the
kernel, P the padding of the convolution, `height` and `width` belong to the input without padding,
`h` and `w` to the pooled output. BM, BN and BK are the sides of blocks. STAGES: number of blocks of
the loop that are loaded in advance. PRODUCTS: Triton's `input_precision`.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

DEAD = tl.constexpr(4)


@triton.jit
def larger(v1, place1, v2, place2):
    """Return the larger value and its place; NaN is larger than any number, as in torch."""
    first = (v1 > v2) | (v1 != v1) | ((v1 == v2) & (place1 < place2))
    return tl.where(first, v1, v2), tl.where(first, place1, place2)


@triton.jit
def store_pooled(
    best, place, bias, out, places, m, valid, h: tl.constexpr, w: tl.constexpr,
    D: tl.constexpr, HALO: tl.constexpr,
):  # fmt: skip
    """Add the bias [D], apply ReLU, and store the windows `m` of all clients.

    best, place: [number of windows, D].
    out: images [., h + 2 * HALO, w + 2 * HALO, D], whose margins are not written.
    places: [., D].
    valid: which windows exist.
    """
    o = tl.arange(0, D)
    value = best + bias[None, :]
    dead = value <= 0  # not true for NaN
    row = (m // (h * w)) * (h + 2 * HALO) + m % (h * w) // w + HALO
    pixel = row * (w + 2 * HALO) + m % w + HALO
    valid = valid[:, None] & (o < D)[None, :]
    value = tl.where(dead, 0.0, value).to(out.dtype.element_ty)
    tl.store(out + pixel[:, None] * D + o[None, :], value, mask=valid)
    place = tl.where(dead, DEAD, place).to(tl.uint8)
    tl.store(places + m[:, None] * D + o[None, :], place, mask=valid)


@triton.jit
def load_patches(
    x, m, height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, h: tl.constexpr, w: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Return the patches of the windows `m`, [number of windows, KP].

    A patch has the (K + 1) x (K + 1) x C values from which the four outputs of a window are
    computed. Zeros follow, up to KP values.
    """
    k = tl.arange(0, KP)
    row, column, c = k // ((K + 1) * C), k // C % (K + 1), k % C
    top, left = 2 * (m % (h * w) // w) - P, 2 * (m % w) - P
    base = ((m // (h * w)) * height + top) * width + left
    inside = (k < (K + 1) * (K + 1) * C)[None, :] & (m >= 0)[:, None]
    if P > 0:
        i, j = top[:, None] + row[None, :], left[:, None] + column[None, :]
        inside = inside & (i >= 0) & (i < height) & (j >= 0) & (j < width)
    at = base[:, None] * C + ((row * width + column) * C + c)[None, :]
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["windows"])
def first_convolution(
    x, weight, bias, out, places, windows,
    height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    HALO: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Convolve and pool images with few channels, [S, windows / (h * w), height, width, C].

    One product computes the four outputs of a window. Its right side [KP, 4 * D] contains each
    weight four times: column `place * D + o` has the weights of channel o, moved to this place.

    weight: [S, D, K, K, C]. bias: [S, D]. out, places: see `store_pooled`.
    """
    s = tl.program_id(1)
    k = tl.arange(0, KP)
    n = tl.arange(0, 4 * D)
    dy = (k // ((K + 1) * C))[:, None] - (n // (2 * D))[None, :]
    dx = (k // C % (K + 1))[:, None] - (n // D % 2)[None, :]
    inside = (dy >= 0) & (dy < K) & (dx >= 0) & (dx < K)
    at = ((s * D + n % D)[None, :] * K + dy) * K + dx
    spread = tl.load(weight + at * C + (k % C)[:, None], mask=inside, other=0.0)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    valid = m < windows
    m = s * windows + tl.minimum(m, windows - 1)
    patches = load_patches(x, m, height, width, C, K, P, h, w, KP)
    patches = patches.to(out.dtype.element_ty)
    spread = spread.to(out.dtype.element_ty)
    values = tl.dot(patches, spread, input_precision=PRODUCTS)
    place = tl.broadcast_to((n // D)[None, :], (BM, 4 * D))
    best, place = tl.reduce(
        (tl.reshape(values, (BM, 4, D)), tl.reshape(place, (BM, 4, D))), 1, larger
    )
    own = tl.load(bias + s * D + tl.arange(0, D))
    store_pooled(best, place, own, out, places, m, valid, h, w, D, HALO)


@triton.jit
def multiply(
    a, b, base, start, WIDTH: tl.constexpr, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    FLIP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Return the sums over all pixels and channels of a kernel, [BM, N].

    a: images with margins, so that all pixels exist. WIDTH: their width.
    b: weights [N, K, K, C] from `start` on. With FLIP, the kernels are turned by 180 degrees.
    base: [BM], the offset of the first pixel below the kernel in `a`.
    """
    n = tl.arange(0, N)
    kk = tl.arange(0, BK)
    total = tl.zeros((BM, N), tl.float32)
    for it in tl.range(0, tl.cdiv(K * K * C, BK), num_stages=STAGES):
        if BK <= C:
            tap = it // (C // BK)
            channel = it % (C // BK) * BK + kk
        else:
            tap = it * (BK // C) + kk // C
            channel = kk % C
        pixel = tl.minimum(tap, K * K - 1)
        at = ((pixel // K) * WIDTH + pixel % K) * C + channel
        left = tl.load(a + base[:, None] + at[None, :])
        if FLIP:
            tap = K * K - 1 - tap
        weights = b + start + n[None, :] * (K * K * C) + (tap * C + channel)[:, None]
        if K * K * C % BK == 0:
            right = tl.load(weights)
        else:
            right = tl.load(weights, mask=((tap >= 0) & (tap < K * K))[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRODUCTS)
    return total


@triton.jit(do_not_specialize=["windows"])
def convolution(
    x, weight, bias, out, places, windows,
    height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    HALO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Convolve and pool images [S, windows / (h * w), height + 2 * P, width + 2 * P, C].

    The margins of the images are zeros.

    weight: [S, D, K, K, C], in the type of x. bias: [S, D]. out, places: see `store_pooled`.

    The rows of a block are ordered such that the four pixels of a window lie in the registers of
    one thread (in the layout of the tensor cores).
    """
    s = tl.program_id(1)
    r = tl.arange(0, BM)
    m = tl.program_id(0) * (BM // 4) + r // 16 % (BM // 32) * 8 + r % 8
    m = s * windows + tl.minimum(m, windows - 1)
    down, right = r // (BM // 2), r // 8 % 2
    i, j = 2 * (m % (h * w) // w) + down, 2 * (m % w) + right
    base = (((m // (h * w)) * (height + 2 * P) + i) * (width + 2 * P) + j) * C
    values = multiply(
        x, weight, base, s * (D * K * K * C), width + 2 * P, C, K, D, False, BM, BK, STAGES,
        PRODUCTS,
    )  # fmt: skip
    place = tl.broadcast_to((2 * down + right)[:, None], (BM, D))
    best, place = tl.reduce(
        (
            tl.reshape(values, (2, BM // 32, 2, 8, D)),
            tl.reshape(place, (2, BM // 32, 2, 8, D)),
        ),
        0,
        larger,
    )
    best, place = tl.reduce((best, place), 1, larger)
    best, place = tl.reshape(best, (BM // 4, D)), tl.reshape(place, (BM // 4, D))
    m = tl.program_id(0) * (BM // 4) + tl.arange(0, BM // 4)
    own = tl.load(bias + s * D + tl.arange(0, D))
    store_pooled(best, place, own, out, places, s * windows + m, m < windows, h, w, D, HALO)


@triton.jit
def unpool(
    grad, places, out, part,
    height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Put the gradient of pooled images [., h, w, D] to its places.

    out: images [., height + K - 1, width + K - 1, D] with margins of K - 1 - P pixels. Zeros are
        written to all other places.
    part: [., number of blocks, D], the sums over the pixels of each block.
    """
    image = tl.program_id(0)
    block = tl.program_id(1)
    o = tl.arange(0, D)
    r = block * BM + tl.arange(0, BM)
    i, j = r // (width + K - 1) - (K - 1 - P), r % (width + K - 1) - (K - 1 - P)
    inside = ((i >= 0) & (i < 2 * h) & (j >= 0) & (j < 2 * w))[:, None] & (o < D)[None, :]
    at = ((image * h + i // 2) * w + j // 2)[:, None] * D + o[None, :]
    place = tl.load(places + at, mask=inside, other=DEAD)
    value = tl.load(grad + at, mask=inside, other=0.0)
    value = tl.where(place == (i % 2 * 2 + j % 2)[:, None], value, 0.0)
    pixels: tl.constexpr = (height + K - 1) * (width + K - 1)
    fits = (r < pixels)[:, None] & (o < D)[None, :]
    tl.store(out + (image * pixels + r)[:, None] * D + o[None, :], value, mask=fits)
    total = tl.sum(value.to(tl.float32), 0)
    tl.store(part + (image * tl.num_programs(1) + block) * D + o, total)


@triton.jit(do_not_specialize=["pixels"])
def gradient_of_input(
    grad, weight, out, pixels,
    height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a convolution's input, out [S, pixels, C].

    grad: the gradient of the convolution's output with margins, see `unpool`.
    weight: [S, C, K, K, D], not yet turned.
    """
    s = tl.program_id(1)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    q = s * pixels + tl.minimum(p, pixels - 1)
    row = (q // (height * width)) * (height + K - 1) + q % (height * width) // width
    base = (row * (width + K - 1) + q % width) * D
    values = multiply(
        grad, weight, base, s * (C * K * K * D), width + K - 1, D, K, C, True, BM, BK, STAGES,
        PRODUCTS,
    )  # fmt: skip
    n = tl.arange(0, C)
    at = (s * pixels + p)[:, None] * C + n[None, :]
    valid = (p < pixels)[:, None] & (n < C)[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["pixels", "steps"])
def gradient_of_weight(
    grad, x, part, pixels, steps,
    height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    N1: tl.constexpr, N2: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Compute one row of the kernels' gradient from a part of the pixels.

    grad: the gradient of the convolution's output with margins, see `unpool`.
    x: images with margins, see `convolution`.
    part: [S, number of parts, D, K, K * C]. A row has N1 values and then up to N2 values, which
        are computed separately because Triton's blocks are powers of two.
    pixels: the number of a client's pixels below windows. steps: blocks of BK pixels of a part.
    """
    dy = tl.program_id(0)
    split = tl.program_id(1)
    s = tl.program_id(2)
    o = tl.arange(0, D)
    n1 = tl.arange(0, N1)
    n2 = N1 + tl.arange(0, N2)
    acc1 = tl.zeros((D, N1), tl.float32)
    acc2 = tl.zeros((D, N2), tl.float32)
    halo: tl.constexpr = K - 1 - P
    for it in tl.range(0, steps, num_stages=STAGES):
        p = (split * steps + it) * BK + tl.arange(0, BK)
        valid = (p < pixels)[:, None] & (o < D)[None, :]
        q = s * pixels + tl.minimum(p, pixels - 1)
        image, i, j = q // (4 * h * w), q % (4 * h * w) // (2 * w), q % (2 * w)
        pixel = (image * (height + K - 1) + i + halo) * (width + K - 1) + j + halo
        g = tl.trans(tl.load(grad + pixel[:, None] * D + o[None, :], mask=valid, other=0.0))
        row = image * (height + 2 * P) + i + dy
        at = x + ((row * (width + 2 * P) + j) * C)[:, None]
        acc1 = tl.dot(g, tl.load(at + n1[None, :]), acc1, input_precision=PRODUCTS)
        if N1 < K * C:
            if N1 + N2 == K * C:
                x2 = tl.load(at + n2[None, :])
            else:
                x2 = tl.load(at + n2[None, :], mask=(n2 < K * C)[None, :], other=0.0)
            acc2 = tl.dot(g, x2, acc2, input_precision=PRODUCTS)
    to = (s * tl.num_programs(1) + split) * (D * K * K * C) + dy * (K * C)
    to = part + to + o[:, None] * (K * K * C)
    tl.store(to + n1[None, :], acc1)
    if N1 < K * C:
        tl.store(to + n2[None, :], acc2, mask=(n2 < K * C)[None, :] & (o < D)[:, None])


@triton.jit(do_not_specialize=["windows", "steps"])
def gradient_of_first_weight(
    x, grad, places, part, bias_part, windows, steps,
    height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    KP: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the right side in `first_convolution` from a part of the windows.

    grad: the gradient of the pooled output, [S, windows, D].
    part: [S, number of parts, KP, 4 * D]. bias_part: [S, number of parts, 4 * D].
    steps: blocks of BK windows of a part.
    """
    split = tl.program_id(0)
    s = tl.program_id(1)
    k = tl.arange(0, KP)
    n = tl.arange(0, 4 * D)
    acc = tl.zeros((KP, 4 * D), tl.float32)
    sums = tl.zeros((BK, 4 * D), tl.float32)
    for it in tl.range(0, steps, num_stages=STAGES):
        m = (split * steps + it) * BK + tl.arange(0, BK)
        valid = m < windows
        m = s * windows + tl.minimum(m, windows - 1)
        patches = load_patches(x, m, height, width, C, K, P, h, w, KP)
        at = m[:, None] * D + (n % D)[None, :]
        g = tl.load(grad + at)
        here = (tl.load(places + at) == (n // D)[None, :]) & valid[:, None]
        g = tl.where(here, g, 0.0)
        sums += g.to(tl.float32)
        patches = tl.trans(patches.to(g.dtype))
        acc = tl.dot(patches, g, acc, input_precision=PRODUCTS)
    part_of = s * tl.num_programs(0) + split
    tl.store(part + (part_of * KP + k[:, None]) * (4 * D) + n[None, :], acc)
    tl.store(bias_part + part_of * (4 * D) + n, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["parts"])
def add_first_parts(
    part, out, parts,
    height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    KP: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the results of `gradient_of_first_weight` to gradients out [S, D, K, K, C].

    ROWS: the number of parts that are loaded at once.
    """
    s = tl.program_id(1)
    e = tl.program_id(0) * BM + tl.arange(0, BM)
    valid = e < K * K * C * D
    dy, dx, c, o = e // (K * C * D), e // (C * D) % K, e // D % C, e % D
    total = tl.zeros((ROWS, BM), tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < parts)[:, None] & valid[None, :]
        for place in tl.static_range(4):
            k = ((dy + place // 2) * (K + 1) + dx + place % 2) * C + c
            at = ((s * parts + row) * (KP * 4 * D))[:, None] + (k * (4 * D) + place * D + o)[
                None, :
            ]
            total += tl.load(part + at, mask=there, other=0.0)
    to = out + (s * D + o) * (K * K * C) + (dy * K + dx) * C + c
    tl.store(to, tl.sum(total, 0), mask=valid)


@triton.jit(do_not_specialize=["parts", "size"])
def add_parts(
    part, out, parts, size,
    height: tl.constexpr, width: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    BM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add parts [S, parts, size] to out [S, size].

    ROWS: the number of parts that are loaded at once.
    """
    s = tl.program_id(1)
    e = tl.program_id(0) * BM + tl.arange(0, BM)
    total = tl.zeros((ROWS, BM), tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < parts)[:, None] & (e < size)[None, :]
        at = ((s * parts + row) * size)[:, None] + e[None, :]
        total += tl.load(part + at, mask=there, other=0.0)
    tl.store(out + s * size + e, tl.sum(total, 0), mask=e < size)
