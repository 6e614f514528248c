"""Data sets of Hugging Face; tested if the optional package is installed (fedexp[huggingface])."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedexp.cli import main
from fedexp.core.errors import ConfigError
from fedexp.data.huggingface import HuggingFaceImages, encode_labels
from fedexp.data.partitioned import Partition
from test_datasets import load


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


def save(datasets, folder: Path, train: dict, test: dict, features=None) -> str:
    splits = {
        name: datasets.Dataset.from_dict(part, features=features)
        for name, part in (("train", train), ("test", test))
    }
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return str(folder)


def images(datasets, tmp_path) -> tuple[str, np.ndarray]:
    x = np.random.default_rng(0).integers(0, 256, (3, 4, 5), dtype=np.uint8)
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    shown = [Image.fromarray(each) for each in x]
    parts = [{"img": shown[:n], "label": [1, 0, 1][:n]} for n in (3, 2)]
    return save(datasets, tmp_path / "saved", *parts, features), x


def test_saved_hugging_face_images_are_read(datasets, tmp_path):
    path, x = images(datasets, tmp_path)
    grey = ("dataset.mean=[0.5]", "dataset.std=[0.5]", f"dataset.path='{path}'")
    for _ in range(2):  # decoded, then from the cache
        data = load("huggingface", tmp_path, *grey)
        assert np.array_equal(data.x_train[..., 0].numpy(), x)
        assert (data.y_train.tolist(), data.y_test.tolist(), data.classes) == (
            [1, 0, 1],
            [1, 0],
            ("cat", "dog"),
        )
    resized = load("huggingface", tmp_path, f"dataset.path='{path}'", "dataset.size=2")
    assert tuple(resized.x_test.shape) == (2, 2, 2, 3)


def test_saved_hugging_face_texts_are_read(datasets, tmp_path):
    train, test = (
        {"text": ["abba", "c"], "label": ["good", "bad"]},
        {"text": ["ax"], "label": ["bad"]},
    )
    path = save(datasets, tmp_path / "saved", train, test)
    data = load("huggingface_text", tmp_path, f"dataset.path='{path}'", "dataset.length=3")
    assert ["".join(data.vocabulary[c] for c in row) for row in data.x_train] == [
        "abb",
        "c<PAD><PAD>",
    ]
    assert [data.classes[c] for c in (*data.y_train, *data.y_test)] == ["good", "bad", "bad"]
    save(datasets, tmp_path / "more", train, {"text": ["ax"], "label": ["new"]})
    with pytest.raises(ConfigError, match="label: the label 'new' is not one of the 2 class"):
        load("huggingface_text", tmp_path, f"dataset.path='{tmp_path / 'more'}'")


def test_owner_column_of_texts_gives_the_natural_clients(datasets, tmp_path, caplog):
    train = {"text": ["abba", "c", "d"], "label": [0, 1, 0], "writer_id": ["30", "4", "30"]}
    train["lacking"] = ["b", None, "b"]
    path = save(datasets, tmp_path / "texts", train, {"text": ["x"], "label": [1]})
    texts = (f"dataset.path='{path}'", "dataset.owner=writer_id")
    assert load("huggingface_text", tmp_path, *texts).owners.tolist() == [1, 0, 1]
    assert not caplog.text
    train["spaced"] = ["w3", "w3 ", "w4"]
    path = save(datasets, tmp_path / "spaced", train, {"text": ["x"], "label": [1]})
    spaced = load("huggingface_text", tmp_path, f"dataset.path='{path}'", "dataset.owner=spaced")
    assert spaced.owners.tolist() == [0, 1, 2]
    assert "dataset.owner=spaced: 'w3' and 'w3 ' are different clients" in caplog.text
    with pytest.raises(ConfigError, match="1 of the 3 training examples have no owner"):
        load("huggingface_text", tmp_path, texts[0], "dataset.owner=lacking")


def test_writers_of_femnist_are_clients(datasets, here, capsys):
    """A file in the format of flwrlabs/femnist, which has no test split: each client holds out a
    tenth. Every run on the file has the same clients, numbered by name."""
    writers = [("b", "a", "c")[k % 3] for k in range(30)]
    features = {"image": datasets.Image(), "writer_id": datasets.Value("string")}
    features["hsf_id"] = datasets.Value("int64")
    features["character"] = datasets.ClassLabel(names=["0", "A", "a"])
    rng = np.random.default_rng(0)
    examples = {
        "image": [Image.fromarray(rng.integers(0, 256, (28, 28), np.uint8)) for _ in writers],
        "writer_id": writers,
        "hsf_id": [0] * 30,
        "character": [k % 2 for k in range(30)],
    }
    (here / "femnist").mkdir()
    saved = datasets.Dataset.from_dict(examples, features=datasets.Features(features))
    saved.to_parquet(str(here / "femnist" / "train-0.parquet"))
    command = ["dataset=huggingface", "dataset.path=femnist", "dataset.test_split=train"]
    command += ["dataset.label=character", "dataset.owner=writer_id", "partition=natural"]
    command += ["dataset.mean=[0.9637]", "dataset.std=[0.155]", "num_clients=3", "rounds=1"]
    command += ["participation=1", "tracker=none", "figures=false", "hardware=cpu", "data_dir=."]
    for number in (1, 2):  # decoded, then from the cache
        assert main.main([*command, "test_per_client=0.1", f"hydra.run.dir=run{number}"]) == 0
        partition = Partition.load(here / f"run{number}" / "partition.npz")
        assert partition.sizes.tolist() == [9, 9, 9]
        for part, name in zip(partition.parts, "abc", strict=True):
            assert {writers[i] for i in part} == {name}
        assert len(partition.test) == 3
    capsys.readouterr()
    for changes, message in (
        ([], "dataset.test_split=train: clients would also train on the test examples"),
        (["test_per_client=0.1", "dataset.owner=writer"], "nearest: 'writer_id'"),
        (["test_per_client=0.1", "num_clients=4"], "at most 3, the number of natural clients"),
    ):
        assert main.main([*command, *changes]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (["a", "b"], [0, -1], "label: 1 of the 2 training examples have no label .*number 1"),
        (["a", None], [0, 1], "text: 1 of the 2 training examples have no text .*number 1"),
    ],
)
def test_missing_labels_and_texts_are_rejected(texts, labels, message, datasets, tmp_path):
    part = {"text": texts, "label": labels}
    path = save(datasets, tmp_path / "saved", part, part)
    with pytest.raises(ConfigError, match=message):
        load("huggingface_text", tmp_path, f"dataset.path='{path}'")


class Split(dict):
    """A split in which each column is a list. names: the class names, ordered by label."""

    def __init__(self, labels: list, names: list[str] | None = None):
        super().__init__(label=labels)
        self.features = {"label": SimpleNamespace(names=names)}


def test_lists_of_labels_are_rejected():
    split = Split([[0, 2], [1]])
    with pytest.raises(ConfigError, match=r"dataset.label=label: .* a label is \[0, 2\]"):
        encode_labels(split, split, "label")


@pytest.mark.parametrize(
    ("train", "test", "found"),
    [
        (Split([0, 3], [*"alps"]), Split([0, 1], ["s", "p"]), ([0, 3], [3, 2])),
        (Split([0, 1], ["b", "a"]), Split(["a", "b"]), ([0, 1], [1, 0])),
        (Split(["a", "b"]), Split([0, 1], ["b", "a"]), ([0, 1], [1, 0])),
        (Split([0, 1], ["0", "1"]), Split([1, 0]), ([0, 1], [1, 0])),
        (Split([0, 1]), Split([0, 1], ["0", "1"]), ([0, 1], [0, 1])),
    ],
)
def test_splits_that_number_classes_differently_are_matched_by_name(train, test, found):
    assert encode_labels(train, test, "label")[:2] == found


def test_names_that_differ_in_white_space_are_said(caplog):
    split = Split([0, 1], ["cat", "cat "])
    assert encode_labels(split, split, "label")[2] == ("cat", "cat ")
    assert "dataset.label=label: 'cat' and 'cat ' are different classes" in caplog.text


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (Split([0], ["a", "b"]), Split([1]), "training examples have class names .a, .* the test"),
        (Split([0]), Split([1], ["a", "b"]), "test examples have class names .a, .* the training"),
        (Split([0], ["a", "b"]), Split([0], ["A", "b"]), "label 'A' is not one of the 2 classes"),
        (Split([0], ["a", "b"]), Split([2], ["b", "a"]), "label '2' is not one of the 2 classes"),
    ],
)
def test_splits_whose_classes_cannot_be_matched_are_rejected(train, test, message):
    with pytest.raises(ConfigError, match=message):
        encode_labels(train, test, "label")


def test_labels_of_separately_encoded_splits_replace_a_cached_entry(datasets, tmp_path):
    """Each split numbers its own classes, as `class_encode_column` on a single split does."""
    parts = (("train", ["apple", "lime", "sky"]), ("test", ["sky", "lime"]))
    shown = [Image.fromarray(np.full((4, 4), k, np.uint8)) for k in range(3)]
    splits = {}
    for split, names in parts:
        columns = {"image": shown[: len(names)], "label": names}
        splits[split] = datasets.Dataset.from_dict(columns).class_encode_column("label")
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    for _ in range(2):  # decoded, then from the cache
        data = load("huggingface", tmp_path, f"dataset.path='{tmp_path / 'saved'}'")
        assert [data.classes[k] for k in data.y_train] == ["apple", "lime", "sky"]
        assert [data.classes[k] for k in data.y_test] == ["sky", "lime"]


def test_data_sets_and_splits_do_not_replace_each_other_in_the_cache(
    datasets, tmp_path, monkeypatch
):
    path, _ = images(datasets, tmp_path)
    other = shutil.copytree(path, tmp_path / "other")
    chosen = [[f"dataset.path='{path}'"], [f"dataset.path='{other}'"]]
    chosen.append([*chosen[0], "dataset.test_split=train"])
    for _ in range(2):
        for options in chosen:
            load("huggingface", tmp_path, *options)
        monkeypatch.setattr(HuggingFaceImages, "_images", None)  # then from the cache


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dataset.train_split=trian", "must be one of train, test .nearest: 'train'"),
        ("dataset.column=label", "must contain images, but it contains int"),
        ("dataset.path=null", "must be the name of a data set on the Hugging Face hub, .* or"),
    ],
)
def test_invalid_options_are_rejected(override, message, datasets, tmp_path):
    path, _ = images(datasets, tmp_path)
    with pytest.raises(ConfigError, match=message):
        load("huggingface", tmp_path, f"dataset.path='{path}'", override)


def test_missing_package_is_reported_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError,
        match=r"dataset.path=x/y: .*; install it with pip install .*huggingface",
    ):
        load("huggingface", tmp_path, "dataset.path=x/y")
