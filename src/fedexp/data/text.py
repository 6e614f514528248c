"""Text data sets that are read as sequences of characters.

These are the data sets of CFeD (Ma et al., IJCAI 2022), or have the same formats. Each of the first
`length` characters of a text is encoded as the character's number in a vocabulary. `<UNK>` replaces
characters that are not in the vocabulary, and short texts are padded with `<PAD>`. Texts are not
normalised.
"""

import json
import logging
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Count, Limit
from fedexp.core.storage import load_npz
from fedexp.data.augment import Draws
from fedexp.data.text_files import (
    find_files,
    label_numbers,
    name_classes,
    read_texts,
    require_complete,
)
from fedexp.data.types import DataSource, TextData

log = logging.getLogger("fedexp")
UNK, PAD = "<UNK>", "<PAD>"
Names = Annotated[tuple[str, ...], Limit("different names", lambda v: len(v) == len(set(v)) > 0)]


class DropoutKeys(Draws):
    """Random keys from which a model computes its dropout masks (fedexp.models.textcnn).

    A new key is drawn each time an example is used. Data sets of texts have this class in place of
    Augmentation. Like augmentation, dropout therefore depends on the seed, the round and the
    client, but not on the order in which the clients are trained.
    """

    active = True

    def draw(self, rng: np.random.Generator, n: int, height: int = 0, width: int = 0) -> np.ndarray:
        """Return uniform random keys, int64 [n, 1].

        The first keys do not depend on `n`. The image size is ignored.
        """
        low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        return rng.integers(low, high, size=(n, 1), dtype=np.int64, endpoint=True)


@dataclass(frozen=True)
class LabelledTexts:
    """The texts and labels in the files of a data set."""

    train: list[str]
    test: list[str]
    y_train: list[int]
    y_test: list[int]
    classes: tuple[str, ...]


class TextSource(DataSource):
    """Base class of text data sets.

    `load` raises ConfigError if files are missing or damaged.
    """

    kind: ClassVar[str] = "text"
    augmentation: ClassVar[DropoutKeys] = DropoutKeys()  # random numbers for each training example

    # number of characters per example
    length: Annotated[int, Limit("from 1 to 65536 characters", lambda v: 1 <= v <= 65536)]
    # largest size of a vocabulary that is made from the training texts, without <UNK> and <PAD>
    max_words: Count
    # json file {character: number} in <data_dir>/<name>; None: made from the training texts
    vocabulary: str | None
    # npz file in <data_dir>/<name> with an embedding of each entry of `vocabulary`; None: no
    # vectors
    vectors: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.vectors is None or self.vocabulary is not None
        words = "null unless dataset.vocabulary is set"
        require(fits, "dataset.vectors", self.vectors, words)

    @property
    def folder(self) -> Path:
        return Path(self.data_dir, self.name)

    @abstractmethod
    def read(self, length: int) -> LabelledTexts:
        """Return the labelled texts, cut to `length` characters."""

    def load(self, like: TextData | None = None) -> TextData:
        """Return the data set with encoded texts.

        like: data set whose vocabulary, length and vectors are used. None: use the options.
        """
        read = self.read(self.length if like is None else like.shape.length)
        if like is None:
            vocabulary, vectors = self._vocabulary(read.train)
            length = self.length
        else:
            length, vocabulary, vectors = like.shape.length, like.vocabulary, like.vectors
        x_train, x_test = (encode(part, vocabulary, length) for part in (read.train, read.test))
        return TextData(
            name=self.name,
            x_train=torch.from_numpy(x_train),
            y_train=torch.tensor(read.y_train, dtype=torch.int64),
            x_test=torch.from_numpy(x_test),
            y_test=torch.tensor(read.y_test, dtype=torch.int64),
            classes=read.classes,
            vocabulary=vocabulary,
            vectors=vectors,
        )

    def _vocabulary(self, texts: Sequence[str]) -> tuple[tuple[str, ...], torch.Tensor | None]:
        if self.vocabulary is None:
            return add_special_words(most_frequent(texts, self.max_words)), None
        path = self.folder / self.vocabulary
        words = read_vocabulary(path)
        if self.vectors is None:
            return add_special_words(words), None
        vectors = read_vectors(self.folder / self.vectors)
        if len(vectors) != len(words):
            raise ConfigError(
                f"{self.folder / self.vectors}: has {len(vectors)} vectors, but {path} has"
                f" {len(words)} entries; there must be one vector per entry"
            )
        return add_special_words(words), torch.from_numpy(_add_special_vectors(words, vectors))


class TextDataset(TextSource):
    """Labelled training and test texts, read from files in `<data_dir>/<name>`.

    The files must have one of the layouts in fedexp.data.text_files.
    """

    # class names, ordered by label; None: read class.txt or, if it is missing, use the labels
    classes: Names | None
    # layout of the files; None: the first layout that matches a file
    layout: Literal["txt", "csv", "class_il", "domain_il"] | None

    def find(self) -> str:
        find_files(self.folder, self.layout)
        return ""

    def read(self, length: int) -> LabelledTexts:
        parts = [read_texts(paths, length) for paths in find_files(self.folder, self.layout)]
        listed = self._listed_classes()
        for part in parts:
            require_complete(part, listed)
        classes = listed or name_classes(parts[0])
        train = [example.text for example in parts[0]]
        test = [example.text for example in parts[1]]
        y_train, y_test = (label_numbers(part, classes) for part in parts)
        return LabelledTexts(train, test, y_train, y_test, classes)

    def _listed_classes(self) -> tuple[str, ...]:
        """Return the class names of the option or of class.txt, or none without both."""
        if self.classes is not None:
            return tuple(self.classes)
        path = self.folder / "class.txt"
        if not path.is_file():
            return ()
        try:
            lines = path.read_text("utf-8-sig").splitlines()
        except ValueError as error:
            raise ConfigError(f"{path}: must be encoded in UTF-8 ({error})") from error
        names = tuple(line.strip() for line in lines if line.strip())
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{path}: must have one class name per line, without repetitions")
        return names


class UnlabelledTexts(TextSource):
    """Texts without labels, for use as a surrogate set.

    All labels are -1, and the test set is empty. A label column in the file is ignored.
    """

    file: str  # path of the csv file, relative to data_dir

    def find(self) -> str:
        self.path()
        return ""

    def path(self) -> Path:
        path = Path(self.data_dir, self.file)
        if path.suffix != ".csv" or not path.is_file():
            raise ConfigError(
                f"dataset.file={self.file}: {path} must be an existing csv file with a column named"
                " title, body, content or article; fedexp cannot download this file"
            )
        return path

    def read(self, length: int) -> LabelledTexts:
        path = self.path()
        texts = [example.text for example in read_texts([path], length, labelled=False)]
        if empty := texts.count(""):
            log.warning("%s: %s of %s texts are empty", path, f"{empty:,}", f"{len(texts):,}")
        return LabelledTexts(texts, [], [-1] * len(texts), [], ())


def encode(texts: Sequence[str], vocabulary: Sequence[str], length: int) -> np.ndarray:
    """Return the first `length` characters of each text as vocabulary numbers, int32 [N, length].

    vocabulary: must contain <UNK> and <PAD>.
    """
    # the number in the vocabulary of each code point
    numbers = np.full(sys.maxunicode + 1, vocabulary.index(UNK), np.int32)
    for number, word in enumerate(vocabulary):
        if len(word) == 1:
            numbers[ord(word)] = number
    cut = [text[:length] for text in texts]
    points = np.frombuffer("".join(cut).encode("utf-32-le"), "<u4")
    used = np.arange(length) < np.array([len(text) for text in cut], np.int64)[:, None]
    encoded = np.full((len(texts), length), vocabulary.index(PAD), np.int32)
    encoded[used] = numbers[points]
    return encoded


def most_frequent(texts: Sequence[str], limit: int) -> tuple[str, ...]:
    """Return the `limit` most frequent characters, starting with the most frequent one.

    Characters that are equally frequent are ordered by code point.
    """
    counts = Counter("".join(texts))
    return tuple(sorted(counts, key=lambda character: (-counts[character], character))[:limit])


def add_special_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Append <UNK> and <PAD> if they are missing."""
    return words + tuple(word for word in (UNK, PAD) if word not in words)


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """Return the characters in a json file `{character: number}`, ordered by number."""
    try:
        numbers = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); dataset.vocabulary=null makes a vocabulary from the"
            " training texts"
        ) from error
    valid = isinstance(numbers, dict) and all(type(number) is int for number in numbers.values())
    if not valid or not numbers or sorted(numbers.values()) != list(range(len(numbers))):
        raise ConfigError(
            f"{path}: must be a JSON object that maps N characters to the numbers 0 to N - 1"
        )
    return tuple(sorted(numbers, key=numbers.__getitem__))


def read_vectors(path: Path) -> np.ndarray:
    """Return pre-trained vectors, float32 [V, D], from an npz file.

    The vectors are the array `embeddings` or, if the file has no array of this name, its only
    matrix.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path}: this file is missing; set dataset.vectors=null to use no pre-trained vectors"
        )
    arrays = load_npz(path)
    matrices = {name: array for name, array in arrays.items() if array.ndim == 2 and array.size}
    vectors = matrices.get("embeddings", next(iter(matrices.values()), None))
    if (
        vectors is None
        or ("embeddings" not in matrices and len(matrices) > 1)
        or not np.issubdtype(vectors.dtype, np.floating)
        or not np.isfinite(vectors).all()
    ):
        raise ConfigError(
            f"{path}: must contain a matrix of finite floating-point numbers, with one row per"
            " vocabulary entry; if it contains several matrices, this one must be named"
            f" embeddings. It contains the arrays {', '.join(arrays)}"
        )
    return vectors.astype(np.float32)


def _add_special_vectors(words: tuple[str, ...], vectors: np.ndarray) -> np.ndarray:
    """Append rows for <UNK> (the mean of all rows) and <PAD> (zeros) if they are missing."""
    added = {UNK: vectors.mean(0, dtype=np.float64), PAD: np.zeros(vectors.shape[1])}
    rows = [added[word] for word in add_special_words(words)[len(words) :]]
    return np.concatenate([vectors, *(row[None].astype(np.float32) for row in rows)])
