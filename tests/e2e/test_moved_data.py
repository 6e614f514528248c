"""Runs and sweeps whose folders of images have moved."""

import shutil
from pathlib import Path

import pytest
from helpers import assert_same_run


def interrupt(directory: Path) -> None:
    """As if it had been killed in its second round."""
    (directory / "summary.json").unlink()
    shutil.move(directory / "checkpoint/previous.pt", directory / "checkpoint/latest.pt")


def images(root: Path) -> None:
    """Ten grey images of 8 x 8 of each of two classes, five for the test."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 5)):
        for label in ("x", "y"):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                picture = Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8))
                picture.save(root / split / label / f"{i}.png")


PHOTOS = (
    "dataset=image_folder",
    "dataset.mean=[0.5]",
    "dataset.std=[0.5]",
    "partition=iid",
    "num_clients=4",
)
PHOTOS = (
    *PHOTOS,
    "rounds=2",
    "participation=0.5",
    "local.epochs=1",
    "figures=false",
    "checkpoint_interval=1",
)
PHOTOS = (
    *PHOTOS,
    "hardware=cpu",
    "hardware.engine=sequential",
    "hardware.threads=1",
    "local.lr=0.001",
)


@pytest.mark.slow
def test_images_may_lie_elsewhere_on_resume(fedexp, tmp_path, monkeypatch):
    """A relative dataset.root begins where the run did; moved images are found again by what they
    are."""
    images(tmp_path / "photos")
    assert fedexp(*PHOTOS, "dataset.root=photos", "hydra.run.dir=run").code == 0
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    interrupt(tmp_path / "run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    answer = fedexp("resume=../run")
    assert answer.code == 0, answer.err
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    interrupt(tmp_path / "run")
    shutil.move(tmp_path / "photos", tmp_path / "pictures")
    answer = fedexp("resume=../run", "dataset.root=../pictures", "data_dir=cache")
    assert answer.code == 0, answer.err
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    interrupt(tmp_path / "run")
    (tmp_path / "pictures" / "train" / "x" / "0.png").unlink()
    answer = fedexp("resume=../run", "dataset.root=../pictures")
    assert answer.code == 2
    assert "dataset.root: 30 files" in answer.err


@pytest.mark.slow
def test_a_sweep_tells_folders_by_their_images(fedexp, tmp_path):
    """Two folders of one name are two jobs; the same images at another place are the job that is
    complete."""
    images(tmp_path / "a" / "photos")
    images(tmp_path / "b" / "photos")
    (tmp_path / "b" / "photos" / "train" / "x" / "0.png").unlink()
    sweep = ("--multirun", "hydra.sweep.dir=sweep", *PHOTOS, "rounds=1")
    answer = fedexp(*sweep, "dataset.root=a/photos,b/photos")
    assert answer.code == 0, answer.err
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 2
    shutil.move(tmp_path / "a", tmp_path / "c")
    answer = fedexp(*sweep, "dataset.root=c/photos")
    assert answer.code == 0, answer.err
    assert "nothing to do" in answer.err
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 2
