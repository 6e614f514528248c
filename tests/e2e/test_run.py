"""The files of a run, and that the same command gives the same run."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from helpers import SMALL, WITHOUT_MIN_SIZE, assert_same_run, summary_of, write_images
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fedexp.core.storage import read_table
from fedexp.training.summary import RESERVED


def test_run_directory_is_complete(fedexp, tmp_path):
    answer = fedexp.done(
        "algorithm=fedntd",
        "partition=lda",
        "alpha=0.1",
        "rounds=3",
        "targets=[0.1,0.99]",
        *SMALL,
        "figures=true",
    )
    (directory,) = (tmp_path / "outputs").glob("*/*")
    rounds = read_table(directory / "rounds.csv")
    named = "round test_accuracy test_loss train_loss lr forgetting round_forgetting"
    assert rounds.columns[:7].tolist() == named.split()
    assert rounds["round"].tolist() == [0, 1, 2, 3]
    assert rounds["train_loss"].isna().tolist() == [True, False, False, False]
    np.testing.assert_allclose(rounds["lr"][1:], [0.05, 0.05 * 0.99, 0.05 * 0.99**2], rtol=1e-12)

    # The three views of accuracy agree: per class, per round, summary.
    classes = read_table(directory / "class_accuracy.csv")
    assert classes.columns.tolist() == ["round", "class", "accuracy"]
    totals = examples_per_class()
    per_class = classes.pivot(index="round", columns="class", values="accuracy").to_numpy()
    np.testing.assert_allclose(
        per_class @ totals / totals.sum(), rounds["test_accuracy"], rtol=0, atol=1e-12
    )
    summary = summary_of(directory)
    assert summary["status"] == "completed"
    assert summary["accuracy"] == rounds["test_accuracy"].iloc[-1]
    assert summary["best_accuracy"] == rounds["test_accuracy"][1:].max()
    # F by its definition (FedNTD Eq. 5), from the file alone.
    expected = (per_class[1:-1].max(0) - per_class[-1]).mean()
    np.testing.assert_allclose(
        [summary["forgetting"], rounds["forgetting"].iloc[-1]], expected, atol=1e-12
    )
    drops = np.maximum(0, per_class[1:-1] - per_class[2:]).mean(1)
    np.testing.assert_allclose(summary["round_forgetting"], drops.mean(), atol=1e-12)
    assert summary["rounds_to_target"]["0.99"] is None
    assert summary["rounds_to_target"]["1.0*best"] == int(rounds["test_accuracy"][1:].idxmax())
    needed = "algorithm dataset rounds seed seconds train_samples_per_second versions commit"
    assert {*needed.split(), "hardware"} <= summary.keys()
    assert set(summary) <= {*RESERVED, "forgetting", "round_forgetting"}

    clients = pd.read_csv(directory / "clients.csv")
    assert clients.groupby("round").size().tolist() == [4, 4, 4]
    partition = np.load(directory / "partition.npz")
    assert (clients["examples"] == partition["sizes"][clients["client"]]).all()
    assert partition["counts"].sum() == 1437
    names = pd.read_csv(directory / "classes.csv", dtype=str).to_numpy().tolist()
    assert names == [[str(digit), str(digit)] for digit in range(10)]
    config = yaml.safe_load((directory / "config.yaml").read_text())
    assert config["algorithm"]["beta"] == 1.0
    assert config["choices"]["algorithm"] == "fedntd"
    overrides = yaml.safe_load((directory / ".hydra/overrides.yaml").read_text())
    assert "alpha=0.1" in overrides
    pictures = {"class_accuracy", "class_accuracy_normalised", "curves", "data_distribution"}
    assert pictures <= {path.stem for path in (directory / "figures").glob("*.png")}
    assert (directory / "checkpoint/latest.pt").exists()
    assert "rounds.csv" in answer.out
    assert "class_accuracy.png" in answer.out


def examples_per_class() -> np.ndarray:
    """Return the class counts of the digits' test set, a stratified fifth."""
    labels = load_digits().target
    return np.bincount(train_test_split(labels, test_size=0.2, stratify=labels, random_state=0)[1])


@pytest.mark.slow
def test_same_command_twice_is_the_same_run(fedexp, tmp_path):
    said = {}
    for name, more in {"a": (), "b": (), "other": ("seeds.sampling=1",)}.items():
        fedexp.done("rounds=2", "forgetting_metric=all", f"hydra.run.dir={name}", *SMALL, *more)
        said[name] = summary_of(tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    same = ("identity", "seeds", "versions", "commit", "hardware", "checksums")
    assert all(said["a"][key] == said["b"][key] for key in same)
    changed = [key for key in same if said["a"][key] != said["other"][key]]
    assert changed == ["identity", "seeds"]
    packages = "fedexp python torch torchvision numpy scipy scikit-learn pillow"
    assert said["a"]["versions"].keys() >= set(packages.split())
    assert said["a"]["versions"]["torch"] == torch.__version__


def test_first_lines_describe_the_data_and_unused_examples(fedexp, tmp_path):
    few = ("num_clients=1000", "participation=0.002", "rounds=1", "partition=iid")
    fedexp.done(*WITHOUT_MIN_SIZE, *few, "hydra.run.dir=run")
    said = (tmp_path / "run/run.log").read_text()
    assert "dataset=digits: 10 classes (0 to 9); 1,437 training and 360 test examples" in said
    assert "WARNING partition=iid: 437 of 1,437 training examples are unused" in said


def test_one_class_is_rejected(fedexp, tmp_path):
    write_images(tmp_path / "images", 4, 2)
    for split in ("train", "test"):
        shutil.rmtree(tmp_path / "images" / split / "b")
    answer = fedexp.rejected("dataset=image_folder", "dataset.root=images", "partition=iid")
    assert "image_folder has only one class (a)" in answer.err


def test_partition_file_can_be_reused(fedexp, tmp_path):
    fedexp.done("rounds=1", "hydra.run.dir=first", *SMALL)
    again = (
        "partition=file",
        "partition.path=first/partition.npz",
        "seeds.partition=9",
        "hydra.run.dir=second",
    )
    fedexp.done("rounds=1", *again, *WITHOUT_MIN_SIZE)
    assert_same_run(tmp_path / "first", tmp_path / "second")


def test_diverged_run_has_results(fedexp, tmp_path):
    answer = fedexp.done("rounds=5", "local.lr=1e30", "hydra.run.dir=run", *SMALL, "figures=true")
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "diverged"
    assert summary["rounds"] < 5
    assert "the run has diverged, because" in answer.err
    last = pd.read_csv(tmp_path / "run/clients.csv").query("round == @summary['rounds']")
    assert summary["not_finite"]
    assert set(summary["not_finite"]) <= set(last["client"])
    assert (tmp_path / "run/figures/curves.png").exists()
