"""EMNIST, SVHN, Shakespeare and AG News from small files in the published formats, and the LSTM."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedexp.core.errors import ConfigError
from fedexp.data.shakespeare import LETTERS
from fedexp.data.types import TextShape
from fedexp.models.lstm import LSTM
from test_datasets import compose, dataset, idx_bytes, load, no_network, pixels  # noqa: F401

# ---- EMNIST ----


def write_emnist(folder: Path, split: str, labels: list[int], packed: bool = False) -> np.ndarray:
    """Write the files of a split. Return the stored training images."""
    x, y = pixels(0, len(labels), 3, 4), np.array(labels, np.uint8)
    parts = {
        "train-images-idx3": x,
        "train-labels-idx1": y,
        "test-images-idx3": x[:2],
        "test-labels-idx1": y[:2],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in parts.items():
        content = idx_bytes(array)
        path = folder / f"emnist-{split}-{name}-ubyte{'.gz' * packed}"
        path.write_bytes(gzip.compress(content) if packed else content)
    return x


@pytest.mark.parametrize(("folder", "packed"), [("raw", False), ("raw", True), ("raw/gzip", True)])
def test_emnist_images_are_transposed(folder, packed, tmp_path):
    x = write_emnist(tmp_path / "EMNIST" / folder, "balanced", [0, 46, 10], packed)
    for _ in range(2):  # decoded, then from the cache
        data = load("emnist", tmp_path)
        assert np.array_equal(data.x_train[..., 0].numpy(), x.transpose(0, 2, 1))
        assert data.y_test.tolist() == [0, 46]
        assert data.num_classes == 47
        assert [data.classes[c] for c in data.y_train] == ["0", "t", "A"]


def test_emnist_letters_start_at_one(tmp_path):
    write_emnist(tmp_path / "EMNIST" / "raw", "letters", [1, 26, 2])
    data = load("emnist", tmp_path, "dataset.split=letters")
    assert (data.num_classes, data.y_train.tolist()) == (26, [0, 25, 1])
    assert [data.classes[c] for c in data.y_train] == ["a", "z", "b"]


def test_wrong_emnist_files_are_rejected(tmp_path, no_network):  # noqa: F811
    with pytest.raises(Exception, match=r"dataset.split=leters: .*nearest: 'letters'"):
        dataset("emnist", tmp_path, "dataset.split=leters")
    with pytest.raises(ConfigError, match=r"dataset=emnist: .*\n.*\n  gzip.zip"):
        load("emnist", tmp_path)
    write_emnist(tmp_path / "EMNIST" / "raw", "balanced", [0, 1])
    (tmp_path / "EMNIST/raw/emnist-balanced-test-labels-idx1-ubyte").write_bytes(b"short")
    with pytest.raises(ConfigError, match="test-labels-idx1-ubyte: is corrupt"):
        load("emnist", tmp_path)


# ---- SVHN ----


def write_svhn(folder: Path, split: str, labels: list[int]) -> np.ndarray:
    """Write a MATLAB file in the published format. Return its images [n, 32, 32, 3]."""
    x = pixels(len(labels), len(labels), 32, 32, 3)
    folder.mkdir(parents=True, exist_ok=True)
    savemat(
        folder / f"{split}_32x32.mat",
        {"X": x.transpose(1, 2, 3, 0), "y": np.array(labels, np.uint8)[:, None]},
    )
    return x


@pytest.mark.parametrize("folder", [".", "svhn"])
def test_svhn_label_10_is_digit_0(folder, tmp_path):
    train = write_svhn(tmp_path / folder, "train", [10, 1, 9])
    write_svhn(tmp_path / folder, "test", [5, 10])
    data = load("svhn", tmp_path)
    assert np.array_equal(data.x_train.numpy(), train)
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 1, 9], [5, 0])
    assert data.classes[0] == "0"
    extra = write_svhn(tmp_path / folder, "extra", [2, 2, 3, 4])
    more = load("svhn", tmp_path, "dataset.extra=true")
    assert np.array_equal(more.x_train.numpy(), np.concatenate([train, extra]))


def test_wrong_svhn_files_are_rejected(tmp_path, no_network):  # noqa: F811
    with pytest.raises(
        ConfigError, match=r"dataset=svhn: (.|\n)*train_32x32.mat(.|\n)*test_32x32.mat"
    ):
        load("svhn", tmp_path)
    write_svhn(tmp_path / "svhn", "train", [11])
    write_svhn(tmp_path / "svhn", "test", [1])
    with pytest.raises(ConfigError, match=r"train_32x32.mat: is corrupt"):
        load("svhn", tmp_path)


# ---- Shakespeare ----


def write_roles(folder: Path, **roles: tuple[list[str], list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"users": list(roles), "num_samples": [len(y) for _, y in roles.values()]}
    content["user_data"] = {role: {"x": x, "y": y} for role, (x, y) in roles.items()}
    (folder / "all_data_niid_0_keep_0_train_8.json").write_text(json.dumps(content))


def test_shakespeare_has_a_client_for_each_role(tmp_path):
    assert len(LETTERS) == 80
    root = tmp_path / "shakespeare"
    write_roles(
        root / "train", ROMEO=(["x" * 78 + "lo"], ["v"]), JULIET=(["a" * 80, "b" * 80], ["e", "}"])
    )
    write_roles(root / "test", JULIET=(["~" + "c" * 79], [" "]))
    data = load("shakespeare", tmp_path)
    assert data.owners.tolist() == [0, 0, 1]  # JULIET, JULIET, ROMEO
    assert [data.classes[c] for c in (*data.y_train, *data.y_test)] == ["e", "}", "v", " "]
    assert "".join(data.vocabulary[c] for c in data.x_train[2][-3:]) == "xlo"
    assert data.vocabulary[data.x_test[0][0]] == "<UNK>"
    short = load("shakespeare", tmp_path, "dataset.length=2")
    assert "".join(short.vocabulary[c] for c in short.x_train[2]) == "lo", (
        "the characters before the next one"
    )


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (["~"], "y must contain only single characters of LEAF"),
        (["ab"], "y must"),
        ([], "there are 1 texts and 0 characters"),
    ],
)
def test_damaged_shakespeare_files_are_rejected(y, message, tmp_path):
    write_roles(tmp_path / "shakespeare" / "test", ROMEO=(["a"], ["b"]))
    with pytest.raises(
        ConfigError,
        match=r"shakespeare/train: contains no json files. Shakespeare cannot.*--tf 0.8",
    ):
        load("shakespeare", tmp_path)
    write_roles(tmp_path / "shakespeare" / "train", ROMEO=(["a"], y))
    with pytest.raises(
        ConfigError, match=f"all_data.*is not a LEAF json file for Shakespeare .*{message}"
    ):
        load("shakespeare", tmp_path)


def test_lstm_equals_its_equations():
    """The equations are i, f, g, o = split(W x + U h + b), c = f c + i g, h = o tanh(c)."""
    torch.manual_seed(0)
    network = LSTM(dimension=3, hidden=4, layers=2).build(TextShape(5, 7, None), 6).double()
    words = torch.randint(0, 7, (2, 5))
    sequence = network.embedding.weight[words]
    for layer in range(2):
        w, u, b, d = (
            getattr(network.recurrent, f"{k}_l{layer}")
            for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = c = torch.zeros(2, 4, dtype=torch.float64)
        outputs = []
        for x in sequence.unbind(1):
            i, f, g, o = (x @ w.T + h @ u.T + b + d).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        sequence = torch.stack(outputs, 1)
    # with a key of dropout, which it does not read
    found = network(torch.cat([words, torch.full((2, 1), 99)], 1))
    torch.testing.assert_close(found.features, sequence[:, -1])
    torch.testing.assert_close(found.logits, network.classifier(sequence[:, -1]))


# ---- AG News ----


def write_news(folder: Path, split: str, *rows: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.csv").write_text("".join(f"{row}\n" for row in rows))


def test_ag_news_is_read_as_published(tmp_path):
    write_news(tmp_path / "ag_news", "train", '"3","Oil ","rises ""again"""', '"1","A","b\nc"')
    write_news(tmp_path / "ag_news", "test", '"4","New chip","is out"')
    data = load("ag_news", tmp_path, "dataset.length=9")
    texts = [
        "".join(data.vocabulary[c] for c in row if data.vocabulary[c] != "<PAD>")
        for row in data.x_train
    ]
    assert texts == ["Oil rises", "A b\nc"]
    assert [data.classes[c] for c in (*data.y_train, *data.y_test)] == [
        "Business",
        "World",
        "Sci/Tech",
    ]


@pytest.mark.parametrize("row", ['"5","a","b"', '"1","a"', "class,title,description"])
def test_invalid_ag_news_records_are_rejected(row, tmp_path):
    write_news(tmp_path / "ag_news", "train", '"1","a","b"', row)
    write_news(tmp_path / "ag_news", "test", '"1","a","b"')
    with pytest.raises(ConfigError, match=r"train.csv, record 2: must have a class from 1 to 4"):
        load("ag_news", tmp_path)
