"""Read MNIST and CIFAR data sets from the files that torchvision uses."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.data.cache import Arrays, make_arrays


class TorchvisionFiles:
    """The files in `data_dir` that one of torchvision's data set classes reads."""

    def __init__(self, class_name: str, data_dir: str):
        import torchvision.datasets

        self.cls: Any = getattr(torchvision.datasets, class_name)
        self.data_dir = data_dir
        self.is_idx = hasattr(self.cls, "resources")  # idx files (MNIST), or pickles (CIFAR)
        if self.is_idx:
            self.folder = Path(data_dir, class_name, "raw")
            self.hosts, self.published = self.cls.mirrors, self.cls.resources
            self.paths = [self.folder / name.removesuffix(".gz") for name, _ in self.published]
        else:
            self.folder = Path(data_dir)
            self.hosts = [self.cls.url.removesuffix(self.cls.filename)]
            self.published = [(self.cls.filename, self.cls.tgz_md5)]
            listed = [*self.cls.train_list, *self.cls.test_list]
            self.md5 = dict(listed) | {self.cls.meta["filename"]: self.cls.meta["md5"]}
            self.paths = [self.folder / self.cls.base_folder / name for name in self.md5]

    def read(self) -> Arrays:
        """Return the decoded images and labels.

        Raises ConfigError, with the name of the file, if a file is corrupt.
        """
        if self.is_idx:
            train_x, train_y, test_x, test_y = map(read_idx, self.paths, (3, 1, 3, 1))
            # class names in MNIST look like "3 - three"
            names = [name.partition(" - ")[0] for name in self.cls.classes]
            return make_arrays((train_x, train_y), (test_x, test_y), names)
        from torchvision.datasets.utils import check_integrity

        # torchvision unpickles these files, which is safe only if they are the published files.
        for path in self.paths:
            if not check_integrity(path, self.md5[path.name]):
                raise corrupt_file(path)
        train, test = (self.cls(self.data_dir, train=train) for train in (True, False))
        return make_arrays((train.data, train.targets), (test.data, test.targets), train.classes)


def read_idx(path: Path, rank: int) -> np.ndarray:
    """Read an idx file of uint8 values.

    The file starts with two zero bytes, the byte 8 (for uint8), a byte with the number of axes, and
    the sizes as big-endian int32. The values follow.

    rank: number of axes, 1 for labels or 3 for images.

    Returns labels int64 [N] or images uint8 [N, H, W, 1].
    """
    try:
        content = path.read_bytes()
        start = 4 + 4 * rank
        sizes = np.frombuffer(content[4:start], ">i4").tolist()
        values = np.frombuffer(bytearray(content[start:]), np.uint8)  # writable, as torch requires
        if content[:4] != bytes([0, 0, 8, rank]) or len(values) != math.prod(sizes):
            raise ValueError(f"not a complete idx file with {rank} axes")
        values = values.reshape(sizes)
    except (OSError, ValueError, MemoryError) as error:
        raise corrupt_file(path) from error
    return values.astype(np.int64) if rank == 1 else values[..., None]


def corrupt_file(path: Path) -> ConfigError:
    return ConfigError(f"{path}: is corrupt; delete it, and the next run will download it again")
