"""Resume a run, or repeat its command. tests/e2e/test_processes.py kills runs."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import SMALL, assert_same_run, content_of, summary_of

RUN = ("algorithm=scaffold", "rounds=2", *SMALL, "local.batch_size=200")  # one step a client


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def run(fedexp, shelf, tmp_path) -> Path:
    """A complete run, made once for all tests."""
    if not (shelf / "run").exists():
        fedexp.done(*RUN, f"hydra.run.dir={shelf}/run")
    return Path(shutil.copytree(shelf / "run", tmp_path / "run"))


def test_resuming_complete_run_changes_nothing(fedexp, run):
    """The checkpoints may be damaged, since they are not needed."""
    for name in ("latest.pt", "previous.pt"):
        (run / "checkpoint" / name).write_bytes(b"no checkpoint")
    before = content_of(run)
    answer = fedexp.done("resume=run")
    assert "complete (2 rounds); nothing to do" in answer.err
    assert content_of(run) == before


def test_options_of_a_resumed_run_are_kept_except_those_of_one_command(fedexp, run):
    """They were only kept if the run was extended, and then accept_changed_data, too."""

    def stored():
        return yaml.safe_load((run / "config.yaml").read_text())

    def interrupt():  # as if killed in round 2
        (run / "summary.json").unlink()
        shutil.move(run / "checkpoint/previous.pt", run / "checkpoint/latest.pt")

    interrupt()
    before = (run / "config.yaml").read_bytes()
    fedexp.done("resume=run")
    assert (run / "config.yaml").read_bytes() == before, "its paths stay relative"
    given = ("keep_models=1", "accept_changed_data=true")
    for more in ((), ("rounds=3",)):
        if not more:
            interrupt()
        fedexp.done("resume=run", *given, *more)
        assert stored()["keep_models"] == 1
        assert (stored()["resume"], stored()["accept_changed_data"]) == (None, False)
    fedexp.done("resume=run", "rounds=4")
    assert stored()["keep_models"] == 1


def test_partitions_of_an_interrupted_start_are_removed(fedexp, tmp_path, monkeypatch):
    """The first command had three tasks. It was interrupted before it wrote round 0."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedexp.training.run.run_rounds", interrupted)
        command = (*RUN, "scenario=class_incremental", "hydra.run.dir=run")
        assert fedexp(*command).code == 130
    assert len(list((tmp_path / "run").glob("partition_task*.npz"))) == 2
    fedexp.done(*RUN, "hydra.run.dir=run")
    assert [path.name for path in (tmp_path / "run").glob("partition*")] == ["partition.npz"]


@pytest.mark.slow
def test_run_interrupted_while_drawing_is_not_complete(fedexp, tmp_path, monkeypatch):
    """summary.json is written last."""
    figures = ("rounds=1", *SMALL, "figures=true", "hydra.run.dir=run")

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedexp.training.callbacks.make_figures", die)
        assert fedexp(*figures).code == 130
    assert not (tmp_path / "run/summary.json").exists()
    fedexp.done("resume=run")
    assert len(list((tmp_path / "run/figures").glob("*.png"))) == 5
    assert (tmp_path / "run/summary.json").exists()


OTHER = (*RUN, "algorithm=fedavg", "local.lr=0.01", "hydra.run.dir=run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("resume=run", "local.lr=0.2", "rounds=3", "hardware.precision=bf16"),
            "  local.lr: |  rounds: |  hardware.precision: ",
        ),
        (OTHER, "resume="),
        (
            ("--multirun", *OTHER, "hydra.sweep.dir=.", "hydra.sweep.subdir=run"),
            "another configuration",
        ),
    ],
)
def test_run_with_other_configuration_is_not_changed(fedexp, run, arguments, words):
    before = content_of(run)
    said = fedexp.rejected(*arguments).err
    assert all(word in said for word in words.split("|")), said
    assert content_of(run) == before


def test_resume_without_a_valid_checkpoint_is_rejected_or_starts_again(fedexp, run, shelf):
    (run / "summary.json").unlink()
    for name in ("latest.pt", "previous.pt"):
        (run / "checkpoint" / name).write_bytes(b"no checkpoint")
    before = content_of(run)
    answer = fedexp.rejected("resume=run")
    for word in ("latest.pt: cannot be read", "previous.pt: cannot be read", "to start again"):
        assert word in answer.err
    assert content_of(run) == before
    shutil.rmtree(run / "checkpoint")  # as if killed before it was written for the first time
    answer = fedexp.done("resume=run")
    assert "no checkpoint was saved" in answer.err
    assert_same_run(run, shelf / "run")


def test_finished_run_without_checkpoints_is_kept(fedexp, tmp_path):
    sweep = ("--multirun", "rounds=1", "seed=0", *SMALL, "hydra.sweep.dir=many")
    fedexp.done(*sweep)
    (job,) = tmp_path.glob("many/digits_*")
    shutil.rmtree(job / "checkpoint")
    before = content_of(job)
    assert "is complete (1 rounds); nothing to do" in fedexp.done(*sweep).err
    assert content_of(job) == before
    answer = fedexp.rejected(f"resume={job}", "rounds=2")
    assert "its checkpoints were removed" in answer.err
    assert content_of(job) == before


def test_changed_partition_is_rejected(fedexp, run):
    (run / "summary.json").unlink()
    arrays = dict(np.load(run / "partition.npz"))
    order = np.argsort(arrays["sizes"])
    np.savez(run / "partition.npz", **arrays | {"sizes": arrays["sizes"][order]})
    answer = fedexp.rejected("resume=run")
    assert "partition" in answer.err


def test_resume_uses_the_stored_options(fedexp, run):
    assert (
        "algorithm: cannot be given with resume="
        in fedexp.rejected("resume=run", "algorithm=fedavg").err
    )
    assert "hydra.run.dir=" in fedexp.rejected("resume=run", "hydra.run.dir=b").err
    less = fedexp.rejected("resume=run", "rounds=1").err
    assert "rounds=1: must be greater than 2, the last completed round" in less
    fedexp.done("resume=run", "rounds=3", "hardware.threads=2")
    assert summary_of(run)["rounds"] == 3
    assert summary_of(run)["algorithm"] == "scaffold"


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        pytest.param("fedewc", "SGD diverges if", marks=pytest.mark.slow),
        ("fedalign", "batch norm"),
    ],
)
def test_failing_method_shows_hint(algorithm, words, fedexp, tmp_path):
    """The console, run.log and summary have it. With a rate of 1e6, any run diverges."""
    scenario = ("scenario=class_incremental",) if algorithm == "fedewc" else ()
    answer = fedexp.done(
        f"algorithm={algorithm}", *scenario, "rounds=1", "local.lr=1e6", *SMALL, "hydra.run.dir=run"
    )
    assert words in summary_of(tmp_path / "run")["hint"]
    assert f"algorithm={algorithm}: " in answer.err
