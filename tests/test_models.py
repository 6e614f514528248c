"""Built-in models: sizes as in the papers' code, exact equivalences, and what the engines rely
on."""

import importlib
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.func import grad, vmap

from fedexp.core.errors import ConfigError
from fedexp.models.cnn import CNN
from fedexp.models.pooling import ScatteredMaxPool, pool
from fedexp.models.resnet import TorchvisionResNet
from toy_federation import random

CONF = Path(__file__).parents[1] / "conf" / "model"
# which test_text.py and test_own_models.py test
ELSEWHERE = {"textcnn", "torchvision", "timm"}
OPTIONS = sorted({path.stem for path in CONF.glob("*.yaml")} - ELSEWHERE)
CIFAR, MNIST, DIGITS, TINY = (3, 32, 32), (1, 28, 28), (1, 8, 8), (3, 64, 64)


def load(option):
    """Return the model of a yaml file, checked against its class."""
    node = OmegaConf.load(CONF / f"{option}.yaml")
    module, _, name = node.pop("_target_").rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    assert set(node) == {field.name for field in fields(cls)}
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), node))


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("option", "shape", "classes", "count"),
    [
        ("cnn", CIFAR, 10, 2_156_490),
        ("cnn", MNIST, 10, 1_663_370),
        # 8x8: (1*25+1)*32 + (32*25+1)*64 = 832 + 51,264; flat 64*2*2 = 256: 257*512 = 131,584;
        # 513*10 = 5,130
        ("cnn", DIGITS, 10, 188_810),
        ("cnn_3fc", CIFAR, 10, 2_218_314),
        ("t_cnn", CIFAR, 10, 878_538),
        ("resnet10", CIFAR, 10, 4_903_242),
        ("resnet56_bottleneck", CIFAR, 10, 591_322),
        ("resnet18", CIFAR, 10, 11_181_642),
        ("resnet50", CIFAR, 100, 23_712_932),
        # two input channels fewer in the 7x7 stem
        ("resnet18", MNIST, 10, 11_181_642 - 2 * 64 * 49),
    ],
)
def test_models_have_the_published_numbers_of_parameters(option, shape, classes, count):
    with torch.device("meta"):  # sizes only, no initialisation
        assert parameters(load(option).build(shape, classes)) == count


@pytest.mark.parametrize(
    ("option", "shape", "features"),
    [
        ("cnn", (3, 20, 32), 512),
        ("t_cnn", MNIST, 512),
        ("resnet10", TINY, 512),
        ("resnet50", CIFAR, 2048),
    ],
)
def test_logits_are_the_classifier_of_the_features(option, shape, features):
    model = load(option).build(shape, 7)
    out = model(torch.randn(3, *shape))
    assert out.features.shape == (3, features)
    assert out.logits.shape == (3, 7)
    torch.testing.assert_close(out.logits, model.classifier(out.features))


@pytest.mark.parametrize("option", ["cnn", "cnn_3fc"])
def test_cnn_equals_relu_before_pooling(option):
    """The textbook order: convolution, ReLU, max-pooling."""
    model = load(option).build(CIFAR, 10).double()
    x = torch.randn(4, *CIFAR, dtype=torch.float64)
    z = x
    for convolution in model.convolutions:
        z = F.max_pool2d(F.relu(convolution(z)), kernel_size=2, stride=2)
    z = z.reshape(4, -1)
    for layer in model.hidden:
        z = F.relu(layer(z))
    out = model(x)
    assert torch.equal(out.features, z)
    assert torch.equal(out.logits, model.classifier(z))


# slow; same class as 18
@pytest.mark.parametrize("option", [option for option in OPTIONS if option != "resnet50"])
def test_mixes_examples_says_whether_examples_affect_each_other(option):
    """In training mode, an example's output depends on the other examples exactly if
    `mixes_examples` is true."""
    spec = load(option)
    model = spec.build(CIFAR, 3).double().train()
    x = torch.randn(3, *CIFAR, dtype=torch.float64)
    other = torch.cat([x[:1], torch.randn(2, *CIFAR, dtype=torch.float64)])
    same = torch.allclose(model(x).logits[0], model(other).logits[0], rtol=1e-9, atol=1e-12)
    assert same is not spec.mixes_examples


def test_cnn_applies_batch_norm_before_pooling():
    """Batch norm is between each convolution, which has no bias, and its pooling. It uses batch
    statistics in training and running statistics in evaluation."""
    spec = CNN(channels=(3, 4), kernel=3, padding=1, hidden=(5,), batch_norm=True)
    assert spec.mixes_examples
    model = spec.build((1, 8, 8), 3).double().train()
    x = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = x
        for convolution in model.convolutions:
            assert convolution.bias is None
            maps = F.conv2d(expected, convolution.weight, padding=1)
            expected = F.relu(F.max_pool2d(F.batch_norm(maps, None, None, training=True), 2))
        expected = model.classifier(F.relu(model.hidden[0](expected.flatten(1))))
        torch.testing.assert_close(model(x).logits, expected)
        first = F.conv2d(x, model.convolutions[0].weight, padding=1)
        torch.testing.assert_close(model.norms[0].running_mean, 0.1 * first.mean((0, 2, 3)))
        assert not torch.allclose(model.eval()(x).logits, expected)


def test_resnet10_keeps_no_buffers_and_uses_batch_statistics_in_evaluation():
    model = load("resnet10").build(CIFAR, 10).double()
    assert not list(model.buffers())
    x = torch.randn(4, *CIFAR, dtype=torch.float64)
    torch.testing.assert_close(model.train()(x).logits, model.eval()(x).logits)


def test_resnet10_block_equals_the_residual_equation():
    block = load("resnet10").build(CIFAR, 10).double().stages[1]
    x = torch.randn(2, 64, 8, 8, dtype=torch.float64)

    def convolve(layer, x, **kwargs):
        z = F.conv2d(x, layer[0].weight, **kwargs)
        return F.batch_norm(z, None, None, training=True)

    z = convolve(block.second, F.relu(convolve(block.first, x, stride=2, padding=1)), padding=1)
    torch.testing.assert_close(block(x), F.relu(z + convolve(block.shortcut, x, stride=2)))


def test_resnet18_equals_torchvision():
    from torchvision.models import resnet18

    torch.manual_seed(3)
    model = load("resnet18").build(CIFAR, 10).eval()
    torch.manual_seed(3)
    reference = resnet18(weights=None, num_classes=10).eval()
    x = torch.randn(2, *CIFAR)
    torch.testing.assert_close(model(x).logits, reference(x))
    assert parameters(model) == parameters(reference)
    assert len(list(model.buffers())) == len(list(reference.buffers())) > 0


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("t_cnn", DIGITS, "at least 16 x 16 pixels, but the images have 8 x 8"),
        ("cnn", (1, 3, 8), "at least 4 x 4 pixels, but the images have 3 x 8"),
    ],
)
def test_too_small_images_are_rejected(spec, shape, message):
    with pytest.raises(ConfigError, match=message):
        load(spec).build(shape, 10)


VALID = {"channels": (32, 64), "kernel": 5, "padding": 2, "hidden": (512,)}


@pytest.mark.parametrize(
    ("cls", "values", "key"),
    [
        (CNN, VALID | {"padding": 5}, "model.padding"),
        (TorchvisionResNet, {"depth": 20, "weights": None}, "model.depth"),
        (
            TorchvisionResNet,
            {"depth": 18, "weights": "nowhere.pth"},
            "model.weights=nowhere.pth.*must be a file",
        ),
    ],
)
def test_invalid_options_are_rejected(cls, values, key):
    with pytest.raises(ConfigError, match=key):
        cls(**values)


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 7)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_pooling_without_gradient_equals_pytorch(size, layout):
    """Bit for bit equal to pooling with a gradient, including NaN."""
    x = random(3, 8, *size).float()
    x[0, 0, 0, 0] = torch.nan
    x = x.to(memory_format=layout)
    with torch.no_grad():
        actual = pool(x)
    expected = pool(x.requires_grad_()).detach()
    assert expected.isnan().sum() == 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def pool_by_scatter(x):
    return ScatteredMaxPool.apply(x)[0]


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_gradient_of_pooling_by_scatter_equals_pytorch(size, layout):
    """Bit for bit, also with equal values in a window, and under vmap."""
    x = torch.randint(-2, 3, (5, 3, 2, *size)).double()
    weight = random(3, 2, size[0] // 2, size[1] // 2)

    def gradient(function):
        return grad(lambda image: (function(image) * weight).sum())

    for one in x:
        one = one.to(memory_format=layout)
        expected = gradient(partial(F.max_pool2d, kernel_size=2))(one)
        assert torch.equal(gradient(pool_by_scatter)(one), expected)
    expected = vmap(gradient(partial(F.max_pool2d, kernel_size=2)))(x)
    assert torch.equal(vmap(gradient(pool_by_scatter))(x), expected)


def test_second_derivatives_of_pooling_by_scatter_equal_pytorch():
    x = random(4, 3, 2, 6, 5)

    def second(function):
        first = grad(lambda image: (function(image) ** 3).sum())
        return vmap(grad(lambda image: (first(image) ** 2).sum()))(x)

    expected = second(partial(F.max_pool2d, kernel_size=2))
    torch.testing.assert_close(second(pool_by_scatter), expected)
