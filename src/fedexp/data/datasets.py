"""The image data sets of conf/dataset.

CIFAR, CINIC-10, Tiny-ImageNet and Caltech-256 are read from a folder tree
`<data_dir>/<name>/{train,test}/<class>/<image>` if it exists. The label of a class is then the
position of its folder in sorted order. Otherwise, the data sets are read from the official files,
which are downloaded if they are missing.
"""

import functools
import inspect
import math
import operator
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch

from fedexp.core.errors import ConfigError, nearest, reason_of, require, require_choice
from fedexp.core.limits import Limit, OpenShare, Seed32
from fedexp.data import leaf
from fedexp.data.augment import Normalise, Transform
from fedexp.data.cache import (
    Arrays,
    SourceFile,
    load_cached,
    load_mapped,
    make_arrays,
    relative,
    stamps,
)
from fedexp.data.download import Published
from fedexp.data.image_files import (
    MODES,
    FolderTree,
    Form,
    class_folders,
    decode,
    draw_test_part,
    label_files,
    list_images,
    require_all_used,
    scan_classes,
    scan_lists,
    scan_splits,
    scan_tree,
    scan_undivided,
    stratified_split,
    to_array,
)
from fedexp.data.mapped import Chosen, Stored
from fedexp.data.resized_crop import ResizedCrop, Side
from fedexp.data.tiny_imagenet import scan_published
from fedexp.data.types import DataSource, ImageData, number_labels, sort_classes

Mean = Annotated[
    tuple[float, ...],
    Limit("1 value (grey) or 3 values (red, green, blue)", lambda v: len(v) in MODES),
    Limit("finite", lambda v: all(map(math.isfinite, v))),
]
Std = Annotated[
    tuple[float, ...],
    Limit("greater than 0 and finite", lambda v: all(0 < s < math.inf for s in v)),
]
TreeCounts = Annotated[
    tuple[int, ...],
    Limit("the numbers of training images, test images and classes", lambda v: len(v) == 3),
]
JoinedSplits = Annotated[
    tuple[str, ...],
    Limit("[train] or [train,test]", lambda v: tuple(v) in (("train",), ("train", "test"))),
]
ARRAYS = ("x_train", "x_test", "y_train", "y_test")
# optional arrays with a number for each training or test example
COMPANIONS = {
    "owners": "train",
    "test_owners": "test",
    "train_domains": "train",
    "test_domains": "test",
}
DOMAINS = ("domains", "train_domains", "test_domains")
KNOWN = (*ARRAYS, "classes", *COMPANIONS, "domains", "validation")
MOST_BYTES = 2**31  # larger sets of resized images are not loaded into memory
PIECE = 1024  # number of images that are decoded at a time if they are stored on disk


class Dataset(DataSource):
    """Base class of image data sets.

    `load` raises ConfigError if files are missing or corrupt.
    """

    kind: ClassVar[str] = "images"

    mean: Mean  # per channel, on the scale 0..1
    std: Std
    augmentation: Transform  # of the training data; a ResizedCrop also crops test images

    max_value: ClassVar[int] = 255

    def __post_init__(self) -> None:
        super().__post_init__()
        many = len(self.mean)
        good = len(self.std) == many
        require(good, "dataset.std", list(self.std), f"{many} values, as many as dataset.mean has")

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def normalise(self) -> Normalise:
        return Normalise(self.mean, self.std, self.max_value)

    @property
    def crop(self) -> ResizedCrop | None:
        return self.augmentation if isinstance(self.augmentation, ResizedCrop) else None

    @abstractmethod
    def read(self) -> Arrays:
        """Return the decoded arrays `x_train`, `y_train`, `x_test`, `y_test` and `classes`.

        Shapes and types are those of the fields of ImageData. The arrays `owners`, `test_owners`
        and `domains` with `train_domains` and `test_domains` are optional, and so is `validation`
        with a field `validation_splits` that is set. Any other name is refused.
        """

    def load(self) -> ImageData:
        return self.checked(self.read())

    def checked(self, arrays: Arrays) -> ImageData:
        """Return the data set with the arrays of `read`. Raises ConfigError if they are invalid."""
        for problem in self.problems(arrays):
            raise ConfigError(f"dataset={self.name}: {problem}")
        parts: dict[str, Any] = {name: to_tensor(arrays[name]) for name in ARRAYS}
        held = arrays.get("validation")
        return ImageData(
            name=self.name,
            **parts,
            classes=tuple(map(str, arrays["classes"])),
            mean=self.normalise.mean,
            std=self.normalise.std,
            max_value=self.max_value,
            crop=self.crop,
            owners=arrays.get("owners"),
            test_owners=arrays.get("test_owners"),
            domains=tuple(map(str, arrays.get("domains", ()))),
            train_domains=arrays.get("train_domains"),
            test_domains=arrays.get("test_domains"),
            validation=None if held is None else torch.from_numpy(held),
        )

    def problems(self, arrays: Arrays) -> Iterator[str]:
        """Yield what is wrong with the arrays of `read`; a later problem may follow from it."""
        for name in arrays.keys() - KNOWN:
            yield (
                f"`read` returns {name}, which fedexp does not use{nearest(name, KNOWN)}; it uses"
                f" {', '.join(KNOWN)}"
            )
        if missing := [name for name in (*ARRAYS, "classes") if name not in arrays]:
            yield f"`read` must also return the arrays {', '.join(missing)}"
        classes = Counter(map(str, arrays["classes"]))
        if twice := [name for name, times in classes.items() if times > 1]:
            yield f"class names must be different, but these are repeated: {', '.join(twice)}"
        for split in ("train", "test"):
            x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
            for letter, array, form in (("x", x, ("uint8", 4)), ("y", y, ("int64", 1))):
                if form_of(array) != form:
                    shape = f" of shape {[*array.shape]}" if hasattr(array, "shape") else ""
                    yield (
                        f"{letter}_{split} is {form_of(array)[0]}{shape}; x must be uint8 [N,"
                        " height, width, channels], and y must be int64 [N]"
                    )
            if len(x) == 0 or len(x) != len(y):
                yield f"the {split} data have {len(x)} images and {len(y)} labels"
            if y.min() < 0 or y.max() >= len(classes):
                yield f"the {split} data have labels outside 0..{len(classes) - 1}"
            if x.shape[3] != self.channels:
                yield (
                    f"the {split} data have {x.shape[3]} channels, but dataset.mean has"
                    f" {self.channels} values"
                )
        yield from self.mismatches(arrays)

    def mismatches(self, arrays: Arrays) -> Iterator[str]:
        """Yield which arrays do not fit to each other or to the options."""
        if arrays.get("validation") is not None and not getattr(self, "validation_splits", None):
            yield (
                "`read` returns validation, but the data set has no dataset.validation_splits;"
                " leave validation out, and set validation.fraction"
            )
        sizes = [[*arrays[name].shape[1:3]] for name in ("x_train", "x_test")]
        if sizes[0] != sizes[1] and self.crop is None:
            yield (
                f"the test images have the size {sizes[1]} (height, width), but the training images"
                f" {sizes[0]}; both must have one size"
            )
        given = {name for name in (*COMPANIONS, *DOMAINS) if arrays.get(name) is not None}
        found = [name for name in DOMAINS if name in given]
        if len(found) != self.has_domains * len(DOMAINS):
            yield (
                f"`read` returns {' and '.join(found) or 'no domains'}, but"
                f" {type(self).__name__}.has_domains is {self.has_domains}; if it is True, `read`"
                f" must return {', '.join(DOMAINS)}, otherwise none of them"
            )
        for name, split in COMPANIONS.items():
            if name in given:
                many = len(arrays["domains"]) if name in DOMAINS else None
                yield from number_problems(name, arrays[name], f"y_{split}", arrays, many)

    def read_tree(self, tree: FolderTree, form: Form | None = None) -> Arrays:
        """Return the decoded images of a folder tree, from the cache if possible.

        Resized images that need more than MOST_BYTES stay on disk (see fedexp.data.mapped).
        """
        form = form or Form(self.channels)
        train, test, held = (
            [label for _, label in part] for part in (tree.train, tree.test, tree.validation)
        )
        n, files = len(train) + len(held), tree.files
        content = stamps(files, self.data_dir)
        content += [f"train {train} test {test} classes {list(tree.classes)}"]
        content += [f"validation {held}"] if held else []
        place = (self.data_dir, self.name, content, form.options | self.place())

        def arrays(x: Any) -> Arrays:
            made = make_arrays((x[:n], train + held), (x[n:], test), tree.classes)
            return made | ({"validation": np.arange(len(train), n)} if held else {})

        if form.size is not None:
            shape = (len(files), form.size, form.size, form.channels)
            if math.prod(shape) > MOST_BYTES:
                pieces = (files[start : start + PIECE] for start in range(0, len(files), PIECE))
                images = load_mapped(*place, shape, lambda: (decode(p, form) for p in pieces))
                return arrays(Chosen.all_of(images))
        return load_cached(*place, lambda: arrays(decode(files, form)))

    def place(self) -> dict[str, Any]:
        """Return options that select images and splits, for the names of cache entries.

        An entry replaces only entries with the same values.
        """
        return {}

    def image_tree(self) -> Path | None:
        """Return `<data_dir>/<name>` if it has the folders train and test, else None."""
        root = Path(self.data_dir, self.name)
        return root if (root / "train").is_dir() and (root / "test").is_dir() else None


def number_problems(
    name: str, numbers: Any, labels: str, arrays: Arrays, many: int | None
) -> Iterator[str]:
    """Yield what is wrong with an array that has a number for each example.

    labels: the array with the labels of these examples. many: how many numbers there are; None: any
    number.
    """
    found, count = np.asarray(numbers), len(arrays[labels])
    if found.shape != (count,):
        yield (
            f"{name} has shape {[*found.shape]}; must be [{count}], the number of examples in"
            f" {labels}"
        )
    if found.dtype.kind not in "iu":
        yield f"{name} is {found.dtype}; must be integers, numbered from 0"
    elif found.min() < 0:
        yield f"{name} has the number {found.min()}; must be at least 0"
    elif many is not None and found.max() >= many:
        yield f"{name} has the number {found.max()}; must be less than the {many} domains"


def form_of(array: Any) -> tuple[str, int]:
    """Return the type and the number of axes; images that stay on disk are uint8 with four axes."""
    if isinstance(array, Chosen):
        return "uint8", 4
    return str(getattr(array, "dtype", type(array).__name__)), getattr(array, "ndim", 0)


def to_tensor(array: np.ndarray | Chosen) -> Stored:
    return array if isinstance(array, Chosen) else torch.from_numpy(np.ascontiguousarray(array))


class JoinsSplits(Dataset):
    """Base class of data sets whose own test images may be added to the training images.

    With train_splits=[train,test], the training data are the training images, followed by the test
    images (PFLlib). The test set must then be held out from the clients (`test_per_client`).
    """

    train_splits: JoinedSplits = ("train",)

    def load(self) -> ImageData:
        arrays = self.read()
        if "test" in self.train_splits:
            for k in "xy":
                both = np.concatenate([arrays[f"{k}_train"], arrays[f"{k}_test"]])
                arrays = arrays | {f"{k}_train": both}
        return self.checked(arrays)


class Digits(JoinsSplits):
    """The 1,797 handwritten digits (8 x 8, grey levels 0..16) that scikit-learn includes."""

    test_fraction: OpenShare
    split_seed: Seed32

    max_value: ClassVar[int] = 16

    def read(self) -> Arrays:
        digits = parse_digits()
        x, y = digits.images.astype(np.uint8)[..., None], digits.target.astype(np.int64)
        train, test = stratified_split(y, self.test_fraction, self.split_seed)
        return make_arrays((x[train], y[train]), (x[test], y[test]), digits.target_names)


@functools.cache  # scikit-learn parses text files, which is slow, and a process may run many jobs
def parse_digits() -> Any:
    from sklearn.datasets import load_digits

    return load_digits()


class TorchvisionDataset(Published, JoinsSplits):
    """MNIST, FashionMNIST, CIFAR10 or CIFAR100 from torchvision's files or from a folder tree."""

    torchvision_class: Literal["MNIST", "FashionMNIST", "CIFAR10", "CIFAR100"]

    @cached_property
    def source(self) -> Any:
        """Return torchvision's class. MNIST's files have other attributes than CIFAR's."""
        import torchvision.datasets

        return getattr(torchvision.datasets, self.torchvision_class)

    @property
    def hosts(self) -> Sequence[str]:
        source = self.source
        if hasattr(source, "mirrors"):
            return source.mirrors
        return [source.url.removesuffix(source.filename)]

    @property
    def published(self) -> Sequence[tuple[str, str]]:
        source = self.source
        return getattr(source, "resources", None) or [(source.filename, source.tgz_md5)]

    @property
    def download_folder(self) -> Path:
        folder = Path(self.data_dir)
        mnist = hasattr(self.source, "resources")
        return folder / self.torchvision_class / "raw" if mnist else folder

    def find(self) -> str:
        return "" if self.image_tree() is not None else super().find()

    @property
    def is_present(self) -> bool:
        names = [name.removesuffix(".gz") for name, _ in self.published]
        if folder := getattr(self.source, "base_folder", None):
            names = [folder]
        return all((self.download_folder / name).exists() for name in names)

    def read(self) -> Arrays:
        if (root := self.image_tree()) is not None:
            return self.read_tree(scan_tree(root))
        self.fetch_missing()
        try:
            train, test = (self.source(self.data_dir, train=part) for part in (True, False))
        except Exception as error:  # a damaged file can raise anything
            raise ConfigError(
                f"dataset={self.name}: a file in {self.download_folder} is corrupt"
                f" ({reason_of(error)}); delete the files of this data set, and the next run will"
                " download them again"
            ) from error
        # class names in MNIST look like "3 - three"
        names = [name.partition(" - ")[0] for name in train.classes]
        found = []
        for part in (train, test):
            x = np.asarray(part.data)
            found.append((x.reshape(*x.shape[:3], -1), part.targets))
        return make_arrays(found[0], found[1], names)


class AnyChannels(Dataset):
    """Base class of data sets whose images decide the number of channels.

    A single mean and standard deviation are those of all channels.
    """

    def load(self) -> ImageData:
        arrays = self.read()
        many = arrays["x_train"].shape[3]
        mean, std = (each * many if len(each) == 1 else each for each in (self.mean, self.std))
        return replace(self, mean=mean, std=std).checked(arrays)


class AnyTorchvision(AnyChannels):
    """Any data set of torchvision whose examples are an image and an integer label.

    `name` is the name of its class in torchvision.datasets. Classes are the labels of the training
    examples, and the images have as many channels as in the data set. Raises ConfigError for what
    cannot be read in this way.
    """

    # arguments of the constructor for each set; None: train=True and train=False or, for a class
    # without the argument `train`, split="train" and split="test"
    train: dict[str, Any] | None
    test: dict[str, Any] | None
    size: Side | None  # images are resized to size x size pixels; None: they have the same size

    def read(self) -> Arrays:
        train, test = self.open("train"), self.open("test")
        (x_train, raw), (x_test, raw_test) = self.decode(train), self.decode(test)
        known = sort_classes(set(raw))
        names, test_names = (getattr(each, "classes", None) for each in (train, test))
        if names and test_names and list(names) != list(test_names):  # other numbers
            raw_test = number_labels([test_names[k] for k in raw_test], names, self.source)
        names = names or range(known[-1] + 1)
        y_train, y_test = (number_labels(labels, known, self.source) for labels in (raw, raw_test))
        return make_arrays((x_train, y_train), (x_test, y_test), [str(names[k]) for k in known])

    def conversion(self) -> str:
        size = f"{self.size} x {self.size} (bilinear; the aspect ratio is not kept)"
        return "" if self.size is None else f"images are resized to {size}"

    @property
    def source(self) -> str:
        return f"dataset.name={self.name}"

    def open(self, part: Literal["train", "test"]) -> Any:
        """Return torchvision's data set of the training or test data; it may download the files."""
        import torchvision.datasets as found

        require_choice("dataset.name", self.name, found.__all__)
        cls = getattr(found, self.name)
        known = inspect.signature(cls).parameters
        if None in (self.train, self.test) and not {"train", "split"} & {*known}:
            raise ConfigError(
                f"{self.source}: its constructor has no argument train or split; set dataset.train"
                " and dataset.test to the arguments that give the two sets"
            )
        by_flag = "train" in known
        train = {"train": True} if by_flag else {"split": "train"}
        test = {"train": False} if by_flag else {"split": "test"}
        train = train if self.train is None else self.train
        test = test if self.test is None else self.test
        if train == test:
            raise ConfigError(f"dataset.test={test}: must differ from dataset.train={train}")
        given = train if part == "train" else test
        download = {"download": True} if "download" in known else {}
        try:
            return cls(root=self.data_dir, **download | given)
        except Exception as error:  # network, disk and other errors have no common type
            raise ConfigError(
                f"{self.source}: torchvision cannot read this data set from {self.data_dir}"
                f" ({reason_of(error)})"
            ) from error

    def decode(self, examples: Any) -> tuple[np.ndarray, list[int]]:
        """Return the images and labels of a data set of torchvision."""
        images, labels = [], []
        for number in range(len(examples)):
            try:
                image, label = examples[number]
                labels.append(operator.index(label))
                mode = image.mode
            except Exception as error:  # a data set may contain anything, and its files be damaged
                raise ConfigError(
                    f"{self.source}: example {number} is not an image with an integer label"
                    f" ({reason_of(error)})"
                ) from error
            images.append(image)
            if mode not in MODES.values() or mode != images[0].mode:
                raise ConfigError(
                    f"{self.source}: image {number} has the mode {mode}; all images must have the"
                    " mode L (grey), or all must have the mode RGB"
                )
        channels = 3 if images and images[0].mode == "RGB" else 1
        return stack_images(images, Form(channels, self.size), self.source), labels


def stack_images(images: Iterable[Any], form: Form, source: str) -> np.ndarray:
    """Return PIL images as uint8 [n, height, width, channels].

    source: where the images are from, for messages. Raises ConfigError if an image is damaged or
    has another size than the first.
    """
    arrays: list[np.ndarray] = []
    for number, image in enumerate(images):
        try:
            arrays.append(to_array(image, form))
        except Exception as error:  # PIL raises many types for damaged files
            raise ConfigError(f"{source}: image {number} cannot be read ({error})") from error
        if arrays[-1].shape != arrays[0].shape:
            raise ConfigError(
                f"dataset.size=null: the images of {source} have different sizes; set"
                " dataset.size=<pixels> to resize them"
            )
    if not arrays:
        raise ConfigError(f"{source}: contains no images")
    return np.stack(arrays)


class Femnist(Dataset):
    """LEAF's FEMNIST, read from `<data_dir>/femnist/{train,test}/*.json`.

    Each writer is a natural client (see `Data.owners`).
    """

    def find(self) -> str:
        self.split_files()
        return ""

    def split_files(self) -> tuple[Sequence[Path], Sequence[Path]]:
        folder = Path(self.data_dir, self.name)
        train, test = (leaf.find_split_files(folder / split) for split in ("train", "test"))
        return train, test

    def read(self) -> Arrays:
        train, test = self.split_files()
        content = stamps(map(SourceFile.of, (*train, *test)), self.data_dir)
        build = functools.partial(leaf.read_femnist, train, test)
        return load_cached(self.data_dir, self.name, content, {}, build)


class ImageFiles(Dataset):
    """Base class of data sets that store each image in a separate file."""

    @abstractmethod
    def scan(self) -> FolderTree:
        """Find the image files and their labels. Raises ConfigError if they are missing."""

    def find(self) -> str:
        self.scan()
        return ""

    def read(self) -> Arrays:
        if isinstance(self, Published):
            self.fetch_missing()
        return self.read_tree(self.scan(), self.form)

    @property
    def form(self) -> Form:
        """Return the size and number of channels in which decoded images are stored."""
        return Form(self.channels, getattr(self, "size", None))

    def conversion(self) -> str:
        return self.form.sentence()


class ImageFolder(ImageFiles):
    """Any folder tree `<root>/{train,test}/<class>/<image>`.

    Images are read as grey images if dataset.mean has 1 value, and as colour images if it has 3. If
    `test_fraction` is given, the tree is `<root>/<class>/<image>`, without a test folder. This
    fraction of each class is then drawn as the test set, with the seed `split_seed`.

    The images of a class are directly in its folder. Raises ConfigError for images in deeper
    folders, and for images in other folders of `root` unless `test_splits` or `counts` is given.
    """

    root: str
    # folders whose images together form the training data
    train_splits: Annotated[tuple[str, ...], Limit("at least one folder", bool)]
    # all images are resized to size x size pixels; None: they already have the same size
    size: Side | None
    # folders of the test data; None: the folder test, and all images in `root` must be used
    test_splits: Annotated[tuple[str, ...], Limit("at least one folder", bool)] | None = None
    test_fraction: OpenShare | None = None  # None: use the test folders of the tree
    split_seed: Seed32 = 0
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    # True: the shorter side is resized to `size`, and the centre is cropped; False: images are
    # stretched
    keep_ratio: bool = False
    counts: TreeCounts | None = None  # None: any number of images
    # folders of the validation set; None: none, or a fraction of the training images
    validation_splits: Annotated[tuple[str, ...], Limit("at least one folder", bool)] | None = (
        field(default=None, metadata={"neutral": None})
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = self.test_splits is None or self.test_fraction is None
        words = "null with dataset.test_fraction, which draws the test set"
        require(alone, "dataset.test_splits", self.test_splits, words)
        before: tuple[str, ...] = ()
        for key in ("train_splits", "validation_splits", "test_splits"):
            folders = getattr(self, key) or ()
            require(len({*folders}) == len(folders), f"dataset.{key}", folders, "different folders")
            both = sorted({*before} & {*folders})
            words = "other folders than those in dataset.train_splits and dataset.validation_splits"
            require(not both, f"dataset.{key}", both, words)
            before += tuple(folders)

    @property
    def form(self) -> Form:
        return Form(self.channels, self.size, self.interpolation, self.keep_ratio)

    def place(self) -> dict[str, Any]:
        fields = ("train_splits", "test_splits", "test_fraction", "split_seed")
        root = f"/{relative(self.root, self.data_dir)}"  # the directory may be moved
        held = {"validation_splits": self.validation_splits} if self.validation_splits else {}
        return {"root": root} | {name: getattr(self, name) for name in fields} | held

    def read_tree(self, tree: FolderTree, form: Form | None = None) -> Arrays:
        """Return the decoded images. Raises ConfigError if their numbers differ from `counts`."""
        found = (len(tree.train), len(tree.test), len(tree.classes))
        if self.counts is not None and found != tuple(self.counts):
            train, test, classes = self.counts
            raise ConfigError(
                f"{self.root}: has {found[0]:,} training images, {found[1]:,} test images and"
                f" {found[2]} classes, but {self.name} has {train:,}, {test:,} and {classes};"
                " download it again, or set dataset.counts=null to use these images"
            )
        return super().read_tree(tree, form)

    def load_test(self) -> ImageData:
        """Return the data set. If there are only test folders, it has one training image."""
        root, splits = Path(self.root), self.test_splits or ("test",)
        missing = not any((root / name).is_dir() for name in self.train_splits)
        if self.counts is not None or not missing or not (root / splits[0]).is_dir():
            return self.load()
        files, classes = scan_splits(root, splits)
        return self.checked(self.read_tree(FolderTree(files[:1], files, classes), self.form))

    def scan(self) -> FolderTree:
        root = Path(self.root)
        held = self.validation_splits or ()
        if self.test_fraction is not None:
            tree = scan_undivided(root, self.train_splits, held)
            tree = draw_test_part(tree, self.test_fraction, self.split_seed)
        else:
            tree = scan_tree(root, self.train_splits, self.test_splits or ("test",))
        if self.test_fraction is None and self.test_splits is None and self.counts is None:
            advice = (
                "dataset.validation_splits=[{}] makes them the validation set,"
                f" dataset.train_splits=[{','.join(self.train_splits)},{{}}] trains on them, and"
                " dataset.test_splits=[test] leaves them out"
            )
            require_all_used(root, (*self.train_splits, *held, "test"), advice)
        found = chain(*(scan_classes(root / split, tree.classes) for split in held))
        return replace(tree, validation=list(found))


class DomainNet(ImageFolder):
    """A domain of DomainNet, with training and test images as in the published lists."""

    domain: Literal["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]

    def scan(self) -> FolderTree:
        root = Path(self.root)
        return scan_lists(root, [root / f"{self.domain}_{part}.txt" for part in ("train", "test")])


class Cinic10(Published, ImageFolder):
    """CINIC-10, published as a folder tree. It is downloaded if it is missing."""

    # The published folder valid is used only on request.
    test_splits: tuple[str, ...] | None = ("test",)

    hosts = ("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/",)
    published = (("CINIC-10.tar.gz", "6ee4d0c996905fe93221de577967a372"),)

    @property
    def download_folder(self) -> Path:
        return Path(self.root)

    @property
    def is_present(self) -> bool:
        return all(Path(self.root, split).is_dir() for split in (*self.train_splits, "test"))


class TinyImageNet(Published, ImageFiles, JoinsSplits):
    """Tiny-ImageNet-200 from the published files or from a folder tree.

    The published val images are used as the test set, because the published test images have no
    labels.
    """

    hosts = ("http://cs231n.stanford.edu/",)
    published = (("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),)

    @property
    def published_folder(self) -> Path | None:
        """Return the folder of the published files, or None if they are missing."""
        folders = [Path(self.data_dir, folder) for folder in ("tiny-imagenet-200", self.name)]
        return next((f for f in folders if (f / "val" / "val_annotations.txt").is_file()), None)

    def scan(self) -> FolderTree:
        if self.published_folder is not None:
            return scan_published(self.published_folder)
        return scan_tree(Path(self.data_dir, self.name))

    @property
    def is_present(self) -> bool:
        return self.published_folder is not None or self.image_tree() is not None


class Caltech256(Published, ImageFiles):
    """Caltech-256 from the published files, whose images are resized, or from a folder tree.

    The published files have no test set, so a stratified test set is drawn.
    """

    # The test set is drawn by this class, so a surrogate set may also use the test images.
    splits_itself: ClassVar[bool] = True

    size: Side
    test_fraction: OpenShare
    split_seed: Seed32

    hosts = ("https://data.caltech.edu/records/nyy15-4j048/files/",)
    published = (("256_ObjectCategories.tar", "67b4f42ca05d46448c6bb8ecd2220f6d"),)

    @property
    def download_folder(self) -> Path:
        return Path(self.data_dir, self.name)

    @property
    def published_folder(self) -> Path:
        return self.download_folder / "256_ObjectCategories"

    def scan(self) -> FolderTree:
        if (root := self.image_tree()) is not None:
            return scan_tree(root)
        folders = class_folders(self.published_folder)
        # some class folders contain folders with stray files, so subfolders are not searched
        by_class = [list_images(self.published_folder / name, recursive=False) for name in folders]
        classes = [name.partition(".")[2] or name for name in folders]  # 001.ak47
        tree = FolderTree(label_files(by_class), [], classes)
        return draw_test_part(tree, self.test_fraction, self.split_seed)

    @property
    def is_present(self) -> bool:
        return self.image_tree() is not None or self.published_folder.is_dir()
