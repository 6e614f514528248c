"""Check a data set."""

import copy
import warnings

import numpy as np
import torch
from torch import Tensor

from fedexp.core.console import plural
from fedexp.data.mapped import crc_of_inputs
from fedexp.data.types import Data, DataSource, ImageData
from fedexp.testing.federation import require
from fedexp.training.division import require_classes

FEW = 8  # examples that are converted to inputs of a model


def check_dataset(dataset: DataSource, classes: int | None = None) -> None:
    """Check a data set, which is read twice.

    The checks are:

    - Reading it again gives the same examples. `load_test` gives the same test set.
    - Inputs and labels have the same length, and labels are int64, from 0 to C - 1. There are two
      classes or more, with distinct names, or `classes` if given.
    - Pixels use the range from 0 to `max_value`.
    - Inputs of a model have the declared shape, with and without augmentation, and are finite.

    A warning says how many test examples equal training examples (images and texts in memory), and
    which classes have no training or no test examples: a test cannot trust such numbers blindly.
    """
    data, where = dataset.load(), f"dataset={dataset.name}"
    again = copy.deepcopy(dataset).load()
    require(
        data.checksum == again.checksum,
        f"{where}: reading it again gives other examples or another order; sort files, and draw"
        " only from a generator with a fixed seed",
    )
    require_classes(data)
    count = data.num_classes
    require(
        classes in (None, count), f"{where}: has {plural(count, 'class')}, but must have {classes}"
    )
    twice = sorted({name for name in data.classes if data.classes.count(name) > 1})
    require(not twice, f"{where}: class names must be different, not twice {', '.join(twice)}")
    for split in ("train", "test"):
        check_split(where, split, data)
    check_companions(where, data)
    check_inputs(where, dataset, data)
    if type(dataset).load_test is not DataSource.load_test:
        tested = copy.deepcopy(dataset).load_test()
        same = torch.equal(tested.y_test, data.y_test) and tested.classes == data.classes
        require(same, f"{where}: load_test gives other labels or classes than load")
        same = crc_of_inputs(tested.x_test, 0) == crc_of_inputs(data.x_test, 0)
        require(same, f"{where}: load_test gives other test examples than load")
    if copies := data.count_copies(np.arange(len(data.y_train))):
        warnings.warn(
            f"{where}: {plural(copies, 'test example')} of {len(data.y_test):,} equal training"
            " examples",
            stacklevel=2,
        )


def check_split(where: str, split: str, data: Data) -> None:
    """Check the inputs and labels of the training or test set."""
    x, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
    require(
        y.dtype == torch.int64 and y.dim() == 1,
        f"{where}: y_{split} is {y.dtype} of shape {[*y.shape]}; must be torch.int64 [N]",
    )
    require(
        len(x) == len(y) > 0, f"{where}: x_{split} has {len(x)} examples, y_{split} has {len(y)}"
    )
    # training examples of a surrogate set may be unlabelled
    least = -1 if split == "train" else 0
    outside = y[(y < least) | (y >= data.num_classes)]
    require(
        not len(outside),
        f"{where}: y_{split} has the label {outside[:1].tolist()}; must be 0 to"
        f" {data.num_classes - 1}",
    )
    if missing := sorted({*range(data.num_classes)} - {*y.tolist()}):
        names = ", ".join(data.classes[label] for label in missing[:5])
        warnings.warn(
            f"{where}: {plural(len(missing), 'class')} without {split} examples: {names}",
            stacklevel=3,
        )
    if isinstance(data, ImageData) and isinstance(x, Tensor):
        check_pixels(where, f"x_{split}", x, data.max_value)


def check_pixels(where: str, name: str, x: Tensor, max_value: int) -> None:
    """Check the range of the pixels of images x, [N, height, width, channels]."""
    require(
        x.dtype == torch.uint8 and x.dim() == 4,
        f"{where}: {name} is {x.dtype} of shape {[*x.shape]}; must be torch.uint8 [N, height,"
        " width, channels]",
    )
    largest = int(x.max())
    require(
        largest <= max_value and (largest > 1 or max_value == 1),
        f"{where}: the pixels of {name} are 0 to {largest}, but max_value is {max_value}; scale"
        " them, or set max_value",
    )


def check_companions(where: str, data: Data) -> None:
    """Check the arrays that say more about the training or test examples, as far as given."""
    lengths = {"owners": len(data.y_train), "test_tasks": len(data.y_test)}
    for name, length in lengths.items():
        values = getattr(data, name)
        require(
            values is None or tuple(values.shape) == (length,),
            f"{where}: {name} has shape {None if values is None else [*values.shape]}; must be"
            f" [{length}]",
        )


def check_inputs(where: str, dataset: DataSource, data: Data) -> None:
    """Check the inputs of a model that a few training examples become."""
    index = torch.arange(min(FEW, len(data.y_train)))
    drawn = dataset.augmentation.draw(np.random.default_rng(0), len(index), *data.image_size)
    shape = data.shape if isinstance(data, ImageData) else tuple(data.x_train.shape[1:])
    draws = (None, torch.from_numpy(drawn)) if isinstance(data, ImageData) else (None,)
    for each in draws:
        x = data.inputs(data.x_train, index, each, dataset.augmentation, torch.float32)
        what = f"{where}: the inputs of a model{'' if each is None else ' with augmentation'}"
        require(
            tuple(x.shape) == (len(index), *shape),
            f"{what} have shape {[*x.shape]}; must be {[len(index), *shape]}",
        )
        require(bool(x.isfinite().all()), f"{what} contain nan or infinity; see dataset.std")
