"""ReLU of 2 x 2 max-pooling: the fast ways against torch's two operations."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedexp.core import triton_kernels
from fedexp.models import pooling
from fedexp.models.pooling import pooled


def ordinary(x):
    return F.relu(F.max_pool2d(x, 2, 2))


def draw(dtype, device, shape=(3, 5, 7, 6, 8)):
    """Stacked images [S, N, C, H, W], equal pixels and a NaN among them, and weights of their
    pooled pixels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).round(decimals=1)
    x[0, 0, 0, 0, 1] = torch.nan
    weights = torch.randn(*shape[:3], shape[3] // 2, shape[4] // 2, generator=generator)
    return x.to(device, dtype), weights.to(device, dtype)


def value_and_gradient(function, x, weights):
    """Of the images of each stack, and of the first stack alone without vmap."""

    def loss(x, weights):
        y = function(x)
        return (y * weights).nansum(), y

    one = grad(loss, has_aux=True)
    return vmap(one)(x, weights), one(x[0], weights[0])


def assert_bit_for_bit(function, dtype, device):
    for layout in (torch.channels_last, torch.contiguous_format):
        x, weights = draw(dtype, device)
        x = x.flatten(0, 1).to(memory_format=layout).unflatten(0, x.shape[:2])
        actual, expected = (value_and_gradient(f, x, weights) for f in (function, ordinary))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        with torch.no_grad():
            torch.testing.assert_close(function(x[1]), ordinary(x[1]), rtol=0, atol=0)


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.slow
def test_kernels_interpreted():
    """Triton's interpreter runs the kernels on a CPU; it must be told before triton is imported."""
    code = "import test_pooling as t; t.interpret()"
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def interpret():
    pytest.importorskip("triton")
    from fedexp.models import pooling_kernels

    pooling.kernels = lambda: pooling_kernels
    for dtype in DTYPES:
        assert_bit_for_bit(lambda x: pooling._Pooled.apply(x)[0], dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_kernels(dtype, caplog):
    pooling.kernels.cache_clear()
    assert pooling.kernels() is not None, caplog.messages
    assert_bit_for_bit(pooled, dtype, "cuda")


def test_without_triton(monkeypatch):
    pooling.kernels.cache_clear()
    monkeypatch.setattr(triton_kernels, "find_spec", lambda name: None)
    assert pooling.kernels() is None
    pooling.kernels.cache_clear()


def test_where_triton_does_not_work(monkeypatch, caplog):
    """Here for want of a CUDA device; elsewhere of a C compiler."""
    pooling.kernels.cache_clear()
    monkeypatch.setattr(
        torch,
        "zeros",
        lambda *shape, device: (_ for _ in ()).throw(RuntimeError("no compiler\nmore")),
    )
    if triton_kernels.find_spec("triton") is None:
        pytest.skip("no Triton here")
    assert pooling.kernels() is None
    assert caplog.messages == [
        "pooling without kernels of its own: Triton does not work here (no compiler)"
    ]
    pooling.kernels.cache_clear()


def test_kernels_are_tried_with_tensors_that_have_memory(monkeypatch):
    """Also when they are first wanted inside of torch.func.grad, where new tensors are wrapped."""
    pytest.importorskip("triton")
    from fedexp.models import pooling_kernels

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    monkeypatch.setattr(pooling_kernels, "pool", lambda x: (x, x.data_ptr()))
    monkeypatch.setattr(pooling_kernels, "spread", lambda y, address: y)
    pooling.kernels.cache_clear()

    def loss(x):
        with pytest.raises(RuntimeError, match="data pointer"):
            zeros(1).data_ptr()
        assert pooling.kernels() is pooling_kernels
        return (x * x).sum()

    vmap(grad(loss))(torch.ones(2, 2))
    pooling.kernels.cache_clear()


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 7)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_without_gradient(size, layout):
    """Bit for bit what it is with one, NaN included."""
    x = torch.randn(3, 8, *size, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0] = torch.nan
    x = x.to(memory_format=layout)
    with torch.no_grad():
        actual = pooled(x)
    expected = pooled(x.requires_grad_()).detach()
    assert expected.isnan().sum() == 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
