"""Sweeps: every job complete, apart from the others, and a failing one does not stop the rest."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml
from helpers import SMALL, assert_same_run

from fedexp.wandb_push import main
from wandb_runs import read_run, run_folders

ALGORITHM = """
from dataclasses import dataclass

from fedexp.algorithms.base import FedAvg


@dataclass(frozen=True, kw_only=True)
class Broken(FedAvg):
    def aggregate(self, server, messages, round):
        raise RuntimeError("the aggregation broke")
"""


def jobs(tmp_path: Path, order: str = "algorithm") -> list[Path]:
    """Directories of the jobs by a key of their configuration (the algorithm: as in `choices`), then seed."""

    def key(directory: Path) -> tuple:
        config = yaml.safe_load((directory / "config.yaml").read_text())
        return config["choices"].get(order, config.get(order)), config["seed"]

    found = [path for path in (tmp_path / "multirun").glob("*/digits_*") if (path / "config.yaml").exists()]
    return sorted(found, key=key)


def failed(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "multirun").glob("*/digits_*/error.txt"))


def test_every_job_is_complete_and_equals_a_single_run(fedexp, tmp_path):
    answer = fedexp("--multirun", "algorithm=fedavg,fedntd", "seed=0,1", "rounds=2", *SMALL)
    assert answer.code == 0, answer.err
    names = [directory.name.rpartition("_")[0] for directory in jobs(tmp_path)]
    assert names == [f"digits_lda_{algorithm}_seed{seed}" for algorithm in ("fedavg", "fedntd") for seed in (0, 1)]
    assert len({directory.name.rpartition("_")[2] for directory in jobs(tmp_path)}) == 4
    for directory in jobs(tmp_path):
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["status"] == "completed"
        assert f"_{summary['algorithm']}_seed{summary['seed']}_" in directory.name
        assert not (directory / "figures").exists()  # figures=false
    # The third job in one process is the run that the same options give alone.
    assert fedexp("algorithm=fedntd", "rounds=2", "hydra.run.dir=alone", *SMALL).code == 0
    assert_same_run(jobs(tmp_path)[2], tmp_path / "alone")


def test_a_failing_job_keeps_its_traceback_and_the_others_run(fedexp, tmp_path, monkeypatch):
    (tmp_path / "broken_algorithm.py").write_text(ALGORITHM)
    (tmp_path / "own/algorithm").mkdir(parents=True)
    (tmp_path / "own/algorithm/broken.yaml").write_text("# Broken.\n_target_: broken_algorithm.Broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = fedexp("--multirun", "--config-dir", "own", "algorithm=fedavg,broken,fedprox", "rounds=1", *SMALL)
    assert answer.code == 1
    bad, good, last = jobs(tmp_path)
    assert json.loads((good / "summary.json").read_text())["status"] == "completed"
    assert json.loads((last / "summary.json").read_text())["status"] == "completed"
    assert json.loads((bad / "summary.json").read_text())["status"] == "failed"
    report = (bad / "error.txt").read_text()
    assert "Traceback" in report
    assert "the aggregation broke" in report
    assert "Traceback" not in answer.err


def test_a_job_with_bad_input_says_so_in_its_directory(fedexp, tmp_path):
    answer = fedexp("--multirun", "alpha=0.5,-1", "rounds=1", *SMALL)
    assert answer.code == 2
    (good,), (bad,) = jobs(tmp_path), failed(tmp_path)
    assert json.loads((good / "summary.json").read_text())["status"] == "completed"
    assert "alpha=-1.0: must be" in (bad / "error.txt").read_text()
    assert not (bad / "rounds.csv").exists()


def test_every_job_is_its_own_wandb_run(fedexp, tmp_path):
    pytest.importorskip("wandb")
    answer = fedexp("--multirun", "seed=0,1", "rounds=1", "tracker=wandb", "tracker.mode=offline", *SMALL)
    assert answer.code == 0, answer.err
    identities, groups = set(), set()
    for seed, directory in enumerate(jobs(tmp_path)):
        (offline,) = run_folders(directory)
        run, _, records = read_run(offline)
        identities.add(run["run_id"])
        groups |= {record["run"]["run_group"] for record in records if record["type"] == "run"}
        assert run["config"]["seed"] == seed
        assert run["tags"][-1] == directory.parent.name  # the sweep
    assert len(identities) == 2
    assert len(groups) == 1  # repetitions
    assert not (tmp_path / "wandb").exists()
    # The means and standard deviations are a run of their own.
    sweep = directory.parent
    (offline,) = run_folders(sweep)
    run, _, records = read_run(offline)
    (record,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["name"], record["job_type"], record["run_group"]) == (f"{sweep.name} table", "table", sweep.name)
    logged = json.loads((offline / "files" / run["summary"]["tables/table"]["path"]).read_text())
    printed = pd.read_csv(sweep / "table.csv")
    stds = pd.DataFrame(logged["data"], columns=logged["columns"])["accuracy_std"]
    assert stds.tolist() == printed["accuracy_std"].tolist()
    assert run["summary"]["tables/rounds_to_target"]["nrows"] == 1
    assert answer.err.count("wandb sync") == 3
    # Pushed again: the same ids.
    assert main([str(sweep), "--mode", "offline"]) == 0
    assert {folder.name.rpartition("-")[2] for d in jobs(tmp_path) for folder in run_folders(d)} == identities
    assert {folder.name.rpartition("-")[2] for folder in run_folders(sweep)} == {run["run_id"]}


SWEEP = ("--multirun", "hydra.sweep.dir=multirun/again", "rounds=3", *SMALL)


def test_the_same_sweep_again_runs_what_is_left(fedexp, tmp_path):
    """What is complete stays as it is; a seed that is added runs; a job that failed is tried again."""
    assert fedexp(*SWEEP, "seed=0,1").code == 0
    first = {path.name: (path / "summary.json").stat().st_mtime_ns for path in jobs(tmp_path)}
    broken = jobs(tmp_path)[1]
    (broken / "summary.json").write_text('{"status": "failed"}')
    (broken / "error.txt").write_text("it broke")
    answer = fedexp(*SWEEP, "seed=0,1,2", "checkpoint_interval=2")  # which decides nothing
    assert answer.code == 0, answer.err
    assert len(jobs(tmp_path)) == 3
    assert answer.err.count("nothing to do") == 1
    assert (jobs(tmp_path)[0] / "summary.json").stat().st_mtime_ns == first[jobs(tmp_path)[0].name]
    assert json.loads((broken / "summary.json").read_text())["status"] == "completed"
    assert not (broken / "error.txt").exists()


def test_two_launchers_do_not_run_one_job_twice(fedexp, tmp_path):
    """The second one passes over what the first one is working on, and says who that is."""
    arguments = [*SWEEP, "seed=0,1", "rounds=40"]
    command = [sys.executable, "-m", "fedexp", *arguments]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list((tmp_path / "multirun/again").glob("*/rounds.csv")):
            assert first.poll() is None
            time.sleep(0.05)
        (occupied,) = {path.parent.name for path in (tmp_path / "multirun/again").glob("*/rounds.csv")}
        answer = fedexp(*arguments)
    finally:
        first.wait(timeout=100)
    assert first.returncode == answer.code == 0
    assert f"{occupied}: process {first.pid} on " in answer.err
    rounds = [(path / "rounds.csv").read_text().splitlines() for path in jobs(tmp_path)]
    assert [len(lines) for lines in rounds] == [42, 42]


@pytest.mark.slow
def test_a_killed_sweep_ends_as_an_undisturbed_one(fedexp, tmp_path):
    """kill -9 five times, at moments all over the sweep; then to the end."""
    arguments = [*SWEEP, "algorithm=fedavg,scaffold", "seed=0,1", "rounds=6"]
    command = [sys.executable, "-m", "fedexp", *arguments]
    for attempt in range(5):
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        written = progress(tmp_path)
        while progress(tmp_path) <= written + 2 * attempt and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    answer = fedexp(*arguments)
    assert answer.code == 0, answer.err
    assert fedexp(*arguments, "hydra.sweep.dir=multirun/undisturbed").code == 0
    for directory in (tmp_path / "multirun/again").glob("digits_*"):
        assert_same_run(directory, tmp_path / "multirun/undisturbed" / directory.name)
    assert len(jobs(tmp_path)) == 8


def progress(tmp_path: Path) -> int:
    """Lines of all rounds.csv so far."""
    return sum(len(path.read_text().splitlines()) for path in (tmp_path / "multirun/again").glob("*/rounds.csv"))
