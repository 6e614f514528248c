"""Runs begun before fingerprints had a format number, and runs resumed from elsewhere."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from helpers import FEDERATION, assert_same_run

from fedexp.core import former_names
from fedexp.rundir import format_1

FORMER = Path(__file__).parents[1] / "format_1" / "digits_lda_fedntd_seed0_4028ef48"
RUN = ("algorithm=fedntd", "rounds=2", *FEDERATION)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("former")


@pytest.fixture
def run(fedexp, shelf, tmp_path) -> Path:
    """A run of RUN as the code of then left it: with the paths that its classes had, and without
    fingerprint.json."""
    if not (shelf / "run").exists():
        # the code of then timed nothing: the instruction set decided
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "fedexp.training.prepare.with_fastest_way", lambda hardware, *rest: hardware
            )
            assert fedexp(*RUN, f"hydra.run.dir={shelf}/run").code == 0
    directory = Path(shutil.copytree(shelf / "run", tmp_path / "run"))
    (directory / "fingerprint.json").unlink()
    config = yaml.safe_load((directory / "config.yaml").read_text())
    (directory / "config.yaml").write_text(yaml.safe_dump(format_1.with_paths(config)))
    return directory


def interrupt(directory: Path) -> None:
    """As if it had been killed in its second round."""
    (directory / "summary.json").unlink()
    shutil.move(directory / "checkpoint/previous.pt", directory / "checkpoint/latest.pt")


@pytest.mark.slow
def test_a_former_job_of_a_sweep_is_found_complete(fedexp, run, tmp_path):
    """By its directory; its files are those that the code of then wrote."""
    job = Path(shutil.copytree(run, tmp_path / "sweep" / FORMER.name))
    for name in ("config.yaml", ".hydra/overrides.yaml"):
        shutil.copy(FORMER / name, job / name)
    answer = fedexp("--multirun", "hydra.sweep.dir=sweep", "seed=0,1", *RUN)
    assert answer.code == 0, answer.err
    assert f"{FORMER.name} is complete (2 rounds); nothing to do" in answer.err
    names = sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/summary.json"))
    assert names[0] == FORMER.name
    assert len(names) == 2
    assert "seed1" in names[1]
    answer = fedexp("--multirun", "hydra.sweep.dir=sweep", "seed=0,1", *RUN, "preview=true")
    assert answer.out.splitlines()[-1] == "2 jobs: 2 done"


def test_a_former_run_is_resumed(fedexp, run, shelf):
    """And has a fingerprint from then on."""
    interrupt(run)
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert "resuming after round 1" in answer.err
    assert_same_run(run, shelf / "run")
    noted = json.loads((run / "fingerprint.json").read_text())["fingerprint"]
    for directory in (run, shelf / "run"):
        assert json.loads((directory / "summary.json").read_text())["fingerprint"] == noted


def test_a_former_run_with_another_configuration_is_refused(fedexp, run):
    interrupt(run)
    answer = fedexp("resume=run", "algorithm=fedprox")
    assert answer.code == 2
    assert "algorithm._target_: FedNTD there, FedProx asked for" in answer.err


def test_the_former_name_of_an_option_is_accepted(fedexp):
    """With one line that tells the new one."""
    former_names.notice.cache_clear()
    old, new = (fedexp(f"partition={name}", "--cfg", "job") for name in ("shards", "equal_shards"))
    assert (
        old.err
        == "fedexp: partition=shards: has become partition=equal_shards; the old name is still"
        " accepted\n"
    )
    assert (old.code, new.code, new.err) == (0, 0, "")
    assert old.out == new.out
    assert "_target_: fedexp.data.partition.Shards" in new.out


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
