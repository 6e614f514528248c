"""Augmentation and normalisation compared with torchvision's transforms and with loops."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tv

from fedexp.core.errors import ConfigError
from fedexp.data.augment import (
    CX,
    CY,
    DRAWS,
    DX,
    DY,
    FLIP,
    Augmentation,
    Normalise,
    load_batch,
)

NORMALISE = Normalise(mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
OFF: dict[str, Any] = {"crop_padding": 0, "padding_mode": "zero", "flip": False}
OFF |= {"cutout": 0, "rotation": 0.0}
CIFAR: dict[str, Any] = {**OFF, "crop_padding": 4, "flip": True, "cutout": 16}


def make_images(n: int, side: int = 32, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, (n, side, side, channels), generator=generator).to(torch.uint8)


def slow(
    image: torch.Tensor, draw: torch.Tensor, aug: Augmentation, normalise: Normalise
) -> torch.Tensor:
    """Apply torchvision's functional transforms to one example in the published order; return
    float32 [C, H, W].
    """
    height, width, _ = image.shape
    dy, dx, flip, cy, cx, angle = draw.tolist()
    x = image.permute(2, 0, 1)
    if aug.crop_padding:
        x = tv.pad(
            x,
            [aug.crop_padding] * 4,
            padding_mode="constant" if aug.padding_mode == "zero" else "reflect",
        )
        x = tv.crop(x, dy, dx, height, width)
    if flip:
        x = tv.hflip(x)
    if aug.rotation:
        x = tv.rotate(x, angle / 1000, InterpolationMode.NEAREST)
    x = tv.normalize(x.float() / normalise.max_value, normalise.mean, normalise.std)
    if aug.cutout:
        half = aug.cutout // 2
        for row, col in itertools.product(range(height), range(width)):
            inside = [cy - half <= row < cy - half + aug.cutout]
            inside += [cx - half <= col < cx - half + aug.cutout]
            if all(inside):
                x[:, row, col] = 0
    return x


def one_by_one(images: torch.Tensor, draws: torch.Tensor, aug: Augmentation) -> torch.Tensor:
    return torch.stack([slow(x, d, aug, NORMALISE) for x, d in zip(images, draws, strict=True)])


def fast(
    images: torch.Tensor, draws: torch.Tensor, aug: Augmentation, **kwargs: Any
) -> torch.Tensor:
    return load_batch(images, torch.arange(len(images)), draws, aug, NORMALISE, **kwargs)


@pytest.mark.parametrize("padding_mode", ["zero", "reflect"])
def test_crop_and_flip_equal_torchvision(padding_mode):
    aug = Augmentation(**{**OFF, "crop_padding": 4, "padding_mode": padding_mode, "flip": True})
    positions = list(itertools.product(range(9), range(9), range(2)))
    images = make_images(len(positions), side=12)
    draws = torch.zeros(len(positions), DRAWS, dtype=torch.int64)
    draws[:, [DY, DX, FLIP]] = torch.tensor(positions)
    expected = one_by_one(images, draws, aug)
    torch.testing.assert_close(fast(images, draws, aug), expected, rtol=0, atol=1e-5)


def test_cutout_at_every_position_is_a_clipped_square():
    aug = Augmentation(**{**OFF, "cutout": 6})
    centres = list(itertools.product(range(9), range(9)))
    images = make_images(len(centres), side=9)
    draws = torch.zeros(len(centres), DRAWS, dtype=torch.int64)
    draws[:, [CY, CX]] = torch.tensor(centres)
    out = fast(images, draws, aug)
    expected = one_by_one(images, draws, aug)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    # centre (0, 0), side 6: rows and columns -3..2; only 0..2 are inside the image
    assert (out[0, :, :3, :3] == 0).all()
    assert (out[0] == 0).sum() == 3 * 9


@pytest.mark.parametrize(
    ("options", "side"),
    [
        ({**OFF, "rotation": 180.0}, 28),
        ({**OFF, "rotation": 15.0}, 33),
        ({**CIFAR, "rotation": 15.0}, 32),  # the hole of FedNTD: eight rows up, seven down
    ],
)
def test_rotation_and_all_transforms_equal_torchvision(options, side):
    aug, images = Augmentation(**options), make_images(40, side=side)
    draws = torch.from_numpy(aug.draw(np.random.default_rng(3), 40, side, side))
    expected = one_by_one(images, draws, aug)
    different = (fast(images, draws, aug) - expected).abs().amax(1) > 1e-4
    # two float32 formulas may round a source position on an edge differently
    assert different.float().mean() < 0.003


@pytest.mark.parametrize(
    "options", [CIFAR, {**CIFAR, "padding_mode": "reflect", "rotation": 10.0}, OFF]
)
def test_vmap_equals_a_loop_and_a_leading_dimension(options):
    aug, images = Augmentation(**options), make_images(30)
    rng = np.random.default_rng(0)
    idx = torch.from_numpy(rng.integers(0, 30, (4, 7)))
    draws = torch.from_numpy(aug.draw(rng, 28, 32, 32)).view(4, 7, DRAWS)

    def load(i: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return load_batch(images, i, d, aug, NORMALISE)

    loop = torch.stack([load(i, d) for i, d in zip(idx, draws, strict=True)])
    assert torch.equal(torch.func.vmap(load)(idx, draws), loop)
    assert torch.equal(load(idx, draws), loop)
    plain = torch.func.vmap(lambda i: load_batch(images, i, None, None, NORMALISE))(idx)
    assert torch.equal(plain, load_batch(images, idx, None, None, NORMALISE))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_without_augmentation_equal_torchvision(channels):
    normalise = Normalise(NORMALISE.mean[:channels], NORMALISE.std[:channels], max_value=16)
    images = make_images(6, side=8, channels=channels) % 17
    idx, draws = torch.tensor([4, 0, 4]), torch.zeros(3, DRAWS, dtype=torch.int64)
    expected = tv.normalize(images[idx].permute(0, 3, 1, 2) / 16, normalise.mean, normalise.std)
    for given in ((None, None), (draws, Augmentation(**OFF))):
        torch.testing.assert_close(load_batch(images, idx, *given, normalise), expected)


def test_float32_and_bfloat16_are_close_to_float64():
    aug, images = Augmentation(**CIFAR), make_images(5)
    draws = torch.from_numpy(aug.draw(np.random.default_rng(0), 5, 32, 32))
    exact = fast(images, draws, aug, dtype=torch.float64)
    assert exact.dtype == torch.float64
    # bfloat16: half a unit in 8 bits
    for dtype, tolerance in [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)]:
        out = fast(images, draws, aug, dtype=dtype)
        assert out.dtype == dtype
        assert out.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_reflecting_more_than_the_image_is_rejected():
    aug = Augmentation(**{**OFF, "crop_padding": 8, "padding_mode": "reflect"})
    with pytest.raises(ConfigError, match="crop_padding=8: must be less than 8"):
        aug.draw(np.random.default_rng(0), 1, 8, 8)
