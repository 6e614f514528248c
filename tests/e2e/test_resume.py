"""A run that is continued, or asked for twice; tests/e2e/test_processes.py kills some."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import SMALL, assert_same_run

RUN = ("algorithm=scaffold", "rounds=2", *SMALL)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def run(fedexp, shelf, tmp_path) -> Path:
    """A complete run, made once for all tests."""
    if not (shelf / "run").exists():
        assert fedexp(*RUN, f"hydra.run.dir={shelf}/run").code == 0
    return Path(shutil.copytree(shelf / "run", tmp_path / "run"))


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_complete_run_is_left_alone(fedexp, run):
    """Also when its checkpoints are damaged, since it needs none."""
    for name in ("latest.pt", "previous.pt"):
        (run / "checkpoint" / name).write_bytes(b"no checkpoint")
    before = snapshot(run)
    answer = fedexp("resume=run")
    assert answer.code == 0
    assert "complete (2 rounds); nothing to do" in answer.err
    assert snapshot(run) == before


def test_a_run_that_died_over_its_figures_is_not_complete(fedexp, tmp_path, monkeypatch):
    """summary.json comes last."""
    figures = ("rounds=1", *SMALL, "figures=true", "hydra.run.dir=run")

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedexp.results.make_figures", die)
        assert fedexp(*figures).code == 130
    assert not (tmp_path / "run/summary.json").exists()
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert len(list((tmp_path / "run/figures").glob("*.png"))) == 5
    assert (tmp_path / "run/summary.json").exists()


def test_resume_with_another_configuration_is_refused(fedexp, run):
    before = snapshot(run)
    answer = fedexp("resume=run", "algorithm=fedprox", "rounds=3", "seed=1", "hardware.precision=bf16")
    assert answer.code == 2
    for key in ("algorithm.mu", "rounds", "seeds.training", "hardware.precision"):
        assert f"  {key}: " in answer.err
    assert "Traceback" not in answer.err
    assert snapshot(run) == before


def test_a_new_run_does_not_overwrite_an_old_one(fedexp, run):
    before = snapshot(run)
    answer = fedexp(*RUN, "hydra.run.dir=run")
    assert answer.code == 2
    assert "resume=" in answer.err
    assert snapshot(run) == before


def test_a_damaged_checkpoint_is_replaced_by_the_one_before_it(fedexp, run, shelf):
    """What is lost is said; tests/test_checkpoint.py has more damages."""
    (run / "summary.json").unlink()
    latest = bytearray((run / "checkpoint/latest.pt").read_bytes())
    latest[len(latest) // 2] ^= 1
    (run / "checkpoint/latest.pt").write_bytes(latest)
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert "latest.pt: damaged (the checksum of" in answer.err
    assert "the checkpoint before it is used" in answer.err
    assert "resuming after round 1; round 2 is run again" in answer.err
    assert (run / "checkpoint/damaged.pt").read_bytes() == latest
    assert_same_run(run, shelf / "run")


def test_without_a_whole_checkpoint_a_run_is_refused_and_without_any_it_begins_anew(fedexp, run, shelf):
    (run / "summary.json").unlink()
    for name in ("latest.pt", "previous.pt"):
        (run / "checkpoint" / name).write_bytes(b"no checkpoint")
    before = snapshot(run)
    answer = fedexp("resume=run")
    assert answer.code == 2
    assert "Traceback" not in answer.err
    for word in ("latest.pt: damaged", "previous.pt: damaged", "no checkpoint is whole", "to begin again"):
        assert word in answer.err
    assert snapshot(run) == before
    shutil.rmtree(run / "checkpoint")  # as if killed before it was written for the first time
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert "no round was saved" in answer.err
    assert_same_run(run, shelf / "run")


def test_no_run_directory(fedexp, tmp_path):
    (tmp_path / "empty").mkdir()
    for directory in ("empty", "nowhere"):
        answer = fedexp(f"resume={directory}")
        assert answer.code == 2
        assert "not a run directory" in answer.err
        assert "Traceback" not in answer.err


def test_data_that_changed_since_are_noticed(fedexp, run):
    (run / "summary.json").unlink()
    arrays = dict(np.load(run / "partition.npz"))
    order = np.argsort(arrays["sizes"])
    np.savez(run / "partition.npz", **arrays | {"sizes": arrays["sizes"][order]})
    answer = fedexp("resume=run")
    assert answer.code == 2
    assert "partition" in answer.err


def test_a_run_whose_table_was_changed_begins_again(fedexp, run, shelf):
    """As by an editor that writes CRLF. What was there is kept, and nothing ends in the middle of a row."""
    (run / "summary.json").unlink()
    changed = (run / "rounds.csv").read_bytes().replace(b"\n", b"\r\n")
    (run / "rounds.csv").write_bytes(changed)
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    (said,) = [line for line in answer.err.splitlines() if "rounds.csv" in line]
    assert "changed since its checkpoint was written; the run begins again" in said
    assert (run / "damaged/rounds.csv").read_bytes() == changed
    assert (run / "damaged/latest.pt").exists()
    assert_same_run(run, shelf / "run")
