"""A run that is killed, interrupted or asked for twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SMALL, SOURCE, assert_same_run

# About half a second a round, so that a signal falls into the middle of one.
RUN = ("algorithm=fedntd", "rounds=6", "forgetting_metric=all", "seed=3", *SMALL, "local.epochs=4", "tracker=none")


def wait_for_rounds(directory: Path, count: int, process) -> None:
    """Until rounds.csv holds `count` trained rounds."""
    path, deadline = directory / "rounds.csv", time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= count + 2:  # header and round 0
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    raise AssertionError(f"no {count} rounds within two minutes")


def rounds_in(directory: Path) -> int:
    return torch.load(directory / "checkpoint/latest.pt", weights_only=True)["round"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The run that nothing happened to."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [sys.executable, "-m", "fedexp", *RUN, f"hydra.run.dir={directory}"]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    subprocess.run(command, check=True, env=environment, cwd=directory.parent, capture_output=True)
    return directory


@pytest.mark.parametrize(("after", "pause"), [(1, 0.05), pytest.param(3, 0.2, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_round(start, fedexp, tmp_path, undisturbed, after, pause):
    process = start(*RUN, "hydra.run.dir=run")
    wait_for_rounds(tmp_path / "run", after, process)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert after - 1 <= rounds_in(tmp_path / "run") < 6  # the rows of a round come before its checkpoint
    assert not (tmp_path / "run/summary.json").exists()
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert_same_run(tmp_path / "run", undisturbed)


def test_rows_after_the_checkpoint_are_cut_off(start, fedexp, tmp_path, undisturbed):
    """A kill between writing a round's rows and its checkpoint leaves rows that resume must replace."""
    process = start(*RUN, "hydra.run.dir=run", "checkpoint_interval=4")
    wait_for_rounds(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert rounds_in(tmp_path / "run") == 0
    with open(tmp_path / "run/rounds.csv", "a", encoding="utf-8") as file:
        file.write("3,0.5,0.1")  # half a line
    answer = fedexp("resume=run", "checkpoint_interval=1")
    assert answer.code == 0, answer.err
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_interrupt_saves_and_says_how_to_go_on(start, fedexp, tmp_path, undisturbed, number):
    process = start(*RUN, "hydra.run.dir=run", "checkpoint_interval=100")
    wait_for_rounds(tmp_path / "run", 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "fedexp resume=run" in output
    assert "Traceback" not in output
    assert 2 <= rounds_in(tmp_path / "run") < 6
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert_same_run(tmp_path / "run", undisturbed)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_complete_run_is_left_alone(fedexp, tmp_path):
    assert fedexp("rounds=1", "hydra.run.dir=run", *SMALL).code == 0
    before = snapshot(tmp_path / "run")
    answer = fedexp("resume=run")
    assert answer.code == 0
    assert "complete" in answer.err
    assert snapshot(tmp_path / "run") == before


def test_resume_with_another_configuration_is_refused(fedexp, tmp_path):
    assert fedexp("rounds=1", "hydra.run.dir=run", *SMALL).code == 0
    before = snapshot(tmp_path / "run")
    for change, key in (
        ("algorithm=fedprox", "algorithm.mu"),
        ("rounds=2", "rounds"),
        ("seed=1", "seeds.training"),
        ("hardware.precision=bf16", "hardware.precision"),
    ):
        answer = fedexp("resume=run", change)
        assert answer.code == 2
        assert key in answer.err
        assert "Traceback" not in answer.err
        assert snapshot(tmp_path / "run") == before


def test_a_new_run_does_not_overwrite_an_old_one(fedexp, tmp_path):
    assert fedexp("rounds=1", "hydra.run.dir=run", *SMALL).code == 0
    before = snapshot(tmp_path / "run")
    answer = fedexp("rounds=1", "hydra.run.dir=run", *SMALL)
    assert answer.code == 2
    assert "resume=" in answer.err
    assert snapshot(tmp_path / "run") == before


def test_damaged_directories_are_refused(fedexp, tmp_path):
    (tmp_path / "empty").mkdir()
    assert fedexp("rounds=1", "hydra.run.dir=run", *SMALL).code == 0
    (tmp_path / "run/summary.json").unlink()
    whole = (tmp_path / "run/checkpoint/latest.pt").read_bytes()
    (tmp_path / "run/checkpoint/latest.pt").write_bytes(whole[: len(whole) // 2])
    for directory, word in (("empty", "not a run directory"), ("run", "latest.pt"), ("nowhere", "not a run directory")):
        answer = fedexp(f"resume={directory}")
        assert answer.code == 2
        assert word in answer.err
        assert "Traceback" not in answer.err


def test_data_that_changed_since_are_noticed(fedexp, tmp_path):
    assert fedexp("rounds=1", "hydra.run.dir=run", *SMALL).code == 0
    (tmp_path / "run/summary.json").unlink()
    saved = torch.load(tmp_path / "run/checkpoint/latest.pt", weights_only=True)
    torch.save(saved | {"status": "running", "round": 0}, tmp_path / "run/checkpoint/latest.pt")
    arrays = dict(np.load(tmp_path / "run/partition.npz"))
    order = np.argsort(arrays["sizes"])
    np.savez(tmp_path / "run/partition.npz", **arrays | {"sizes": arrays["sizes"][order]})
    answer = fedexp("resume=run")
    assert answer.code == 2
    assert "partition" in answer.err
