"""Read the published files of Tiny-ImageNet-200.

A class is identified by its WordNet ID (wnid). The files are:

- `train/<wnid>/images/*.JPEG`: training images
- `val/images/*.JPEG`: images that are used for the test
- `val/val_annotations.txt`: file name, wnid and bounding box of each val image, separated by tabs
- `words.txt`: wnid and class names, separated by a tab
"""

from pathlib import Path

from fedexp.core.errors import ConfigError
from fedexp.data.cache import SourceFile
from fedexp.data.image_files import FolderTree, class_folders, label_files, list_class


def scan_published(root: Path) -> FolderTree:
    """Return the published files, with the val images as test images.

    The label of a class is the position of its wnid in sorted order. Raises ConfigError if files
    are missing or the annotations are invalid.
    """
    wnids = class_folders(root / "train")
    train = label_files([list_class(root / "train" / wnid / "images") for wnid in wnids])
    label = {wnid: i for i, wnid in enumerate(wnids)}
    annotations, test = root / "val" / "val_annotations.txt", []
    try:
        for line in annotations.read_text(encoding="utf-8").splitlines():
            image, wnid, *_ = line.split("\t")
            test.append((SourceFile.of(root / "val" / "images" / image), label[wnid]))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{annotations}: a line is invalid, or names an image that is missing or a class"
            f" without a folder in {root / 'train'} ({error})"
        ) from error
    if not test:
        raise ConfigError(f"{annotations}: contains no images; download the data set again")
    return FolderTree(train, sorted(test), _read_names(root, wnids))


def _read_names(root: Path, wnids: list[str]) -> list[str]:
    """Return the first English name of each wnid, or the wnids if words.txt is missing.

    If several classes have the same name, the wnid is appended to it.
    """
    words = root / "words.txt"
    if not words.is_file():
        return wnids
    lines = (
        line.partition("\t")
        for line in words.read_text(encoding="utf-8", errors="replace").splitlines()
    )
    name = {wnid: rest.partition(",")[0].strip() for wnid, _, rest in lines}
    names = [name.get(wnid) or wnid for wnid in wnids]
    return [
        n if names.count(n) == 1 else f"{n} ({wnid})" for n, wnid in zip(names, wnids, strict=True)
    ]
