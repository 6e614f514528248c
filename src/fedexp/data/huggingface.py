"""Image and text data sets from the Hugging Face hub, or saved by its library `datasets`.

The library is an optional dependency. It reads Parquet, Arrow, json, csv and image files. Since
version 4, it does not run code from data sets. `dataset.path` cannot be the name of one of the
library's built-in readers, because the reader `pandas` unpickles files from the working directory.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedexp.core.errors import ConfigError, reason_of, require_choice
from fedexp.core.packages import import_extra
from fedexp.data.cache import Arrays, load_cached, make_arrays
from fedexp.data.datasets import Dataset, Side, stack_images
from fedexp.data.image_files import Form
from fedexp.data.text import LabelledTexts, TextSource
from fedexp.data.types import MISSING, TextData, number_labels, sort_classes

log = logging.getLogger("fedexp")
ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")
# common column names, which are tried in this order if `dataset.label` or `dataset.column` is null
LABELS = ("label", "labels", "fine_label", "target", "class")
INPUTS = {"image": ("image", "img"), "text": ("text", "content", "sentence", "title")}


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Options that select a data set, its splits and its columns, for images and texts."""

    path: str | None  # name on the hub, such as ylecun/mnist, or a local folder
    subset: str | None  # configuration of the data set (called `name` in the library)
    train_split: str
    test_split: str  # may equal train_split if the clients hold out the test set (test_per_client)
    column: str | None  # column of the images or texts; None: the first column with a common name
    label: str | None  # column of the labels; None: the first column with a common name
    owner: str | None = None  # column of the natural clients, such as writer_id; None: no clients

    def splits(self, kind: str) -> tuple[Any, Any, str, str]:
        """Return (training examples, test examples, column of the inputs, column of the labels).

        kind: image or text.
        """
        found = load(self.path, self.subset)
        require_choice("dataset.train_split", self.train_split, found)
        require_choice("dataset.test_split", self.test_split, found)
        train, test = found[self.train_split], found[self.test_split]
        column = choose_column(train, self.column, "column", INPUTS[kind])
        return train, test, column, choose_column(train, self.label, "label", LABELS)


def load(path: str | None, subset: str | None) -> Mapping[str, Any]:
    """Return the splits of a data set as a dict {name: split}.

    path, subset: see `Hub`.

    Raises ConfigError if the data set or the library is missing.
    """
    local = path is not None and Path(path).is_dir()
    if not path or not (local or ON_THE_HUB.fullmatch(path)):
        raise ConfigError(
            f"dataset.path={path or 'null'}: must be the name of a data set on the Hugging Face"
            " hub, <owner>/<name>, or a local folder"
        )
    datasets = import_extra("datasets", "huggingface", f"dataset.path={path}")
    try:
        if (Path(path) / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(path)
        else:
            # use the absolute path, because a folder can have the same name as a built-in reader
            found = datasets.load_dataset(str(Path(path).absolute()) if local else path, subset)
    except Exception as error:  # the library raises many types, including network errors
        raise ConfigError(
            f"dataset.path={path}: the package datasets cannot load this data set"
            f" ({reason_of(error)})"
        ) from error
    return {str(name): split for name, split in found.items()}


def number_owners(train: Any, column: str) -> np.ndarray:
    """Return each training example's natural client, int [N], in the order of `sort_classes`.

    Names that differ only in white space are said. Raises ConfigError if the column does not exist
    or lacks values.
    """
    require_choice("dataset.owner", column, list(train.column_names))
    values = list(train[column])
    absent = [number for number, value in enumerate(values) if is_missing(value)]
    key, lacking = f"dataset.owner={column}", "owner (None, nan, -1 or an empty text)"
    require_none(absent, len(values), key, "training examples", lacking)
    kinds = {type(value) for value in values}
    if kinds not in ({int}, {str}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ConfigError(
            f"{key}: all values must be texts, or all must be integers, but they are {names}"
        )
    owners = sort_classes(set(values))
    warn_of_spaces(owners, key, "clients")
    return np.array(number_labels(values, owners, key), np.int64)


def warn_of_spaces(names: Sequence[Any], key: str, what: str) -> None:
    """Warn of names that differ only in white space, because they are probably the same.

    key: what gives the names. what: the things that they name.
    """
    found: dict[str, str] = {}
    for name in map(str, names):
        other = found.setdefault("".join(name.split()), name)
        if other != name:
            log.warning(
                "%s: %r and %r are different %s, but differ only in white space",
                *(key, other, name, what),
            )


def choose_column(split: Any, wanted: str | None, key: str, usual: Sequence[str]) -> str:
    """Return the column `wanted` or, if it is None, the first column with a common name.

    split: a split of the data set.
    key: name of the option, for messages.
    usual: common names, in order of preference.

    Raises ConfigError if the column does not exist.
    """
    columns = list(split.column_names)
    if wanted is None:
        wanted = next((name for name in usual if name in columns), None)
    require_choice(f"dataset.{key}", str(wanted), columns)
    return str(wanted)


def encode_labels(
    train: Any, test: Any, column: str
) -> tuple[list[int], list[int], tuple[str, ...]]:
    """Return (labels of the training examples, labels of the test examples, class names).

    The class names are taken from the training split if it defines them. Otherwise they are the
    labels of the training examples, in the order of `sort_classes`. The two splits may number their
    classes differently; labels are then matched by class name.

    Raises ConfigError if labels are missing, or if only one split names its classes and the labels
    of the other are numbers.
    """
    splits = (train, test)
    names, test_names = (list_names(split, column) for split in splits)
    raw = [list(split[column]) for split in splits]
    lacking = "label (None, nan, -1 or an empty text)"
    for split, labels in (("training", raw[0]), ("test", raw[1])):
        absent = [number for number, label in enumerate(labels) if is_missing(label)]
        require_none(absent, len(labels), f"dataset.label={column}", f"{split} examples", lacking)
    for label in (*raw[0], *raw[1]):
        if isinstance(label, list | dict):
            raise ConfigError(
                f"dataset.label={column}: each example must have one label, but a label is"
                f" {label}; choose another column"
            )
    source = f"dataset.label={column}"
    if names != test_names:
        require_names(raw, (names, test_names), source)
        raw = [name_labels(*each) for each in zip(raw, (names, test_names), strict=True)]
        known = list(names or sort_classes(set(raw[0])))
    else:
        known = list(range(len(names))) if names else sort_classes(set(raw[0]))
    y_train, y_test = (number_labels(labels, known, source) for labels in raw)
    warn_of_spaces(names or known, source, "classes")
    return y_train, y_test, tuple(map(str, names or known))


def list_names(split: Any, column: str) -> tuple[str, ...]:
    """Return the class names that a split defines, ordered by label, or none."""
    return tuple(getattr(split.features[column], "names", None) or ())


def name_labels(labels: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return the class name of each label. Without `names`, a label is its class name."""
    known = range(len(names))
    return [names[label] if label in known else str(label) for label in labels]


def require_names(
    raw: Sequence[Sequence[Any]], names: Sequence[Sequence[str]], source: str
) -> None:
    """Raise ConfigError if only one split names its classes, and the other one has numbers.

    The numbers may count the classes in another order. They are accepted if the names are the
    numbers 0 to C - 1. raw, names: of the training and test examples.
    """
    for plain, other, k in ((raw[1], names[0], 1), (raw[0], names[1], 0)):
        numbered = any(not isinstance(label, str) for label in plain)
        if other and not names[k] and numbered and list(other) != [*map(str, range(len(other)))]:
            which = ("training", "test")
            raise ConfigError(
                f"{source}: the {which[1 - k]} examples have class names ({other[0]}, ...), but"
                f" the {which[k]} examples only have numbers, which may count the classes in"
                " another order; store the class names with both splits"
            )


def is_missing(label: object) -> bool:
    """Return whether a label stands for no label: None, nan, an empty text or, on the hub, -1."""
    return label is None or str(label).strip().lower() in (*MISSING, "-1", "-1.0")


def require_none(numbers: Sequence[int], total: int, key: str, examples: str, what: str) -> None:
    """Raise ConfigError if there are examples without a label or text.

    numbers: their numbers. total: the number of all examples.
    """
    if numbers:
        raise ConfigError(
            f"{key}: {len(numbers):,} of the {total:,} {examples} have no {what} (the first is"
            f" number {numbers[0]}); remove them from the data set, or choose another column"
        )


@dataclass(frozen=True, kw_only=True)
class HuggingFaceImages(Hub, Dataset):
    """Images that are greyscale if dataset.mean has one value, and in colour if it has three."""

    # images are resized to size x size pixels; None: they already have the same size
    size: Side | None

    def conversion(self) -> str:
        return Form(self.channels, self.size).sentence()

    def read(self) -> Arrays:
        train, test, column, label = self.splits("image")
        y_train, y_test, classes = encode_labels(train, test, label)

        def build() -> Arrays:
            x_train = self._images(train, column)
            x_test = x_train if test is train else self._images(test, column)
            return make_arrays((x_train, y_train), (x_test, y_test), classes)

        content = [str(split._fingerprint) for split in (train, test)] + [f"classes {classes}"]
        if (names := list_names(test, label)) != list_names(train, label):
            content += [f"test classes {names}"]
        options: dict[str, Any] = {"channels": self.channels, "size": self.size}
        options |= {"column": column, "label": label}
        options |= {} if self.owner is None else {"owner": self.owner}
        # entries of other data sets stay in the cache
        splits = [self.train_split, self.test_split]
        options |= {"path": self.path, "subset": self.subset, "splits": splits}
        arrays = load_cached(self.data_dir, self.name, content, options, build)
        owner = self.owner
        return arrays if owner is None else arrays | {"owners": number_owners(train, owner)}

    def _images(self, split: Any, column: str) -> np.ndarray:
        """Return the decoded images, uint8 [n, height, width, channels]."""
        if not isinstance(first := split[0][column], Image.Image):
            raise ConfigError(
                f"dataset.column={column}: this column must contain images, but it contains"
                f" {type(first).__name__}"
            )
        form = Form(self.channels, self.size)
        return stack_images(split[column], form, f"{self.path}, {column}")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceTexts(Hub, TextSource):
    """Texts that are read as sequences of characters."""

    def load(self, like: TextData | None = None) -> TextData:
        data = super().load(like)
        if self.owner is None:
            return data
        return replace(data, owners=number_owners(self.splits("text")[0], self.owner))

    def read(self, length: int) -> LabelledTexts:
        train, test, column, label = self.splits("text")
        y_train, y_test, classes = encode_labels(train, test, label)
        found = []
        for name, split in (("training", train), ("test", test)):
            texts = list(split[column])
            blank = [k for k, text in enumerate(texts) if text is None or not str(text).strip()]
            require_none(blank, len(texts), f"dataset.column={column}", f"{name} examples", "text")
            found.append([str(text)[:length] for text in texts])
        return LabelledTexts(found[0], found[1], y_train, y_test, classes)
