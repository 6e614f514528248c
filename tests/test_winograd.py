"""Winograd's convolution against torch's own."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedexp.models import winograd

# images, channels, height, width, output channels, kernel, padding; the first ones take several
# chunks
SIZES = [
    (50, 32, 16, 16, 64, 5, 2),
    (23, 32, 14, 14, 24, 5, 2),
    (3, 16, 12, 11, 8, 5, 0),
    (2, 16, 4, 4, 8, 5, 4),
    (1, 16, 5, 6, 3, 5, 1),
    (9, 64, 8, 8, 16, 3, 1),
    (2, 16, 7, 9, 8, 3, 0),
    (1, 1, 3, 3, 1, 3, 2),
]


def draw(n, c, h, w, o, k, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, c, h, w), (o, c, k, k), (o,)]
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x.to(dtype), (weight / (k * k * c) ** 0.5).to(dtype), bias.to(dtype)


def both(inputs, padding, wanted=(True, True, True)):
    """(output, gradients that are wanted) of Winograd's and of torch's convolution."""
    answers = []
    for convolve in (winograd.conv2d, lambda x, w, b, p: F.conv2d(x, w, b, padding=p)):
        own = [
            value.clone().requires_grad_(want) for value, want in zip(inputs, wanted, strict=True)
        ]
        out = convolve(*own, padding)
        above = torch.randn(
            out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        ).to(out.dtype)
        answers.append(
            (out.detach(), *torch.autograd.grad(out, [v for v in own if v.requires_grad], above))
        )
    return answers


def error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kernel", [3, 5])
def test_one_dimension(kernel):
    """A^T ((G g) * (B^T d)) are the inner products of g with the windows of d."""
    rng, (outputs, filters, data) = np.random.default_rng(0), winograd.toom_cook(kernel)
    g, d = rng.normal(size=kernel), rng.normal(size=kernel + 3)
    expected = [g @ d[i : i + kernel] for i in range(4)]
    np.testing.assert_allclose(outputs @ ((filters @ g) * (data @ d)), expected, rtol=0, atol=1e-13)


def test_the_matrices_of_the_paper():
    """Lavin and Gray's F(4, 3), up to the factors that move between the rows of G and of B^T. Its
    first row of B^T is [4, 0, -5, 0, 1, 0], of G [1/4, 0, 0]; the last column of A^T is [0, 0, 0,
    1]."""
    outputs, filters, data = winograd.toom_cook(3)
    np.testing.assert_allclose(
        np.outer(filters[0], data[0])[0], np.array([4, 0, -5, 0, 1, 0]) / 4, atol=1e-15
    )
    assert outputs.tolist() == [
        [1, 1, 1, 1, 1, 0],
        [0, 1, -1, 2, -2, 0],
        [0, 1, 1, 4, 4, 0],
        [0, 1, -1, 8, -8, 1],
    ]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_and_gradients(size):
    for actual, expected in zip(*both(draw(*size[:6]), size[6]), strict=True):
        assert actual.shape == expected.shape
        assert error(actual, expected) < 1e-12


@pytest.mark.parametrize("size", SIZES[:1], ids=str)
def test_single_precision(size):
    """Rounding: at most 1e-5 of the norm (torch's own: 2e-6)."""
    inputs = draw(*size[:6], dtype=torch.float32)
    exact = both([value.double() for value in inputs], size[6])[1]
    for actual, expected in zip(both(inputs, size[6])[0], exact, strict=True):
        assert 0 < error(actual, expected) < 1e-5


def test_gradcheck():
    inputs = [value.requires_grad_() for value in draw(2, 2, 5, 6, 2, 3)]
    assert torch.autograd.gradcheck(lambda *values: winograd.conv2d(*values, 1), inputs)


@pytest.mark.parametrize(
    "wanted", [(False, True, True), (True, False, False), (False, False, True)]
)
def test_only_the_gradients_that_are_wanted(wanted):
    for actual, expected in zip(*both(draw(3, 16, 8, 8, 4, 5), 2, wanted), strict=True):
        assert error(actual, expected) < 1e-12


def test_memory_order_does_not_matter():
    """Neither of the inputs nor of the gradient by the output."""
    x, weight, bias = draw(3, 16, 8, 8, 4, 5)
    plain = winograd.conv2d(x, weight, bias, 2)
    turned = winograd.conv2d(
        x.to(memory_format=torch.channels_last),
        weight.transpose(2, 3).clone().transpose(2, 3),
        bias,
        2,
    )
    assert torch.equal(plain, turned)
    weight.requires_grad_()
    above = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    grads = [
        torch.autograd.grad(winograd.conv2d(x, weight, bias, 2), weight, each)[0]
        for each in (
            above,
            above.to(memory_format=torch.channels_last),
            above.transpose(2, 3).clone().transpose(2, 3),
        )
    ]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_two_calls_before_their_gradients():
    """What one call keeps for its gradient is not the memory that the next one works in."""
    x, weight, bias = draw(12, 32, 16, 16, 8, 5)
    weight.requires_grad_()
    first, second = winograd.conv2d(x, weight, bias, 2), winograd.conv2d(2 * x, weight, bias, 2)
    ones = torch.ones_like(first)
    by_second, by_first = (torch.autograd.grad(out, weight, ones)[0] for out in (second, first))
    assert error(by_second, 2 * by_first) < 1e-12
    assert (
        error(by_first, torch.autograd.grad(F.conv2d(x, weight, bias, padding=2), weight, ones)[0])
        < 1e-12
    )


def test_without_bias():
    x, weight, _ = draw(2, 16, 8, 8, 4, 3)
    assert error(winograd.conv2d(x, weight, None, 1), F.conv2d(x, weight, padding=1)) < 1e-14


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"kernel_size": 5, "padding": 2}, True),
        ({"kernel_size": 3, "padding": 1, "bias": False}, True),
        ({"kernel_size": 3, "stride": 2}, False),
        ({"kernel_size": 3, "dilation": 2}, False),
        ({"kernel_size": 3, "groups": 2}, False),
        ({"kernel_size": (3, 5)}, False),
        ({"kernel_size": 3, "padding": (1, 0)}, False),
        ({"kernel_size": 3, "padding": "same"}, False),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, False),
        ({"kernel_size": 1}, False),
    ],
)
def test_a_layer_takes_it_where_it_can(settings, fits):
    """And gives what torch's own layer gives either way."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(**{"in_channels": 64, "out_channels": 48} | settings), nn.Tanh()
    ).double()
    x = torch.randn(20, 64, 12, 12, dtype=torch.float64)
    names = list(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        winograd.convert(model)
        assert list(model.state_dict()) == names
        assert model[0].fits == fits
        assert torch.equal(model(x), expected) == (not fits)
        assert error(model(x), expected) < 1e-14


@pytest.mark.parametrize(
    ("size", "saving", "pays"),
    [
        # 64 (16 (2048 + 64 * 32 + 16 * 64) + 25 * 2048 / 50) / (256 * 25 * 2048): the CNN's second
        # layer, 50 images
        ((50, 32, 16, 16, 64, 5, 2), 0.405, True),
        # its first: 64 (64 (96 + 192 + 512) + 48) / (1024 * 25 * 96)
        ((50, 3, 32, 32, 32, 5, 2), 1.335, False),
        ((50, 64, 8, 8, 64, 3, 1), 0.464, True),
        ((50, 512, 1, 1, 512, 3, 1), 5.126, False),  # 1 x 1 images in tiles of 4 x 4
        # one image: all filters are transformed for its one tile
        ((1, 64, 4, 4, 64, 3, 1), 2.703, False),
    ],
)
def test_where_it_pays(size, saving, pays):
    x, weight, _ = draw(*size[:6])
    assert winograd.Plan.of(x, weight, size[6]).saving == pytest.approx(saving, abs=5e-4)
    assert winograd.pays(x, weight, size[6]) == pays
