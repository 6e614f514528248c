"""W&B runs of whole runs, and a run finishes if W&B fails."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from helpers import SMALL, summary_of, table

from wandb_runs import clean_home, content, read_run, run_folders  # noqa: F401 (a fixture)

OFFLINE = ("tracker=wandb", "tracker.wandb.mode=offline")


def make_run(fedexp, *options: str) -> Path:
    fedexp.done(*SMALL, "hydra.run.dir=run", *options)
    return Path("run").absolute()


@pytest.mark.slow
def test_tracked_run_has_the_results_of_its_files(fedexp):
    images = ("tracker.wandb.log_images_every=2", "forgetting_metric=all")
    run = make_run(fedexp, *OFFLINE, "rounds=3", "tracker.wandb.tags=[mine]", *images)
    (tracked,) = run_folders(run)
    seen = content(tracked)
    assert seen["name"] == "fedavg_digits_lda0.1_seed0"
    assert (seen["job_type"], seen["tags"]) == (
        "fedavg",
        ["digits", "lda", "fedavg", "cnn", "mine"],
    )
    assert seen["config"]["choices"] == yaml.safe_load((run / "config.yaml").read_text())["choices"]
    assert seen["group"].startswith("fedavg_digits_lda0.1_")
    assert {row["round"] for row in seen["history"] if any("figures" in key for key in row)} == {2}
    assert len([name for name in seen["files"] if "local_round" in name]) == 1
    summary = summary_of(run)
    assert seen["summary"]["rounds_to_75pct_of_best"] == summary["rounds_to_target"]["0.75*best"]
    assert seen["summary"]["forgetting"] == summary["forgetting"]
    assert seen["summary"]["test/accuracy"]["last"] == summary["accuracy"]


@pytest.mark.slow
def test_page_reads_an_offline_run_back(fedexp, tmp_path, monkeypatch):
    """The lines of docs/guide/wandb.md find the values of rounds.csv and class_accuracy.csv."""
    page = Path(__file__).parents[2] / "docs" / "guide" / "wandb.md"
    section = page.read_text(encoding="utf-8").partition("## Read an offline run\n")[2]
    lines = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    run = make_run(fedexp, *OFFLINE, "rounds=3")
    Path("offline").symlink_to(run)
    program = tmp_path / "bin" / "wandb"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m wandb "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    found = {}
    exec(compile(lines, str(page), "exec"), found)
    rounds = pd.read_csv(run / "rounds.csv").set_index("round")
    assert found["accuracy"] == rounds["test_accuracy"].to_dict()
    classes = pd.read_csv(run / "class_accuracy.csv").pivot(
        index="round", columns="class", values="accuracy"
    )
    logged = [each for each in found["logged"] if "class/3" in each]
    assert {each["round"]: each["class/3"] for each in logged} == classes[3].to_dict()


@pytest.mark.slow
def test_killed_offline_run_loses_no_round(fedexp):
    """After kill -9 and resume, the folder that the message names has every round once."""
    program = """
import os, signal, sys
from fedexp.cli.main import main
from fedexp.trackers.wandb_tracker import WandbTracker
after_round = WandbTracker.after_round
def kill(self, record):
    after_round(self, record)
    if record.round == 3:
        os.kill(os.getpid(), signal.SIGKILL)
WandbTracker.after_round = kill
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", program, *SMALL, "hydra.run.dir=run", *OFFLINE, "rounds=5"]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == -signal.SIGKILL
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    _, folder = run_folders(Path("run"))
    assert f"upload with: wandb sync run/wandb/{folder.name}" in answer.err
    _, history, _ = read_run(folder)
    assert [row["round"] for row in history if "test/accuracy" in row] == [*range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["unreachable", "no place"])
def test_run_finishes_if_wandb_fails(fedexp, tmp_path, monkeypatch, fault):
    """The exit code is 0, there is one warning, and the files equal those of an untracked run."""
    fedexp.done(*SMALL, "hydra.run.dir=alone", "rounds=3")
    options = [
        "tracker=wandb",
        "tracker.wandb.init_timeout=1",
        "tracker.wandb.finish_timeout=1",
        "rounds=3",
    ]
    if fault == "unreachable":
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    else:
        options.append("tracker.wandb.mode=offline")
    (tmp_path / "run").mkdir()
    if fault == "no place":
        (tmp_path / "run" / "wandb").write_text("a file in the way")
    answer = fedexp(*SMALL, "hydra.run.dir=run", *options)
    assert answer.code == 0, answer.err
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count(" WARNING ") == 1, log
    assert "Traceback" not in answer.err + log
    assert ("wandb sync" in answer.err) == (fault != "no place")
    assert summary_of(tmp_path / "run")["status"] == "completed"
    for name in ("rounds.csv", "class_accuracy.csv", "clients.csv"):
        pd.testing.assert_frame_equal(
            table(tmp_path / "run", name), table(tmp_path / "alone", name)
        )
