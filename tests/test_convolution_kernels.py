"""The kernels for stacked convolutions against torch's own convolutions in float64."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedexp.core.errors import ConfigError
from fedexp.engine.hardware import Hardware
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.vectorised import convolution
from fedexp.engine.vectorised.convolution import convolve
from fedexp.engine.vectorised.pooled_convolution import convolve_and_pool
from fedexp.engine.vectorised.stacked import StackedNetwork
from fedexp.models.cnn import CNN
from fedexp.models.pooling import twice_differentiable
from toy_federation import HARDWARE

# Channels in and out, height, width, kernel, padding, stride. More than one tile of pixels (64), of
# channels and of patch values (32); windows that leave out the last rows; kernels of two shapes; 1
# x 1; a stride wider than the kernel.
CASES = {
    "first layer": (3, 5, 9, 8, (5, 5), (2, 2), (1, 1)),
    "tiles": (6, 34, 7, 6, (3, 3), (1, 1), (1, 1)),
    "stride": (4, 7, 9, 8, (3, 3), (1, 1), (2, 2)),
    "two strides": (2, 3, 8, 7, (3, 2), (0, 1), (3, 1)),
    "projection": (5, 6, 6, 6, (1, 1), (0, 0), (2, 2)),
    "deep": (40, 3, 4, 4, (3, 3), (1, 1), (1, 1)),
}


def draw(case, biased, dtype, device="cpu"):
    inputs, outputs, height, width, kernel, padding, stride = case
    generator = torch.Generator().manual_seed(sum(case[:4]))
    shapes = (3, 5, inputs, height, width), (3, outputs, inputs, *kernel), (3, outputs)
    tensors = [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    ]
    return [t.to(device) for t in (tensors if biased else tensors[:2])], padding, stride


def value_and_gradients(function, tensors, dtype):
    """Of a function of the output that weighs every pixel in another way, by numbers that `dtype`
    has; the gradient by every input."""

    def loss(*tensors):
        y = function(*tensors)
        weights = (
            torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(dtype).to(y).view(y.shape)
        )
        return (y * weights).sum(), y

    gradients, value = vmap(grad(loss, argnums=tuple(range(len(tensors))), has_aux=True))(*tensors)
    return value, *gradients


def compare(case, biased, dtype, device="cpu", pool=False):
    """The largest error of the values and of each gradient, relative to the largest number in it;
    with `pool` of the convolution with max-pooling and ReLU."""
    tensors, padding, stride = draw(case, biased, dtype, device)

    def ours(x, weight, bias=None):
        call = (x, weight, bias, padding, stride)
        return convolve_and_pool(*call) if pool else convolve(*call, "kernels")

    def theirs(x, weight, bias=None):
        y = F.conv2d(x, weight, bias, stride, padding)
        return F.relu(F.max_pool2d(y, 2, 2)) if pool else y

    actual = value_and_gradients(ours, tensors, dtype)
    exact = value_and_gradients(theirs, [t.double() for t in tensors], dtype)
    assert [a.shape for a in actual] == [e.shape for e in exact]
    assert all(a.dtype == dtype for a in actual)
    return [
        float((a.double() - e).abs().max() / e.abs().max())
        for a, e in zip(actual, exact, strict=True)
    ]


def multiply_numbers():
    """Have Triton's interpreter multiply bf16 as numbers: it keeps them as uint16, and its `dot`
    multiplies those."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def as_numbers(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    def create_dot(self, a, b, *rest):
        return dot(self, as_numbers(a), as_numbers(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def interpret():
    multiply_numbers()
    for name, case in CASES.items():
        for biased, pool in ((True, False), (False, False), (True, True)):
            errors = compare(case, biased, torch.float32, pool=pool)
            assert max(errors) < 2e-6, (name, biased, pool, errors)
    assert max(compare(CASES["first layer"], False, torch.float32, pool=True)) < 2e-6
    for pool in (False, True):
        # sums in fp32, cut off once to 8 bits
        errors = compare(CASES["stride"], True, torch.bfloat16, pool=pool)
        assert max(errors) < 2**-7, errors
    every_input_shared()
    channels_last()
    equal_and_undefined_pixels()
    whole_network()


def every_input_shared():
    """A teacher's weights, or images that all clients share, are ordinary convolutions."""
    (x, weight, bias), padding, stride = draw(CASES["stride"], True, torch.float32)

    def ours(x, weight, bias):
        return convolve(x, weight, bias, padding, stride, "kernels")

    for dims in ((0, None, None), (None, 0, 0)):
        inputs = [t if dim == 0 else t[0] for t, dim in zip((x, weight, bias), dims, strict=True)]
        expected = vmap(lambda *one: F.conv2d(*one, stride, padding), in_dims=dims)(*inputs)
        torch.testing.assert_close(
            vmap(ours, in_dims=dims)(*inputs), expected, rtol=1e-5, atol=1e-5
        )


def equal_and_undefined_pixels():
    """Of equal pixels of a window (numbers that fp32 adds exactly) the gradient goes to the first,
    as in torch, and to none where all are 0 or less; NaN stays."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randint(-1, 2, shape, generator=generator).float()
        for shape in ((2, 3, 2, 9, 8), (2, 3, 2, 2, 2), (2, 3))
    )
    functions = (
        lambda x, w, b: convolve_and_pool(x, w, b, (0, 0)),
        lambda x, w, b: F.relu(F.max_pool2d(F.conv2d(x, w, b), 2, 2)),
    )
    ours, theirs = (
        value_and_gradients(function, (x, weight, bias), torch.float32) for function in functions
    )
    assert (theirs[0] == 0).any()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-5, atol=1e-5)
    x[1, 2, 0, 4, 4] = torch.nan
    ours, theirs = (vmap(function)(x, weight, bias) for function in functions)
    assert theirs.isnan().any()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def whole_network():
    """The network of the paper's experiments finds the operation by itself, and not where gradients
    of gradients are wanted, nor for layers that compute more than a convolution."""
    model = CNN(channels=(3, 4), kernel=3, padding=1, hidden=(5,)).build((3, 16, 16), 4)
    net, calls = FunctionalNetwork(model, "fp32"), []
    fused = convolution.kernels().forward_pooled
    convolution.kernels().forward_pooled = lambda *call: calls.append(1) or fused(*call)
    params = {name: torch.stack([p, -p]) for name, p in model.named_parameters()}
    x = torch.randn(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    one = vmap(
        lambda params, x: grad(
            lambda p: StackedNetwork(net, "kernels")(p, x).logits.square().sum()
        )(params)
    )
    plain = vmap(lambda params, x: grad(lambda p: net(p, x).logits.square().sum())(params))
    ours = one(params, x)
    assert len(calls) == 2
    torch.testing.assert_close(ours, plain(params, x), rtol=1e-4, atol=1e-5)
    with twice_differentiable():
        torch.testing.assert_close(one(params, x), ours, rtol=1e-4, atol=1e-5)
    model.convolutions[0].padding_mode = "circular"
    one(params, x)
    assert len(calls) == 3


def channels_last():
    """The kernels go by strides: images and weights in another order in memory, the same sums."""
    (x, weight, bias), padding, stride = draw(CASES["first layer"], True, torch.float32)
    module, results = convolution.kernels(), []
    for turn in (
        lambda t: t,
        lambda t: t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3),
    ):
        y = module.forward(turn(x), turn(weight), bias, padding, stride)
        gradients = [
            f(turn(y), turn(x), turn(weight), padding, stride)
            for f in (module.gradient_of_input, module.gradient_of_weight)
        ]
        results.append([y, *gradients])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.slow
def test_kernels_interpreted():
    """Triton's interpreter runs the kernels on a CPU; it must be told before triton is imported."""
    pytest.importorskip("triton")
    code = "import test_convolution_kernels as t; t.interpret()"
    environment = {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=280)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fedexp.algorithms import divergence_kernels
from fedexp.engine.vectorised import convolution_kernels as kernels
from fedexp.models import pooling_kernels

def assembly(function, types, constants, capability):
    names = function.arg_names
    kinds = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(function, kinds, constexprs=values)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm

def matrix_products(capability, product, *kinds):
    for kind, precision in kinds:
        for pool in (False, True):
            types = dict.fromkeys(("x", "w", "bias", "y", "g"), kind) | {"where": "*u8" if pool else kind}
            same = dict(kernel_height=5, kernel_width=5, pool=pool, precision=precision)
            same |= dict(rows=kernels.ROWS, columns=64, depth=kernels.DEPTH)
            for function, more_types, more in (
                (kernels._forward, {}, {"biased": True}),
                (kernels._of_input, {}, {}),
                (kernels._of_weight, {"out": "*fp32"}, {}),
            ):
                asm = assembly(function, types | more_types, same | more, capability)
                assert asm["cubin"] and product in asm["ptx"], (function, kind, pool)

for function, types in (
    (pooling_kernels._pool, {"x": "*bf16", "y": "*bf16", "where": "*u8"}),
    (pooling_kernels._spread, {"grad": "*bf16", "where": "*u8", "out": "*bf16"}),
):
    assert assembly(function, types, {"block": pooling_kernels.BLOCK}, 90)["cubin"]
for masked in (False, True):
    types = dict.fromkeys(("teacher", "student", "value", "slope"), "*fp32")
    types |= {"keep": "*u8" if masked else "*fp32", "scale": "fp32"}
    assert assembly(divergence_kernels._divergence, types, dict(masked=masked, block=128, width=16), 90)["cubin"]
matrix_products(90, "wgmma.mma_async", ("*bf16", "ieee"), ("*fp32", "tf32"))
matrix_products(80, "mma.sync", ("*bf16", "ieee"))
"""


@pytest.mark.slow
def test_kernels_compiled_for_gpus(tmp_path):
    """Triton compiles for an H100 and an A100 on any machine: to their tensor cores, in bf16 and
    tf32."""
    pytest.importorskip("triton")
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": ":".join(filter(None, sys.path)),
    }
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=280)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gpu_kernels(case, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for pool in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = False
        assert max(compare(case, True, torch.float32, "cuda", pool)) < 2e-6
        assert max(compare(case, True, torch.bfloat16, "cuda", pool)) < 2**-7
        torch.backends.cuda.matmul.allow_tf32 = True
        errors = compare(case, True, torch.float32, "cuda", pool)
        # products of 11 bits; they may move a maximum
        assert max(errors[:1] if pool else errors) < 2e-3


@pytest.mark.parametrize("dims", [(None, 0, 0), (0, None, None)], ids=["images", "weights"])
def test_what_clients_share(dims):
    """Convolution and pooling where clients share an input are torch's own operations."""
    tensors, padding, stride = draw(CASES["stride"], True, torch.float64)
    inputs = [t if dim == 0 else t[0] for t, dim in zip(tensors, dims, strict=True)]

    def gradients(function):
        def loss(*inputs):
            return (function(*inputs) ** 2).sum()

        return vmap(grad(loss, argnums=(0, 1, 2)), in_dims=dims)(*inputs), grad(loss)(
            *(t[0] for t in tensors)
        )

    ours = gradients(lambda *inputs: convolve_and_pool(*inputs, padding, stride))
    theirs = gradients(
        lambda *inputs: F.relu(F.max_pool2d(F.conv2d(*inputs, stride, padding), 2, 2))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_kernels_need_a_gpu():
    hardware = Hardware(**HARDWARE | {"engine": "vectorised", "convolution": "kernels"})
    with pytest.raises(
        ConfigError, match=r"hardware.convolution=kernels: only on a CUDA device, not in fp64"
    ):
        hardware.resolve(vectorises=True, cohort_size=3)
