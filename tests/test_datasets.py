"""Data sets: published formats in small, image trees, the cache, downloads, missing files."""

import contextlib
import gzip
import hashlib
import http.server
import json
import logging
import os
import pickle
import shutil
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import hydra
import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
from PIL import Image

import fedexp
from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data.augment import Transform
from fedexp.data.datasets import Dataset
from fedexp.data.types import ImageData, sort_classes
from fedexp.training.prepare import prepare
from quick_runs import SMALL
from toy_federation import CONF, composed

# see test_text.py, test_hub.py
TEXTS = "thucnews sogoucs sina2019 weibo huggingface_text"
# option -> name of its data set, if they differ
NAMED = {"cifar100_224": "cifar100", "domainnet": "domainnet_clipart", "torchvision": "SVHN"}
NAMES = sorted({path.stem for path in (CONF / "dataset").glob("*.yaml")} - set(TEXTS.split()))


def compose(name: str, *overrides: str) -> Any:
    return composed(f"dataset={name}", *overrides)


def dataset(name: str, data_dir: Path, *overrides: str) -> Dataset:
    config = compose(name, f"data_dir='{data_dir}'", *overrides)
    return hydra.utils.instantiate(config.dataset, _convert_="all")


def load(name: str, data_dir: Path, *overrides: str) -> ImageData:
    return dataset(name, data_dir, *overrides).load()


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_image(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def write_tree(
    root: Path, classes: dict[str, int], splits: tuple[str, ...] = ("train", "test"), side: int = 4
) -> None:
    """Write `classes[name]` PNG images of random colours per class and split."""
    for s, split in enumerate(splits):
        for c, (name, n) in enumerate(classes.items()):
            for i in range(n):
                write_image(
                    root / split / name / f"{i:03}.png", pixels(100 * s + 10 * c + i, side, side, 3)
                )


@pytest.fixture
def no_network(monkeypatch) -> list[str]:
    """Let every attempt to open an address fail at once, and return the addresses."""
    tried: list[str] = []

    def reject(request, *args, **kwargs):
        tried.append(request.full_url)
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", reject)
    return tried


@contextlib.contextmanager
def web_folder(folder: Path) -> Iterator[str]:
    """Serve a folder at the returned address, which is requested without a proxy."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: Any) -> None:
            pass

    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("no_proxy", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# ---- the options ----


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_option_builds(name, tmp_path):
    built = dataset(name, tmp_path)
    assert built.name == NAMED.get(name, name)
    assert built.data_dir == str(tmp_path)
    assert isinstance(built.augmentation, Transform)


# ---- digits ----


def test_digits_equals_scikit_learn(tmp_path):
    from sklearn.datasets import load_digits

    data = load("digits", tmp_path)
    assert (data.max_value, data.shape) == (16, (1, 8, 8))
    assert (len(data.x_train), len(data.x_test)) == (1437, 360)
    sizes = torch.bincount(data.y_train) + torch.bincount(data.y_test)
    assert float((torch.bincount(data.y_test) - sizes * 0.2).abs().max()) < 1
    rows = torch.cat([data.x_train, data.x_test]).flatten(1)
    original = torch.from_numpy(load_digits().data).to(torch.uint8)
    assert sorted(map(bytes, rows.numpy())) == sorted(map(bytes, original.numpy()))
    scaled = data.x_train.double() / 16
    assert float(scaled.mean()) == pytest.approx(data.mean[0], abs=1e-4)
    assert float(scaled.std()) == pytest.approx(data.std[0], abs=1e-4)


# ---- MNIST-like ----


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


@pytest.fixture
def mnist_files(monkeypatch) -> dict[str, bytes]:
    """Return four small idx files, after setting torchvision's md5 sums to those of the packed
    files.
    """
    arrays = {
        "train-images-idx3-ubyte": pixels(0, 6, 5, 5),
        "train-labels-idx1-ubyte": np.array([0, 1, 9, 3, 4, 5], np.uint8),
        "t10k-images-idx3-ubyte": pixels(1, 3, 5, 5),
        "t10k-labels-idx1-ubyte": np.array([7, 0, 2], np.uint8),
    }
    files = {name: idx_bytes(array) for name, array in arrays.items()}
    sums = [
        (f"{name}.gz", hashlib.md5(gzip.compress(raw, mtime=0)).hexdigest())
        for name, raw in files.items()
    ]
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", sums)
    return files


def write_raw(folder: Path, files: dict[str, bytes], compressed: bool = False) -> None:
    folder.mkdir(parents=True)
    for name, raw in files.items():
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(raw, mtime=0) if compressed else raw)


def check_mnist(data: ImageData) -> None:
    assert np.array_equal(data.x_train[..., 0].numpy(), pixels(0, 6, 5, 5))
    assert np.array_equal(data.x_test[..., 0].numpy(), pixels(1, 3, 5, 5))
    assert data.y_train.tolist() == [0, 1, 9, 3, 4, 5]
    assert data.y_test.tolist() == [7, 0, 2]
    assert data.classes == tuple("0123456789")
    assert data.shape == (1, 5, 5)


@pytest.mark.parametrize("compressed", [False, True])
def test_existing_mnist_files_need_no_network(compressed, mnist_files, no_network, tmp_path):
    write_raw(tmp_path / "MNIST" / "raw", mnist_files, compressed)
    check_mnist(load("mnist", tmp_path))
    assert no_network == []


def test_concurrent_jobs_download_files_once(mnist_files, tmp_path, caplog):
    write_raw(tmp_path / "web", mnist_files, compressed=True)
    logged = caplog.at_level(logging.INFO, "fedexp")
    with web_folder(tmp_path / "web") as address, logged, ThreadPoolExecutor(3) as pool:
        source = dataset("mnist", tmp_path / "data", f"dataset.url={address}/")
        for job in [pool.submit(source.fetch_missing) for _ in range(3)]:
            job.result()
    assert caplog.text.count("mnist: downloading ") == 4
    check_mnist(load("mnist", tmp_path / "data"))


@pytest.mark.parametrize(
    "address",
    ["https://me:secret@host/x", "ftp://me:secret@host/x", "'https://host/x?token=secret'"],
)
def test_passwords_in_addresses_are_rejected_unseen(address, tmp_path):
    with pytest.raises(Exception, match=r"dataset\.url: .* must not contain .*a password") as error:
        dataset("mnist", tmp_path, f"dataset.url={address}")
    assert "secret" not in str(error.value)


def test_download_failure_lists_files_and_md5(no_network, tmp_path):
    with pytest.raises(ConfigError) as error:
        load("mnist", tmp_path)
    message = str(error.value)
    for name, md5 in torchvision.datasets.MNIST.resources:
        assert f"{name}  (md5 {md5})" in message
    assert str(tmp_path / "MNIST" / "raw") in message
    assert "dataset.url=" in message
    assert [*torchvision.datasets.MNIST.mirrors][1] in message  # every host was tried
    assert len({url.split("/")[2] for url in no_network}) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-labels-idx1-ubyte", idx_bytes(np.zeros(5, np.uint8)), "6 images and 5 labels"),
        ("train-labels-idx1-ubyte", b"", "a file in .*MNIST/raw is corrupt"),
    ],
)
def test_damaged_mnist_files_are_rejected(name, content, message, mnist_files, tmp_path):
    write_raw(tmp_path / "MNIST" / "raw", mnist_files | {name: content})
    with pytest.raises(ConfigError, match=message):
        load("mnist", tmp_path)


# ---- CIFAR ----


@pytest.fixture
def cifar_archive(monkeypatch, tmp_path) -> Path:
    """Write `cifar-10-python.tar.gz` with two images per file in CIFAR's layout: the red, green
    and blue plane of each image.
    """
    folder = tmp_path / "made" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    contents: dict[str, Any] = {"batches.meta": {"label_names": list("abcdefghij")}}
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        contents[name] = {"data": pixels(i, 2, 3072), "labels": [i, 9]}
    sums = {}
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    archive = tmp_path / "web" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    cifar = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cifar, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(
        cifar, "train_list", [[f"data_batch_{k}", sums[f"data_batch_{k}"]] for k in range(1, 6)]
    )
    monkeypatch.setattr(cifar, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(
        cifar,
        "meta",
        {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]},
    )
    return archive


def check_cifar(data: ImageData) -> None:
    assert data.shape == (3, 32, 32)
    assert len(data.x_train) == 10
    planes = pixels(5, 2, 3, 32, 32)  # of test_batch
    assert np.array_equal(data.x_test.permute(0, 3, 1, 2).numpy(), planes)
    assert data.y_train.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert data.classes == tuple("abcdefghij")


@pytest.mark.filterwarnings("ignore:Python 3.14 will:DeprecationWarning")
def test_cifar_archive_is_unpacked_and_checked(cifar_archive, no_network, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    os.link(cifar_archive, tmp_path / "data" / cifar_archive.name)
    check_cifar(load("cifar10", tmp_path / "data"))
    assert no_network == []
    (tmp_path / "data" / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"half")
    with pytest.raises(ConfigError, match=r"a file in .* is corrupt"):
        load("cifar10", tmp_path / "data")
    monkeypatch.undo()  # the network and the true md5 sums are back: the archive is a wrong one now
    with (
        web_folder(cifar_archive.parent) as address,
        pytest.raises(ConfigError, match=r"could not be downloaded"),
    ):
        load("cifar10", tmp_path / "other", f"dataset.url={address}/{cifar_archive.name}")


def test_cifar_image_folders_are_preferred_to_a_download(no_network, tmp_path):
    write_tree(tmp_path / "cifar10", {"dog": 2, "cat": 3}, side=32)
    data = load("cifar10", tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.y_train.tolist() == [0, 0, 0, 1, 1]
    # the first dog: class 0 of write_tree
    assert np.array_equal(data.x_train[3].numpy(), pixels(0, 32, 32, 3))
    assert np.array_equal(data.x_test[4].numpy(), pixels(101, 32, 32, 3))
    assert no_network == []


# ---- FEMNIST ----


def leaf_json(users: dict[str, tuple[np.ndarray, list[int]]]) -> str:
    data = {
        u: {"x": (x.reshape(len(y), 784) / 255).tolist(), "y": y} for u, (x, y) in users.items()
    }
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(y) for _, y in users.values()],
            "user_data": data,
        }
    )


def write_leaf(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)


def test_torchvision_set_equals_our_reader_except_for_classes_without_examples(
    mnist_files, tmp_path
):
    write_raw(tmp_path / "MNIST" / "raw", mnist_files)
    with pytest.raises(ConfigError, match="MNIST: the label 2 is not one of the 6 classes"):
        load("torchvision", tmp_path, "dataset.name=MNIST")
    labels = idx_bytes(np.array([9, 0, 1], np.uint8))
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(labels)
    found, ours = load("torchvision", tmp_path, "dataset.name=MNIST"), load("mnist", tmp_path)
    assert torch.equal(found.x_train, ours.x_train)
    assert torch.equal(found.x_test, ours.x_test)
    assert found.y_train.tolist() == [0, 1, 5, 2, 3, 4]
    assert [found.classes[c][0] for c in found.y_test] == [ours.classes[c] for c in ours.y_test]


class Coloured:
    """A set of torchvision's with two images and without names of classes."""

    images: ClassVar = [Image.fromarray(pixels(k, 4, 5, 3)) for k in range(2)]
    labels: ClassVar = [7, 3]

    def __init__(self, root, split="train"):
        self.examples = list(zip(self.images, self.labels, strict=True))
        self.examples = self.examples if split == "train" else self.examples[::-1]

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return self.examples[number]


def test_torchvision_set_has_the_channels_and_labels_of_its_images(monkeypatch, tmp_path):
    monkeypatch.setattr(torchvision.datasets, "SVHN", Coloured)
    data = load("torchvision", tmp_path, "dataset.std=[0.25]")
    assert np.array_equal(data.x_train[1].numpy(), pixels(1, 4, 5, 3))
    assert (data.y_train.tolist(), data.y_test.tolist(), data.classes) == (
        [1, 0],
        [0, 1],
        ("3", "7"),
    )
    assert (data.shape, data.mean, data.std) == ((3, 4, 5), (0.5,) * 3, (0.25,) * 3)
    same = "dataset.train={split: test}", "dataset.test={split: train}"
    assert load("torchvision", tmp_path, *same).y_train.tolist() == [0, 1]


class Named(Coloured):
    """A set whose test part does not have the class ant, as a tree of folders may."""

    def __init__(self, root, split="train"):
        self.classes = ["ant", "bee", "cat"] if split == "train" else ["bee", "cat"]
        self.examples = [(self.images[0], k) for k in range(len(self.classes))]

    def __len__(self):
        return len(self.examples)


def test_torchvision_sets_that_number_classes_differently_are_matched_by_name(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(torchvision.datasets, "SVHN", Named)
    data = load("torchvision", tmp_path)
    assert [data.classes[k] for k in data.y_test] == ["bee", "cat"]


@pytest.mark.parametrize(
    ("changes", "override", "message"),
    [
        ({}, "dataset.name=SVNH", "dataset.name=SVNH: must be one of .*nearest: 'SVHN'"),
        ({}, "dataset.train={train: true}", "torchvision cannot read this data set from .*train"),
        ({}, "dataset.test={split: train}", "must differ from dataset.train={'split': 'train'}"),
        ({"labels": [7, "cat"]}, "dataset.size=2", "example 1 is not an image with an integer"),
        (
            {"images": [Image.new("RGB", (2, 2)), Image.new("L", (2, 2))]},
            "dataset.size=2",
            "mode L",
        ),
        ({"images": [Image.new("RGB", (2, k)) for k in (1, 2)]}, "dataset.size=null", "size=null"),
        ({"__init__": lambda self, root: None}, "dataset.size=2", "no argument train or split"),
    ],
)
def test_torchvision_sets_of_other_kinds_are_rejected(
    changes, override, message, monkeypatch, tmp_path
):
    monkeypatch.setattr(torchvision.datasets, "SVHN", type("SVHN", (Coloured,), changes))
    with pytest.raises(ConfigError, match=message):
        load("torchvision", tmp_path, override)


def test_femnist_numbers_writers_by_name(tmp_path):
    a, b, t = pixels(0, 2, 28, 28), pixels(1, 1, 28, 28), pixels(2, 1, 28, 28)
    train, test = tmp_path / "femnist" / "train", tmp_path / "femnist" / "test"
    write_leaf(
        train, all_data_0=leaf_json({"f2": (a, [3, 61])}), all_data_1=leaf_json({"f1": (b, [10])})
    )
    write_leaf(test, all_data_0=leaf_json({"f2": (t, [35])}))
    for _ in range(2):  # decoded, then from the cache
        data = load("femnist", tmp_path)
        assert np.array_equal(data.x_train[..., 0].numpy(), np.concatenate([b, a]))
        assert np.array_equal(data.x_test[..., 0].numpy(), t)
        assert data.owners is not None
        assert data.owners.tolist() == [0, 1, 1]  # f1, f2, f2
        assert [data.classes[k] for k in (*data.y_train, *data.y_test)] == ["A", "3", "z", "Z"]
        assert data.num_classes == 62


def test_missing_leaf_files_are_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"femnist/train: contains no json files.*preprocess\.sh"):
        load("femnist", tmp_path)


# ---- Tiny-ImageNet, Caltech-256, CINIC-10 ----


def write_tiny(root: Path) -> None:
    for c, wnid in enumerate(["n02", "n01"]):
        for i in range(2):
            write_image(
                root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG",
                np.full((64, 64, 3), 40 * c + i, np.uint8),
            )
    for i in range(3):
        write_image(
            root / "val" / "images" / f"val_{i}.JPEG", np.full((64, 64, 3), 100 + i, np.uint8)
        )
    write_image(root / "test" / "images" / "test_0.JPEG", np.zeros((64, 64, 3), np.uint8))
    boxes = (
        "val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\nval_2.JPEG\tn02\t0\t0\t9\t9\n"
    )
    (root / "val" / "val_annotations.txt").write_text(boxes)
    (root / "words.txt").write_text(
        "n00\tentity\nn01\tgoldfish, Carassius auratus\nn02\tbullfrog\n"
    )


@pytest.mark.parametrize("folder", ["tiny-imagenet-200", "tiny_imagenet"])
def test_tiny_imagenet_is_read_as_published(folder, no_network, tmp_path):
    write_tiny(tmp_path / folder)
    data = load("tiny_imagenet", tmp_path)
    assert data.classes == ("goldfish", "bullfrog")
    assert data.x_train[:, 0, 0, 0].tolist() == [40, 41, 0, 1]
    assert data.y_train.tolist() == [0, 0, 1, 1]
    # the val images, not the unlabelled test image
    assert data.x_test[:, 5, 5, 1].tolist() == [100, 101, 102]
    assert data.y_test.tolist() == [1, 0, 1]


def test_caltech256_is_read_as_published_resized_and_split(no_network, tmp_path):
    root = tmp_path / "caltech256" / "256_ObjectCategories"
    for c, name in enumerate(["001.ak47", "002.american-flag"]):
        for i in range(10):
            write_image(
                root / name / f"{c + 1:03}_{i:04}.png",
                np.full((20 + i, 50, 3), 100 * c + i, np.uint8),
            )
    # the real set has such strays
    write_image(root / "001.ak47" / "greg" / "stray.png", np.zeros((9, 9), np.uint8))
    (root / "002.american-flag" / "RENAME2").write_text("not an image")
    data = load("caltech256", tmp_path)
    assert data.classes == ("ak47", "american-flag")
    assert data.shape == (3, 32, 32)
    assert torch.bincount(data.y_train).tolist() == [8, 8]
    values = torch.cat([data.x_train, data.x_test])[:, 3, 3, 0].tolist()
    assert sorted(values) == [*range(10), *range(100, 110)]
    assert [v // 100 for v in data.x_test[:, 0, 0, 0].tolist()] == data.y_test.tolist()


def test_cinic_can_join_validation_images(no_network, tmp_path):
    write_tree(tmp_path / "cinic10", {"cat": 1, "dog": 2}, splits=("train", "valid", "test"))
    assert load("cinic10", tmp_path).y_train.tolist() == [0, 1, 1]
    data = load("cinic10", tmp_path, "dataset.train_splits=[train,valid]")
    assert data.y_train.tolist() == [0, 1, 1, 0, 1, 1]
    assert np.array_equal(data.x_train[3].numpy(), pixels(100, 4, 4, 3))
    assert np.array_equal(data.x_test[0].numpy(), pixels(200, 4, 4, 3))


# ---- image folders ----


def load_folder(tmp_path: Path, *overrides: str) -> ImageData:
    return load("image_folder", tmp_path, f"dataset.root='{tmp_path / 'images'}'", *overrides)


def test_images_are_converted_to_grey_or_colour(tmp_path):
    """Hidden files and files of other types are ignored."""
    grey, colour = pixels(1, 4, 4), pixels(0, 4, 4, 3)
    for split in ("train", "test"):
        folder = tmp_path / "images" / split / "a"
        write_image(folder / "grey.png", grey)
        write_image(folder / "rgba.png", np.dstack([colour, pixels(2, 4, 4)]))
        (folder / ".DS_Store").write_bytes(b"x")
        (folder / "notes.txt").write_text("x")
    data = load_folder(tmp_path)
    assert np.array_equal(data.x_train.numpy(), [np.repeat(grey[..., None], 3, axis=2), colour])
    data = load_folder(tmp_path, "dataset.mean=[0.5]", "dataset.std=[0.5]")
    assert data.shape == (1, 4, 4)
    assert np.array_equal(data.x_train[0, ..., 0].numpy(), grey)


@pytest.mark.parametrize("split", ["", "train"])
def test_folders_without_a_test_set_are_split_by_class_and_seed(split, tmp_path):
    write_tree(tmp_path / "images", {"a": 10, "b": 20}, splits=(split,))
    first, again, other = (
        load_folder(tmp_path, "dataset.test_fraction=0.2", f"dataset.split_seed={seed}")
        for seed in (0, 0, 1)
    )
    assert first.classes == ("a", "b")
    assert torch.bincount(first.y_test).tolist() == [2, 4]  # 0.2 of 10 and of 20
    everything = {image.numpy().tobytes() for image in (*first.x_train, *first.x_test)}
    assert everything == {
        pixels(10 * c + i, 4, 4, 3).tobytes() for c, n in enumerate((10, 20)) for i in range(n)
    }
    assert torch.equal(first.x_test, again.x_test)
    assert not torch.equal(first.x_test, other.x_test)


WITH = "dataset.test_fraction=0.5"


@pytest.mark.parametrize(
    ("splits", "overrides", "message"),
    [
        # the splits were classes
        (
            ("Training", "Testing"),
            [WITH],
            r"set dataset\.train_splits=\[Training\] dataset\.test_splits=\[Testing\]",
        ),
        # the folder that wraps the classes was a class
        (("wrapper",), [WITH], r"images/wrapper: .*as a/000\.png.* set dataset\.root=.*/wrapper;"),
        (("x/train", "x/test"), [], r"images/train: .* set dataset\.root=.*images/x"),
        # images were ignored
        (
            ("train", "val"),
            [WITH],
            r"in val would not .*validation_splits=\[val\] .*test_splits=\[val\] with .*null",
        ),
        (
            ("train", "test", "val"),
            [],
            r"in val .*validation_splits=\[val\] .*train_splits=\[train,val\] .*=\[test\] le",
        ),
        (("train",), [], r"images/test: this folder .*dataset\.test_fraction=0\.2"),
        (("train", "test"), [WITH], "has a folder named test"),
        # images were counted twice
        (("train",), [WITH, "dataset.train_splits=[train,train]"], "must be different folders"),
    ],
)
def test_other_folders_than_classes_are_rejected(splits, overrides, message, tmp_path):
    write_tree(tmp_path / "images", {"a": 2, "b": 2}, splits)
    with pytest.raises(Exception, match=message):
        load_folder(tmp_path, *overrides)


def test_images_beside_or_below_class_folders_are_rejected(tmp_path):
    root = tmp_path / "images"
    write_tree(root, {"a": 1, "b": 1})
    write_tree(root, {"a/more": 1}, splits=("test",))
    with pytest.raises(ConfigError, match=r"such as more/000\.png.* set dataset\.root=\S*a/more;"):
        load_folder(tmp_path)
    write_image(root / "train" / "0.png", pixels(0, 4, 4, 3))
    with pytest.raises(ConfigError, match=r"images/train: .*beside the class folders, such as 0"):
        load_folder(tmp_path)


@pytest.mark.parametrize("overrides", [[], [WITH]])
def test_splits_inside_the_classes_are_named(overrides, tmp_path):
    """The tree is <root>/<class>/<split>/<image>. One class has images for one split only."""
    write_tree(tmp_path / "images", {"train": 2, "test": 1}, splits=("cat", "dog"))
    write_tree(tmp_path / "images", {"train": 1}, splits=("elk",))
    with pytest.raises(ConfigError, match=r"images: .* as in cat/test; .* as in test/cat$"):
        load_folder(tmp_path, *overrides)


VALIDATED = "dataset.validation_splits=[val]"


def test_a_folder_can_be_the_validation_set(tmp_path):
    """Except for the validation set, the run equals one that leaves the folder out."""
    root = tmp_path / "images"
    write_tree(root, {"a": 8, "b": 6}, ("train", "test"), side=8)
    write_tree(root, {"a": 2, "b": 1}, ("other/x", "val"), side=8)
    shutil.rmtree(root / "other")
    for _ in range(2):  # decoded, then from the cache
        data = load_folder(tmp_path, VALIDATED)
        assert data.validation.tolist() == [14, 15, 16]
        assert "; 14 training, 3 validation and 14 test examples" in data.sentence()
        assert np.array_equal(data.x_train[14].numpy(), pixels(100, 8, 8, 3))
        assert data.y_train[14:].tolist() == [0, 0, 1]
    options = [
        *(o for o in SMALL if "min_size" not in o),
        "dataset=image_folder",
        f"dataset.root={root}",
        f"data_dir={tmp_path}",
    ]
    options += ["partition=iid", "num_clients=2", "participation=1", "rounds=2"]
    without = fedexp.run([*options, "dataset.test_splits=[test]"], tmp_path / "without")
    run = fedexp.run([*options, VALIDATED, "evaluate_on=both"], tmp_path / "run")
    pd.testing.assert_series_equal(run.rounds["test_loss"], without.rounds["test_loss"])
    assert run.partition.validation.tolist() == [14, 15, 16]
    for part, other in zip(run.partition.parts, without.partition.parts, strict=True):
        assert part.tolist() == other.tolist()
    alone = fedexp.run([*options, VALIDATED], tmp_path / "alone")  # the test set is left alone
    assert "test_accuracy" not in alone.rounds
    model = run.model(2)
    x = (data.x_train[14:].permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    right = (model(x).argmax(1) == data.y_train[14:]).double().mean().item()
    assert run.rounds["validation_accuracy"].iloc[-1] == pytest.approx(right)
    shutil.rmtree(root / "test")
    drawn = load_folder(tmp_path, VALIDATED, WITH)
    assert (len(drawn.y_train), drawn.validation.tolist()) == (10, [7, 8, 9])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["validation.fraction=0.1"], r"splits=\['val'\]: cannot be used with validation.fraction"),
        (["scenario=class_incremental"], "cannot be used with scenario=class_incremental"),
        (["partition=file", "partition.path=a.npz"], "cannot be used with partition=file"),
        (["dataset.train_splits=[train,val]"], "must be other folders than those in"),
        (["dataset.test_splits=[val]"], "must be other folders than those in"),
        (["dataset=digits", "surrogate.dataset=image_folder"], "surrogate.dataset: .* be null"),
    ],
)
def test_validation_folder_is_rejected(overrides, message):
    first, *others = overrides
    options = ["tracker=none", "dataset=image_folder", VALIDATED]
    if first.startswith("dataset=digits"):
        options = ["tracker=none", "+surrogate.options.validation_splits=[val]"]
    with pytest.raises(ConfigError, match=message):
        prepare(build(composed(*options, first, *others)))


def test_splits_can_have_any_name(tmp_path):
    write_tree(tmp_path / "images", {"a": 1, "b": 2}, ("Training", "Testing", "dev"))
    data = load_folder(
        tmp_path, "dataset.train_splits=[Training]", "dataset.test_splits=[Testing,dev]"
    )
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1, 1], [0, 1, 1, 0, 1, 1])
    assert np.array_equal(data.x_test[3].numpy(), pixels(200, 4, 4, 3))


def test_numbers_as_names_of_classes_are_sorted_by_value(tmp_path):
    write_tree(tmp_path / "images", {str(c): 1 for c in (10, 2, 0)})
    data = load_folder(tmp_path)
    assert data.classes == ("0", "2", "10")
    assert data.x_train[2, 0, 0].tolist() == pixels(0, 4, 4, 3)[0, 0].tolist()
    assert sort_classes(["10", "9a"]) == ["10", "9a"]
    assert sort_classes([1.5, -2, 10]) == [-2, 1.5, 10]


def test_images_of_unequal_size_are_rejected_or_resized(tmp_path):
    write_tree(tmp_path / "images", {"a": 2})
    write_image(tmp_path / "images" / "train" / "a" / "wide.png", np.full((6, 9, 3), 77, np.uint8))
    with pytest.raises(ConfigError, match=r"wide\.png: has 9x6 pixels.*dataset\.size"):
        load_folder(tmp_path)
    data = load_folder(tmp_path, "dataset.size=5")
    assert data.shape == (3, 5, 5)
    assert (data.x_train[2] == 77).all()


def test_train_and_test_must_have_the_same_class_folders(tmp_path):
    root = tmp_path / "images"
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"images/train: contains no class folders"):
        load_folder(tmp_path)
    write_tree(root, {"a": 1, "b": 1})
    (root / "test" / "b").rename(root / "test" / "c")
    with pytest.raises(ConfigError, match=r"images/test: must have the same class .*: b, c"):
        load_folder(tmp_path)
    write_tree(root, {"b": 1}, splits=("test",))
    (root / "train" / "c").mkdir()
    with pytest.raises(ConfigError, match=r"train/c: contains no images"):
        load_folder(tmp_path)


def test_test_images_that_clients_train_on_are_counted(tmp_path, caplog):
    root = tmp_path / "images"
    write_tree(root, {"a": 4, "b": 4}, splits=("train",))
    options = ["dataset=image_folder", f"dataset.root='{root}'", f"data_dir='{tmp_path}'"]
    options += ["dataset.size=16", "partition=iid", "num_clients=2", "tracker=none"]
    caplog.set_level("INFO", "fedexp")
    for number, changed in ((8, []), (6, ["000.png", "001.png"])):
        shutil.copytree(root / "train", root / "test", dirs_exist_ok=True)
        for k, name in enumerate(changed):
            write_image(root / "test" / "a" / name, pixels(50 + k, 4, 4, 3))
        prepare(build(composed(*options)))
        assert f"{number} of the 8 test examples are equal to training examples" in caplog.text
    assert load("digits", tmp_path).count_copies(np.arange(1437)) == 0


# ---- the cache ----


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """Return a list of the number of images in each decoding."""
    from fedexp.data import datasets

    calls, original = [], datasets.decode

    def counting(files, *args):
        calls.append(len(files))
        return original(files, *args)

    monkeypatch.setattr(datasets, "decode", counting)
    return calls


def entries(data_dir: Path) -> list[Path]:
    return sorted((data_dir / ".fedexp_cache").iterdir())


def test_changed_files_are_decoded_again(decoded, tmp_path):
    root = tmp_path / "images"
    write_tree(root, {"a": 2, "b": 1})
    first, second = load_folder(tmp_path), load_folder(tmp_path)
    assert torch.equal(first.x_train, second.x_train)
    write_image(root / "train" / "a" / "000.png", np.full((4, 4, 3), 9, np.uint8))
    assert (load_folder(tmp_path).x_train[0] == 9).all()
    (root / "train" / "a" / "001.png").rename(root / "train" / "b" / "001.png")
    assert load_folder(tmp_path).y_train.tolist() == [0, 1, 1]
    (root / "train" / "b" / "001.png").unlink()
    assert len(load_folder(tmp_path).x_train) == 2
    assert decoded == [6, 6, 6, 5]
    assert len(entries(tmp_path)) == 1  # outdated entries are removed


def test_swapped_files_with_equal_times_are_decoded_again(decoded, tmp_path):
    """Archives may give all files one time, and `cp -p` keeps it; the images have equal sizes."""
    root = tmp_path / "images"
    write_tree(root, {"a": 1, "b": 1})
    for path in root.rglob("*.png"):
        path.write_bytes(path.read_bytes().ljust(200, b"\0"))
        os.utime(path, (10**9, 10**9))
    first = load_folder(tmp_path)
    (root / "train" / "a").rename(root / "train" / "c")
    (root / "train" / "b").rename(root / "train" / "a")
    (root / "train" / "c").rename(root / "train" / "b")
    swapped = load_folder(tmp_path)
    assert torch.equal(swapped.x_train, first.x_train.flip(0))
    a, b = root / "train" / "a" / "000.png", root / "train" / "b" / "000.png"
    for source, target in ((a, tmp_path / "spare"), (b, a), (tmp_path / "spare", b)):
        target.write_bytes(source.read_bytes())
        os.utime(target, (10**9, 10**9))
    assert torch.equal(load_folder(tmp_path).x_train, first.x_train)
    assert decoded == [4, 4, 4]


def test_cache_does_not_depend_on_how_a_path_is_given(decoded, tmp_path, monkeypatch):
    write_tree(tmp_path / "project" / "images", {"a": 1, "b": 1})
    for place in ("project", "moved"):
        monkeypatch.chdir(tmp_path / place)
        for root in ("images", "./images", tmp_path / place / "images"):
            for data_dir in ("data", tmp_path / place / "data"):
                load("image_folder", data_dir, f"dataset.root='{root}'")
        if place == "project":
            monkeypatch.chdir(tmp_path)
            (tmp_path / "project").rename(tmp_path / "moved")
    assert decoded == [4]


def test_a_damaged_cache_is_built_again(decoded, tmp_path, caplog):
    write_tree(tmp_path / "images", {"a": 2}, side=32)
    first = load_folder(tmp_path)
    (path,) = entries(tmp_path)
    content = bytearray(path.read_bytes())
    content[2000] ^= 255  # among the pixels of the first array
    path.write_bytes(content)
    assert torch.equal(first.x_train, load_folder(tmp_path).x_train)
    assert torch.equal(first.x_train, load_folder(tmp_path).x_train)
    assert len(decoded) == 2
    assert len([r for r in caplog.records if "cannot read the cache" in r.message]) == 1


def test_unwritable_cache_logs_one_warning(decoded, tmp_path, caplog):
    write_tree(tmp_path / "images", {"a": 2})
    (tmp_path / ".fedexp_cache").write_text("a file in the way")
    assert len(load_folder(tmp_path).x_train) == 2
    messages = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("cannot save the decoded images" in message for message in messages)


# ---- the real data ----


@pytest.mark.data
def test_real_mnist_has_published_checksums_and_statistics():
    data_dir = Path(os.environ.get("FEDEXP_DATA", "data")).absolute()
    if not (data_dir / "MNIST" / "raw" / "train-images-idx3-ubyte").exists():
        pytest.skip(f"{data_dir} has no MNIST; set FEDEXP_DATA to the folder that has it")
    data = load("mnist", data_dir)
    assert data.x_train.shape == (60000, 28, 28, 1)
    assert data.x_test.shape == (10000, 28, 28, 1)
    digest = {
        k: hashlib.md5(idx_bytes(x[..., 0].numpy())).hexdigest()
        for k, x in [("train", data.x_train), ("t10k", data.x_test)]
    }
    assert digest == {
        "train": "6bbc9ace898e44ae57da46a324031adb",
        "t10k": "2646ac647ad5339dbf082846283269ea",
    }
    assert torch.bincount(data.y_test)[:3].tolist() == [980, 1135, 1032]
