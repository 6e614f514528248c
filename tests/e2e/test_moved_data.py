"""Runs and sweeps whose data have moved or changed."""

import os
import shutil
from pathlib import Path

from helpers import (
    SMALL,
    WITHOUT_MIN_SIZE,
    assert_same_run,
    content_of,
    summary_of,
    write_images,
)

from fedexp.core import storage


def change(path: Path) -> None:
    """Flip the last bit of a file, which keeps its name and size."""
    content, time = path.read_bytes(), path.stat().st_mtime_ns + 1
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(time, time))  # the file system's clock may stand still


def interrupt(directory: Path) -> None:
    """Leave the run as if it had been killed in its second round."""
    (directory / "summary.json").unlink()
    shutil.move(directory / "checkpoint/previous.pt", directory / "checkpoint/latest.pt")


QUICK = (
    *("partition=iid", "rounds=2", "local.epochs=1", "figures=false", "checkpoint_interval=1"),
    *("hardware=cpu", "hardware.engine=sequential", "hardware.threads=1"),
)
PHOTOS = (
    *("dataset=image_folder", "dataset.mean=[0.5]", "dataset.std=[0.5]"),
    *("num_clients=4", "participation=0.5", "local.lr=0.001", *QUICK),
)
CHANGED = "the data have changed since the run started (checksums of arrays: "


def test_resume_finds_moved_images(fedexp, tmp_path, monkeypatch):
    """A relative dataset.root refers to the directory in which the run began. Moved images are
    recognised by their content.
    """
    write_images(tmp_path / "photos", 10, 5)
    fedexp.done(*PHOTOS, "dataset.root=photos", "hydra.run.dir=run")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    interrupt(tmp_path / "run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    fedexp.done("resume=../run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    interrupt(tmp_path / "run")
    shutil.move(tmp_path / "photos", tmp_path / "pictures")
    fedexp.done("resume=../run", "dataset.root=../pictures", "data_dir=cache")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_keys_that_only_the_options_of_the_run_have_can_be_given(fedexp, tmp_path):
    """The default options have neither partition.path nor algorithm.mu."""
    fedexp.done("rounds=1", *SMALL, "hydra.run.dir=first")
    shutil.copy(tmp_path / "first/partition.npz", tmp_path / "parts.npz")
    given = ("partition=file", "partition.path=parts.npz", "algorithm=fedprox")
    fedexp.done("rounds=1", *given, *WITHOUT_MIN_SIZE, "hydra.run.dir=run")
    (tmp_path / "parts.npz").rename(tmp_path / "moved.npz")
    changed = ("rounds=2", "partition.path=moved.npz")
    assert "  algorithm.mu: " in fedexp.rejected("resume=run", *changed, "algorithm.mu=7").err
    fedexp.done("resume=run", *changed)
    assert summary_of(tmp_path / "run")["rounds"] == 2
    assert {*changed} <= {*storage.read_overrides(tmp_path / "run/.hydra/overrides.yaml")}
    for key in ("algorithm.beta", "partition.alpha", "dataset.root"):
        said = fedexp.rejected("resume=run", "rounds=3", f"{key}=1").err
        assert f"{key}: cannot be given with resume=" in said


def test_resume_rejects_changed_images_unless_accepted(fedexp, tmp_path):
    """Images in a format without checksums."""
    write_images(tmp_path / "photos", 10, 5, suffix="bmp")
    files = sorted((tmp_path / "photos/train").rglob("*.bmp"))
    fedexp.done(*PHOTOS, "dataset.root=photos", "data_dir=cache", "hydra.run.dir=run")
    shutil.copytree(tmp_path / "run", tmp_path / "complete")
    interrupt(tmp_path / "run")
    before = content_of(tmp_path / "run")
    change(files[0])
    for directory in ("run", "complete"):
        assert CHANGED in fedexp.rejected(f"resume={directory}").err
    assert content_of(tmp_path / "run") == before
    answer = fedexp.done("resume=run", "accept_changed_data=true")
    assert "the data have changed since the previous rounds" in answer.err
    parts = summary_of(tmp_path / "run")["parts"]
    assert [part["first_round"] for part in parts] == [0, 2]
    assert parts[1]["data"] == summary_of(tmp_path / "run")["checksums"] != parts[0]["data"]
    change(files[0])
    assert CHANGED in fedexp("resume=run").err, "accepted once only"
    shutil.rmtree(tmp_path / "run/checkpoint")
    (tmp_path / "run/summary.json").unlink()
    fedexp.done("resume=run")  # no rounds were saved, so the data may differ
    assert "parts" not in summary_of(tmp_path / "run")


def test_evaluate_rejects_changed_images(fedexp, tmp_path):
    """Unless they are given as another data set."""
    write_images(tmp_path / "photos", 10, 5, suffix="bmp")
    given = (*PHOTOS, "dataset.root=photos", "test_per_client=0.5", "hydra.run.dir=run")
    fedexp.done(*given, "dataset.train_splits=[train,test]")
    before = fedexp.done("evaluate", "run").out
    change(min((tmp_path / "photos/test").rglob("*.bmp")))
    said = fedexp.rejected("evaluate", "run").err
    assert "run: the data of image_folder have changed since the run (checksum " in said
    of_photos = [each for each in given if each.startswith("dataset")]
    assert fedexp.done("evaluate", "run", *of_photos).out != before


def test_unchanged_data_need_no_acceptance(fedexp):
    answer = fedexp("accept_changed_data=true")
    assert answer.code == 2
    assert "accept_changed_data=true: can only be used with resume=<run directory>" in answer.err
