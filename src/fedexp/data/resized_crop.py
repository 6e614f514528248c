"""Crop and resize images in batches, as pretrained networks are trained and tested.

The transforms are torchvision's: RandomResizedCrop and RandomHorizontalFlip for training images,
Resize and CenterCrop for test images. An image is resized along each axis by a product with a
matrix of interpolation weights. Every example of a batch can therefore have its own crop, and
`load` also runs under torch.func.vmap. The weights are those of torchvision with antialias=True and
of Pillow. Pillow rounds pixels to integers after resizing; here, pixels are only clipped to
0..max_value.

Images are then normalised with the mean and std of the data set. A pretrained network converts this
normalisation to that of its weights (`fedexp.models.own.Reading`).
"""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.core.errors import require
from fedexp.core.limits import Limit
from fedexp.data.augment import Normalise, Transform

TOP, LEFT, HEIGHT, WIDTH, MIRROR = range(5)  # columns of `draws`; see `ResizedCrop.draw`
TRIES = 10  # number of crops that are drawn to find one that fits into the image, as in torchvision
Side = Annotated[int, Limit("greater than 0 and at most 4096 pixels", lambda v: 0 < v <= 4096)]
Shares = Annotated[
    tuple[float, ...],
    Limit("two numbers 0 < low <= high <= 1", lambda v: len(v) == 2 and 0 < v[0] <= v[1] <= 1),
]
Ratios = Annotated[
    tuple[float, ...],
    Limit("two numbers 0 < low <= high <= 10", lambda v: len(v) == 2 and 0 < v[0] <= v[1] <= 10),
]


def triangle(x: Tensor) -> Tensor:
    """Return the weight of a pixel at a distance of x pixels for bilinear interpolation."""
    return (1 - x.abs()).clamp(min=0)


def cubic(x: Tensor) -> Tensor:
    """Return the weight of a pixel at a distance of x pixels for bicubic interpolation.

    The parameter of the interpolation is a = -1/2.

    """
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


FILTERS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": triangle, "bicubic": cubic}


class ResizedCrop(Transform):
    """Crops that are resized to a square: random for training images, central for test images."""

    size: Side  # height and width of the resized crops
    # height and width to which images are resized before they are cropped; null: the stored size
    base: Side | None
    scale: Shares  # smallest and largest area of a random crop, as a fraction of the image area
    ratio: Ratios  # smallest and largest width / height of a random crop
    flip: bool  # whether to mirror images left to right with probability 1/2
    # length to which the shorter side of test images is resized before their centre is cropped
    test_size: Side
    interpolation: Literal["bilinear", "bicubic"]

    def __post_init__(self) -> None:
        super().__post_init__()
        words = f"at least {self.prefix}size={self.size}"
        require(self.test_size >= self.size, f"{self.prefix}test_size", self.test_size, words)

    @property
    def active(self) -> bool:
        return True

    def based(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the images before the crop: `base` or the stored size."""
        return (height, width) if self.base is None else (self.base, self.base)

    def draw(self, rng: np.random.Generator, n: int, height: int, width: int) -> np.ndarray:
        """Return random crops for `n` examples, int64 [n, 5]: top, left, height, width and mirror.

        The area is uniform in `scale`, and the logarithm of width / height is uniform in `ratio`.
        The first of 10 such crops that fits into the image is used. If none of them fits, the
        largest central crop with an allowed ratio is used. The first rows do not depend on `n`.
        """
        height, width = self.based(height, width)
        drawn = rng.random((n, TRIES + 1, 4))
        area = height * width * (self.scale[0] + np.ptp(self.scale) * drawn[:, :TRIES, 0])
        logs = np.log(self.ratio)
        ratio = np.exp(logs[0] + np.ptp(logs) * drawn[:, :TRIES, 1])
        sides = np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], -1).round()
        fits = np.all((sides > 0) & (sides <= [height, width]), axis=-1)
        first = fits.argmax(1)
        found = sides[np.arange(n), first].astype(np.int64)
        rest = np.array([height, width]) - found
        corner = (drawn[np.arange(n), first, 2:] * (rest + 1)).astype(np.int64)
        lost = ~np.any(fits, axis=1)
        found[lost] = self.largest(height, width)
        corner[lost] = (np.array([height, width]) - self.largest(height, width)) // 2
        mirror = drawn[:, TRIES, :1] < (0.5 if self.flip else 0)
        return np.concatenate([corner, found, mirror.astype(np.int64)], 1)

    def largest(self, height: int, width: int) -> np.ndarray:
        """Return the (height, width) of the largest crop whose ratio is allowed."""
        low, high = self.ratio
        ratio = min(max(width / height, low), high)
        return np.array([min(height, round(width / ratio)), min(width, round(height * ratio))])

    def load(
        self,
        images: Tensor,
        idx: Tensor,
        draws: Tensor | None,
        normalise: Normalise,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return the examples `images[idx]` with random crops or, without draws, central crops.

        images: uint8 [N, H, W, C].
        idx: int64 [..., B].
        draws: int64 [..., B, 5] from `draw`.

        Returns a tensor of type `dtype` and shape [..., B, C, size, size]. It is computed in
        float64 if `dtype` is float64, and in float32 otherwise.
        """
        work = dtype if dtype == torch.float64 else torch.float32
        pixels = images.flatten(1).index_select(0, idx.flatten()).to(work)
        pixels = pixels.view(*idx.shape, *images.shape[1:]).movedim(-1, -3)
        _, height, width, _ = images.shape
        rows, cols = self.matrices(height, width, draws, images.device, work)
        x = (rows @ pixels @ cols.mT).clamp(0, normalise.max_value)
        mean, std = (x.new_tensor(v).view(-1, 1, 1) for v in (normalise.mean, normalise.std))
        return ((x / normalise.max_value - mean) / std).to(dtype)

    def matrices(
        self,
        height: int,
        width: int,
        draws: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return the matrices that crop and resize rows [..., size, H] and columns [..., size, W].

        height, width: the stored size of the images. draws: as in `load`.

        """
        based, found = self.based(height, width), []
        for axis, stored in enumerate((height, width)):
            side = based[axis]
            if draws is None:
                resized = int(self.test_size * side / min(based))
                border = round((resized - self.size) / 2)
                matrix = self.whole(resized, side, device, dtype)[border : border + self.size]
            else:
                start, length = (draws[..., column + axis, None, None] for column in (TOP, HEIGHT))
                matrix = self.weigh(start, length, self.size, side, dtype)
            found.append(matrix @ self.whole(side, stored, device, dtype))
        rows, cols = found
        if draws is None:
            return rows, cols
        mirrored = draws[..., MIRROR, None, None] > 0
        return rows[..., None, :, :], torch.where(mirrored, cols.flip(-2), cols)[..., None, :, :]

    def whole(self, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the weights [outputs, inputs] that resize a row of `inputs` pixels."""
        start = torch.zeros((1, 1), dtype=torch.int64, device=device)
        return self.weigh(start, start + inputs, outputs, inputs, dtype)

    def weigh(
        self, start: Tensor, length: Tensor, outputs: int, inputs: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the weights [..., outputs, inputs] that resize a part of a row of pixels.

        If the part becomes smaller, the filter is stretched by the same factor (antialiasing).
        Pixels outside the part have weight 0.

        start, length: int64 [..., 1, 1], the first pixel of the part and its number of pixels.
        """
        output = torch.arange(outputs, device=start.device, dtype=dtype)
        pixel = torch.arange(inputs, device=start.device, dtype=dtype)
        step = length.to(dtype) / outputs
        centre = start + (output[:, None] + 0.5) * step
        distance = (pixel + 0.5 - centre) / step.clamp(min=1)
        inside = (pixel >= start) & (pixel < start + length)
        weights = FILTERS[self.interpolation](distance) * inside
        return weights / weights.sum(-1, keepdim=True)
