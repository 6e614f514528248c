"""The kernels for stacked convolutions against torch's own convolutions in float64."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedexp.core.errors import ConfigError
from fedexp.engine.hardware import Hardware
from fedexp.engine.vectorised import convolution
from fedexp.engine.vectorised.convolution import convolve
from toy_federation import HARDWARE

# Channels in and out, height, width, kernel, padding, stride. More than one tile of pixels (64), of channels and of
# patch values (32); windows that leave out the last rows; kernels of two shapes; 1 x 1; a stride wider than the kernel.
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
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return [t.to(device) for t in (tensors if biased else tensors[:2])], padding, stride


def value_and_gradients(function, tensors, dtype):
    """Of a function of the output that weighs every pixel in another way, by numbers that `dtype` has; the gradient by
    every input."""

    def loss(*tensors):
        y = function(*tensors)
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(dtype).to(y).view(y.shape)
        return (y * weights).sum(), y

    gradients, value = vmap(grad(loss, argnums=tuple(range(len(tensors))), has_aux=True))(*tensors)
    return value, *gradients


def compare(case, biased, dtype, device="cpu"):
    """The largest error of the values and of each gradient, relative to the largest number in it."""
    tensors, padding, stride = draw(case, biased, dtype, device)

    def ours(x, weight, bias=None):
        return convolve(x, weight, bias, padding, stride, "kernels")

    def theirs(x, weight, bias=None):
        return F.conv2d(x, weight, bias, stride, padding)

    actual = value_and_gradients(ours, tensors, dtype)
    exact = value_and_gradients(theirs, [t.double() for t in tensors], dtype)
    assert [a.shape for a in actual] == [e.shape for e in exact]
    assert all(a.dtype == dtype for a in actual)
    return [float((a.double() - e).abs().max() / e.abs().max()) for a, e in zip(actual, exact, strict=True)]


def multiply_numbers():
    """Have Triton's interpreter multiply bf16 as numbers: it keeps them as uint16, and its `dot` multiplies those."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def as_numbers(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, as_numbers(a), as_numbers(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def interpret():
    multiply_numbers()
    for name, case in CASES.items():
        for biased in (True, False):
            errors = compare(case, biased, torch.float32)
            assert max(errors) < 2e-6, (name, biased, errors)
    errors = compare(CASES["stride"], True, torch.bfloat16)  # sums in fp32, cut off once to 8 bits
    assert max(errors) < 2**-7, errors
    every_input_shared()
    channels_last()


def every_input_shared():
    """A teacher's weights, or images that all clients share, are ordinary convolutions."""
    (x, weight, bias), padding, stride = draw(CASES["stride"], True, torch.float32)

    def ours(x, weight, bias):
        return convolve(x, weight, bias, padding, stride, "kernels")

    for dims in ((0, None, None), (None, 0, 0)):
        inputs = [t if dim == 0 else t[0] for t, dim in zip((x, weight, bias), dims, strict=True)]
        expected = vmap(lambda *one: F.conv2d(*one, stride, padding), in_dims=dims)(*inputs)
        torch.testing.assert_close(vmap(ours, in_dims=dims)(*inputs), expected, rtol=1e-5, atol=1e-5)


def channels_last():
    """The kernels go by strides: images and weights in another order in memory, the same sums."""
    (x, weight, bias), padding, stride = draw(CASES["first layer"], True, torch.float32)
    module, results = convolution.kernels(), []
    for turn in (lambda t: t, lambda t: t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)):
        y = module.forward(turn(x), turn(weight), bias, padding, stride)
        gradients = [f(turn(y), turn(x), turn(weight), padding, stride)
                     for f in (module.gradient_of_input, module.gradient_of_weight)]  # fmt: skip
        results.append([y, *gradients])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.slow
def test_kernels_interpreted():
    """Triton's interpreter runs the kernels on a CPU; it must be told before triton is imported."""
    pytest.importorskip("triton")
    code = "import test_convolution_kernels as t; t.interpret()"
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=280)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gpu_kernels(case, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert max(compare(case, True, torch.float32, "cuda")) < 2e-6
    assert max(compare(case, True, torch.bfloat16, "cuda")) < 2**-7
    torch.backends.cuda.matmul.allow_tf32 = True
    assert max(compare(case, True, torch.float32, "cuda")) < 2e-3  # products of 11 bits


def test_kernels_need_a_gpu():
    hardware = Hardware(**HARDWARE | {"engine": "vectorised", "convolution": "kernels"})
    with pytest.raises(ConfigError, match=r"hardware.convolution=kernels: only on a CUDA device, not in fp64"):
        hardware.resolve(vectorises=True, cohort_size=3)
