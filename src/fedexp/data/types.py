"""Types of a loaded data set: tensors that can live on a device."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch

from fedexp.core.limits import Checked, Limit
from fedexp.data.augment import Augmentation, Normalise, load_batch
from fedexp.data.marks import SourceFile


class Draws(Protocol):
    """Random numbers for every training example: an Augmentation of images draws them, or
    DropoutKeys."""

    changes_inputs: ClassVar[bool]  # also as a model in eval mode sees them

    @property
    def active(self) -> bool:
        """Tell whether there is anything to draw."""

    def draw(self, rng: np.random.Generator, n: int, height: int, width: int, /) -> np.ndarray:
        """Return the draws of n examples, [n, ...]; the first rows do not depend on n."""


@dataclass(frozen=True)
class Data(ABC):
    """Labelled examples for training and testing, as they are stored."""

    name: str
    x_train: torch.Tensor  # [N, ...]
    y_train: torch.Tensor  # int64 [N]; -1: not labelled (a surrogate set)
    x_test: torch.Tensor  # [M, ...]
    y_test: torch.Tensor  # int64 [M]
    classes: tuple[str, ...]  # names; index = label
    owners: np.ndarray | None = field(default=None, kw_only=True)
    """int64 [N]: natural client of each training example (LEAF), numbered from 0."""
    test_tasks: torch.Tensor | None = field(default=None, kw_only=True)
    """int64 [M]: task of each test example, from 0, in a scenario of several."""
    validation: torch.Tensor | None = field(default=None, kw_only=True)
    """int64 [V]: numbers of the training examples that are the validation set."""
    validation_tasks: torch.Tensor | None = field(default=None, kw_only=True)
    """int64 [V]: task of each of them, where `test_tasks` is given."""
    checksum: str | None = field(default=None, kw_only=True)
    """Of the inputs as they were read; None where they come from files, whose bytes are compared:
    other versions of a decoder may make other inputs of them."""

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks; 1 without a scenario."""
        return 1 if self.test_tasks is None else int(self.test_tasks.max()) + 1

    @property
    @abstractmethod
    def shape(self) -> Any:
        """Return the shape for which a model is built."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Return (height, width); (0, 0) for texts."""
        return 0, 0

    @abstractmethod
    def inputs(
        self,
        stored: torch.Tensor,
        index: torch.Tensor,
        draws: torch.Tensor | None,
        augmentation: Draws | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the examples index [...] of `stored` (x_train or x_test) as a model reads them,
        augmented where draws are given. Safe under vmap."""

    def to(self, device: torch.device | str) -> Self:
        names = (
            "x_train",
            "y_train",
            "x_test",
            "y_test",
            "test_tasks",
            "validation",
            "validation_tasks",
        )
        return replace(
            self, **{k: v.to(device) for k in names if (v := getattr(self, k)) is not None}
        )

    def tested_on_validation(self) -> Self:
        """Return the data with the validation set in the place of the test set."""
        assert self.validation is not None, "checked when the run was prepared"
        x, y = self.x_train[self.validation], self.y_train[self.validation]
        return replace(self, x_test=x, y_test=y, test_tasks=self.validation_tasks)

    def tested_on(self, numbers: torch.Tensor) -> Self:
        """Return the data with these test examples alone, by number, int64 [m]."""
        tasks = None if self.test_tasks is None else self.test_tasks[numbers]
        x, y = self.x_test[numbers], self.y_test[numbers]
        return replace(self, x_test=x, y_test=y, test_tasks=tasks)


class DataSource(Checked, ABC, prefix="dataset."):
    """Base of the `dataset` group: where a data set lies and how it is read."""

    kind: ClassVar[str]  # images | text
    in_words: ClassVar[str] = "the name of a data set"

    name: Annotated[str, Limit("letters, digits, _ . -", re.compile(r"[\w.-]+").fullmatch)]
    data_dir: str

    if TYPE_CHECKING:  # at run time it would be the default of a subclass's field of that name

        @property
        def augmentation(self) -> Draws:
            """Return the source of what is drawn for each training example."""

    @property
    def paths(self) -> Sequence[Path]:
        """Return the files that `load` reads; none where it reads no files. Raises ConfigError
        where they are missing."""
        return ()

    @property
    def files(self) -> Sequence[SourceFile]:
        """Return `paths`. Raises ConfigError or OSError where one is missing."""
        return [SourceFile.of(path) for path in self.paths]

    @abstractmethod
    def load(self) -> Data:
        """Return the data set; raises ConfigError where files are missing or damaged."""


@dataclass(frozen=True)
class ImageData(Data):
    """A decoded image data set; x_* are uint8 [., height, width, channels].

    Pixels are integers 0..max_value in channels-last layout; normalised as (pixel / max_value -
    mean) / std.
    """

    mean: tuple[float, ...]  # per channel, on the scale 0..1
    std: tuple[float, ...]
    max_value: int = 255

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (channels, height, width), the order in which models see an image."""
        _, height, width, channels = self.x_train.shape
        return channels, height, width

    @property
    def image_size(self) -> tuple[int, int]:
        return self.shape[1:]

    @cached_property
    def normalise(self) -> Normalise:
        return Normalise(self.mean, self.std, self.max_value)

    def inputs(
        self,
        stored: torch.Tensor,
        index: torch.Tensor,
        draws: torch.Tensor | None,
        augmentation: Draws | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the images [..., channels, height, width] of `dtype`."""
        augmentation = augmentation if draws is not None else None
        assert augmentation is None or isinstance(augmentation, Augmentation)
        return load_batch(stored, index, draws, augmentation, self.normalise, dtype)


@dataclass(frozen=True)
class Task:
    """A part of a data set that is learned for some rounds (see fedexp.data.tasks)."""

    name: str
    classes: tuple[int, ...]  # labels of its examples, ascending
    train: np.ndarray  # numbers of its training examples, ascending


class TextShape(NamedTuple):
    """Shape for which a model that reads text is built."""

    length: int  # characters of an example, padding included
    words: int  # size of the vocabulary
    vectors: torch.Tensor | None  # [words, D] to begin with; None: the model's own initialisation


@dataclass(frozen=True)
class TextData(Data):
    """Texts as numbers of a vocabulary; x_* are int32 [., length]."""

    vocabulary: tuple[str, ...]  # characters, <UNK> and <PAD>; index = number
    vectors: torch.Tensor | None = None  # float32 [V, D]: pre-trained

    @property
    def shape(self) -> TextShape:
        return TextShape(self.x_train.shape[1], len(self.vocabulary), self.vectors)

    def inputs(
        self,
        stored: torch.Tensor,
        index: torch.Tensor,
        draws: torch.Tensor | None,
        augmentation: Draws | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the texts as int64 [..., length], or [..., length + 1] with the draws of
        text.DropoutKeys as last column."""
        words = stored[index].long()
        return words if draws is None else torch.cat([words, draws], -1)
