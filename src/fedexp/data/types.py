"""What a loaded data set is: tensors that can live on a device."""

from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True)
class ImageData:
    """A decoded image data set.

    Pixels are integers 0..max_value in channels-last layout; normalised as (pixel / max_value - mean) / std.
    """

    name: str
    x_train: torch.Tensor  # uint8 [N, height, width, channels]
    y_train: torch.Tensor  # int64 [N]
    x_test: torch.Tensor  # uint8 [M, height, width, channels]
    y_test: torch.Tensor  # int64 [M]
    classes: tuple[str, ...]  # names; index = label
    mean: tuple[float, ...]  # per channel, on the scale 0..1
    std: tuple[float, ...]
    max_value: int = 255
    owners: np.ndarray | None = None  # int64 [N]: natural client of each training example (LEAF), numbered from 0

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width), the order in which models see an image."""
        _, height, width, channels = self.x_train.shape
        return channels, height, width

    def to(self, device: torch.device | str) -> "ImageData":
        move = {k: getattr(self, k).to(device) for k in ("x_train", "y_train", "x_test", "y_test")}
        return replace(self, **move)
