"""MNIST-like and CIFAR-like data sets in the files that torchvision's classes read."""

import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.data.cache import Arrays
from fedexp.data.download import Download

THROTTLED = "the host of CIFAR has been throttled since June 2026; a mirror is faster"


class TorchvisionFiles:
    """The files in `data_dir` that one of torchvision's data set classes reads."""

    def __init__(self, class_name: str, data_dir: str):
        import torchvision.datasets

        self.cls: Any = getattr(torchvision.datasets, class_name)
        self.data_dir = data_dir
        self.is_idx = hasattr(self.cls, "resources")  # MNIST and its kin; otherwise CIFAR's pickles
        if self.is_idx:
            folder = Path(data_dir, class_name, "raw")
            resources = tuple(self.cls.resources)
            self.md5: dict[Path, str | None] = {
                folder / name.removesuffix(".gz"): None for name, _ in resources
            }
            self.download = Download(tuple(self.cls.mirrors), resources, folder)
        else:
            folder = Path(data_dir, self.cls.base_folder)
            meta = (self.cls.meta["filename"], self.cls.meta["md5"])
            self.md5 = {
                folder / name: md5
                for name, md5 in (*self.cls.train_list, *self.cls.test_list, meta)
            }
            host = self.cls.url.removesuffix(self.cls.filename)
            self.download = Download(
                (host,), ((self.cls.filename, self.cls.tgz_md5),), Path(data_dir), THROTTLED
            )

    def paths(self) -> list[Path]:
        return list(self.md5)

    def read(self) -> Arrays:
        """Decode all files. Raises ConfigError that names the file when one is corrupt."""
        return self._read_idx() if self.is_idx else self._read_batches()

    def _read_idx(self) -> Arrays:
        readers = (read_images, read_labels) * 2
        x_train, y_train, x_test, y_test = map(self._decode, self.md5, readers)
        return {
            "x_train": x_train,
            "y_train": y_train,
            "x_test": x_test,
            "y_test": y_test,
            # MNIST has "3 - three"
            "classes": np.array([name.partition(" - ")[0] for name in self.cls.classes]),
        }

    def _read_batches(self) -> Arrays:
        from torchvision.datasets.utils import check_integrity

        # torchvision unpickles the batches, so they must be the published ones to the bit.
        for path, md5 in self.md5.items():
            if not check_integrity(path, md5):
                raise ConfigError(self._corrupt(path))
        train, test = (self.cls(self.data_dir, train=train) for train in (True, False))
        return {
            "x_train": train.data,
            "y_train": np.array(train.targets, dtype=np.int64),
            "x_test": test.data,
            "y_test": np.array(test.targets, dtype=np.int64),
            "classes": np.array(train.classes),
        }

    def _decode(self, path: Path, decode: Any) -> Any:
        try:
            with path.open("rb") as file:
                return decode(file)
        except (OSError, ValueError) as error:
            raise ConfigError(self._corrupt(path)) from error

    def _corrupt(self, path: Path) -> str:
        files = ", ".join(name for name, _ in self.download.files)
        return f"{path}: is corrupt; delete it, so that the next run restores it from {files}"


def read_images(file: BinaryIO) -> np.ndarray:
    """Read images as uint8 [N, H, W, 1]; MNIST has no dimension of channels."""
    return read_idx(file, 3)[..., None]


def read_labels(file: BinaryIO) -> np.ndarray:
    """Read labels as int64 [N]."""
    return read_idx(file, 1).astype(np.int64)


def read_idx(file: BinaryIO, rank: int) -> np.ndarray:
    """Read an idx file of bytes: two zero bytes, 8 = uint8, the rank, big-endian int32 sizes, the
    values."""
    start, sizes = file.read(4), np.frombuffer(file.read(4 * rank), ">i4").tolist()
    content = np.frombuffer(bytearray(file.read()), np.uint8)  # writable, as torch wants it
    if start != bytes([0, 0, 8, rank]) or len(sizes) != rank or len(content) != math.prod(sizes):
        raise ValueError(f"not a whole idx file of rank {rank}")
    return content.reshape(sizes)
