"""The workload W1 as data: the images, and the examples of each client in each round.

W1 is CIFAR-10 with a Dirichlet partition (alpha=0.1) among 100 clients, 10 clients per round, 5
local epochs with batches of 50, SGD with learning rate 0.01 (momentum 0.9, weight decay 1e-5), the
CNN with 2,156,490 parameters, and crop, flip and cutout. fedexp draws the partition and the
cohorts. All other contestants read them from files, so that all train the same clients in the same
rounds.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from benchmarks.measure import CONF, ROOT, last_values
from fedexp.data.cache import Arrays
from fedexp.data.datasets import TorchvisionDataset
from fedexp.data.text import LabelledTexts, TextDataset
from fedexp.data.types import ImageData
from fedexp.training.simulation import Simulation

# imported late: the references import this module, too, and their memory is measured
if TYPE_CHECKING:
    from fedexp.config.build import Built

CLIENTS, BATCH, EPOCHS, ALPHA = 100, 50, 5, 0.1
LR, LR_DECAY, MOMENTUM, WEIGHT_DECAY = 0.01, 0.99, 0.9, 1e-5
CROP_PADDING, CUTOUT = 4, 16
OVERRIDES = (
    *("model=cnn", "partition=lda", f"alpha={ALPHA}", "seed=0", "augment=true"),
    "weighting=examples",
    *(
        f"num_clients={CLIENTS}",
        "participation=0.1",
        f"local.epochs={EPOCHS}",
        f"local.batch_size={BATCH}",
    ),
    *(f"local.lr={LR}", f"local.lr_decay={LR_DECAY}", f"local.momentum={MOMENTUM}"),
    f"local.weight_decay={WEIGHT_DECAY}",
)


class RandomPixels(TorchvisionDataset):
    """Random pixels with the shapes and class sizes of CIFAR-10.

    A partition therefore gives clients as many examples as on CIFAR-10.
    """

    sizes: ClassVar = (50_000, 10_000)
    side: ClassVar = 32  # pixels
    paths: ClassVar = ()  # reads no files

    def read(self) -> Arrays:
        rng, arrays = np.random.default_rng(0), {}
        for split, size in zip(("train", "test"), self.sizes, strict=True):
            arrays[f"x_{split}"] = rng.integers(
                0, 256, (size, self.side, self.side, 3), dtype=np.uint8
            )
            arrays[f"y_{split}"] = rng.permutation(np.arange(size, dtype=np.int64) % 10)
        return arrays | {"classes": np.array([str(c) for c in range(10)])}


class FewRandomPixels(RandomPixels):
    """A tenth of `RandomPixels`, for measurements that take seconds."""

    sizes: ClassVar = (5_000, 1_000)


class SmallRandomPixels(RandomPixels):
    """600,000 small images, for measurements with very many clients."""

    sizes: ClassVar = (600_000, 1_000)
    side: ClassVar = 16


class RandomTexts(TextDataset):
    """10,000 training and 1,000 test texts of random characters, with ten classes."""

    sizes: ClassVar = (10_000, 1_000)
    first: ClassVar = 0x4E00  # code point of the first character
    characters: ClassVar = 4_000

    def find(self) -> str:
        return ""  # reads no files

    def read(self, length: int) -> LabelledTexts:
        rng = np.random.default_rng(0)
        points = rng.integers(self.first, self.first + self.characters, (sum(self.sizes), length))
        texts = ["".join(map(chr, row)) for row in points.tolist()]
        labels = [number % 10 for number in range(len(texts))]
        end, classes = self.sizes[0], tuple(str(c) for c in range(10))
        return LabelledTexts(texts[:end], texts[end:], labels[:end], labels[end:], classes)


def data_overrides() -> list[str]:
    """Return the overrides that select the data.

    CIFAR-10 is selected if it is below FEDEXP_DATA (default: data/), and random pixels otherwise.
    Nothing is downloaded.
    """
    folder = Path(os.environ.get("FEDEXP_DATA") or ROOT / "data").resolve()
    there = all((folder / "cifar10" / split).is_dir() for split in ("train", "test"))
    there = there or (folder / "cifar-10-batches-py").is_dir()
    return [f"data_dir={folder}", "dataset=cifar10" if there else "dataset=random_pixels"]


def data_sentence(overrides: list[str]) -> str:
    """Return the text that describes the images in the results."""
    if "dataset=random_pixels" not in overrides:
        return "real CIFAR-10"
    return (
        "random pixels (CIFAR-10 is not below FEDEXP_DATA; the client sizes are the same, and so is"
        " the work)"
    )


@dataclass(frozen=True)
class Workload:
    """The workload that contestants read. `load` maps the files that `save` wrote into memory."""

    x_train: np.ndarray  # uint8 [N, 32, 32, 3]
    y_train: np.ndarray  # int64 [N]
    x_test: np.ndarray
    y_test: np.ndarray
    mean: np.ndarray  # [3], of pixels / 255
    std: np.ndarray
    indices: np.ndarray  # int64: training examples of the clients in round 1, then round 2, ...
    sizes: np.ndarray  # int64 [rounds, clients of a round]
    epochs: np.ndarray  # int64 []

    def cohort(self, number: int) -> list[np.ndarray]:
        """Return the indices of the training examples of each client in a round (1, 2, ...)."""
        start = int(self.sizes[: number - 1].sum())
        own = self.sizes[number - 1]
        return np.split(self.indices[start : start + own.sum()], np.cumsum(own)[:-1])

    def examples(self, number: int) -> int:
        """Return the number of examples trained on in a round, counting every epoch."""
        return int(self.epochs) * int(self.sizes[number - 1].sum())

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in vars(self).items():
            np.save(folder / f"{name}.npy", array)

    @classmethod
    def load(cls, folder: Path) -> "Workload":
        # Copy on write: processes share the pages, and torch gets the writable arrays that it asks
        # for.
        names = cls.__dataclass_fields__
        return cls(
            **{
                name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
                for name in names
            }
        )


def make_simulation(overrides: list[str]) -> Simulation:
    """Return fedexp's simulation of W1 with overrides, such as those of `data_overrides`."""
    from fedexp.training.prepare import prepare

    other = any(each.startswith("partition=") for each in overrides)  # without alpha
    base = [each for each in OVERRIDES if not (other and each.startswith("alpha="))]
    return prepare(built([*base, *overrides]))


def built(overrides: Sequence[str]) -> "Built":
    """Return the objects of a configuration, which may name the data sets of benchmarks/conf."""
    from fedexp.config.build import build
    from fedexp.config.composition import composed, without_hydra

    everything = [*last_values(overrides), "tracker=none", "hydra.run.dir=unused"]
    with composed(everything, CONF) as config:
        return build(without_hydra(config))


def prepare_workload(rounds: int, extra: list[str]) -> Workload:
    """Return the workload W1 for a number of rounds, as fedexp draws it.

    extra: further overrides, such as those of `data_overrides`.
    """
    from fedexp.training.exchange import sample

    simulation = make_simulation([*extra, "hardware=cpu"])
    data, held = simulation.runtime.data, simulation.stages[0].federation.parts
    assert isinstance(data, ImageData)
    parts: list[np.ndarray] = []
    sizes = []
    for number in range(1, rounds + 1):
        cohort = [held[client] for client in sample(simulation, number)]
        if simulation.mixes_examples:  # batch norm leaves out a last batch of one example
            cohort = [part[:-1] if len(part) % BATCH == 1 else part for part in cohort]
        parts += cohort
        sizes.append([len(part) for part in cohort])
    epochs = np.array(simulation.runtime.local.epochs)
    arrays = {k: getattr(data, k).numpy() for k in ("x_train", "y_train", "x_test", "y_test")}
    return Workload(
        **arrays,
        mean=np.array(data.mean, dtype=np.float32),
        std=np.array(data.std, dtype=np.float32),
        indices=np.concatenate(parts),
        sizes=np.array(sizes),
        epochs=epochs,
    )
