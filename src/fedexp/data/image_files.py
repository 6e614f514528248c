"""Find image files, determine the class of each file, and decode its pixels."""

import logging
import os
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.data.cache import SourceFile
from fedexp.data.types import sort_classes

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger("fedexp")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # TIFF tags, and a value of PHOTOMETRIC
MODES = {1: "L", 3: "RGB"}  # PIL's names by number of channels
# names of the folders of a split, in lower case; two of them are hardly names of classes
SPLIT_NAMES = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval")


Labelled = list[tuple[SourceFile, int]]  # image files and their labels, sorted by class and path


@dataclass(frozen=True)
class FolderTree:
    """The image files of a data set."""

    train: Labelled
    test: Labelled
    classes: Sequence[str]  # class names, ordered by label
    validation: Labelled = field(default_factory=list)

    @property
    def files(self) -> list[SourceFile]:
        return [file for file, _ in self.train + self.validation + self.test]


def class_folders(folder: Path) -> list[str]:
    """Return the names of the class folders in `folder`, in the order of `sort_classes`.

    The position of a name is the label of the class. Raises ConfigError if there are no folders, if
    they are named like splits, or if there are images beside them.
    """
    try:
        names = subfolders(folder)
    except OSError as error:
        require_splits_outside(folder.parent)
        hint = suggest_splits(folder.parent)
        raise ConfigError(
            f"{folder}: this folder of images cannot be read ({error.strerror}); expected"
            " <dataset.root>/{train,test}/<class>/<image>. "
            + (
                f"With dataset=image_folder, set {hint}"
                if hint
                else "Without a folder named test, dataset.test_fraction=0.2 draws a test set"
            )
        ) from error
    if not names:
        raise ConfigError(
            f"{folder}: contains no class folders; must contain images as <class>/<image>"
        )
    if len(splits := [name for name in names if name.lower() in SPLIT_NAMES]) > 1:
        hint = suggest_splits(folder) or "dataset.train_splits and dataset.test_splits"
        raise ConfigError(
            f"{folder}: {', '.join(splits)} are names of splits, but folders of classes are"
            f" expected here; set {hint} (and dataset.test_fraction=null), or rename the classes"
        )
    if beside := [path.name for path in folder.iterdir() if is_image(path.name)]:
        raise ConfigError(
            f"{folder}: contains images beside the class folders, such as {min(beside)}; move them"
            " into the folders of their classes, or remove them"
        )
    return sort_classes(names)


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in `folder`, sorted as texts. Hidden ones are skipped."""
    entries = os.scandir(folder)
    return sorted(each.name for each in entries if each.is_dir() and not each.name.startswith("."))


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def suggest_splits(root: Path) -> str:
    """Return options of dataset=image_folder for the folders in `root`, or an empty text.

    The folders may be splits with unusual names, or `root` may contain only the right folder.
    """
    names = subfolders(root) if root.is_dir() else []
    splits = [name for name in names if name.lower() in SPLIT_NAMES]
    train = [name for name in splits if name.lower().startswith("train")]
    held = [name for name in splits if name.lower().startswith("test")]
    held = held or [name for name in splits if name not in train]
    if train and held:
        return f"dataset.train_splits=[{','.join(train)}] dataset.test_splits=[{','.join(held)}]"
    return typed_root(root / names[0]) if len(names) == 1 and not splits else ""


def require_splits_outside(root: Path) -> None:
    """Raise ConfigError for a tree `<root>/<class>/<split>/<image>`."""
    for name in subfolders(root) if root.is_dir() else ():
        splits = [each for each in subfolders(root / name) if each.lower() in SPLIT_NAMES]
        if splits and all(find_images(root / name / each, recursive=False) for each in splits):
            raise ConfigError(
                f"{root}: the folders of the splits are inside those of the classes, as in"
                f" {name}/{splits[0]}; move the images to <split>/<class>/<image>, as in"
                f" {splits[0]}/{name}"
            )


def typed_root(folder: Path) -> str:
    """Return the option for a folder of images as a user types it in a command."""
    return shlex.quote(f"dataset.root={folder}")


def list_class(folder: Path) -> list[SourceFile]:
    """Return the images of a class, sorted by path.

    Raises ConfigError unless all images are directly in `folder`: folders below it are probably
    the classes, or splits.
    """
    files = list_images(folder)
    deeper = next((f.path for f in files if os.path.dirname(f.path) != str(folder)), None)
    if deeper is None:
        return files
    require_splits_outside(folder.parent)
    hint = suggest_splits(folder)
    if "dataset.root=" not in hint:
        hint = f"{typed_root(folder)} {hint}".strip()
    raise ConfigError(
        f"{folder}: the images of a class must be directly in its folder, but here are images in"
        f" folders below it, such as {os.path.relpath(deeper, folder)}. If {folder.name} is not a"
        f" class, set {hint}; if it is one, move its images"
    )


def require_all_used(root: Path, used: Sequence[str], advice: str) -> None:
    """Raise ConfigError if folders in `root` contain images, but are not `used`.

    advice: how to use these folders or leave them out, with `{}` for their names.
    """
    others = [name for name in subfolders(root) if name not in used and find_images(root / name)]
    if others:
        names = ",".join(others)
        raise ConfigError(
            f"{root}: the images in {names} would not be used; {advice.replace('{}', names)}"
        )


def list_images(folder: Path, recursive: bool = True) -> list[SourceFile]:
    """Return the image files in `folder`, sorted by path. Raises ConfigError without any."""
    if not (found := find_images(folder, recursive)):
        raise ConfigError(f"{folder}: contains no images (files ending in {' '.join(SUFFIXES)})")
    return found


def find_images(folder: Path, recursive: bool = True) -> list[SourceFile]:
    """Return the image files in `folder`, sorted by path. Links are followed.

    Hidden files and folders are skipped. Raises ConfigError for broken links and pipes.
    """

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename}: cannot be read ({error.strerror}); repair or remove it"
        ) from error

    found = []
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if recursive and not name.startswith(".")]
        for path in (os.path.join(place, name) for name in names if is_image(name)):
            if not os.path.isfile(path):
                raise ConfigError(
                    f"{path}: is a broken link, or no regular file; repair or remove it"
                )
            found.append(SourceFile.of(path))
    return sorted(found)


def scan_classes(folder: Path, classes: Sequence[str]) -> Labelled:
    """Return all images in `folder/<class>/*` with their labels.

    Raises ConfigError unless the names of the class folders are exactly `classes`.
    """
    found = class_folders(folder)
    if differing := set(found) ^ set(classes):
        raise ConfigError(
            f"{folder}: must have the same class folders as the training data; folders that only"
            f" one of the two has: {', '.join(sorted(differing)[:5])}"
        )
    return label_files([list_class(folder / c) for c in classes])


def label_files(by_class: Sequence[Sequence[SourceFile]]) -> Labelled:
    """Return the files of all classes with their labels.

    by_class: the files of each class, ordered by label.
    """
    return [(file, label) for label, files in enumerate(by_class) for file in files]


def scan_splits(root: Path, splits: Sequence[str]) -> tuple[Labelled, list[str]]:
    """Return (files, class names) of `<root>/<split>/<class>/*` for all splits together."""
    classes = class_folders(root / splits[0])
    parts = [scan_classes(root / split, classes) for split in splits]
    return list(chain(*parts)), classes


def scan_tree(
    root: Path, train_splits: Sequence[str] = ("train",), test_splits: Sequence[str] = ("test",)
) -> FolderTree:
    """Return the files in `<root>/<split>/<class>/*`.

    The folders `train_splits` together form the training data, and `test_splits` the test data.
    """
    train, classes = scan_splits(root, train_splits)
    test = [scan_classes(root / split, classes) for split in test_splits]
    return FolderTree(train, list(chain(*test)), classes)


def scan_undivided(
    root: Path, train_splits: Sequence[str], others: Sequence[str] = ()
) -> FolderTree:
    """Return the files of a tree that has no test folder, all as training files.

    The files are `<root>/<split>/<class>/*` if the folders `train_splits` exist, and
    `<root>/<class>/*` otherwise.

    Raises ConfigError if there is a folder named test, or if there are folders of images beside
    those of `train_splits` and the `others`.
    """
    if (root / "test").is_dir():
        raise ConfigError(
            f"{root}: has a folder named test; dataset.test_fraction=null uses it as the test set"
        )
    if all((root / split).is_dir() for split in train_splits):
        files, classes = scan_splits(root, train_splits)
        together = f"dataset.train_splits=[{','.join(train_splits)},{{}}]"
        advice = (
            f"{together} also draws from them; dataset.validation_splits=[{{}}] makes them the"
            " validation set; dataset.test_splits=[{}] with"
            f" dataset.test_fraction=null tests on them; {typed_root(root / train_splits[0])}"
            " leaves them out"
        )
        require_all_used(root, (*train_splits, *others), advice)
    else:
        classes = class_folders(root)
        files = label_files([list_class(root / name) for name in classes])
    return FolderTree(files, [], classes)


def scan_lists(root: Path, lists: Sequence[Path]) -> FolderTree:
    """Return the image files in two lists, the first for training and the second for testing.

    Each line of a list contains the path of an image relative to `root`, `.../<class>/<image>`.
    Text after the first space is ignored. Raises ConfigError if a list or an image is missing.
    """
    found: list[list[SourceFile]] = []
    try:
        for each in lists:
            lines = each.read_text(encoding="utf-8").splitlines()
            paths = [root / line.split()[0] for line in lines if line.strip()]
            found.append(sorted(map(SourceFile.of, paths)))
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot be read ({error.strerror}); must be the list {each} or an"
            " image in this list"
        ) from error
    classes = sort_classes({Path(file.path).parent.name for file in chain(*found)})
    label = {name: number for number, name in enumerate(classes)}
    train, test = (
        [(file, label[Path(file.path).parent.name]) for file in files] for files in found
    )
    return FolderTree(train, test, classes)


def stratified_split(
    labels: np.ndarray, test_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (training indices, test indices), ascending.

    The fraction `test_fraction` of each class is used for the test set.
    """
    from sklearn.model_selection import train_test_split

    everything = np.arange(len(labels))
    try:
        train, test = train_test_split(
            everything, test_size=test_fraction, stratify=labels, random_state=seed
        )
    except ValueError as error:
        raise ConfigError(
            f"dataset.test_fraction={test_fraction}: cannot draw a test set from {len(labels)}"
            f" images ({error})"
        ) from error
    return np.sort(train), np.sort(test)


def draw_test_part(tree: FolderTree, test_fraction: float, seed: int) -> FolderTree:
    """Return a copy of a tree in which some training files of each class become test files."""
    files = tree.train
    labels = np.array([label for _, label in files])
    train, test = stratified_split(labels, test_fraction, seed)
    kept = [files[i] for i in train]
    drawn = [files[i] for i in test]
    return FolderTree(kept, drawn, tree.classes)


class Form(NamedTuple):
    """How images are decoded: number of channels, size and kind of resizing."""

    channels: int
    size: int | None = None  # height and width in pixels; None: the size of the file
    interpolation: str = "bilinear"
    keep_ratio: bool = False  # True: crop the centre to a square; False: stretch the image

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that are not default values, for the names of cache entries."""
        changed = {k: v for k, v in self._asdict().items() if v != self._field_defaults.get(k)}
        return {"channels": self.channels, "size": self.size} | changed

    def sentence(self) -> str:
        """Return a description of what decoding changes."""
        kept = "its centre is cropped" if self.keep_ratio else "the aspect ratio is not kept"
        size = f"resized to {self.size} x {self.size} ({self.interpolation}; {kept})"
        return (
            f"images are {'not resized' if self.size is None else size}, and converted to"
            f" {MODES[self.channels]}; transparency is dropped (a transparent pixel keeps the"
            " colour in the file)"
        )


def decode(files: Sequence[SourceFile], form: Form) -> np.ndarray:
    """Decode image files to uint8 [N, H, W, channels].

    Raises ConfigError, with the name of the file, if a file is corrupt, or if `form.size` is None
    and an image does not have the size of the first image.
    """
    first = _read_image(files[0].path, form)
    x = np.empty((len(files), *first.shape), np.uint8)
    log.info("decoding %s images; this is done only once", f"{len(files):,}")

    def read(file: SourceFile) -> np.ndarray:
        pixels = _read_image(file.path, form)
        if pixels.shape != first.shape:
            (h, w), (h0, w0) = pixels.shape[:2], first.shape[:2]
            raise ConfigError(
                f"{file.path}: has {w}x{h} pixels, but {files[0].path} has {w0}x{h0}; all images"
                " must have the same size (with dataset=image_folder, dataset.size=<pixels> resizes"
                " them)"
            )
        return pixels

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        # PIL releases the interpreter lock while it decodes
        for i, pixels in enumerate(pool.map(read, files)):
            x[i] = pixels
    return x


def _read_image(path: str, form: Form) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return to_array(image, form)
    except Exception as error:  # PIL raises many types for damaged files
        raise ConfigError(
            f"{path}: this image cannot be read ({error}); replace or remove it"
        ) from error


def to_array(image: "Image.Image", form: Form) -> np.ndarray:
    """Return an image as uint8 [height, width, channels], resized if `form.size` is given.

    Raises ValueError, or an error raised by PIL, if the image is damaged or cannot be converted.
    """
    from PIL import Image, ImageOps

    converted, size = to_eight_bits(image).convert(MODES[form.channels]), form.size
    if size is not None and converted.size != (size, size):
        method = Image.Resampling[form.interpolation.upper()]
        if form.keep_ratio:
            converted = ImageOps.fit(converted, (size, size), method)
        else:
            converted = converted.resize((size, size), method)
    return np.asarray(converted).reshape(converted.height, converted.width, form.channels)


def to_eight_bits(image: "Image.Image") -> "Image.Image":
    """Convert a grey image with 9 to 16 bits per pixel to 8 bits; return other images unchanged.

    The upper 8 bits of each pixel are kept, as PIL does for 16-bit colour images. For grey images,
    PIL would instead clip the values at 255, and almost every pixel would become white.

    Raises ValueError if the file format does not define which value is white: for floating-point
    numbers, and for integers that are signed or have more than 16 bits.
    """
    from PIL import Image

    # in PNG and PPM files, images of mode I have 16 bits
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise ValueError("it is unknown which value is white; save the image with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    pixels, tags = np.asarray(image), getattr(image, "tag_v2", {})
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]
    upper = np.clip(pixels.astype(np.int64) >> (bits - 8), 0, 255).astype(np.uint8)
    return Image.fromarray(255 - upper if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else upper)
