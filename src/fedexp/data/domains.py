"""Images from several domains, such as photos and sketches, and the partition by domain.

Each client has images of one domain, so clients differ in their features, not only in their labels.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError, require, require_choice
from fedexp.core.limits import Count, Counts, Limit, OpenShare, Positive, Seed32
from fedexp.data.cache import Arrays, relative
from fedexp.data.datasets import ImageFiles
from fedexp.data.image_files import (
    FolderTree,
    Form,
    Labelled,
    class_folders,
    draw_test_part,
    label_files,
    list_class,
    scan_lists,
    subfolders,
)
from fedexp.data.partition import Assigned, Partitioner
from fedexp.data.partition_lda import LDA
from fedexp.data.resized_crop import Side

Names = Annotated[tuple[str, ...], Limit("different names", lambda v: len(v) == len(set(v)) > 0)]


class DomainFolder(ImageFiles):
    """A folder tree `<root>/<domain>/<class>/<image>`, in which all domains have the same classes.

    The fraction `test_fraction` of each class of each domain is drawn as the test set, with the
    seed `split_seed`.
    """

    has_domains: ClassVar[bool] = True

    root: str
    domains: Names | None  # names of the folders, in the order of their numbers; None: all
    size: Side | None  # all images are resized to size x size pixels; None: they have the same size
    test_fraction: OpenShare | None
    split_seed: Seed32
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    # True: the shorter side is resized to `size`, and the centre is cropped; False: images are
    # stretched
    keep_ratio: bool = False

    @property
    def form(self) -> Form:
        return Form(self.channels, self.size, self.interpolation, self.keep_ratio)

    def place(self) -> dict[str, Any]:
        fields = ("domains", "test_fraction", "split_seed")
        root = f"/{relative(self.root, self.data_dir)}"  # the directory may be moved
        return {"root": root} | {name: getattr(self, name) for name in fields}

    def read(self) -> Arrays:
        trees = self.trees()
        made = self.read_tree(join(trees), self.form)
        parts = {"train": [tree.train for tree in trees.values()]}
        parts["test"] = [tree.test for tree in trees.values()]
        made |= {f"{key}_domains": number_domains(files) for key, files in parts.items()}
        return made | {"domains": np.array([*trees])}

    def scan(self) -> FolderTree:
        return join(self.trees())

    def trees(self) -> dict[str, FolderTree]:
        """Return the image files of each domain. Raises ConfigError if they are missing."""
        require(self.test_fraction is not None, "dataset.test_fraction", None, "a number below 1")
        assert self.test_fraction is not None
        found = {}
        for name in self.names():
            folder = Path(self.root, name)
            classes = class_folders(folder)
            files = label_files([list_class(folder / each) for each in classes])
            tree = FolderTree(files, [], classes)
            found[name] = draw_test_part(tree, self.test_fraction, self.split_seed)
        return found

    def names(self) -> Sequence[str]:
        """Return the names of the domains. Raises ConfigError for one without a folder."""
        root = Path(self.root)
        names = subfolders(root) if root.is_dir() else []
        if len(names) < (2 if self.domains is None else 1):
            raise ConfigError(
                f"dataset.root={self.root}: has {plural(len(names), 'folder')}, but each domain"
                " needs one, with its images in <domain>/<class>/<image>"
            )
        for name in self.domains or ():
            if not (root / name).is_dir():
                require_choice("dataset.domains", name, names)
        return self.domains or names


class DomainNetDomains(DomainFolder):
    """Several domains of DomainNet, with training and test images as in the published lists."""

    def trees(self) -> dict[str, FolderTree]:
        root = Path(self.root)
        return {
            name: scan_lists(root, [root / f"{name}_{part}.txt" for part in ("train", "test")])
            for name in self.names()
        }


def join(trees: Mapping[str, FolderTree]) -> FolderTree:
    """Return the files of all domains, one domain after the other.

    Raises ConfigError unless all domains have the same classes.
    """
    (first, one), *others = trees.items()
    for name, tree in others:
        if differing := sorted({*one.classes} ^ {*tree.classes}):
            raise ConfigError(
                f"dataset.domains: {first} and {name} must have the same classes, but only one of"
                f" them has {', '.join(differing[:5])}"
            )
    train, test = (
        list(chain(*(getattr(tree, part) for tree in trees.values()))) for part in ("train", "test")
    )
    return FolderTree(train, test, one.classes)


def number_domains(files: Sequence[Labelled]) -> np.ndarray:
    """Return the domain of each file, int64 [N]. files: those of each domain."""
    return np.repeat(np.arange(len(files)), [len(each) for each in files])


class Domains(Partitioner):
    """Give each client examples of one domain: the first clients those of domain 0, and so on.

    Within a domain, class proportions are drawn as by LDA (`fedexp.data.partition_lda`), with the
    domain's clients and examples.
    """

    by_domain: ClassVar[bool] = True

    alpha: Positive
    min_size: Count
    balance: bool
    max_draws: Count
    clients: Counts | None  # of each domain; None: equally many

    def assign(
        self,
        labels: np.ndarray,
        num_classes: int,
        num_clients: int,
        rng: np.random.Generator,
        owners: np.ndarray | None,
    ) -> Assigned:
        """Return each client's example indices. owners: int [N], the domain of each example."""
        if owners is None:
            raise ConfigError(
                "partition=domains: this data set has no domains; use dataset=domain_folder or"
                " dataset=domainnet_domains"
            )
        each = self.clients_of(int(owners.max()) + 1, num_clients)
        inside = LDA(
            alpha=self.alpha,
            min_size=self.min_size,
            balance=self.balance,
            max_draws=self.max_draws,
        )
        parts: list[np.ndarray] = []
        for domain, clients in enumerate(each):
            members = np.flatnonzero(owners == domain)
            dealt, _ = inside.assign(labels[members], num_classes, clients, rng, None)
            parts += [members[part] for part in dealt]
        return parts, {"domains": np.repeat(np.arange(len(each)), each).tolist()}

    def clients_of(self, domains: int, num_clients: int) -> Sequence[int]:
        """Return the number of clients of each domain."""
        if self.clients is None:
            words = f"a multiple of the {domains} domains, or set partition.clients to a list"
            require(num_clients % domains == 0, "num_clients", num_clients, words)
            return [num_clients // domains] * domains
        words = f"{domains} numbers, one for each domain, with the sum num_clients={num_clients}"
        fits = len(self.clients) == domains and sum(self.clients) == num_clients
        require(fits, "partition.clients", list(self.clients), words)
        return self.clients
