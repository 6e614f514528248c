"""MNIST-like and CIFAR-like data sets: torchvision's classes say which files they need, and these
are read here.

CIFAR's files are pickles, which can run any code when they are read; here they can only build
arrays, lists and texts.
"""

import math
import pickle
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

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

        for path, md5 in self.md5.items():
            if not check_integrity(path, md5):
                raise ConfigError(self._corrupt(path))
        *batches, meta = (self._decode(path, read_plain) for path in self.md5)
        n = len(self.cls.train_list)
        (x_train, y_train), (x_test, y_test) = (join(part) for part in (batches[:n], batches[n:]))
        names = np.array(meta[self.cls.meta["key"]])
        return {
            "x_train": x_train,
            "y_train": y_train,
            "x_test": x_test,
            "y_test": y_test,
            "classes": names,
        }

    def _decode(self, path: Path, decode: Any) -> Any:
        try:
            with path.open("rb") as file:
                return decode(file)
        except Exception as error:  # pickle raises many types
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


class Plain(pickle.Unpickler):
    """Reads pickles of plain values and NumPy arrays. What else they name is neither imported nor
    called."""

    # makes an empty array, which is then filled
    RECONSTRUCT: ClassVar = np.zeros(0).__reduce__()[0]
    ALLOWED: ClassVar = {
        "numpy.core.multiarray._reconstruct": RECONSTRUCT,
        "numpy._core.multiarray._reconstruct": RECONSTRUCT,
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(
                f"names {module}.{name}, which no data file needs"
            ) from None


def read_plain(file: BinaryIO) -> Any:
    """Read a pickle of plain values, written by Python 2 (CIFAR) or 3."""
    return Plain(file, encoding="latin1").load()


def join(batches: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (x uint8 [N, 32, 32, 3], y int64 [N]) of batches whose rows are the red, green, then
    blue plane."""
    x = (
        np.concatenate([batch["data"] for batch in batches])
        .reshape(-1, 3, 32, 32)
        .transpose(0, 2, 3, 1)
    )
    labels = [batch["labels" if "labels" in batch else "fine_labels"] for batch in batches]
    return np.ascontiguousarray(x), np.concatenate(labels).astype(np.int64)
