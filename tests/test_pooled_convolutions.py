"""The Triton convolutions of the vectorised engine, in Triton's interpreter on a CPU."""

import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedexp.core import tree
from fedexp.core.private.torch_internals import size_of_vmap
from fedexp.engine.vectorised import pooled_convolutions
from fedexp.engine.vectorised.pooled_convolutions import PooledConvolutions

# clients, images, (channels, height, width), output channels, kernel size, padding
SIZES = {
    "padding": (2, 2, (3, 9, 8), (16, 16), 5, 2),
    "no padding": (1, 1, (1, 16, 17), (16, 32), 5, 0),
    "one layer": (2, 3, (3, 5, 4), (16,), 3, 1),
    "three layers": (1, 1, (2, 7, 6), (16, 16, 16), 2, 1),
    "wide padding": (1, 1, (3, 5, 4), (16, 16), 4, 3),
    "one pixel": (2, 1, (3, 4, 6), (16, 32), 1, 0),
}
# relative errors; when converting to bf16, the interpreter cuts off bits instead of rounding
LIMITS = {"fp32": 1e-5, "tf32": 3e-2, "bf16": 2e-1}


def convolve(x, padding, *tensors):
    for weight, bias in zip(tensors[::2], tensors[1::2], strict=True):
        x = F.relu(F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2))
    return x


def draw(clients, images, shape, outs, kernel, padding):
    """Return images, and a list of weights and biases, in turn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, images, *shape, generator=generator)
    tensors, channels = [], shape[0]
    for out in outs:
        weight = torch.randn(clients, out, channels, kernel, kernel, generator=generator)
        tensors += [weight / (kernel * kernel * channels) ** 0.5]
        tensors += [torch.randn(clients, out, generator=generator) / 8]
        channels = out
    return x, tensors


def train(function, x, tensors, teacher):
    """Return gradients and outputs of clients, and of a teacher that all clients share."""

    def loss(tensors, teacher, x):
        before, y = function(x, *teacher), function(x, *tensors)
        return ((y - before) ** 2).sum(), (y, before)

    step = vmap(grad(loss, argnums=(0, 1), has_aux=True), in_dims=(0, None, 0))
    (own, shared), outputs = step(tensors, teacher, x)
    return [*own, *shared, *outputs]


def compare(name, precision):
    """Compare the kernels with float64. This function runs in the interpreter."""
    padding = SIZES[name][-1]
    x, tensors = draw(*SIZES[name])
    teacher = [tensor[0] + 0.05 for tensor in tensors]

    def plain(x, *own):
        return convolve(x, padding, *own)

    def operation(x, *own):
        return PooledConvolutions.apply(x, padding, precision, *own)[0]

    found = train(operation, x, tensors, teacher)
    exact = train(plain, *tree.map(torch.Tensor.double, (x, tensors, teacher)))
    pairs = zip(found, exact, strict=True)
    errors = [float((ours.double() - best).norm() / best.norm()) for ours, best in pairs]
    assert max(errors) < LIMITS[precision], errors


def main(precision):
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def in_fp32(self, a, b, *rest):
        for each in (a, b):
            if each.data.dtype == np.uint16:  # bf16, of which the interpreter multiplies the bits
                each.data = (each.data.astype(np.uint32) << 16).view(np.float32)
        return create_dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = in_fp32
    for options in pooled_convolutions.CONFIGURATIONS[precision].values():
        if "BM" in options:
            options["BM"] = 32  # wastes less time in the interpreter
    for name in SIZES if precision == "fp32" else ["padding"]:
        compare(name, precision)
        print(name, flush=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
@pytest.mark.parametrize("precision", LIMITS)
def test_kernels_equal_float64_in_the_interpreter(precision):
    """Outputs and gradients of clients, beside a teacher whose weights all clients share."""
    subprocess.run(
        [sys.executable, __file__, precision],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent,
        check=True,
    )


# --- where the operation applies


@pytest.mark.parametrize(
    ("change", "supported"),
    [
        ({}, True),
        ({"shape": (1, 28, 27), "padding": 0}, True),
        ({"outs": (32,)}, True),
        ({"outs": (32, 48)}, False),
        ({"outs": (32, 64, 128)}, False),
        ({"kernel": 7, "padding": 3}, False),
        ({"shape": (4, 32, 32)}, False),  # a patch would have 144 values
        ({"images": 80_000}, True),
        ({"images": 85_000}, False),  # offsets of 32 bits
        ({"clients": 2_000}, False),
    ],
    ids=str,
)
def test_sizes_that_the_kernels_support(change, supported):
    """model=cnn on CIFAR-10, and changes of it."""
    size = {"shape": (3, 32, 32), "outs": (32, 64), "kernel": 5, "padding": 2}
    size |= {"clients": 10, "images": 500} | change
    channels = (size["shape"][0], *size["outs"])
    weights = [
        torch.empty(after, before, size["kernel"], size["kernel"], device="meta")
        for before, after in pairwise(channels)
    ]
    layers = pooled_convolutions.layers_of(size["shape"], weights, size["padding"])
    found = pooled_convolutions.are_supported(layers, size["clients"], size["images"])
    assert found == supported


def test_the_operation_needs_one_vmap_and_at_most_one_gradient():
    sizes = []

    def note(x):
        sizes.append(size_of_vmap())
        return x.sum()

    x = torch.ones(3, 2)
    note(x)
    vmap(note)(x)
    vmap(grad(note))(x)
    assert sizes == [0, 3, 3]
    vmap(grad(lambda x: grad(note)(x).sum()))(x)
    vmap(vmap(note))(x)
    grad(lambda x: vmap(note)(x).sum())(x)
    assert sizes[3:] == [0, 0, 0]


if __name__ == "__main__":
    main(sys.argv[1])
