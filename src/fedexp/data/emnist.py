"""EMNIST: handwritten letters and digits in the format of MNIST, in six splits.

G. Cohen et al., "EMNIST: an extension of MNIST to handwritten letters", arXiv 1702.05373. The files
are transposed, and are turned upright here; the labels of the letters begin at 1 there, and at 0
here.
"""

import gzip
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedexp.core.errors import ConfigError, require_choice
from fedexp.data.cache import Arrays
from fedexp.data.datasets import Dataset
from fedexp.data.download import Download
from fedexp.data.torchvision_files import read_images, read_labels

PARTS = ("train-images", "train-labels", "test-images", "test-labels")


@dataclass(frozen=True, kw_only=True)
class Emnist(Dataset):
    """One split of EMNIST, from `<data_dir>/EMNIST/raw`, unpacked as torchvision does it, or as the
    .gz files."""

    splits: ClassVar[tuple[str, ...]] = (
        "byclass",
        "bymerge",
        "balanced",
        "letters",
        "digits",
        "mnist",
    )

    split: str
    url: str | None  # mirror: address of gzip.zip

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("dataset.split", self.split, self.splits)

    @property
    def folder(self) -> Path:
        return Path(self.data_dir, "EMNIST", "raw")

    def find(self, part: str) -> Path | None:
        """Return the file of a part, packed or not; None where there is none."""
        name = f"emnist-{self.split}-{part}-idx{3 if part.endswith('images') else 1}-ubyte"
        tried = (
            self.folder / name,
            self.folder / f"{name}.gz",
            self.folder / "gzip" / f"{name}.gz",
        )
        return next((path for path in tried if path.is_file()), None)

    @property
    def paths(self) -> list[Path]:
        """Return the files of PARTS that are there."""
        return [path for part in PARTS if (path := self.find(part)) is not None]

    def read(self) -> Arrays:
        if len(self.paths) < len(PARTS):
            files = (("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),)
            Download(("https://biometrics.nist.gov/cs_links/EMNIST/",), files, self.folder).fetch(
                self.name, self.url
            )
        if len(self.paths) < len(PARTS):
            raise ConfigError(f"{self.folder}: gzip.zip has no files of the split {self.split}")
        return self.cached(self._decode, split=self.split)

    def _decode(self) -> Arrays:
        found = {}
        for part, path in zip(PARTS, self.paths, strict=True):
            try:
                content = (
                    gzip.decompress(path.read_bytes())
                    if path.suffix == ".gz"
                    else path.read_bytes()
                )
                found[part] = (read_images if part.endswith("images") else read_labels)(
                    BytesIO(content)
                )
            except Exception as error:  # gzip raises many types
                raise ConfigError(
                    f"{path}: is corrupt; delete it, so that the next run restores it"
                ) from error
        first = 1 if self.split == "letters" else 0
        return {
            "x_train": found["train-images"].transpose(0, 2, 1, 3),
            "y_train": found["train-labels"] - first,
            "x_test": found["test-images"].transpose(0, 2, 1, 3),
            "y_test": found["test-labels"] - first,
            "classes": np.array(classes_of(self.split)),
        }


def classes_of(split: str) -> list[str]:
    """Return the names of the classes of a split in the order of their labels, as torchvision has
    them."""
    from torchvision.datasets import EMNIST

    return [name for name in EMNIST.classes_split_dict[split] if name != "N/A"]
