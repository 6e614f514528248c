"""The data sets of conf/dataset: each loads to an ImageData.

CIFAR, CINIC-10, Tiny-ImageNet and Caltech-256 are read from a tree
`<data_dir>/<name>/{train,test}/<class>/<image>` where there is one (class index = position of the
folder in sorted order), otherwise from the official files, which are fetched if missing.
"""

import functools
import hashlib
import math
import re
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from fedexp.core.errors import ConfigError, require, require_choice
from fedexp.data import leaf
from fedexp.data.augment import Augmentation, Normalise
from fedexp.data.cache import Arrays, SourceFile, cached
from fedexp.data.download import Download
from fedexp.data.image_files import (
    MODES,
    class_folders,
    join_classes,
    list_images,
    load_images,
    require_test_part,
    scan_flat,
    scan_tree,
    stratified_split,
)
from fedexp.data.tiny_imagenet import scan_official
from fedexp.data.torchvision_files import TorchvisionFiles
from fedexp.data.types import DataSource, ImageData


@dataclass(frozen=True, kw_only=True)
class Dataset(DataSource):
    """Base of the data sets. `load` raises ConfigError where files are missing or corrupt."""

    kind: ClassVar[str] = "images"

    mean: tuple[float, ...]  # per channel, on the scale 0..1
    std: tuple[float, ...]
    augmentation: Augmentation  # of the training data

    max_value: ClassVar[int] = 255
    # Whether `read` decodes files of pictures: of a JPEG another version of Pillow may make other
    # pixels.
    decodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(
            bool(re.fullmatch(r"[\w.-]+", self.name)),
            "dataset.name",
            self.name,
            "letters, digits, _ . -",
        )
        require(
            len(self.mean) in MODES,
            "dataset.mean",
            self.mean,
            "1 value (grey) or 3 values (red, green, blue)",
        )
        require(
            len(self.std) == len(self.mean),
            "dataset.std",
            self.std,
            f"{len(self.mean)} values, as dataset.mean",
        )
        require(all(map(math.isfinite, self.mean)), "dataset.mean", self.mean, "finite")
        require(
            all(0 < s < math.inf for s in self.std),
            "dataset.std",
            self.std,
            "greater than 0 and finite",
        )

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def normalise(self) -> Normalise:
        return Normalise(self.mean, self.std, self.max_value)

    @abstractmethod
    def read(self) -> Arrays:
        """Return the decoded arrays: x_train, y_train, x_test, y_test, classes and perhaps owners,
        as in ImageData."""

    def load(self) -> ImageData:
        arrays = self.read()
        if missing := [
            key
            for key in ("x_train", "y_train", "x_test", "y_test", "classes")
            if key not in arrays
        ]:
            raise ConfigError(f"dataset={self.name}: `read` returns no {', '.join(missing)}")
        classes = tuple(str(c) for c in arrays["classes"])
        if twice := [name for name, times in Counter(classes).items() if times > 1]:
            raise ConfigError(f"dataset={self.name}: several classes are called {', '.join(twice)}")
        for split in ("train", "test"):
            self._check(split, arrays[f"x_{split}"], arrays[f"y_{split}"], len(classes))
        names = ("x_train", "y_train", "x_test", "y_test")
        inputs = None if self.decodes else checksum(arrays["x_train"], arrays["x_test"])
        return ImageData(
            name=self.name,
            **{k: torch.from_numpy(np.ascontiguousarray(arrays[k])) for k in names},
            classes=classes,
            mean=self.normalise.mean,
            std=self.normalise.std,
            max_value=self.max_value,
            owners=arrays.get("owners"),
            checksum=inputs,
        )

    def _check(self, split: str, x: np.ndarray, y: np.ndarray, num_classes: int) -> None:
        wanted = {
            "x": (x, np.uint8, 4, "images [N, height, width, channels]"),
            "y": (y, np.int64, 1, "labels [N]"),
        }
        for letter, (array, kind, axes, what) in wanted.items():
            given = isinstance(array, np.ndarray)
            if not given or array.dtype != kind or array.ndim != axes:
                made = (
                    f"{array.dtype} of shape {[*array.shape]}"
                    if given
                    else f"a {type(array).__name__}"
                )
                raise ConfigError(
                    f"dataset={self.name}: {letter}_{split} is {made}; must be {kind.__name__}"
                    f" {what}"
                )
        if len(x) == 0 or len(x) != len(y):
            raise ConfigError(
                f"dataset={self.name}: the {split} data have {len(x)} images and {len(y)} labels"
            )
        if y.min() < 0 or y.max() >= num_classes:
            raise ConfigError(
                f"dataset={self.name}: the {split} data have labels outside 0..{num_classes - 1}"
            )
        if x.shape[3] != self.channels:
            have = f"{x.shape[3]} value{'s' * (x.shape[3] > 1)}"
            raise ConfigError(
                f"dataset.mean={self.mean}: the images of {self.name} need {have}, one per channel"
            )

    def _tree(self) -> Path | None:
        """Return `<data_dir>/<name>` where it is a tree of train and test images."""
        root = Path(self.data_dir, self.name)
        return root if (root / "train").is_dir() and (root / "test").is_dir() else None

    def _load_tree(
        self, root: Path, train_splits: tuple[str, ...] = ("train",), size: int | None = None
    ) -> Arrays:
        train, test, classes = scan_tree(root, train_splits)
        return load_images(self.data_dir, self.name, train, test, classes, self.channels, size)


def checksum(*arrays: np.ndarray) -> str:
    """Return one of what all arrays hold."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Digits(Dataset):
    """The 1,797 handwritten digits (8 x 8, grey levels 0..16) that scikit-learn ships; nothing to
    download."""

    test_fraction: float
    split_seed: int

    max_value: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_split(self.test_fraction, self.split_seed)

    def read(self) -> Arrays:
        x, y, classes = decoded_digits()
        train, test = stratified_split(y, self.test_fraction, self.split_seed)
        # copies
        arrays = {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
        return {**arrays, "classes": classes.copy()}


@functools.cache  # scikit-learn reads them from text; a process may have many runs
def decoded_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all images uint8 [N, 8, 8, 1], their labels int64 [N] and the names of the classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (
        digits.images.astype(np.uint8)[..., None],
        digits.target.astype(np.int64),
        digits.target_names,
    )


@dataclass(frozen=True, kw_only=True)
class TorchvisionDataset(Dataset):
    """MNIST, FashionMNIST, CIFAR10 or CIFAR100 through torchvision's class of that name, or an
    image tree."""

    decodes: ClassVar[bool] = True

    torchvision_class: str
    url: str | None  # mirror: the web folder of MNIST's files, the address of CIFAR's archive

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ["MNIST", "FashionMNIST", "CIFAR10", "CIFAR100"]
        require_choice("dataset.torchvision_class", self.torchvision_class, known)

    def read(self) -> Arrays:
        if (root := self._tree()) is not None:
            return self._load_tree(root)
        files = TorchvisionFiles(self.torchvision_class, self.data_dir)
        if not all(path.is_file() for path in files.paths()):
            files.download.fetch(self.name, self.url)
        content = [SourceFile.of(path).stamp(self.data_dir) for path in files.paths()]
        return cached(self.data_dir, self.name, content, {}, files.read)


@dataclass(frozen=True, kw_only=True)
class Femnist(Dataset):
    """LEAF's FEMNIST, `<data_dir>/femnist/{train,test}/*.json`; `owners` are the writers."""

    def read(self) -> Arrays:
        train, test = (
            leaf.split_files(Path(self.data_dir, self.name, split)) for split in ("train", "test")
        )
        content = [SourceFile.of(path).stamp(self.data_dir) for path in (*train, *test)]
        return cached(self.data_dir, self.name, content, {}, lambda: leaf.read_femnist(train, test))


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Dataset):
    """Any tree `<root>/{train,test}/<class>/<image>`; grey or colour as dataset.mean has 1 or 3
    values.

    With `test_fraction` a tree without a test part, `<root>/<class>/<image>`: each class gives that
    share of its images to the test set, drawn by `split_seed`.
    """

    decodes: ClassVar[bool] = True

    root: str
    train_splits: tuple[str, ...]  # folders joined to the training data
    size: int | None  # pixels to which all images are resized; None: they have one size already
    test_fraction: float | None = None  # None: the tree has a test part
    split_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.train_splits) > 0,
            "dataset.train_splits",
            self.train_splits,
            "at least one folder",
        )
        require_size(self.size)
        _require_split(0.5 if self.test_fraction is None else self.test_fraction, self.split_seed)

    def read(self) -> Arrays:
        if self.test_fraction is not None:
            return self._read_split(Path(self.root), self.test_fraction)
        require_test_part(Path(self.root), self.train_splits)
        return self._load_tree(Path(self.root), tuple(self.train_splits), self.size)

    def _read_split(self, root: Path, fraction: float) -> Arrays:
        """Return the arrays of a tree without a test part."""
        files, classes = scan_flat(root, self.train_splits)
        train, test = stratified_split(files.labels, fraction, self.split_seed)
        return load_images(
            self.data_dir,
            self.name,
            files.take(train),
            files.take(test),
            classes,
            self.channels,
            self.size,
        )


@dataclass(frozen=True, kw_only=True)
class Cinic10(ImageFolder):
    """CINIC-10, an image tree as published; fetched if missing."""

    url: str | None  # mirror: address of the archive

    def read(self) -> Arrays:
        root = Path(self.root)
        if not all((root / split).is_dir() for split in (*self.train_splits, "test")):
            host = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/"
            files = (("CINIC-10.tar.gz", "6ee4d0c996905fe93221de577967a372"),)
            Download((host,), files, root).fetch(self.name, self.url)
        return super().read()


@dataclass(frozen=True, kw_only=True)
class TinyImageNet(Dataset):
    """Tiny-ImageNet-200 as published, tested on its val images (its test images have no labels), or
    an image tree."""

    decodes: ClassVar[bool] = True

    url: str | None  # mirror: address of the archive

    def read(self) -> Arrays:
        folders = [Path(self.data_dir, folder) for folder in ("tiny-imagenet-200", self.name)]
        official = [
            folder for folder in folders if (folder / "val" / "val_annotations.txt").is_file()
        ]
        if not official and (root := self._tree()) is not None:
            return self._load_tree(root)
        if not official:
            files = (("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),)
            Download(("http://cs231n.stanford.edu/",), files, Path(self.data_dir)).fetch(
                self.name, self.url
            )
            official = folders
        train, test, classes = scan_official(official[0])
        return load_images(self.data_dir, self.name, train, test, classes, self.channels)


@dataclass(frozen=True, kw_only=True)
class Caltech256(Dataset):
    """Caltech-256 as published (no official split: a stratified one is drawn), or an image tree;
    resized."""

    decodes: ClassVar[bool] = True
    # its test part is drawn here; as a surrogate set it is all of its images
    splits_itself: ClassVar[bool] = True

    url: str | None  # mirror: address of the archive
    size: int
    test_fraction: float
    split_seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size(self.size)
        _require_split(self.test_fraction, self.split_seed)

    def read(self) -> Arrays:
        if (root := self._tree()) is not None:
            return self._load_tree(root, size=self.size)
        folder = Path(self.data_dir, self.name, "256_ObjectCategories")
        if not folder.is_dir():
            host = "https://data.caltech.edu/records/nyy15-4j048/files/"
            files = (("256_ObjectCategories.tar", "67b4f42ca05d46448c6bb8ecd2220f6d"),)
            Download((host,), files, folder.parent).fetch(self.name, self.url)
        folders = class_folders(folder)
        # some class folders hold other folders with strays: only the images directly in a class
        # folder belong to it
        everything = join_classes([list_images(folder / name, recursive=False) for name in folders])
        train, test = stratified_split(everything.labels, self.test_fraction, self.split_seed)
        classes = [name.partition(".")[2] or name for name in folders]  # 001.ak47
        return load_images(
            self.data_dir,
            self.name,
            everything.take(train),
            everything.take(test),
            classes,
            self.channels,
            self.size,
        )


def _require_split(fraction: float, seed: int) -> None:
    require(0 < fraction < 1, "dataset.test_fraction", fraction, "between 0 and 1")
    require(0 <= seed < 2**32, "dataset.split_seed", seed, f"from 0 to {2**32 - 1}")


def require_size(size: int | None) -> None:
    """Raise ConfigError where `dataset.size` is no number of pixels."""
    require(
        size is None or 0 < size <= 4096,
        "dataset.size",
        size,
        "greater than 0 and at most 4096 pixels",
    )
