"""SVHN: digits of house numbers, 32 x 32 in colour, from the MATLAB files of its authors.

Y. Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning", NeurIPS
workshop 2011. The digit 0 has the label 10 in the files, and the label 0 here.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.data.cache import Arrays, make_arrays
from fedexp.data.datasets import Dataset
from fedexp.data.download import Published


class Svhn(Published, Dataset):
    """The training and test images from `{train,test}_32x32.mat` in `<data_dir>` or its folder
    svhn.

    The `extra` images are a separate training set, which can be added to the training images.
    """

    extra: bool  # 531,131 further training images, somewhat easier

    hosts = ("http://ufldl.stanford.edu/housenumbers/",)
    packed = False

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "extra", "test") if self.extra else ("train", "test")

    @property
    def published(self) -> list[tuple[str, str]]:
        from torchvision.datasets import SVHN

        listed = [SVHN.split_list[split] for split in self.splits]
        return [(name, md5) for _, name, md5 in listed]

    @property
    def download_folder(self) -> Path:
        return Path(self.data_dir, "svhn")

    @property
    def paths(self) -> Sequence[Path]:
        """Return the files of the splits, or () unless one of the two folders has all of them."""
        for folder in (self.download_folder, Path(self.data_dir)):
            paths = [folder / name for name, _ in self.published]
            if all(path.is_file() for path in paths):
                return paths
        return ()

    def read(self) -> Arrays:
        self.fetch_missing()
        paths = dict(zip(self.splits, self.paths, strict=True))
        return self.cached(lambda: decode(paths), extra=self.extra)


def decode(paths: dict[str, Path]) -> Arrays:
    """Read the files of the splits.

    Raises ConfigError with the name of a corrupt file.
    """
    read = {split: read_mat(path) for split, path in paths.items()}
    parts = [part for split, part in read.items() if split != "test"]
    x_train, y_train = map(np.concatenate, zip(*parts, strict=True))
    return make_arrays((x_train, y_train), read["test"], map(str, range(10)))


def read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (x uint8 [n, 32, 32, 3], y int64 [n]) from a file.

    The file has X [32, 32, 3, n] and y [n, 1] in 1..10.
    """
    from scipy.io import loadmat

    try:
        found = loadmat(path)
        x, y = found["X"], found["y"].astype(np.int64).ravel()
        if (
            x.dtype != np.uint8
            or x.shape != (32, 32, 3, len(y))
            or not ((y >= 1) & (y <= 10)).all()
        ):
            raise ValueError(f"X {x.shape} of {x.dtype} and y {y.shape}")
    except Exception as error:  # scipy raises many types
        raise ConfigError(
            f"{path}: is corrupt ({error}); delete it, and the next run downloads it again"
        ) from error
    return np.ascontiguousarray(x.transpose(3, 0, 1, 2)), y % 10
