"""SVHN: digits from house numbers, as colour images of 32 x 32 pixels in MATLAB files.

Y. Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning", NeurIPS
workshop 2011. In the files, the digit 0 has the label 10; this module changes it to 0.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.data.cache import Arrays, make_arrays
from fedexp.data.datasets import Dataset
from fedexp.data.download import Published


class Svhn(Published, Dataset):
    """SVHN, read from `{train,test}_32x32.mat` in `<data_dir>/svhn` or `<data_dir>`.

    The images of the file `extra_32x32.mat` can be added to the training images.
    """

    extra: bool  # whether to add the 531,131 extra training images, which are somewhat easier

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
        """Return the files of all splits from the first folder that has them all, else ()."""
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
    """Return the images and labels in the files of the splits.

    Raises ConfigError, with the name of the file, if a file is corrupt.
    """
    read = {split: read_mat(path) for split, path in paths.items()}
    parts = [part for split, part in read.items() if split != "test"]
    x_train, y_train = map(np.concatenate, zip(*parts, strict=True))
    return make_arrays((x_train, y_train), read["test"], map(str, range(10)))


def read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [n, 32, 32, 3] and labels int64 [n] from a MATLAB file.

    The file contains the images X [32, 32, 3, n] and the labels y [n, 1], from 1 to 10.
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
            raise ValueError(f"X is {x.dtype} of shape {x.shape}, and y has the shape {y.shape}")
    except Exception as error:  # scipy raises many types
        raise ConfigError(
            f"{path}: is corrupt ({error}); delete it, and the next run will download it again"
        ) from error
    return np.ascontiguousarray(x.transpose(3, 0, 1, 2)), y % 10
