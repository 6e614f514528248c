"""Domains made by rotating one data set."""

import numpy as np
import pytest
import torch

from fedexp.config.build import build
from fedexp.data.augment import rotate_images
from fedexp.training.division import divide
from fedexp_continual.data.rotations import Rotations
from test_tasks import Loads, images
from toy_federation import composed

SCENARIO = {"rounds_per_task": 2, "split": None, "evaluate_on": "test"}


def rotations(angles, **changes):
    return Rotations(angles=angles, **SCENARIO | changes)


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_quarter_turns_equal_rot90(quarters):
    x = torch.randint(0, 256, (3, 5, 5, 2), dtype=torch.uint8)
    assert torch.equal(rotate_images(x, 90.0 * quarters), torch.rot90(x, quarters, (1, 2)))


def test_pixels_rotated_in_from_outside_are_black():
    """Rotation of 3 x 3 pixels by 45 degrees: the corner (0, 0) is at (y, x) = (-1, -1) from the
    centre. Its source is at (sin x + cos y, cos x - sin y) = (-sqrt(2), 0), that is (-0.41, 1),
    with nearest pixel (0, 1). For 9 x 9 pixels it is at (-5.66, 0), which is outside."""
    x = torch.arange(1, 10, dtype=torch.uint8).view(1, 3, 3, 1)
    found = rotate_images(x, 45.0)[0, :, :, 0]
    assert (found[1, 1], found[0, 0]) == (5, 2)
    large = rotate_images(torch.full((1, 9, 9, 1), 7, dtype=torch.uint8), 45.0)[0, :, :, 0]
    assert large[0, 0] == 0
    assert large[4, 4] == 7


def test_image_is_in_same_set_in_all_tasks():
    data = images(train=40, test=10)
    for split, trained in ((None, 40), ([0.6, 0.0, 0.4], 30)):
        found = rotations([0.0, 90.0], split=split).sequence(Loads(data), np.random.default_rng(0))
        assert [len(task.train) for task in found.tasks] == [trained] * 2
        first, second = (found.data.x_train[task.train] for task in found.tasks)
        assert torch.equal(torch.rot90(first, 1, (1, 2)), second)
        tests = found.data.x_test.chunk(2)
        assert torch.equal(torch.rot90(tests[0], 1, (1, 2)), tests[1])
        assert found.data.test_tasks.tolist() == [0] * (50 - trained) + [1] * (50 - trained)
        assert found.tasks[1].name == "a turned by 90 degrees"


@pytest.mark.parametrize("withheld", [(), ("surrogate.fraction=0.2", "public.fraction=0.1")])
def test_validation_image_is_never_trained_on(withheld):
    """143 of 1,437 images are held out in all three tasks. Neither clients nor the server have them
    at another angle."""
    data, parts = divide(
        build(composed("scenario=rotations", "validation.fraction=0.1", *withheld))
    )
    size = len(data.y_train) // 3
    sets = [part.partition.validation for part in parts]
    held = set((sets[0] % size).tolist())
    assert len(held) == 143
    assert [set((numbers % size).tolist()) for numbers in sets] == [held] * 3
    assert [set((numbers // size).tolist()) for numbers in sets] == [{0}, {1}, {2}]
    assert torch.equal(data.validation, torch.from_numpy(np.concatenate(sets)))
    for part in parts:
        used = [
            *part.partition.parts,
            part.partition.public,
            part.federation.unlabelled,
            part.federation.shared,
        ]
        assert not held & set((np.concatenate(used) % size).tolist())
