"""Convolutions with bias, ReLU and 2x2 max-pooling of several clients, as one operation on CUDA.

The operation replaces `models.pooling.convolve_and_pool` inside vmap where `applies` returns True.
The Triton kernels store only pooled images and the places of their maxima (benchmarks/RESULTS.md
has the times). Everything that the backward pass needs is allocated anew in each call, so that
several calls, such as those of a student and a teacher, cannot disturb each other.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fedexp.core.errors import reason_of
from fedexp.core.private.torch_internals import outside_transforms, size_of_vmap
from fedexp.engine.vectorised.streams import beside, join
from fedexp.models.pooling import PooledStage

log = logging.getLogger("fedexp")
enabled = True  # only benchmarks change it
CHANNELS = (16, 32, 64)  # numbers of output channels of a layer
MAX_KERNEL = 5
MAX_PATCH = 128  # number of values of a patch in the first layer (see `kernels.load_patches`)
MAX_OFFSET = 2**31 - 1  # Triton computes offsets as 32-bit integers
MAX_PARTS = 40  # number of parts of a sum over all pixels, for one client

# By precision: blocks and launch options of each kernel, from measurements of model=cnn with ten
# clients on an H200
CONFIGURATIONS: dict[str, dict[str, dict[str, int]]] = {
    "bf16": {
        "first_convolution": {"BM": 128, "num_warps": 8},
        "convolution": {"BM": 128, "BK": 64, "STAGES": 3, "num_warps": 4},
        "gradient_of_input": {"BM": 128, "BK": 64, "STAGES": 3, "num_warps": 4},
        "gradient_of_weight": {"BK": 64, "STAGES": 3, "num_warps": 4},
        "gradient_of_first_weight": {"BK": 64, "STAGES": 3, "num_warps": 8},
    },
    "tf32": {
        "first_convolution": {"BM": 64, "num_warps": 4},
        "convolution": {"BM": 128, "BK": 32, "STAGES": 4, "num_warps": 4},
        "gradient_of_input": {"BM": 128, "BK": 32, "STAGES": 4, "num_warps": 4},
        "gradient_of_weight": {"BK": 32, "STAGES": 3, "num_warps": 4},
        "gradient_of_first_weight": {"BK": 32, "STAGES": 2, "num_warps": 8},
    },
    "fp32": {
        "first_convolution": {"BM": 64, "num_warps": 4},
        "convolution": {"BM": 128, "BK": 32, "STAGES": 2, "num_warps": 8},
        "gradient_of_input": {"BM": 128, "BK": 32, "STAGES": 2, "num_warps": 8},
        "gradient_of_weight": {"BK": 32, "STAGES": 1, "num_warps": 8},
        "gradient_of_first_weight": {"BK": 32, "STAGES": 1, "num_warps": 8},
    },
}
# blocks of the kernels without products
SMALL = {
    "unpool": {"BM": 128, "num_warps": 4},
    "add_first_parts": {"BM": 64, "ROWS": 8, "num_warps": 4},
    "add_parts": {"BM": 64, "num_warps": 4},
}
MANY = 1024  # number of sums that occupy the device with few rows
TYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
# Triton's `input_precision`; it has no effect in bf16. In fp32, each product is the sum of three
# products in tf32, which is about as exact (benchmarks/RESULTS.md) and faster than cuDNN.
PRODUCTS = {"bf16": "tf32", "tf32": "tf32", "fp32": "tf32x3"}


class Layer(NamedTuple):
    """The sizes of a convolution with pooling."""

    height: int  # of the input
    width: int
    channels: int
    out: int  # number of output channels
    kernel: int
    padding: int

    @property
    def pooled(self) -> tuple[int, int]:
        """Return the height and the width of the output."""
        less = 2 * self.padding - self.kernel + 1
        return (self.height + less) // 2, (self.width + less) // 2

    @property
    def patch(self) -> int:
        """Return the number of values from which the four outputs of a window are computed."""
        return (self.kernel + 1) ** 2 * self.channels

    @property
    def largest(self) -> int:
        """Return the largest number of values that the kernels store for an image."""
        margin = self.kernel - 1
        spread = (self.height + margin) * (self.width + margin)  # see `kernels.unpool`
        h, w = (side + 2 * self.padding for side in self.pooled)
        if self.channels < min(CHANNELS):  # the first layer
            return max(self.height * self.width * self.channels, h * w * self.out)
        return max(spread, h * w) * max(self.channels, self.out)

    def constants(self) -> dict[str, int]:
        """Return the arguments that all kernels have."""
        sizes = {"height": self.height, "width": self.width, "C": self.channels, "D": self.out}
        h, w = self.pooled
        return sizes | {"K": self.kernel, "P": self.padding, "h": h, "w": w}


def layers_of(shape: Sequence[int], weights: Sequence[Tensor], padding: int) -> tuple[Layer, ...]:
    """Return the sizes of consecutive convolutions.

    shape: of the images, [..., C, H, W].
    weights: [..., D, C, K, K].
    """
    found, (height, width) = [], shape[-2:]
    for weight in weights:
        out, channels, kernel, _ = weight.shape[-4:]
        found.append(Layer(height, width, channels, out, kernel, padding))
        height, width = found[-1].pooled
    return tuple(found)


# --- where the operation applies


def applies(x: Tensor, stages: Sequence[PooledStage]) -> bool:
    """Return whether this module's `convolve_and_pool` can replace the one of `models.pooling`.

    This requires a CUDA device, images and parameters in fp32, no layers between convolutions and
    pooling, vmap without other transforms except one gradient, images whose gradient is not needed,
    and sizes that the kernels support.
    """
    if not (enabled and x.device.type == "cuda" and stages):
        return False
    # The exact types, because the layers themselves do not run. A subclass may do something else.
    if {type(layer) for stage in stages for layer in stage} != {nn.Conv2d, nn.Identity}:
        return False
    weights = [convolution.weight for convolution, _ in stages]
    if {x.dtype, *(weight.dtype for weight in weights)} != {torch.float32} or x.requires_grad:
        return False
    clients, precision = size_of_vmap(), precision_now()
    if not clients or precision not in CONFIGURATIONS:
        return False
    layers = layers_of(x.shape, weights, padding_of(stages))
    return are_supported(layers, clients, clients * len(x)) and runs(layers, precision, x.device)


def padding_of(stages: Sequence[PooledStage]) -> int:
    """Return the padding of the convolutions, which is the same in all layers."""
    (padding,) = {side for convolution, _ in stages for side in convolution.padding}
    return int(padding)


def precision_now() -> str:
    """Return the precision in which convolutions are computed at present."""
    if torch.is_autocast_enabled("cuda"):
        return "bf16" if torch.get_autocast_dtype("cuda") == torch.bfloat16 else "another"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"


def are_supported(layers: Sequence[Layer], clients: int, images: int) -> bool:
    """Return whether the kernels support these sizes for these numbers of clients and images."""
    for layer in layers:
        parts = MAX_PARTS * MAX_PATCH * 4 * layer.out  # of the gradient of a weight
        if max(images * layer.largest, clients * parts) > MAX_OFFSET:
            return False
        if layer.out not in CHANNELS or layer.kernel > MAX_KERNEL or min(layer.pooled) < 1:
            return False
    return layers[0].patch <= MAX_PATCH


@lru_cache
def runs(layers: tuple[Layer, ...], precision: str, device: torch.device) -> bool:
    """Return whether the kernels can be compiled and run, after a trial with one image.

    Triton needs a C compiler, and the kernels need much shared memory.
    """
    if torch.cuda.get_device_capability(device) < (8, 0):  # without bf16 and tf32
        return False
    with outside_transforms(), torch.no_grad():
        try:
            x = torch.zeros(1, 1, layers[0].channels, *layers[0][:2], device=device)
            weights = []
            for one in layers:
                shape = (1, one.out, one.channels, one.kernel, one.kernel)
                weights += [
                    torch.zeros(shape, device=device),
                    torch.zeros(shape[:2], device=device),
                ]
            y, *kept = forward(x, weights, layers[0].padding, precision)
            backward(y, x, weights[::2], kept, layers[0].padding, precision)
        except Exception as error:  # of Triton, a compiler or the driver
            log.warning(
                "convolutions take longer than with Triton, which fails: %s", reason_of(error)
            )
            return False
    return True


# --- the operation


def convolve_and_pool(x: Tensor, stages: Sequence[PooledStage]) -> Tensor:
    """Apply convolutions to x [B, C, H, W], each followed by 2x2 max-pooling and ReLU.

    The result has first derivatives with respect to weights and biases, but no others.
    """
    tensors = [tensor for stage in stages for tensor in (stage[0].weight, stage[0].bias)]
    return PooledConvolutions.apply(x, padding_of(stages), precision_now(), *tensors)[0]


class PooledConvolutions(Function):
    """Return (output, inputs of all layers but the first, places of the maxima of all layers)."""

    @staticmethod
    def forward(x: Tensor, padding: int, precision: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = forward(x[None], [tensor[None] for tensor in tensors], padding, precision)
        return tuple(value[0] for value in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, padding, precision, *tensors = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *tensors[::2], *output[1:])
        ctx.options, ctx.inputs = (padding, precision), len(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * ctx.inputs
        return None, None, None, *_Gradients.apply(grad, *ctx.options, *ctx.saved_tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, padding: int, precision: str, *tensors: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        images = stacked(x, in_dims[0], info.batch_size)
        if all(dim is None for dim in in_dims[3:]):  # one model for all clients, such as a teacher
            images, each = images.flatten(0, 1)[None], [tensor[None] for tensor in tensors]
        else:
            each = [
                stacked(*pair, info.batch_size) for pair in zip(tensors, in_dims[3:], strict=True)
            ]
        found = forward(images, each, padding, precision)
        found = [value.view(info.batch_size, -1, *value.shape[2:]) for value in found]
        return tuple(found), (0,) * len(found)


class _Gradients(Function):
    """The gradients of weight and bias of each layer; separate because of its vmap rule."""

    @staticmethod
    def forward(grad: Tensor, padding: int, precision: str, *saved: Tensor) -> tuple[Tensor, ...]:
        x, weights, kept = split(*(value[None] for value in saved))
        found = backward(grad[None], x, weights, kept, padding, precision)
        return tuple(value[0] for value in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(
            "convolve_and_pool has no second derivatives; set hardware.engine=sequential"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], grad: Tensor, padding: int, precision: str, *saved: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        grad = stacked(grad, in_dims[0], info.batch_size)
        each = (stacked(*pair, info.batch_size) for pair in zip(saved, in_dims[3:], strict=True))
        found = backward(grad, *split(*each), padding, precision)
        return tuple(found), (0,) * len(found)


def stacked(value: Tensor, dim: int | None, size: int) -> Tensor:
    """Return a tensor with the clients' dimension first; if it has none, repeat it."""
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def split(x: Tensor, *saved: Tensor) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Return (images, weights, other results of `forward`) of the saved tensors."""
    count = (len(saved) + 1) // 3
    return x, saved[:count], saved[count:]


# --- launches of the kernels


def forward(x: Tensor, tensors: Sequence[Tensor], padding: int, precision: str) -> list[Tensor]:
    """Return the output [S, B, D, h, w] and what `backward` needs.

    x: [S, B, C, H, W].
    tensors: weight [S, D, C, K, K] and bias [S, D] of each layer, in turn.

    The other results are the inputs of the second to the last layer, [S, B, height, width, C] with
    margins of zeros, and the places of the maxima of each layer, [S, B, h, w, D].
    """
    layers = layers_of(x.shape, tensors[::2], padding)
    images = [with_layout(x, (0, 1, 3, 4, 2), x.dtype)]
    places: list[Tensor] = []
    for layer, weight, bias in zip(layers, tensors[::2], tensors[1::2], strict=True):
        kernel = "convolution" if places else "first_convolution"
        halo = 0 if layer is layers[-1] else padding
        out, place = run_layer(kernel, images[-1], weight, bias, layer, halo, precision)
        images.append(out)
        places.append(place)
    return [images[-1].permute(0, 1, 4, 2, 3), *images[1:-1], *places]


def run_layer(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor, layer: Layer, halo: int, precision: str
) -> tuple[Tensor, Tensor]:
    """Return the pooled images [S, B, ., ., D], with a margin of `halo` zeros, and the places.

    kernel: `first_convolution`, or `convolution` for images x with margins.
    """
    h, w = layer.pooled
    size = (*x.shape[:2], h + 2 * halo, w + 2 * halo, layer.out)
    make = torch.zeros if halo else torch.empty
    out = make(size, dtype=TYPES[precision], device=x.device)
    places = x.new_empty((*x.shape[:2], h, w, layer.out), dtype=torch.uint8)
    # In blocks of the first kernel, a row is a window, and in the other's it is a pixel. The first
    # kernel converts the weights itself.
    first = kernel == "first_convolution"
    weight = with_layout(weight, (0, 1, 3, 4, 2), weight.dtype if first else x.dtype)
    windows = places[0, ..., 0].numel()
    blocks = cdiv(windows if first else 4 * windows, CONFIGURATIONS[precision][kernel]["BM"])
    tensors = (x, weight, bias.contiguous(), out, places)
    launch(kernel, precision, (blocks, len(x)), layer, *tensors, windows, HALO=halo)
    return out, places


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    padding: int,
    precision: str,
) -> list[Tensor]:
    """Return the gradients of the weight and the bias of each layer, in turn.

    grad: the gradient of the output, [S, B, D, h, w].
    x, weights: see `forward`.
    kept: the results of `forward` but the first.
    """
    layers = layers_of(x.shape, weights, padding)
    x = with_layout(x, (0, 1, 3, 4, 2), x.dtype)
    kept = [value.contiguous() for value in kept]
    images, places = kept[: len(layers) - 1], kept[len(layers) - 1 :]
    grad = with_layout(grad, (0, 1, 3, 4, 2), TYPES[precision])
    found: list[Tensor] = []
    spreads: list[Tensor] = []  # kept until `join`
    for number in reversed(range(1, len(layers))):
        layer = layers[number]
        spread, parts = unpool(grad, places[number], layer, precision)
        with beside(x.device):
            of_weight = gradient_of_weight(spread, images[number - 1], layer, precision)
            of_bias = add_parts(parts, layer)
        grad = gradient_of_input(spread, weights[number], layer, precision)
        found = [of_weight, of_bias, *found]
        spreads += [spread, parts]
    first = first_gradients(x, grad, places[0], layers[0], precision)
    if spreads:
        join(x.device)
    return [*first, *found]


def unpool(grad: Tensor, places: Tensor, layer: Layer, precision: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of a convolution's output, with margins, and parts of the bias's.

    grad: the gradient of the pooled output, [S, B, h, w, D]. The parts are [S, parts, D].
    """
    clients, batch = grad.shape[:2]
    height, width = layer.height + layer.kernel - 1, layer.width + layer.kernel - 1
    blocks = cdiv(height * width, SMALL["unpool"]["BM"])
    spread = grad.new_empty((clients, batch, height, width, layer.out))
    parts = grad.new_empty((clients, batch * blocks, layer.out), dtype=torch.float32)
    launch("unpool", precision, (clients * batch, blocks), layer, grad, places, spread, parts)
    return spread, parts


def gradient_of_input(spread: Tensor, weight: Tensor, layer: Layer, precision: str) -> Tensor:
    """Return the gradient of a convolution's input, [S, B, height, width, C].

    spread: the gradient of its output, see `unpool`.
    """
    size = (*spread.shape[:2], layer.height, layer.width, layer.channels)
    out = spread.new_empty(size)
    pixels = out[0, ..., 0].numel()
    grid = (cdiv(pixels, CONFIGURATIONS[precision]["gradient_of_input"]["BM"]), len(out))
    turned = with_layout(weight, (0, 2, 3, 4, 1), spread.dtype)
    launch("gradient_of_input", precision, grid, layer, spread, turned, out, pixels)
    return out


def gradient_of_weight(spread: Tensor, x: Tensor, layer: Layer, precision: str) -> Tensor:
    """Return the gradient of a convolution's weight, [S, D, C, K, K].

    spread: the gradient of its output, see `unpool`.
    x: its input, with margins.
    """
    clients, (h, w), k = len(x), layer.pooled, layer.kernel
    pixels = 4 * h * w * x.shape[1]
    block = CONFIGURATIONS[precision]["gradient_of_weight"]["BK"]
    parts, steps = divided(cdiv(pixels, block), 5, clients)
    part = x.new_empty((clients, parts, layer.out, k, k, layer.channels), dtype=torch.float32)
    columns = k * layer.channels
    first = 1 << columns.bit_length() - 1  # the largest power of two that is not larger
    more = {"N1": first, "N2": power_of_two(columns - first)}
    grid, tensors = (k, parts, clients), (spread, x, part)
    launch("gradient_of_weight", precision, grid, layer, *tensors, pixels, steps, **more)
    return add_parts(part, layer).permute(0, 1, 4, 2, 3)


def first_gradients(
    x: Tensor, grad: Tensor, places: Tensor, layer: Layer, precision: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the first layer's weight and bias, [S, D, C, K, K] and [S, D].

    grad: the gradient of the pooled output, [S, B, h, w, D].
    """
    clients, windows = len(x), places[0, ..., 0].numel()
    block = CONFIGURATIONS[precision]["gradient_of_first_weight"]["BK"]
    parts, steps = divided(cdiv(windows, block), 10, clients)
    width, rows = 4 * layer.out, power_of_two(layer.patch)
    part = x.new_empty((clients, parts, rows, width))
    of_bias = x.new_empty((clients, parts * 4, layer.out))
    tensors = (x, grad, places, part, of_bias)
    name = "gradient_of_first_weight"
    launch(name, precision, (parts, clients), layer, *tensors, windows, steps)
    k, channels = layer.kernel, layer.channels
    of_weight = x.new_empty((clients, layer.out, k, k, channels))
    grid = (cdiv(of_weight[0].numel(), SMALL["add_first_parts"]["BM"]), clients)
    launch("add_first_parts", precision, grid, layer, part, of_weight, parts)
    return of_weight.permute(0, 1, 4, 2, 3), add_parts(of_bias, layer)


def add_parts(part: Tensor, layer: Layer) -> Tensor:
    """Return the sum over the second dimension of [S, parts, ...]."""
    clients, parts, *shape = part.shape
    out = part.new_empty((clients, *shape))
    size = out[0].numel()
    rows = 8 if size > MANY else 64  # with few sums, each program adds more parts at once
    grid = (cdiv(size, SMALL["add_parts"]["BM"]), clients)
    launch("add_parts", "", grid, layer, part, out, parts, size, ROWS=rows)
    return out


def launch(
    name: str, precision: str, grid: tuple[int, ...], layer: Layer, *arguments: Any, **more: int
) -> None:
    """Launch the kernel with this name. It ignores constants that it does not use."""
    from fedexp.engine.vectorised import kernels

    options: dict[str, Any] = dict(SMALL.get(name, {}))
    if not options:
        options = CONFIGURATIONS[precision][name] | {"PRODUCTS": PRODUCTS[precision]}
    if "first" in name:
        options["KP"] = power_of_two(layer.patch)
    with torch.cuda.device_of(arguments[0]):
        getattr(kernels, name)[grid](*arguments, **layer.constants(), **options, **more)


def divided(blocks: int, fewest: int, clients: int) -> tuple[int, int]:
    """Return the number of parts of a sum, and the number of blocks in each part.

    With fewer than ten clients, there are more parts, so that they occupy the device.

    fewest: the number of parts with ten clients or more.
    """
    steps = cdiv(blocks, min(max(fewest, 10 * fewest // clients), MAX_PARTS))
    return cdiv(blocks, steps), steps


def with_layout(value: Tensor, order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor of this type, with the dimensions in this order."""
    value = value.permute(order)
    if value.dtype == dtype and value.is_contiguous():
        return value
    return torch.empty(value.shape, dtype=dtype, device=value.device).copy_(value)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller, but at least 16."""
    return max(1 << (number - 1).bit_length(), 16) if number > 0 else 16


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)
