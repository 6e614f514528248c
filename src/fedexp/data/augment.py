"""Augment and normalise image batches with a single gather from the stored images.

The random numbers for a round are drawn in advance (`Augmentation.draw`). `load_batch` is therefore
a pure function and also runs under torch.func.vmap. The result is the same as applying, in this
order, torchvision's RandomCrop(padding), RandomHorizontalFlip, RandomRotation(nearest, fill 0),
ToTensor and Normalize, and then Cutout (DeVries and Taylor, arXiv 1708.04552).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
import torch

from fedexp.core.errors import require
from fedexp.core.limits import Checked, Limit

DY, DX, FLIP, CY, CX, ANGLE = range(6)  # columns of `draws`; see `Augmentation.draw`
DRAWS = 6
UNITS_PER_DEGREE = 1000  # angles are drawn as integers


PixelCount = Annotated[int, Limit("at least 0 and at most 4096 pixels", lambda v: 0 <= v <= 4096)]


class Draws(ABC):
    """Source of random numbers for training examples: Augmentation, ResizedCrop or DropoutKeys.

    A new row of numbers is drawn each time an example is used.
    """

    @property
    @abstractmethod
    def active(self) -> bool:
        """Return whether any random numbers are drawn."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, n: int, height: int, width: int) -> np.ndarray:
        """Return the random numbers for `n` stored images of the given size, int64 [n, ...].

        The first rows do not depend on `n`.
        """


class Transform(Checked, Draws, prefix="dataset.augmentation."):
    """Base class of random changes of training images."""


class Augmentation(Transform):
    """Random crop, flip, rotation and cutout of training images; each can be turned off."""

    # pixels added on each side before a random crop to the original size; 0 = off
    crop_padding: PixelCount
    padding_mode: Literal["zero", "reflect"]  # zero: padded pixels are 0 before normalisation
    flip: bool  # whether to mirror images left to right with probability 1/2
    # side length of a random square that is set to 0 after normalisation; 0 = off
    cutout: PixelCount
    # largest angle in degrees; angles are drawn uniformly from -rotation to rotation; 0 = off
    rotation: Annotated[float, Limit("from 0 to 180 degrees", lambda v: 0 <= v <= 180)]

    @property
    def active(self) -> bool:
        return bool(self.crop_padding or self.flip or self.cutout or self.rotation)

    def draw(self, rng: np.random.Generator, n: int, height: int, width: int) -> np.ndarray:
        """Return random numbers for `n` examples, int64 [n, DRAWS].

        The columns contain:

        - the crop offsets dy and dx, from 0 to 2 * crop_padding
        - flip, 0 or 1
        - the cutout centre cy and cx, anywhere in the image
        - the angle in thousandths of a degree, from -rotation to rotation

        If a change is turned off, its columns are 0. The first rows do not depend on `n`.
        """
        side = min(height, width)
        fits = self.padding_mode == "zero" or self.crop_padding < side
        key = f"{self.prefix}crop_padding"
        require(fits, key, self.crop_padding, f"less than {side} with padding_mode=reflect")
        offset, angle = 2 * self.crop_padding, round(self.rotation * UNITS_PER_DEGREE)
        centre = (height - 1, width - 1) if self.cutout else (0, 0)
        high = np.array([offset, offset, int(self.flip), *centre, angle])
        low = np.array([0, 0, 0, 0, 0, -angle])
        return rng.integers(low, high, size=(n, DRAWS), dtype=np.int64, endpoint=True)


@dataclass(frozen=True)
class Normalise:
    """The constants for normalising each channel: (pixel / max_value - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_value: int = 255

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # convert to tuples, which are hashable
            object.__setattr__(self, name, tuple(float(v) for v in getattr(self, name)))


@lru_cache(maxsize=64)
def _scale_and_shift(
    normalise: Normalise, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `scale` and `shift`, each [width * C], to normalise pixels as `pixel * scale + shift`.

    The values for the C channels are repeated for all pixels of a row, because long inner loops are
    faster.
    """
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (normalise.mean, normalise.std))
    constants = torch.stack([1 / (normalise.max_value * std), -mean / std])
    scale, shift = constants.repeat(1, width).to(device, dtype)
    return scale, shift


def load_batch(
    images: torch.Tensor,
    idx: torch.Tensor,
    draws: torch.Tensor | None,
    augmentation: Augmentation | None,
    normalise: Normalise,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the examples `images[idx]`, augmented and normalised.

    The function is pure and can be vmapped over `idx` and `draws`.

    images: uint8 [N, H, W, C].
    idx: int64 [..., B].
    draws: int64 [..., B, DRAWS] from `Augmentation.draw`. If `draws` or `augmentation` is None,
    images are only normalised.

    Returns a tensor of type `dtype` and shape [..., B, C, H, W] in channels-last memory format. It
    is computed in float64 if `dtype` is float64, and in float32 otherwise.
    """
    _, height, width, channels = images.shape
    work = dtype if dtype == torch.float64 else torch.float32
    scale, shift = _scale_and_shift(normalise, width, work, images.device)
    if draws is None or augmentation is None or not augmentation.active:
        pixels = (
            images.flatten(1)
            .index_select(0, idx.flatten())
            .view(*idx.shape, height, width * channels)
        )
        x = pixels.to(work).mul_(scale).add_(shift)
    else:
        rows, cols, inside = _source_positions(draws, augmentation, height, width)
        flat = (idx[..., None, None] * height + rows) * width + cols  # [..., B, H, W]
        pixels = images.flatten(0, 2).index_select(0, flat.flatten())
        x = pixels.view(*idx.shape, height, width * channels).to(work).mul_(scale)
        for mask in inside:
            # padded pixels are 0 before normalisation
            x = x.mul_(_per_channel(mask, channels).to(work))
        x = x.add_(shift)
        if augmentation.cutout:
            rows, cols = _cutout_square(draws, augmentation.cutout, height, width)
            x = x.mul_(1 - rows.to(work) * _per_channel(cols, channels).to(work))
    return x.unflatten(-1, (width, channels)).movedim(-1, -3).to(dtype)


def _source_positions(
    draws: torch.Tensor, augmentation: Augmentation, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return (rows, columns, masks) of the stored pixels that the output pixels are copied from.

    Each mask is 1 where the source lies inside the image. The output is
    rotate(flip(crop(pad(image)))), so each position is traced back through the rotation, the flip
    and the crop. All shapes broadcast to [..., B, H, W].
    """
    dy, dx, flip = (draws[..., k, None, None] for k in (DY, DX, FLIP))
    rows = torch.arange(height, device=draws.device)[:, None]
    cols = torch.arange(width, device=draws.device)[None, :]
    inside = []
    if augmentation.rotation:
        rows, cols = _rotate(rows, cols, draws[..., ANGLE, None, None], height, width)
        inside += [_within(rows, height) & _within(cols, width)]
        rows, cols = rows.clamp(0, height - 1), cols.clamp(0, width - 1)
    if augmentation.flip:
        cols = cols + flip * (width - 1 - 2 * cols)
    if augmentation.crop_padding:
        rows, cols = rows + dy - augmentation.crop_padding, cols + dx - augmentation.crop_padding
        if augmentation.padding_mode == "reflect":
            rows, cols = _reflect(rows, height), _reflect(cols, width)
        else:
            inside += [_within(rows, height), _within(cols, width)]
            rows, cols = rows.clamp(0, height - 1), cols.clamp(0, width - 1)
    return rows, cols, inside


def _rotate(
    rows: torch.Tensor, cols: torch.Tensor, angle: torch.Tensor, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the source rows and columns of a counter-clockwise rotation about the image centre.

    The positions are rounded to the nearest pixel and may lie outside the image.
    """
    radians = angle.to(torch.float32) * (torch.pi / 180 / UNITS_PER_DEGREE)
    sin, cos = radians.sin(), radians.cos()
    y, x = rows - (height - 1) / 2, cols - (width - 1) / 2
    source_y, source_x = sin * x + cos * y + (height - 1) / 2, cos * x - sin * y + (width - 1) / 2
    return source_y.round().long(), source_x.round().long()


def rotate_images(images: torch.Tensor, degrees: float) -> torch.Tensor:
    """Return images [n, height, width, channels] rotated counter-clockwise about their centre.

    Nearest-neighbour interpolation is used. Pixels that come from outside the image are 0.
    """
    _, height, width, _ = images.shape
    angle = torch.tensor(degrees * UNITS_PER_DEGREE)
    rows, cols = _rotate(
        torch.arange(height)[:, None], torch.arange(width)[None, :], angle, height, width
    )
    inside = (_within(rows, height) & _within(cols, width))[..., None]
    return images[:, rows.clamp(0, height - 1), cols.clamp(0, width - 1)] * inside.to(images.dtype)


def _within(position: torch.Tensor, size: int) -> torch.Tensor:
    return (position >= 0) & (position < size)


def _reflect(position: torch.Tensor, size: int) -> torch.Tensor:
    """Mirror positions outside an image at its border pixels: -1 -> 1, size -> size - 2."""
    return (size - 1) - ((size - 1) - position.abs()).abs()


def _per_channel(mask: torch.Tensor, channels: int) -> torch.Tensor:
    """Repeat each element of a mask for all channels, [..., W] -> [..., W * channels].

    A mask whose last dimension has size 1 is returned unchanged, because it broadcasts.
    """
    if mask.shape[-1] == 1:
        return mask
    return mask[..., None].expand(*mask.shape, channels).flatten(-2)


def _cutout_square(
    draws: torch.Tensor, side: int, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of the rows [..., B, H, 1] and the columns [..., B, 1, W] of cutout squares.

    The square starts at row cy - side // 2 and column cx - side // 2.
    """
    first_row, first_col = (draws[..., k, None, None] - side // 2 for k in (CY, CX))
    rows = _within(torch.arange(height, device=draws.device)[:, None] - first_row, side)
    cols = _within(torch.arange(width, device=draws.device)[None, :] - first_col, side)
    return rows, cols
