"""Unlabelled examples for distillation by clients and server (config node `surrogate`).

See CFeD, IJCAI 2022, section 4.1. The examples come from another data set, converted to the form of
the first one, or from a part of its training data without the labels. They are stored after the
training examples, with the label -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Checked, Count, CountOrNone, Labels, ShareBelow1
from fedexp.data.text import TextSource
from fedexp.data.types import Data, DataSource, ImageData, Task, TextData

GREY = (0.299, 0.587, 0.114)  # ITU-R 601 luma


class Surrogate(Checked, prefix="surrogate."):
    """Source of the surrogate examples, and the numbers of shards that clients and server draw."""

    dataset: DataSource | None  # an option of the group `dataset`, or null
    options: dict[str, Any]  # overrides of that option's values, already applied
    # share of the training data that is withheld from clients and used without labels
    fraction: ShareBelow1
    # use only examples with these labels in their data set; null: all
    classes: Labels | None
    examples: CountOrNone  # number of examples, drawn at random; null: all
    shards: Count  # per client
    server_shards: Count
    total_shards: CountOrNone  # number of shards that the set is cut into; null: two per client

    def __post_init__(self) -> None:
        super().__post_init__()
        another = self.dataset is not None
        words = "0 if surrogate.dataset is set"
        require(not (self.fraction and another), "surrogate.fraction", self.fraction, words)
        words = "null without surrogate.dataset"
        require(another or self.examples is None, "surrogate.examples", self.examples, words)
        words = "{} without surrogate.dataset"
        require(another or not self.options, "surrogate.options", self.options, words)
        words = "null without surrogate.dataset or surrogate.fraction"
        require(self.given or self.classes is None, "surrogate.classes", self.classes, words)

    @property
    def given(self) -> bool:
        return self.dataset is not None or self.fraction > 0

    def load(self, like: Data) -> torch.Tensor:
        """Return the inputs of the surrogate data set's training examples in the form of `like`.

        The result is empty without a surrogate data set. It includes the test part if the data set
        has no official test part and is not also the data set for training.
        """
        if self.dataset is None:
            return like.x_train[:0]
        data = load_like(self.dataset, like)
        labels, inputs = data.y_train, inputs_like(data, like, "train")
        if getattr(self.dataset, "splits_itself", False) and data.name != like.name:
            labels = torch.cat([labels, data.y_test])
            inputs = torch.cat([inputs, inputs_like(data, like, "test")])
        return inputs[self.chosen(labels, data)]

    def some(self, inputs: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Return the requested number of the inputs [n, ...], in their order."""
        if self.examples is None:
            return inputs
        words = f"at most {len(inputs)}, the number of examples"
        require(self.examples <= len(inputs), "surrogate.examples", self.examples, words)
        drawn = np.sort(rng.choice(len(inputs), self.examples, replace=False))
        return inputs[torch.from_numpy(drawn)]

    def chosen(self, labels: torch.Tensor, data: Data) -> torch.Tensor:
        """Return a mask bool [n] of the examples that `classes` allows."""
        if self.classes is None:
            return torch.ones(len(labels), dtype=torch.bool)
        key, words = "surrogate.classes", f"null: {data.name} has no labels"
        require(data.num_classes > 0, key, self.classes, words)
        words = f"labels from 0 to {data.num_classes - 1}"
        valid = all(0 <= c < data.num_classes for c in self.classes)
        require(valid, key, self.classes, words)
        found = torch.isin(labels, torch.tensor(self.classes))
        require(bool(found.any()), key, self.classes, "labels of at least one example")
        return found

    def attach(
        self, data: Data, tasks: Sequence[Task], rng: np.random.Generator
    ) -> tuple[Data, tuple[Task, ...], np.ndarray]:
        """Return (data with the surrogate examples, tasks without them, indices of the surrogate
        examples).
        """
        labels = data.y_train.clone()
        if not self.fraction:
            extra = self.some(self.load(data), rng)
            numbers = np.arange(len(labels), len(labels) + len(extra))
            if len(extra):
                y = torch.cat([labels, labels.new_full((len(extra),), -1)])
                data = replace(data, x_train=torch.cat([data.x_train, extra]), y_train=y)
            return data, tuple(tasks), numbers
        everything = np.concatenate([task.train for task in tasks])
        everything = everything[self.chosen(labels[everything], data).numpy()]
        count = int(self.fraction * len(everything))
        words = f"at least one of {len(everything)} examples"
        require(count > 0, "surrogate.fraction", self.fraction, words)
        chosen = np.sort(rng.choice(everything, count, replace=False))
        labels[torch.from_numpy(chosen)] = -1
        tasks = [replace(task, train=np.setdiff1d(task.train, chosen)) for task in tasks]
        return replace(data, y_train=labels), tuple(tasks), chosen

    def draw_shards(
        self, numbers: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> "Shards":
        """Return random shards of the surrogate examples.

        Each client draws `shards` different shards, and each shard is drawn about equally often
        (the clients' shards are disjoint if there are enough). The server draws its shards
        independently.

        numbers: indices of the examples.
        """
        total = self.total_shards or 2 * num_clients
        for key, count in (("shards", self.shards), ("server_shards", self.server_shards)):
            words = f"at most {total}, the number of shards"
            require(count <= total, f"surrogate.{key}", count, words)
        if len(numbers) < total:
            raise ConfigError(
                f"surrogate: {len(numbers)} examples cannot be cut into {total} shards;"
                " surrogate.total_shards=<number> cuts it into fewer, a larger surrogate.fraction"
                " gives more examples"
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

        return Shards(tuple(map(joined, drawn)), joined(own))


@dataclass(frozen=True)
class Shards:
    """The surrogate examples of each client and of the server."""

    clients: tuple[np.ndarray, ...]
    server: np.ndarray


def load_like(dataset: DataSource, like: Data) -> Data:
    """Load another data set. Texts are read with the first data set's vocabulary."""
    if isinstance(dataset, TextSource) and isinstance(like, TextData):
        return dataset.load(like)
    return dataset.load()


def inputs_like(data: Data, like: Data, split: str = "train") -> torch.Tensor:
    """Return x_train or x_test of `data` in the form of `like`.

    Images are converted to the size, channels and scale of `like`.
    """
    x = getattr(data, f"x_{split}")
    if isinstance(data, ImageData) and isinstance(like, ImageData):
        return resize_images(x, data.max_value, like)
    if type(data) is not type(like):
        raise ConfigError(
            f"{data.name} and {like.name} cannot be used together: one has images, the other texts"
        )
    return x


def resize_images(images: torch.Tensor, max_value: int, like: ImageData) -> torch.Tensor:
    """Resize images, uint8 [n, h, w, c] -> [n, height, width, channels] of `like`.

    The resizing is bilinear with antialiasing. Colours are converted to grey by luma.
    """
    channels, height, width = like.shape
    if images.shape[1:] == like.x_train.shape[1:] and max_value == like.max_value:
        return images
    parts = []
    for chunk in images.split(2000):  # all images as floats would take 12 times the memory
        x = chunk.permute(0, 3, 1, 2).float()
        if x.shape[1] == 3 and channels == 1:
            x = torch.tensordot(torch.tensor(GREY), x, ([0], [1]))[:, None]
        x = x.expand(-1, channels, -1, -1)
        if x.shape[2:] != (height, width):
            x = F.interpolate(x, (height, width), mode="bilinear", antialias=True)
        x = (x * (like.max_value / max_value)).round().clamp(0, like.max_value)
        parts.append(x.to(torch.uint8).permute(0, 2, 3, 1))
    return torch.cat(parts)
