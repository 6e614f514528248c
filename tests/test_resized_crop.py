"""Random and central crops compared with torchvision's transforms, image by image."""

from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tv

from fedexp.core.errors import ConfigError
from fedexp.data.augment import Normalise
from fedexp.data.resized_crop import ResizedCrop
from fedexp.data.types import ImageData

NORMALISE = Normalise(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
VALUES: dict[str, Any] = {"size": 12, "base": None, "scale": (0.08, 1.0), "ratio": (0.75, 4 / 3)}
VALUES |= {"flip": True, "test_size": 16, "interpolation": "bicubic"}
MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
GENERATOR = np.random.default_rng


def crop(**values: Any) -> ResizedCrop:
    return ResizedCrop(**VALUES | values)


def make_images(n: int, height: int = 24, width: int = 24) -> torch.Tensor:
    pixels = GENERATOR(1).integers(0, 256, (n, height, width, 3), dtype=np.uint8)
    return torch.from_numpy(pixels)


def loaded(images: torch.Tensor, draws: torch.Tensor | None, aug: ResizedCrop) -> torch.Tensor:
    return aug.load(images, torch.arange(len(images)), draws, NORMALISE, torch.float64)


def resized(x: torch.Tensor, size: Any, mode: str) -> torch.Tensor:
    return tv.resize(x, size, MODES[mode], antialias=True)


def finished(x: torch.Tensor) -> torch.Tensor:
    return tv.normalize(x.clamp(0, 255) / 255, NORMALISE.mean, NORMALISE.std)


def slow_train(image: torch.Tensor, draw: torch.Tensor, aug: ResizedCrop) -> torch.Tensor:
    """Apply torchvision's functions to one image, in float64."""
    top, left, height, width, mirror = draw.tolist()
    x = image.permute(2, 0, 1).double()
    if aug.base is not None:
        x = resized(x, [aug.base, aug.base], aug.interpolation)
    x = resized(tv.crop(x, top, left, height, width), [aug.size] * 2, aug.interpolation)
    return finished(tv.hflip(x) if mirror else x)


def slow_test(image: torch.Tensor, aug: ResizedCrop) -> torch.Tensor:
    x = image.permute(2, 0, 1).double()
    if aug.base is not None:
        x = resized(x, [aug.base, aug.base], aug.interpolation)
    return finished(tv.center_crop(resized(x, aug.test_size, aug.interpolation), [aug.size]))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("base", [None, 30])
@pytest.mark.parametrize(("height", "width"), [(24, 24), (20, 31)])
def test_random_crops_equal_torchvision(interpolation, base, height, width):
    aug, images = crop(interpolation=interpolation, base=base), make_images(40, height, width)
    draws = torch.from_numpy(aug.draw(GENERATOR(0), 40, height, width))
    expected = [slow_train(x, d, aug) for x, d in zip(images, draws, strict=True)]
    assert {True, False} == set((draws[:, 4] > 0).tolist())
    torch.testing.assert_close(
        loaded(images, draws, aug), torch.stack(expected), rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("base", [None, 30])
@pytest.mark.parametrize(("height", "width"), [(24, 24), (20, 31), (31, 20)])
@pytest.mark.parametrize("test_size", [12, 15, 40])
def test_central_crops_equal_torchvision(interpolation, base, height, width, test_size):
    aug = crop(interpolation=interpolation, base=base, test_size=test_size)
    images = make_images(3, height, width)
    expected = torch.stack([slow_test(x, aug) for x in images])
    torch.testing.assert_close(loaded(images, None, aug), expected, rtol=0, atol=1e-11)


def draw_like_torchvision(n: int, height: int, width: int, aug: ResizedCrop) -> np.ndarray:
    image = torch.zeros(3, height, width)
    torch.manual_seed(0)
    parameters = transforms.RandomResizedCrop.get_params
    return np.array([parameters(image, list(aug.scale), list(aug.ratio)) for _ in range(n)])


def test_crops_have_the_distribution_of_torchvision():
    height, width = 16, 60
    aug, n = crop(), 5_000
    ours = aug.draw(GENERATOR(0), n, height, width)
    theirs = draw_like_torchvision(n, height, width, aug)
    for column in range(4):
        edges = np.arange(max(height, width) + 2)
        both = [np.histogram(draws[:, column], edges)[0] / n for draws in (ours, theirs)]
        # the largest distance of two empirical distributions of n values: below 1.63 sqrt(2 / n)
        # with probability 0.99
        assert abs(np.cumsum(both[0] - both[1])).max() < 1.63 * (2 / n) ** 0.5
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:4] <= [height, width]).all()


@pytest.mark.parametrize(
    ("height", "width", "crop_of"),
    [
        # no crop of at least 99 % of a long image has a ratio from 3/4 to 4/3
        (10, 100, [0, 43, 10, 13]),  # 13 = round(10 * 4 / 3), (100 - 13) // 2 = 43
        (100, 10, [43, 0, 13, 10]),  # 13 = round(10 / (3 / 4)), (100 - 13) // 2 = 43
    ],
)
def test_crop_is_central_if_none_fits(height, width, crop_of):
    aug = crop(scale=(0.99, 1.0), flip=False)
    assert aug.draw(GENERATOR(0), 2, height, width).tolist() == [[*crop_of, 0]] * 2
    expected = draw_like_torchvision(1, height, width, aug)
    assert expected.tolist() == [crop_of]


def test_draws_mirror_half_and_do_not_depend_on_the_number_of_examples():
    few, many = (crop().draw(GENERATOR(3), n, 24, 24) for n in (5, 10_000))
    assert few.tolist() == many[:5].tolist()
    assert abs(many[:, 4].mean() - 0.5) < 0.02  # four standard deviations
    assert crop(flip=False).draw(GENERATOR(0), 100, 24, 24)[:, 4].sum() == 0


def test_crops_under_vmap_equal_crops_without_vmap():
    aug, images = crop(), make_images(10)
    idx = torch.arange(10).view(2, 5)
    draws = torch.from_numpy(aug.draw(GENERATOR(0), 10, 24, 24)).view(2, 5, 5)
    plain = aug.load(images, idx, draws, NORMALISE)
    batched = torch.func.vmap(lambda i, d: aug.load(images, i, d, NORMALISE))(idx, draws)
    assert plain.shape == (2, 5, 3, 12, 12)
    torch.testing.assert_close(batched, plain, rtol=0, atol=1e-5)
    batched = torch.func.vmap(lambda i: aug.load(images, i, None, NORMALISE))(idx)
    plain = aug.load(images, idx, None, NORMALISE)
    torch.testing.assert_close(batched, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
def test_crops_in_other_dtypes_are_close_to_float64(dtype, tolerance):
    aug, images = crop(), make_images(10)
    draws = torch.from_numpy(aug.draw(GENERATOR(0), 10, 24, 24))
    found = aug.load(images, torch.arange(10), draws, NORMALISE, dtype)
    assert found.dtype == dtype
    expected = loaded(images, draws, aug)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


def test_data_have_the_size_of_the_crops():
    x, y = make_images(4), torch.zeros(4, dtype=torch.int64)
    data = ImageData("x", x, y, x, y, ("a",), NORMALISE.mean, NORMALISE.std, crop=crop())
    assert data.shape == (3, 12, 12)
    assert data.image_size == (24, 24)
    index, draws = torch.arange(4), torch.from_numpy(crop().draw(GENERATOR(0), 4, 24, 24))
    found = data.inputs(x, index, draws, crop(), torch.float64)
    assert torch.equal(found, loaded(x, draws, crop()))
    assert torch.equal(data.inputs(x, index, None, crop(), torch.float64), loaded(x, None, crop()))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"test_size": 11}, "at least dataset.augmentation.size=12"),
        ({"scale": (0.9, 0.8)}, "two numbers 0 < low <= high <= 1"),
    ],
)
def test_invalid_values_are_rejected(values, words):
    with pytest.raises(ConfigError, match=words):
        crop(**values)
