"""Data sets of Hugging Face; tested if the optional package is installed."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedexp.core.errors import ConfigError
from fedexp.data.partition import Natural
from test_datasets import load
from toy_federation import composed


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
    with pytest.raises(
        ConfigError, match="contains the label 'new', which is not one of the 2 class"
    ):
        load("huggingface_text", tmp_path, f"dataset.path='{tmp_path / 'more'}'")


def test_owner_column_gives_the_natural_clients(datasets, tmp_path):
    """Of images (also from the cache) and texts. Owners are numbered in their order."""
    train = {"text": ["abba", "c", "d"], "label": [0, 1, 0], "writer_id": [30, 4, 30]}
    path = save(datasets, tmp_path / "texts", train, {"text": ["x"], "label": [1]})
    texts = (f"dataset.path='{path}'", "dataset.owner=writer_id")
    assert load("huggingface_text", tmp_path, *texts).owners.tolist() == [1, 0, 1]
    x = [Image.fromarray(np.full((2, 2), k, np.uint8)) for k in range(3)]
    part = {"img": x, "label": [0, 1, 0], "who": ["b", "a", "b"], "lacking": ["b", None, "b"]}
    path = save(datasets, tmp_path / "images", part, part)
    for _ in range(2):
        data = load("huggingface", tmp_path, f"dataset.path='{path}'", "dataset.owner=who")
        assert data.owners.tolist() == [1, 0, 1]
        assert Natural().deal(data.y_train.numpy(), 2, None, data.owners).parts[0].tolist() == [1]
    for owner, message in (
        ("whom", "nearest: 'who'"),
        ("lacking", "have no owner"),
    ):
        with pytest.raises(ConfigError, match=message):
            load("huggingface", tmp_path, f"dataset.path='{path}'", f"dataset.owner={owner}")


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (["a", "b"], [0, -1], "label: 1 of the 2 training examples have no label .*number 1"),
        (["a", "b"], [0.0, None], "1 of the 2 training examples have no label"),
        (["a", "b"], ["x", ""], "1 of the 2 training examples have no label"),
        (["a", None], [0, 1], "text: 1 of the 2 training examples have no text .*number 1"),
        ([" ", "b"], [0, 1], "1 of the 2 training examples have no text"),
    ],
)
def test_missing_labels_and_texts_are_rejected(texts, labels, message, datasets, tmp_path):
    part = {"text": texts, "label": labels}
    path = save(datasets, tmp_path / "saved", part, part)
    with pytest.raises(ConfigError, match=message):
        load("huggingface_text", tmp_path, f"dataset.path='{path}'")


def test_numbers_as_labels_are_sorted_by_value(datasets, tmp_path):
    part = {"text": ["a", "b"], "label": ["10", "2"]}
    path = save(datasets, tmp_path / "saved", part, part)
    data = load("huggingface_text", tmp_path, f"dataset.path='{path}'")
    assert (data.classes, data.y_train.tolist()) == (("2", "10"), [1, 0])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dataset.train_split=trian", "must be one of train, test .nearest: 'train'"),
        ("dataset.column=picture", "must be one of img, label"),
        ("dataset.column=label", "must contain images, but it contains int"),
        ("dataset.path=null", "must be the name of a data set on the Hugging Face hub, .* or"),
    ],
)
def test_invalid_options_are_rejected(override, message, datasets, tmp_path):
    path, _ = images(datasets, tmp_path)
    with pytest.raises(ConfigError, match=message):
        load("huggingface", tmp_path, f"dataset.path='{path}'", override)


def test_folder_without_a_data_set_is_rejected(datasets, tmp_path):
    with pytest.raises(ConfigError, match="the package datasets cannot load this data set"):
        load("huggingface", tmp_path, f"dataset.path='{tmp_path}'")


def test_missing_package_is_reported_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError,
        match=r"dataset.path=x/y: needs the package datasets: pip install .*huggingface",
    ):
        load("huggingface", tmp_path, "dataset.path=x/y")


def test_command_line_can_set_any_option_of_the_surrogate_data():
    asked = [
        "surrogate.dataset=image_folder",
        "+surrogate.options={root: photos}",
        "+surrogate.options.size=8",
    ]
    assert composed(*asked).surrogate.options == {"root": "photos", "size": 8}
