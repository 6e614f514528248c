"""Interfaces of data sets: sources of data, and the tensors of a loaded data set."""

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp.core.limits import Checked, Limit
from fedexp.data.augment import Augmentation, Draws, Normalise, load_batch
from fedexp.data.mapped import Chosen, Stored, crc_of_inputs
from fedexp.data.resized_crop import ResizedCrop

NUMBER = re.compile(r"-?\d+(\.\d+)?")


MISSING = ("", "nan", "<na>")  # labels in lower case that stand for no label, as pandas writes them


def sort_classes(names: Iterable[Any]) -> list[Any]:
    """Return class names in the order of their labels: by value if all are numbers, else as texts.

    Sorted as texts, the numbers 0 to 11 would be 0, 1, 10, 11, 2, ...
    """
    found = sorted(names, key=str)
    if all(NUMBER.fullmatch(str(name)) for name in found):
        found.sort(key=float)
    return found


def number_labels(labels: Iterable[Any], classes: Sequence[Any], source: str) -> list[int]:
    """Return the position of each label in `classes`.

    source: what gives the labels, for messages. Raises ConfigError for a label without a class.
    """
    numbers = {label: number for number, label in enumerate(classes)}
    found = list(labels)
    if unknown := sorted(set(found) - numbers.keys(), key=str):
        raise ConfigError(
            f"{source}: the label {unknown[0]!r} is not one of the {len(classes)} classes of the"
            " training examples"
        )
    return [numbers[label] for label in found]


@dataclass(frozen=True)
class Data(ABC):
    """A loaded data set: training and test examples with their labels."""

    name: str
    x_train: Stored  # [N, ...]
    y_train: torch.Tensor  # int64 [N]; -1: unlabelled example of a surrogate set
    x_test: Stored  # [M, ...]
    y_test: torch.Tensor  # int64 [M]
    classes: tuple[str, ...]  # class names, ordered by label
    _: KW_ONLY
    owners: np.ndarray | None = None
    """int64 [N]: the natural client (LEAF) that each training example comes from, numbered from 0;
    None: the data set has no natural clients."""
    test_owners: np.ndarray | None = None
    """int64 [M]: the natural client that has each test example, numbered as `owners`."""
    domains: tuple[str, ...] = ()
    """Names of the domains that the examples come from, by number; (): they are not known."""
    train_domains: np.ndarray | None = None
    """int64 [N]: the domain of each training example, if there are `domains`."""
    test_domains: np.ndarray | None = None
    """int64 [M]: the domain of each test example, if there are `domains`."""
    test_tasks: torch.Tensor | None = None
    """int64 [M]: the task of each test example, numbered from 0; None: there is only one task."""
    test_clients: torch.Tensor | None = None
    """int64 [M]: the client that each test example belongs to, -1 if it belongs to none;
    None: the clients have no test examples of their own."""
    validation: torch.Tensor | None = None
    """int64 [V]: indices of the training examples that form the validation set."""
    validation_tasks: torch.Tensor | None = None
    """int64 [V]: the task of each validation example, if `test_tasks` is given."""
    validation_clients: torch.Tensor | None = None
    """int64 [V]: the client that holds out each validation example; None: they belong to none."""
    train_features: torch.Tensor | None = None
    """[N, D]: the features of the training examples, if a frozen backbone computes them."""
    test_features: torch.Tensor | None = None
    """[M, D]: the features of the test examples, if a frozen backbone computes them."""
    checksum: str = ""
    """Checksum of the inputs, labels and classes as they were loaded."""

    def __post_init__(self) -> None:
        # A copy with other arrays keeps the checksum of the data that were loaded.
        if not self.checksum:
            object.__setattr__(self, "checksum", self.crc())

    def crc(self) -> str:
        """Return the checksum of the arrays, without computed features."""
        crc = zlib.crc32("\n".join(self.classes).encode())
        for name, part in vars(self).items():
            if isinstance(part, np.ndarray):
                part = torch.from_numpy(part)
            if isinstance(part, torch.Tensor | Chosen) and not name.endswith("_features"):
                crc = crc_of_inputs(part, crc)
        return f"{crc:08x}"

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks (1 without a scenario)."""
        return 1 if self.test_tasks is None else int(self.test_tasks.max()) + 1

    def sentence(self) -> str:
        """Return a sentence that gives the classes, the numbers of examples and their shape."""
        names = [f"{label}={name}" for label, name in enumerate(self.classes)]
        shown = names if len(names) <= 20 else [*names[:3], "...", names[-1]]
        if self.classes == tuple(map(str, range(self.num_classes))):
            shown = [f"0 to {self.num_classes - 1}"]
        held = 0 if self.validation is None else len(self.validation)
        train = int((self.y_train >= 0).sum()) - held
        sizes = f"{train:,} training{f', {held:,} validation' if held else ''} and"
        return (
            f"{plural(self.num_classes, 'class')} ({', '.join(shown)}); {sizes}"
            f" {len(self.y_test):,} test examples, {self.form()}"
        )

    def count_copies(self, numbers: np.ndarray) -> int:
        """Return how many test examples equal one of the training examples `numbers`."""
        return int(self.find_copies(numbers).sum())

    def find_copies(self, numbers: np.ndarray) -> np.ndarray:
        """Return a mask of the test examples that equal a training example in `numbers`, bool [M].

        Inputs that stay on disk are not compared.
        """
        none = np.zeros(len(self.y_test), bool)
        if not isinstance(self.x_train, torch.Tensor) or not isinstance(self.x_test, torch.Tensor):
            return none
        if self.x_train.shape[1:] != self.x_test.shape[1:]:  # cropped images may differ in size
            return none
        train, test = self.x_train.flatten(1).numpy(), self.x_test.flatten(1).numpy()
        places = np.linspace(0, test.shape[1] - 1, 64).astype(int)  # tell most examples apart
        parts = {row.tobytes() for row in test[:, places]}
        alike = [n for n in numbers if train[n, places].tobytes() in parts]
        known = {train[n].tobytes() for n in alike}
        return np.array([row.tobytes() in known for row in test])

    @abstractmethod
    def form(self) -> str:
        """Return the form of the stored inputs in words."""

    @property
    @abstractmethod
    def shape(self) -> Any:
        """Return the shape of one input, for building a model."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Return (height, width) of the stored images, or (0, 0) for texts."""
        return 0, 0

    @abstractmethod
    def inputs(
        self,
        stored: Stored,
        index: torch.Tensor,
        draws: torch.Tensor | None,
        augmentation: Draws | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the stored examples at `index` as inputs of a model.

        The examples are augmented if `draws` is given. This method works under torch.func.vmap.

        stored: `x_train` or `x_test`.
        index: int64 [...].
        draws: random numbers from `augmentation.draw`, [..., k].
        """

    def to(self, device: torch.device | str) -> Self:
        tensors: dict[str, Any] = {
            k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor | Chosen)
        }
        return replace(self, **tensors)

    def with_validation_as_test(self) -> Self:
        """Return a copy of the data in which the validation set replaces the test set."""
        assert self.validation is not None, "checked when the run was prepared"
        x, y = self.x_train[self.validation], self.y_train[self.validation]
        known = None if self.train_features is None else self.train_features[self.validation]
        return replace(
            self,
            x_test=x,
            y_test=y,
            test_tasks=self.validation_tasks,
            test_clients=self.validation_clients,
            test_domains=self._domains_of(self.validation),
            test_features=known,
        )

    def _domains_of(self, numbers: torch.Tensor) -> np.ndarray | None:
        """Return the domains of training examples. numbers: int64 [m], their indices."""
        return None if self.train_domains is None else self.train_domains[numbers.cpu().numpy()]

    def with_test_from_training(
        self, numbers: torch.Tensor, clients: torch.Tensor | None = None
    ) -> Self:
        """Return a copy of the data in which training examples replace the test set.

        numbers: int64 [m], indices of the training examples. clients: int64 [m], the client that
        holds out each of them. None: unknown.
        """
        x, y, domains = self.x_train[numbers], self.y_train[numbers], self._domains_of(numbers)
        return replace(self, x_test=x, y_test=y, test_clients=clients, test_domains=domains)


class DataSource(Checked, ABC, prefix="dataset."):
    """Base class of data sets (config group `dataset`): where the files are, how to read them."""

    kind: ClassVar[str]  # "images" or "text"
    in_words: ClassVar[str] = "the name of a data set"
    # whether the data set gives its natural clients test examples of their own
    tests_clients: ClassVar[bool] = False
    # whether the examples come from domains that the data set knows (`Data.domains`)
    has_domains: ClassVar[bool] = False

    name: Annotated[str, Limit("letters, digits, _ . -", re.compile(r"[\w.-]+").fullmatch)]
    data_dir: str

    if TYPE_CHECKING:  # at run time, the property would become the default of a subclass's field

        @property
        def augmentation(self) -> Draws:
            """Return the source of the random numbers for each training example."""

    def conversion(self) -> str:
        """Return how inputs were converted when they were read, or an empty text."""
        return ""

    def find(self) -> str:
        """Look for the files without reading them, and return what a run will download, or "".

        Raises ConfigError if files are missing that are not downloaded.
        """
        return ""

    @abstractmethod
    def load(self) -> Data:
        """Return the data set.

        Raises ConfigError if files are missing or damaged.
        """

    def load_test(self) -> Data:
        """Return the data set for a test alone. Its training part may be incomplete."""
        return self.load()


@dataclass(frozen=True)
class ImageData(Data):
    """A decoded image data set. The inputs are uint8 [., height, width, channels].

    Pixels are integers from 0 to max_value. Model inputs are normalised as (pixel / max_value -
    mean) / std.
    """

    mean: tuple[float, ...]  # per channel, on the scale 0..1
    std: tuple[float, ...]
    max_value: int = 255
    crop: ResizedCrop | None = None  # how images are cropped; None: images keep their size

    def form(self) -> str:
        height, width, channels = self.x_train.shape[1:]
        return f"images of {width} x {height} pixels with {plural(channels, 'channel')}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (channels, height, width), the order of axes in a model's inputs."""
        height, width = self.image_size if self.crop is None else (self.crop.size, self.crop.size)
        return self.x_train.shape[3], height, width

    @property
    def image_size(self) -> tuple[int, int]:
        return self.x_train.shape[1], self.x_train.shape[2]

    @cached_property
    def normalise(self) -> Normalise:
        return Normalise(self.mean, self.std, self.max_value)

    def inputs(
        self,
        stored: Stored,
        index: torch.Tensor,
        draws: torch.Tensor | None,
        augmentation: Draws | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return images of shape [..., channels, height, width] and type `dtype`."""
        if isinstance(stored, Chosen):
            stored, index = stored.fetch(index)
        if self.crop is not None:
            return self.crop.load(stored, index, draws, self.normalise, dtype)
        augmentation = augmentation if draws is not None else None
        assert augmentation is None or isinstance(augmentation, Augmentation)
        return load_batch(stored, index, draws, augmentation, self.normalise, dtype)


@dataclass(frozen=True)
class Task:
    """A part of a data set that the clients train on for some rounds (see fedexp.data.tasks)."""

    name: str
    classes: tuple[int, ...]  # labels of the task's examples, ascending
    train: np.ndarray  # indices of the task's training examples, ascending


class TextShape(NamedTuple):
    """What a text model must know about its inputs."""

    length: int  # number of characters per example, including padding
    words: int  # size of the vocabulary
    vectors: torch.Tensor | None  # [words, D], initial embeddings; None: the model initialises them


@dataclass(frozen=True)
class TextData(Data):
    """Texts that are encoded as numbers in a vocabulary. The inputs are int32 [., length]."""

    vocabulary: tuple[str, ...]  # characters, <UNK> and <PAD>, ordered by number
    vectors: torch.Tensor | None = None  # float32 [V, D]: pre-trained embeddings

    def form(self) -> str:
        length, words = self.x_train.shape[1], len(self.vocabulary)
        return f"texts of {length} characters, from a vocabulary of {words:,}"

    @property
    def shape(self) -> TextShape:
        return TextShape(self.x_train.shape[1], len(self.vocabulary), self.vectors)

    def inputs(
        self,
        stored: Stored,
        index: torch.Tensor,
        draws: torch.Tensor | None,
        augmentation: Draws | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return texts as int64 [..., length].

        If `draws` is given, the dropout keys are appended as the last column, so the shape is [...,
        length + 1] (see fedexp.data.text.DropoutKeys).
        """
        assert isinstance(stored, torch.Tensor), "texts are always in memory"
        words = stored[index].long()
        return words if draws is None else torch.cat([words, draws], -1)
