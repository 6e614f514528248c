"""Splits of PFLlib, FL-bench and Flower: files in their formats, the scripts of the page that
export them, and runs on the result."""

import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

import fedexp
from fedexp.cli import main
from fedexp.config.build import build
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import Partition
from fedexp.data.pfllib import PFLlib
from fedexp.rundir.identity import flatten
from fedexp.training.checks import test_problems as overlaps_of
from fedexp.training.division import divide
from quick_runs import SMALL
from toy_federation import composed

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "coming_from.md"
SIZES = [(9, 3), (6, 2), (12, 4), (15, 5)]  # training and test images of each client
RUN = [each for each in SMALL if not each.startswith(("num_clients", "min_size"))]
NATURAL = ["dataset=pfllib", "partition=natural", "num_clients=4"]


def script(heading):
    """Return the Python block under a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"### {heading}\n")[2]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def pfllib_folder(folder, channels=1, mean=0.5, std=0.5):
    """Write a folder as PFLlib's save_file does: pickled dicts of normalised images. Returns the
    grey levels and labels of each client's two files."""
    rng, found = np.random.default_rng(3), {}
    for part, split in enumerate(("train", "test")):
        (folder / split).mkdir(parents=True)
        for client, sizes in enumerate(SIZES):
            levels = rng.integers(0, 256, (sizes[part], channels, 8, 8), dtype=np.uint8)
            y = rng.integers(0, 4, sizes[part])
            scaled = torch.from_numpy(levels).float() / 255  # as torchvision's ToTensor
            x = ((scaled - mean) / std).numpy()
            np.savez_compressed(folder / split / f"{client}.npz", data={"x": x, "y": y})
            found[split, client] = levels, y
    config = {"num_clients": 4, "num_classes": 4, "non_iid": True, "alpha": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    return found


def export(source, target, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["export.py", str(source), str(target)])
    exec(compile(script("PFLlib"), "export.py", "exec"), {})


@pytest.fixture
def exported(here, monkeypatch):
    """The grey levels and labels of a folder of PFLlib, exported to `clients`."""
    found = pfllib_folder(here / "Cifar10")
    export(here / "Cifar10", here / "clients", monkeypatch)
    return found


def loaded(*overrides):
    root = [] if any("root" in each for each in overrides) else ["dataset.root=clients"]
    return divide(build(composed(*NATURAL, *root, *overrides)))


# --- PFLlib


def test_folders_of_clients_do_not_replace_each_other_in_the_cache(here, exported, monkeypatch):
    shutil.copytree(here / "clients", here / "others")
    for root in ("clients", "others"):
        loaded(f"dataset.root={root}")
    monkeypatch.setattr(PFLlib, "read_clients", lambda *_: pytest.fail("not from the cache"))
    for root in ("clients", "others", "./clients"):
        loaded(f"dataset.root={root}")


@pytest.mark.parametrize(("channels", "mean", "std"), [(1, 0.5, 0.5), (3, 0.5, 0.5), (3, 0.0, 1.0)])
def test_exported_clients_have_their_images(here, monkeypatch, channels, mean, std):
    """Also the inputs of models are PFLlib's, and each test image is its client's."""
    found = pfllib_folder(here / "source", channels, mean, std)
    export(here / "source", here / "clients", monkeypatch)
    data, (stage,) = loaded(f"dataset.mean=[{mean}]", f"dataset.std=[{std}]")
    assert data.num_classes == 4
    for client in range(4):
        part = stage.partition.parts[client]
        levels, y = found["train", client]
        assert (data.x_train[part].numpy() == levels.transpose(0, 2, 3, 1)).all()
        assert data.y_train[part].tolist() == y.tolist()
        levels, y = found["test", client]
        own = data.test_clients == client
        assert (data.x_test[own].numpy() == levels.transpose(0, 2, 3, 1)).all()
        assert data.y_test[own].tolist() == y.tolist()
        stored = np.load(here / "source" / "test" / f"{client}.npz", allow_pickle=True)["data"]
        index = torch.nonzero(own).flatten()
        inputs = data.inputs(data.x_test, index, None, None, torch.float32)
        np.testing.assert_allclose(inputs, stored.item()["x"], rtol=0, atol=1e-6)


def test_run_on_exported_clients_prints_the_number_of_pfllib(here, exported):
    """Sum over clients of the correct predictions, divided by all test images; here by an
    independent pass over PFLlib's own arrays with the saved model."""
    options = [*RUN, *NATURAL, "dataset.root=clients", "evaluate=own", "rounds=2"]
    run = fedexp.run(options, directory=here / "run")
    network = run.model().network.eval()
    right, own = 0, []
    for client, (_, size) in enumerate(SIZES):
        stored = np.load(here / "Cifar10" / "test" / f"{client}.npz", allow_pickle=True)
        x, y = (torch.from_numpy(stored["data"].item()[name]) for name in "xy")
        with torch.no_grad():
            output = network(x)
        logits = output.logits if hasattr(output, "logits") else output
        correct = int((logits.argmax(1) == y).sum())
        right += correct
        own.append(correct / size)
    assert run.summary["own_accuracy_weighted"] == pytest.approx(right / 14, abs=1e-12)
    assert run.summary["own_accuracy"] == pytest.approx(np.mean(own), abs=1e-12)
    table = pd.read_csv(here / "run" / "own_accuracy.csv")
    assert table[table["round"] == 2]["examples"].tolist() == [3, 2, 4, 5]


def test_some_of_the_clients_keep_their_test_images(exported):
    """Test images of clients that were not chosen are no client's, but stay in the test set."""
    data, (stage,) = divide(
        build(
            composed("dataset=pfllib", "partition=natural", "num_clients=2", "dataset.root=clients")
        )
    )
    for client, part in enumerate(stage.partition.parts):
        (owner,) = {int(data.owners[i]) for i in part}
        own = data.test_clients == client
        assert data.y_test[own].tolist() == exported["test", owner][1].tolist()
    assert len(data.y_test) == 14
    assert int((data.test_clients == -1).sum()) == 14 - sum(
        int((data.test_clients == k).sum()) for k in range(2)
    )


def test_pickles_of_pfllib_are_refused(here, capsys):
    pfllib_folder(here / "Cifar10")
    code = main.main([*RUN, *NATURAL, "dataset.root=Cifar10", "hydra.run.dir=run"])
    message = capsys.readouterr().err
    assert code == 2
    assert "Cifar10/train/0.npz: is a pickle of PFLlib" in message
    assert 'the page "Coming from PFLlib, Flower or FL-bench"' in message
    assert not (here / "run").exists()
    assert PAGE.read_text().startswith("# Coming from PFLlib, Flower or FL-bench\n")


def change(name, **arrays):
    """Return a function that replaces arrays of an exported file."""

    def apply():
        path = Path("clients", name)
        np.savez(path, **dict(np.load(path)) | {k: f(np.load(path)[k]) for k, f in arrays.items()})

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda: Path("clients/test/3.npz").unlink(), r"test/3\.npz: is missing; .*num_clients=4"),
        (
            lambda: Path("clients/train/3.npz").rename("clients/train/4.npz"),
            r"train/3\.npz: is missing",
        ),
        (
            lambda: Path("clients/train/4.npz").write_bytes(b""),
            r"train/4\.npz: belongs to no client; .* 0\.npz to 3\.npz in train and in test",
        ),
        (lambda: Path("clients/config.json").unlink(), "dataset.root=clients: has no config.json"),
        (
            lambda: Path("clients/config.json").write_text('{"num_clients": "4"}'),
            "num_clients=4: must be an integer",
        ),
        (change("test/1.npz", y=lambda y: y + 4), r"test/1\.npz: has the label \d; must be from 0"),
        (
            change("train/1.npz", y=lambda y: y - 4),
            r"train/1\.npz: has the label -\d; must be from",
        ),
        (change("train/2.npz", y=lambda y: y[:-1]), "y is int64 of shape .11.; must be a label"),
        (change("train/2.npz", y=lambda y: y * 1.0), "y is float64 of shape .12.; must be a label"),
        (
            change("train/2.npz", x=lambda x: x[:0], y=lambda y: y[:0]),
            r"train/2\.npz: has no examples",
        ),
        (
            change("test/2.npz", x=lambda x: x[..., :-1]),
            r"test/2\.npz: has images of shape .8, 7, 1. .*, but those of .*0\.npz have .8, 8, 1.",
        ),
        (change("test/2.npz", x=lambda x: x[:, 0]), "must be images, float .n, channels, height"),
        (change("test/2.npz", x=lambda x: x / 2), "not normalised with dataset.mean=.0.5. dataset"),
        (
            lambda: np.savez("clients/test/0.npz", x=np.zeros((1, 1, 8, 8))),
            r"test/0\.npz: must have the arrays x and y.*; has x",
        ),
    ],
)
def test_wrong_files_are_named(exported, spoil, message):
    spoil()
    with pytest.raises(ConfigError, match=message):
        loaded()


def test_normalisation_that_is_not_pfllibs_is_refused(exported):
    with pytest.raises(ConfigError, match=r"dataset\.mean=\[0\.0\] dataset\.std=\[1\.0\]"):
        loaded("dataset.mean=[0.0]", "dataset.std=[1.0]")
    with pytest.raises(ConfigError, match="has images with 1 channel; must have as many values"):
        loaded("dataset.mean=[0.5,0.5,0.5]", "dataset.std=[0.5,0.5,0.5]")


# --- FL-bench


def test_partition_of_fl_bench_gives_clients_their_test_examples(here, capsys):
    """Its indices are those of the training images, then the test images, as with joined splits."""
    rng = np.random.default_rng(0)
    numbers = rng.permutation(1797)[:400].reshape(4, 100).astype(np.int32)
    clients = [{"train": row[25:], "val": row[:0], "test": row[:25]} for row in numbers]
    (here / "data" / "cifar10").mkdir(parents=True)
    split = {"separation": {"total": 4}, "data_indices": clients}
    (here / "data" / "cifar10" / "partition.pkl").write_bytes(pickle.dumps(split))
    exec(script("FL-bench"), {})
    options = ["partition=file", "partition.path=clients.json", "num_clients=4", "evaluate=own"]
    options += ["dataset.train_splits=[train,test]", "rounds=1"]
    assert main.main([*RUN, *options, "hydra.run.dir=run"]) == 0
    partition = Partition.load(here / "run" / "partition.npz")
    for part, row in zip(partition.parts, numbers, strict=True):
        assert part.tolist() == sorted(row[25:].tolist())
    assert partition.test.tolist() == sorted(numbers[:, :25].ravel().tolist())
    table = pd.read_csv(here / "run" / "own_accuracy.csv")
    assert table["examples"].tolist() == [25] * 8
    config = build(composed(*options))
    data, _ = divide(config)
    labels = config.dataset.load().y_train
    for client, row in enumerate(numbers):
        own = data.y_test[data.test_clients == client]
        assert own.tolist() == labels[np.sort(row[:25])].tolist()


@pytest.mark.parametrize(
    ("content", "extra", "message"),
    [
        ([{"train": [0], "test": [1]}, [2]], (), "all clients must have one"),
        ([{"train": [0], "val": [1]}, {"train": [2], "test": [3]}], (), "with the keys train and"),
        ([{"train": [0], "test": 1}, {"train": [2], "test": [3]}], (), "and a list of example"),
        ([{"train": [0], "test": [0]}, {"train": [2], "test": [3]}], (), "example 0 to client 0"),
        ([{"train": [0], "test": [2]}, {"train": [2], "test": [3]}], (), "to clients 0 and 1"),
        ([{"train": [], "test": [1]}, {"train": [2], "test": [3]}], (), "0 has no training exam"),
        ([{"train": [0], "test": []}, {"train": [2], "test": []}], (), "no client has test exam"),
        ([{"train": [0], "test": [0.5]}, {"train": [2], "test": [3]}], (), "array of float64"),
        (
            [{"train": [0], "test": [1]}, {"train": [2], "test": [3]}],
            ("test_per_client=0.25",),
            "test_per_client=0.25: clients.json already gives the clients test examples",
        ),
    ],
)
def test_wrong_test_examples_in_a_file_are_named(here, content, extra, message):
    (here / "clients.json").write_text(json.dumps(content))
    options = ["partition=file", "partition.path=clients.json", "num_clients=2", *extra]
    built = build(composed(*options))
    with pytest.raises(ConfigError, match=re.escape(message)):
        divide(built)


def test_missing_file_is_named_before_joined_splits(here, capsys):
    options = ["partition=file", "partition.path=clients.json", "num_clients=4", "evaluate=own"]
    options.append("dataset.train_splits=[train,test]")
    assert main.main([*RUN, *options, "hydra.run.dir=run"]) == 2
    message = capsys.readouterr().err
    assert "partition.path=clients.json: this file does not exist" in message
    assert "also train on" not in message


def test_training_and_test_examples_may_not_overlap_without_test_lists(here):
    """A file without test examples leaves the data set's test set, so joined splits are refused."""
    (here / "clients.json").write_text(json.dumps([[0, 1], [2, 3]]))
    options = ["partition=file", "partition.path=clients.json", "num_clients=2"]
    options.append("dataset.train_splits=[train,test]")
    (problem,) = overlaps_of(build(composed(*options)))
    assert "clients would also train on the test examples" in problem


# --- Flower


class StripedPartitioner:
    """A partitioner of flwr-datasets: `dataset` is assigned once, then partitions are loaded."""

    num_partitions = 3

    def load_partition(self, partition_id):
        return self.dataset.select(range(partition_id, len(self.dataset), 3))


def test_flower_partition_has_the_indices_before_shuffling(here, monkeypatch):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"label": list(range(100, 140))})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: data)
    exec(script("Flower"), {"partitioner": StripedPartitioner()})
    clients = json.loads((here / "clients.json").read_text())
    shuffled = datasets.DatasetDict({"train": data}).shuffle(seed=42)["train"]["label"]
    for client, numbers in enumerate(clients):
        assert [100 + i for i in numbers] == list(shuffled)[client::3]


# --- the table of defaults


def test_defaults_on_the_page_are_those_of_the_program():
    """The third column of the table, and the values of digits below it."""
    text = PAGE.read_text(encoding="utf-8").partition("## What differs by default\n")[2]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    columns = "".join(row[2] for row in rows if len(row) == 4)
    digits = re.search(r"\(digits: (.*?)\)", text, re.DOTALL)[1]
    for dataset, part in (("pfllib", columns), ("cifar10", columns), ("digits", digits)):
        config = composed(f"dataset={dataset}", "tracker=none")
        values = OmegaConf.from_dotlist(re.findall(r"`([a-z_.]+=[^`]+)`", part))
        written = flatten(OmegaConf.to_container(values))
        assert len(written) >= 3
        found = {key: OmegaConf.select(config, key) for key in written}
        assert found == written
