"""Maxima over the windows of a text against a matrix of all products."""

import pytest
import torch
from torch.func import grad, vmap

from fedexp.models import textcnn as module
from fedexp.models.textcnn import max_over_windows

SHAPE = (5, 7, 6, 11)  # texts, windows, numbers of a window, filters


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    texts, number, width, filters = SHAPE
    sizes = (texts, number, width), (filters, width), (filters,)
    return tuple(
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes
    )


def expected_maxima(
    windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    # [W, B, F]
    products = torch.stack([(window @ weight.T + bias) for window in windows.unbind(1)])
    return products.max(0).values


def gradients(function, tensors, upstream):
    return torch.autograd.grad((function(*tensors) * upstream).sum(), tensors)


def test_maxima_and_gradients_equal_those_computed_from_all_products(tensors):
    upstream = torch.randn(SHAPE[0], SHAPE[3], dtype=torch.float64)
    torch.testing.assert_close(
        max_over_windows(*tensors), expected_maxima(*tensors), rtol=1e-13, atol=1e-13
    )
    with torch.no_grad():
        torch.testing.assert_close(
            max_over_windows(*tensors), expected_maxima(*tensors), rtol=1e-13, atol=1e-13
        )
    torch.testing.assert_close(
        gradients(max_over_windows, tensors, upstream),
        gradients(expected_maxima, tensors, upstream),
        rtol=1e-13,
        atol=1e-13,
    )


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_frozen_tensors_have_no_gradient(tensors, frozen):
    parts = [t.detach() if i in frozen else t for i, t in enumerate(tensors)]
    max_over_windows(*parts).sum().backward()
    expected = gradients(
        expected_maxima, tensors, torch.ones(SHAPE[0], SHAPE[3], dtype=torch.float64)
    )
    for i, (part, value) in enumerate(zip(parts, expected, strict=True)):
        if i in frozen:
            assert part.grad is None
        else:
            torch.testing.assert_close(part.grad, value, rtol=1e-13, atol=1e-13)


def test_second_derivatives_equal_finite_differences(tensors):
    assert torch.autograd.gradgradcheck(max_over_windows, tensors)


def test_pooling_under_transforms_uses_torch_operations(tensors, monkeypatch):
    """The custom function has no rule for vmap."""
    monkeypatch.setattr(module, "_Maxima", None)
    upstream = torch.ones(SHAPE[0], SHAPE[3], dtype=torch.float64)
    detached = [t.detach() for t in tensors]
    stacked = vmap(grad(lambda *t: max_over_windows(*t).sum(), argnums=1))(
        *(torch.stack([t, 2 * t]) for t in detached)
    )
    for scale, found in zip((1, 2), stacked, strict=True):
        expected = gradients(
            expected_maxima, [scale * t.requires_grad_() for t in detached], upstream
        )[1]
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
