"""EMNIST: handwritten letters and digits in MNIST's format, in six splits.

G. Cohen et al., "EMNIST: an extension of MNIST to handwritten letters", arXiv 1702.05373. The
published images are transposed, so this module transposes them back. In the files of the split
`letters`, labels start at 1; this module makes them start at 0.
"""

from pathlib import Path
from typing import Literal

from fedexp.data.cache import Arrays, make_arrays
from fedexp.data.datasets import Dataset
from fedexp.data.download import Published
from fedexp.data.torchvision_files import read_idx

PARTS = ("train-images", "train-labels", "test-images", "test-labels")


class Emnist(Published, Dataset):
    """One split of EMNIST, read from `<data_dir>/EMNIST/raw`.

    The files may be compressed (.gz), or unpacked by torchvision.
    """

    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]

    hosts = ("https://biometrics.nist.gov/cs_links/EMNIST/",)
    published = (("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),)

    @property
    def download_folder(self) -> Path:
        return Path(self.data_dir, "EMNIST", "raw")

    def find(self, part: str) -> Path | None:
        """Return the packed or unpacked file of one of PARTS, or None if it is missing."""
        name = f"emnist-{self.split}-{part}-idx{3 if part.endswith('images') else 1}-ubyte"
        tried = (
            self.download_folder / name,
            self.download_folder / f"{name}.gz",
            self.download_folder / "gzip" / f"{name}.gz",
        )
        return next((path for path in tried if path.is_file()), None)

    @property
    def paths(self) -> list[Path]:
        """Return the four files in the order of PARTS, or an empty list if one is missing."""
        found = list(filter(None, map(self.find, PARTS)))
        return found if len(found) == len(PARTS) else []

    def read(self) -> Arrays:
        self.fetch_missing()
        return self.cached(self._decode, split=self.split)

    def _decode(self) -> Arrays:
        from torchvision.datasets import EMNIST

        x_train, y_train, x_test, y_test = map(read_idx, self.paths, (3, 1, 3, 1))
        first = 1 if self.split == "letters" else 0
        names = [name for name in EMNIST.classes_split_dict[self.split] if name != "N/A"]
        return make_arrays(
            (x_train.transpose(0, 2, 1, 3), y_train - first),
            (x_test.transpose(0, 2, 1, 3), y_test - first),
            names,
        )
