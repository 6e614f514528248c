"""MNIST-like and CIFAR-like data sets through torchvision's own classes: which files they need, and reading them."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.data.cache import Arrays
from fedexp.data.download import Download
from fedexp.errors import ConfigError

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
            self.md5: dict[Path, str | None] = {folder / name.removesuffix(".gz"): None for name, _ in resources}
            self.download = Download(tuple(self.cls.mirrors), resources, folder)
        else:
            folder = Path(data_dir, self.cls.base_folder)
            meta = (self.cls.meta["filename"], self.cls.meta["md5"])
            self.md5 = {folder / name: md5 for name, md5 in (*self.cls.train_list, *self.cls.test_list, meta)}
            host = self.cls.url.removesuffix(self.cls.filename)
            self.download = Download((host,), ((self.cls.filename, self.cls.tgz_md5),), Path(data_dir), THROTTLED)

    def paths(self) -> list[Path]:
        return list(self.md5)

    def read(self) -> Arrays:
        """Decode all files. Raises ConfigError that names the file when one is corrupt."""
        for path, md5 in self.md5.items():
            self._check(path, md5)
        train, test = (self.cls(self.data_dir, train=part) for part in (True, False))
        arrays = {
            "x_train": np.asarray(train.data),
            "y_train": np.asarray(train.targets, np.int64),
            "x_test": np.asarray(test.data),
            "y_test": np.asarray(test.targets, np.int64),
            "classes": np.array([name.partition(" - ")[0] for name in train.classes]),  # MNIST has "3 - three"
        }
        for x in ("x_train", "x_test"):
            arrays[x] = arrays[x].reshape(*arrays[x].shape[:3], -1)  # MNIST has no channel dimension
        return arrays

    def _check(self, path: Path, md5: str | None) -> None:
        from torchvision.datasets.utils import check_integrity

        if md5 is None:
            whole = _idx_is_whole(path)
        else:
            whole = check_integrity(path, md5)
        if not whole:
            files = ", ".join(name for name, _ in self.download.files)
            raise ConfigError(f"{path}: is corrupt; delete it, so that the next run restores it from {files}")


def _idx_is_whole(path: Path) -> bool:
    """Whether the size of an idx file fits its header (two zero bytes, 8 = uint8, rank, big-endian int32 sizes)."""
    with path.open("rb") as file:
        start = file.read(4)
        if len(start) < 4 or start[:3] != b"\0\0\x08":
            return False
        sizes = np.frombuffer(file.read(4 * start[3]), ">i4")
    return len(sizes) == start[3] and path.stat().st_size == 4 + 4 * len(sizes) + math.prod(sizes.tolist())
