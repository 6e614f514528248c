"""The published layout of Tiny-ImageNet-200.

`train/<wnid>/images/*.JPEG`; `val/images/*.JPEG` with `val/val_annotations.txt` (file, wnid, box;
tab-separated); `words.txt` (wnid, tab, names).
"""

from pathlib import Path

from fedexp.core.errors import ConfigError
from fedexp.data.image_files import Tree, class_folders, scan_classes
from fedexp.data.marks import SourceFile


def scan_published(root: Path) -> Tree:
    """Return the training and val files. The class index is the wnid's position in sorted order."""
    wnids = class_folders(root / "train")
    train = scan_classes(root / "train", wnids)
    label = {wnid: i for i, wnid in enumerate(wnids)}
    annotations = root / "val" / "val_annotations.txt"
    try:
        lines = [
            line.split("\t")
            for line in annotations.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        labelled = sorted(
            (root / "val" / "images" / image, label[wnid]) for image, wnid, *_ in lines
        )
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{annotations}: a line names a class that {root / 'train'} does not have ({error})"
        ) from error
    if not labelled:
        raise ConfigError(f"{annotations}: names no images")
    try:
        files = [SourceFile.of(path) for path, _ in labelled]
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: named in {annotations} but missing") from error
    test = list(zip(files, (k for _, k in labelled), strict=True))
    return Tree(train, test, _read_names(root, wnids))


def _read_names(root: Path, wnids: list[str]) -> list[str]:
    """Return each wnid's first English name, made unique, or the wnids if words.txt is missing."""
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
