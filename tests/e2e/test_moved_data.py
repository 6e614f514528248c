"""Runs and sweeps whose data have moved or changed."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import assert_same_run, content_of, summary_of, write_images

from test_changed_data import change


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


@pytest.mark.slow
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
    interrupt(tmp_path / "run")
    (tmp_path / "pictures" / "train" / "a" / "0.png").unlink()
    answer = fedexp.rejected("resume=../run", "dataset.root=../pictures")
    assert "dataset.root: 1 of 29 files differ" in answer.err


@pytest.mark.slow
def test_sweep_distinguishes_folders_by_content(fedexp, tmp_path):
    """Two folders with the same name are two jobs. The same images in another folder belong to the
    finished job.
    """
    write_images(tmp_path / "a/photos", 10, 5)
    write_images(tmp_path / "b/photos", 9, 5)
    sweep = ("--multirun", "hydra.sweep.dir=sweep", *PHOTOS, "rounds=1")
    fedexp.done(*sweep, "dataset.root=a/photos,b/photos")
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 2
    shutil.move(tmp_path / "a", tmp_path / "c")
    answer = fedexp.done(*sweep, "dataset.root=c/photos")
    assert "nothing to do" in answer.err
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 2


def bitmaps(root: Path) -> list[Path]:
    """Write images in a format without checksums. Return the training files."""
    write_images(root, 10, 5, suffix="bmp")
    return sorted((root / "train").rglob("*.bmp"))


def test_resume_rejects_changed_images_unless_accepted(fedexp, tmp_path):
    files = bitmaps(tmp_path / "photos")
    options = (*PHOTOS, "dataset.root=photos", "data_dir=cache")
    fedexp.done(*options, "hydra.run.dir=run")
    shutil.copytree(tmp_path / "run", tmp_path / "complete")
    interrupt(tmp_path / "run")
    before = content_of(tmp_path / "run")
    for path in files[:7]:
        change(path)
    for directory in ("run", "complete"):
        answer = fedexp.rejected(f"resume={directory}")
        assert "dataset.root: 7 of 30 files differ\naccept_changed_data=true" in answer.err
    assert content_of(tmp_path / "run") == before
    answer = fedexp.done("resume=run", "accept_changed_data=true")
    assert "the data have changed, 7 of 30 files differ" in answer.err
    noted = json.loads((tmp_path / "run/fingerprint.json").read_text())
    summary = summary_of(tmp_path / "run")
    first = json.loads((tmp_path / "complete/fingerprint.json").read_text())
    mark = noted["marks"]["dataset.root"]
    assert mark.startswith(first["marks"]["dataset.root"][:-1] + ", then ")
    assert summary["fingerprint"] == noted["fingerprint"] != first["fingerprint"]
    spans = summary["determinism"]["spans"]
    assert [span["rounds"] for span in spans] == [[0, 1], [2, 2]]
    now = mark.replace(first["marks"]["dataset.root"][16:-1] + ", then ", "")
    assert [span["data"] for span in spans] == [first["marks"], {"dataset.root": now}]
    change(files[0])
    answer = fedexp("resume=run")
    assert answer.code == 2
    assert "1 of 30 files differ" in answer.err, "accepted once only"


def test_run_without_saved_rounds_restarts_on_changed_images(fedexp, tmp_path):
    files = bitmaps(tmp_path / "photos")
    options = (*PHOTOS, "dataset.root=photos", "data_dir=cache", "rounds=1")
    fedexp.done(*options, "hydra.run.dir=run")
    shutil.rmtree(tmp_path / "run/checkpoint")
    (tmp_path / "run/summary.json").unlink()
    change(files[0])
    answer = fedexp.done("resume=run")
    assert "no checkpoint was saved; the run starts again" in answer.err
    noted = json.loads((tmp_path / "run/fingerprint.json").read_text())
    assert ", then " not in noted["marks"]["dataset.root"]


TEXTS = (
    *("dataset=thucnews", "model=textcnn", "dataset.vocabulary=null", "dataset.vectors=null"),
    *("data_dir=texts", "num_clients=2", "participation=1", "dataset.length=6", *QUICK),
)


def test_changed_texts_are_rejected_on_resume_and_rerun_by_sweeps(fedexp, tmp_path):
    """No option names the text files. The same sweep rejects the job; another one reruns it."""
    folder = tmp_path / "texts/thucnews"
    folder.mkdir(parents=True)
    (folder / "class.txt").write_text("x\ny\n")
    for split in ("train", "test"):
        lines = [f"text {i % 7}\t{i % 2}\n" for i in range(12)]
        (folder / f"{split}.txt").write_text("".join(lines))
    fedexp.done("--multirun", "hydra.sweep.dir=multirun/a", *TEXTS)
    (job,) = (tmp_path / "multirun/a").glob("*/summary.json")
    text = (folder / "train.txt").read_text()
    (folder / "train.txt").write_text(text.replace("text", "word"))
    answer = fedexp("--multirun", "hydra.sweep.dir=multirun/a", *TEXTS)
    assert answer.code != 0
    assert "dataset.files: 1 of 3 files differ" in answer.err
    assert json.loads(job.read_text())["status"] == "completed"
    answer = fedexp.done(
        "--multirun", "hydra.sweep.dir=multirun/a", *TEXTS, "accept_changed_data=true"
    )
    assert "nothing to do" in answer.err
    answer = fedexp.done("--multirun", "hydra.sweep.dir=multirun/b", *TEXTS)
    assert "reusing the complete run" not in answer.err
    (other,) = (tmp_path / "multirun/b").glob("*/summary.json")
    assert (
        json.loads(other.read_text())["fingerprint"] != json.loads(job.read_text())["fingerprint"]
    )
    interrupt(other.parent)
    (folder / "train.txt").write_text(text)
    answer = fedexp(f"resume={other.parent}")
    assert answer.code == 2
    assert "dataset.files: 1 of 3 files differ" in answer.err


def test_unchanged_data_need_no_acceptance(fedexp):
    answer = fedexp("accept_changed_data=true")
    assert answer.code == 2
    assert "accept_changed_data=true: can only be used with resume=<run directory>" in answer.err
