"""Surrogate sets: unlabelled examples for distillation on the clients and the server.

See CFeD, IJCAI 2022, section 4.1, and the config node `surrogate`. The examples are either a second
data set or a part of the training data. A second data set is converted to the form of the training
data and stored after the training examples. In both cases, the labels of the surrogate examples are
set to -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Checked, Count, CountOrNone, Labels, ShareBelow1
from fedexp.data.mapped import Stored, crc_of_inputs, join
from fedexp.data.text import TextSource
from fedexp.data.types import Data, DataSource, ImageData, Task, TextData

GREY = (0.299, 0.587, 0.114)  # ITU-R 601 luma


class Surrogate(Checked, prefix="surrogate."):
    """The source of the surrogate examples, and how they are divided among clients and server."""

    dataset: DataSource | None  # an option of the group `dataset`, or null
    options: dict[str, Any]  # values that override options of `dataset`; they are already applied
    # fraction of the training data that is used as surrogate examples instead of being partitioned
    fraction: ShareBelow1
    # use only examples that have these labels in their data set; null: all examples
    classes: Labels | None
    examples: CountOrNone  # number of examples to draw at random; null: use all examples
    shards: Count  # number of shards that each client draws
    server_shards: Count  # number of shards that the server draws
    # number of shards that the surrogate set is cut into; null: twice the number of clients
    total_shards: CountOrNone

    def __post_init__(self) -> None:
        super().__post_init__()
        another = self.dataset is not None
        words = "0 if surrogate.dataset is set"
        require(not (self.fraction and another), "surrogate.fraction", self.fraction, words)
        words = "null if surrogate.dataset=null"
        require(another or self.examples is None, "surrogate.examples", self.examples, words)
        words = "{} if surrogate.dataset=null"
        require(another or not self.options, "surrogate.options", self.options, words)
        words = "null unless surrogate.dataset or surrogate.fraction is set"
        require(self.given or self.classes is None, "surrogate.classes", self.classes, words)

    @property
    def given(self) -> bool:
        return self.dataset is not None or self.fraction > 0

    def load(self, like: Data) -> Stored:
        """Return the inputs of the surrogate data set, converted to the form of the training data.

        The result is empty if no surrogate data set is given. It contains only training examples,
        with one exception: test examples are also used if the data set has no official test set and
        is not the training data set itself.

        like: the training data.
        """
        if self.dataset is None:
            return like.x_train[:0]
        data = load_like(self.dataset, like)
        labels, inputs = data.y_train, inputs_like(data, like, "train")
        if getattr(self.dataset, "splits_itself", False) and data.name != like.name:
            labels = torch.cat([labels, data.y_test])
            inputs = join([inputs, inputs_like(data, like, "test")])
        return inputs[self.chosen(labels, data)]

    def some(self, inputs: Stored, rng: np.random.Generator) -> Stored:
        """Draw `self.examples` of the inputs [n, ...] at random, and keep their original order."""
        if self.examples is None:
            return inputs
        words = f"at most {len(inputs)}, the number of available examples"
        require(self.examples <= len(inputs), "surrogate.examples", self.examples, words)
        drawn = np.sort(rng.choice(len(inputs), self.examples, replace=False))
        return inputs[torch.from_numpy(drawn)]

    def chosen(self, labels: torch.Tensor, data: Data) -> torch.Tensor:
        """Return a mask of the examples whose label is in `self.classes`, bool [n].

        All examples are selected if `self.classes` is None. data: the data set of the labels.
        """
        if self.classes is None:
            return torch.ones(len(labels), dtype=torch.bool)
        key, words = "surrogate.classes", f"null, because {data.name} has no labels"
        require(data.num_classes > 0, key, self.classes, words)
        words = f"labels from 0 to {data.num_classes - 1}"
        valid = all(0 <= c < data.num_classes for c in self.classes)
        require(valid, key, self.classes, words)
        found = torch.isin(labels, torch.tensor(self.classes))
        require(bool(found.any()), key, self.classes, "labels that at least one example has")
        return found

    def attach(
        self, data: Data, tasks: Sequence[Task], rng: np.random.Generator
    ) -> tuple[Data, tuple[Task, ...], np.ndarray]:
        """Return (data, tasks, indices of the surrogate examples).

        If the surrogate examples come from another data set, they are appended to the training
        data. If they are a fraction of the training examples, they are removed from the tasks.
        """
        labels = data.y_train.clone()
        if not self.fraction:
            extra = self.some(self.load(data), rng)
            numbers = np.arange(len(labels), len(labels) + len(extra))
            if len(extra):
                y = torch.cat([labels, labels.new_full((len(extra),), -1)])
                both = f"{data.checksum} {crc_of_inputs(extra, 0):08x}"
                data = replace(data, x_train=join([data.x_train, extra]), y_train=y, checksum=both)
            return data, tuple(tasks), numbers
        everything = np.concatenate([task.train for task in tasks])
        everything = everything[self.chosen(labels[everything], data).numpy()]
        count = int(self.fraction * len(everything) + 1e-9)  # 0.29 * 100 is less than 29
        words = f"large enough to select at least one of the {len(everything)} examples"
        require(count > 0, "surrogate.fraction", self.fraction, words)
        chosen = np.sort(rng.choice(everything, count, replace=False))
        labels[torch.from_numpy(chosen)] = -1
        tasks = [replace(task, train=np.setdiff1d(task.train, chosen)) for task in tasks]
        return replace(data, y_train=labels), tuple(tasks), chosen

    def draw_shards(
        self, numbers: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> "SurrogateShards":
        """Cut the surrogate examples into shards, and draw shards for the clients and the server.

        Each client draws `shards` different shards. If there are enough shards, no two clients draw
        the same shard. Otherwise, each client draws from all shards with equal probabilities. The
        server draws its shards independently of the clients.

        numbers: indices of the surrogate examples.
        """
        total = self.total_shards or 2 * num_clients
        for key, count in (("shards", self.shards), ("server_shards", self.server_shards)):
            words = f"at most {total}, the number of shards"
            require(count <= total, f"surrogate.{key}", count, words)
        if len(numbers) < total:
            raise ConfigError(
                f"surrogate: {len(numbers)} examples cannot be cut into {total} shards; use a"
                " smaller surrogate.total_shards or, for more examples, a larger"
                " surrogate.fraction"
            )
        pieces = np.array_split(rng.permutation(numbers), total)
        wanted = self.shards * num_clients
        if wanted <= total:
            drawn = rng.permutation(total)[:wanted].reshape(num_clients, self.shards)
        else:
            rows = [rng.choice(total, self.shards, replace=False) for _ in range(num_clients)]
            drawn = np.stack(rows)
        own = rng.choice(total, self.server_shards, replace=False)

        def joined(shards: np.ndarray) -> np.ndarray:
            return np.sort(np.concatenate([pieces[i] for i in shards]))

        return SurrogateShards(tuple(map(joined, drawn)), joined(own))


@dataclass(frozen=True)
class SurrogateShards:
    """Indices of the surrogate examples that each client and the server have."""

    clients: tuple[np.ndarray, ...]
    server: np.ndarray


def load_like(dataset: DataSource, like: Data) -> Data:
    """Load a data set that is used together with the loaded data `like`.

    Texts are encoded with the vocabulary and length of `like`.

    """
    if isinstance(dataset, TextSource) and isinstance(like, TextData):
        return dataset.load(like)
    return dataset.load()


def inputs_like(data: Data, like: Data, split: str = "train") -> Stored:
    """Return `x_train` or `x_test` of `data`, converted to the form of `like`.

    Images are converted to the size, the number of channels and the pixel range of `like`.
    """
    x = getattr(data, f"x_{split}")
    if isinstance(data, ImageData) and isinstance(like, ImageData):
        return resize_images(x, data.max_value, like)
    if type(data) is not type(like):
        raise ConfigError(
            f"{data.name} and {like.name} cannot be used together: one of them contains images, and"
            " the other contains texts"
        )
    return x


def resize_images(images: Stored, max_value: int, like: ImageData) -> Stored:
    """Convert images to the size, the number of channels and the pixel range of `like`.

    Images are resized by bilinear interpolation with antialiasing. Colours are converted to grey by
    ITU-R 601 luma.

    images: uint8 [n, h, w, c].
    max_value: largest pixel value of `images`.

    Returns uint8 [n, height, width, channels].
    """
    height, width, channels = like.x_train.shape[1:]
    if images.shape[1:] == like.x_train.shape[1:] and max_value == like.max_value:
        return images
    parts = []
    for chunk in images.split(2000):  # converting all images at once would need 12 times the memory
        x = chunk.permute(0, 3, 1, 2).float()
        if x.shape[1] == 3 and channels == 1:
            x = torch.tensordot(torch.tensor(GREY), x, ([0], [1]))[:, None]
        x = x.expand(-1, channels, -1, -1)
        if x.shape[2:] != (height, width):
            x = F.interpolate(x, (height, width), mode="bilinear", antialias=True)
        x = (x * (like.max_value / max_value)).round().clamp(0, like.max_value)
        parts.append(x.to(torch.uint8).permute(0, 2, 3, 1))
    return torch.cat(parts)
