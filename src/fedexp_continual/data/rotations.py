"""Create tasks from one image data set: each task rotates all images by a different angle.

This follows the MNIST rotations of Lopez-Paz and Ranzato (NeurIPS 2017, section 4). Each image is
used either for training in all tasks or for testing in all tasks, so no model is trained on a
rotated version of a test image. The images of the validation set are separated in the same way
(fedexp.training.division).
"""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch

from fedexp.core.errors import ConfigError
from fedexp.core.limits import Limit
from fedexp.core.memory import size_of
from fedexp.data.augment import rotate_images
from fedexp.data.mapped import Chosen
from fedexp.data.tasks import TaskSequence, assemble, pool_examples
from fedexp.data.types import DataSource, ImageData
from fedexp_continual.data.streams import Stream

Angles = Annotated[
    list[float],
    Limit("different angles in degrees", lambda v: len({a % 360 for a in v}) == len(v) > 0),
]


class Rotations(Stream):
    """Tasks that have the same images and classes, but rotate the images by different angles."""

    name = "rotations"
    kind = "domain_incremental"
    repeats_examples = True

    angles: Angles  # in degrees counter-clockwise, one per task

    def sequence(self, dataset: DataSource, rng: np.random.Generator) -> TaskSequence:
        """Return one task per angle. All tasks use the same training and test images."""
        data = dataset.load()
        if not isinstance(data, ImageData):
            raise ConfigError(
                f"scenario=rotations: needs an image data set, but {data.name} contains texts"
            )
        x, y, own_test = pool_examples([data], data)
        if isinstance(x, Chosen):
            raise ConfigError(
                f"scenario=rotations: needs images that fit into memory, but {data.name} has"
                f" {size_of(math.prod(x.shape))} of them; use a smaller dataset.size"
            )
        ((train, held),) = self.divide([np.arange(len(y))], y, own_test, rng)
        rotated, parts, names = [], [], []
        for number, angle in enumerate(self.angles):
            start = number * len(y)
            rotated.append(rotate_images(x, angle))
            parts.append((start + train, start + held))
            names.append(f"{data.name} turned by {angle:g} degrees")
        classes = self.task_classes(data.num_classes, rng)
        return assemble(data, torch.cat(rotated), np.tile(y, len(parts)), parts, names, classes)

    def task_classes(self, num_classes: int, rng: np.random.Generator) -> Sequence[Sequence[int]]:
        return [range(num_classes)] * len(self.angles)
