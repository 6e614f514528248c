"""Read the clients of PFLlib (github.com/TsingZ0/PFLlib) with their own training and test images.

PFLlib pickles each client's examples. docs/guide/coming_from.md has a script that exports them to
plain arrays: a folder has PFLlib's `config.json` and, for each client k from 0, `train/<k>.npz` and
`test/<k>.npz` with `x`, float [n, channels, height, width], and `y`, int [n]. No pickle is loaded.
"""

import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp.core.storage import load_npz, read_mapping
from fedexp.data.cache import Arrays, SourceFile, load_cached, make_arrays, relative, stamps
from fedexp.data.datasets import AnyChannels
from fedexp.data.image_files import MODES

PAGE = 'the script on the page "Coming from PFLlib, Flower or FL-bench"'
ROUNDING = 0.05  # largest distance of a grey level from an integer, for float32 and float16


class PFLlib(AnyChannels):
    """The clients of a folder that was exported from PFLlib.

    Client k of PFLlib is natural client k, which has the training and the test examples of its
    files. PFLlib stores normalised images; `mean` and `std` are the values that it used, so
    that models receive the same inputs. They are 0.5 in most of PFLlib's generators.
    """

    tests_clients: ClassVar[bool] = True

    root: str

    def find(self) -> str:
        self.files()
        return ""

    def read(self) -> Arrays:
        train, test = self.files()
        config = Path(self.root, "config.json")
        files = map(SourceFile.of, (config, *train, *test))
        root = relative(self.root, self.data_dir)
        options = {"root": root, "mean": list(self.mean), "std": list(self.std)}
        build = partial(self.read_clients, train, test)
        return load_cached(self.data_dir, self.name, stamps(files, self.data_dir), options, build)

    def files(self) -> tuple[list[Path], list[Path]]:
        """Return the training and the test file of each client.

        Raises ConfigError if a file is missing, or if there are files of other clients.
        """
        clients = self.number("num_clients")
        train, test = (
            [Path(self.root, split, f"{k}.npz") for k in range(clients)]
            for split in ("train", "test")
        )
        for files in (train, test):
            folder = files[0].parent
            found = {path.name for path in folder.glob("*.npz")}
            wanted = {path.name for path in files}
            if wrong := sorted(found ^ wanted, key=lambda name: (len(name), name)):
                what = "is missing" if wrong[0] in wanted else "belongs to no client"
                raise ConfigError(
                    f"{folder / wrong[0]}: {what}; {Path(self.root, 'config.json')} has"
                    f" num_clients={clients}, so there must be 0.npz to {clients - 1}.npz in train"
                    " and in test"
                )
        return train, test

    def number(self, key: str) -> int:
        """Return a number of config.json that is at least 1."""
        path = Path(self.root, "config.json")
        if not path.is_file():
            raise ConfigError(
                f"dataset.root={self.root}: has no config.json; set dataset.root to a folder that"
                f" {PAGE} wrote"
            )
        value = read_mapping(path).get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{path}: {key}={value}: must be an integer of at least 1")
        return value

    def read_clients(self, train: Sequence[Path], test: Sequence[Path]) -> Arrays:
        """Return the arrays of the data set, with the client of each training and test example."""
        classes, parts = self.number("num_classes"), []
        shape: tuple[int, ...] | None = None
        for files in (train, test):
            clients = [self.read_client(path, classes) for path in files]
            for path, (x, _) in zip(files, clients, strict=True):
                shape = shape or x.shape[1:]
                if x.shape[1:] != shape:
                    raise ConfigError(
                        f"{path}: has images of shape {[*x.shape[1:]]} (height, width, channels),"
                        f" but those of {train[0]} have {[*shape]}"
                    )
            owners = np.repeat(np.arange(len(clients)), [len(y) for _, y in clients])
            x, y = (np.concatenate(arrays) for arrays in zip(*clients, strict=True))
            parts.append((x, y, owners))
        (*first, owners), (*second, test_owners) = parts
        made = make_arrays((first[0], first[1]), (second[0], second[1]), map(str, range(classes)))
        return made | {"owners": owners, "test_owners": test_owners}

    def read_client(self, path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a file's images, uint8 [n, height, width, channels], and labels, int64 [n]."""
        if zipfile.is_zipfile(path) and "data.npy" in zipfile.ZipFile(path).namelist():
            raise ConfigError(
                f"{path}: is a pickle of PFLlib, which could run any code when it is loaded; export"
                f" the folder with {PAGE}, and set dataset.root to the result"
            )
        arrays = load_npz(path)
        if arrays.keys() != {"x", "y"}:
            names = ", ".join(sorted(arrays)) or "none"
            raise ConfigError(
                f"{path}: must have the arrays x and y, as {PAGE} writes; has {names}"
            )
        x, y = arrays["x"], arrays["y"]
        if x.ndim != 4 or x.dtype.kind != "f" or x.shape[1] not in MODES:
            raise ConfigError(
                f"{path}: x is {x.dtype} of shape {[*x.shape]}; must be images, float [n, channels,"
                " height, width] with 1 or 3 channels. PFLlib's texts and time series are not read"
            )
        if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
            raise ConfigError(
                f"{path}: y is {y.dtype} of shape {[*y.shape]}; must be a label (integer) for each"
                f" of the {len(x)} images"
            )
        if not len(y):
            raise ConfigError(f"{path}: has no examples; each client needs some")
        if y.min() < 0 or y.max() >= classes:
            wrong = y.min() if y.min() < 0 else y.max()
            raise ConfigError(
                f"{path}: has the label {wrong}; must be from 0 to {classes - 1}, since config.json"
                f" has num_classes={classes}"
            )
        return self.grey_levels(x, path), y.astype(np.int64)

    def grey_levels(self, x: np.ndarray, path: Path) -> np.ndarray:
        """Return normalised images as the integers from 0 to 255 that they were before.

        Raises ConfigError if the images were normalised with another mean and deviation.
        """
        if len(self.mean) not in (1, x.shape[1]):
            raise ConfigError(
                f"dataset.mean={list(self.mean)}: {path} has images with"
                f" {plural(x.shape[1], 'channel')}; must have as many values, or 1 for all"
            )
        mean, std = (np.reshape(each, (-1, 1, 1)) for each in (self.mean, self.std))
        levels = (x.astype(np.float64) * std + mean) * 255
        whole = np.rint(levels)
        if not ((np.abs(levels - whole) <= ROUNDING) & (whole >= 0) & (whole <= 255)).all():
            raise ConfigError(
                f"{path}: its images were not normalised with dataset.mean={list(self.mean)}"
                f" dataset.std={list(self.std)}, since (x * std + mean) * 255 is not a grey level"
                " from 0 to 255. Set the values of PFLlib's generate_*.py: 0.5 and 0.5 for most"
                " data sets, 0 and 1 for images that it does not normalise (DomainNet)"
            )
        return whole.astype(np.uint8).transpose(0, 2, 3, 1)
