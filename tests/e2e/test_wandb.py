"""W&B runs of whole runs. Pushed runs equal tracked ones, and a run finishes if W&B fails."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from helpers import SMALL, summary_of, table

from fedexp.cli.commands import call
from fedexp.cli.push import last_wandb_id, load_finished
from fedexp.core.errors import ConfigError
from fedexp.core.private.wandb_internals import service_process
from fedexp.trackers.wandb_tracker import WandbTracker
from wandb_runs import clean_home, content, read_run, run_folders  # noqa: F401 (a fixture)

OFFLINE = ("tracker=wandb", "tracker.mode=offline")
TIDY = (
    "config.yaml",
    "summary.json",
    "rounds.csv",
    "class_accuracy.csv",
    "clients.csv",
    "tasks.csv",
)
ARRAYS = ("partition*.npz", "local_class_accuracy.npz")


def bare_copy(directory: Path, copy: Path) -> Path:
    """Copy only the csv, json and npz files of a run."""
    copy.mkdir()
    for path in [path for pattern in (*TIDY, *ARRAYS) for path in directory.glob(pattern)]:
        shutil.copy(path, copy)
    (copy / ".hydra").mkdir()
    shutil.copy(directory / ".hydra" / "overrides.yaml", copy / ".hydra")
    return copy


def make_run(fedexp, *options: str) -> Path:
    fedexp.done(*SMALL, "hydra.run.dir=run", *options)
    return Path("run").absolute()


@pytest.mark.slow
def test_pushed_run_equals_the_tracked_run(fedexp, tmp_path, capfd):
    images = ("tracker.log_images_every=2", "forgetting_metric=all")
    run = make_run(fedexp, *OFFLINE, "rounds=3", "tracker.tags=[mine]", *images)
    (tracked,) = run_folders(run)
    copy = bare_copy(run, tmp_path / "copy")
    assert call("push", [str(copy), "--mode", "offline"]) == 0
    (pushed,) = run_folders(copy)
    assert content(pushed) == content(tracked)
    assert last_wandb_id(copy) != last_wandb_id(run)
    assert f"wandb sync copy/wandb/{pushed.name}" in capfd.readouterr().err

    seen = content(tracked)  # and both are correct
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
def test_push_keeps_the_id_and_skips_unfinished_runs(fedexp, tmp_path, capfd):
    run = make_run(fedexp, *OFFLINE, "rounds=1", "tracker.log_images_every=0")
    (tmp_path / "empty").mkdir()
    first = last_wandb_id(run)
    assert (
        call(
            "push", ["empty", "run", "--mode", "offline", "--project", "other", "--entity", "team"]
        )
        == 2
    )
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("fedexp:")]
    assert error == "fedexp: empty: contains no finished run (summary.json is missing)"
    read = [read_run(folder)[0] for folder in run_folders(run)]
    assert [(r["run_id"], r["project"], r["entity"]) for r in read] == [
        (first, "fedexp", ""),
        (first, "other", "team"),
    ]
    shutil.rmtree(run_folders(run)[1])
    assert call("push", ["run", "--mode", "offline", "--new"]) == 0
    assert {folder.name.rpartition("-")[2] == first for folder in run_folders(run)} == {True, False}

    rounds = (run / "rounds.csv").read_text()
    damages = {
        "status": ("summary.json", '{"status": "failed"}', "the run failed"),
        "summary": ("summary.json", "{", "summary.json: is not json"),
        "cut": (
            "rounds.csv",
            rounds[: rounds.index("\n1,") + 1],
            "ends with round 0, but the run ended with round 1",
        ),
        "config": ("config.yaml", "a: [", "config.yaml: is not yaml"),
        "choices": ("config.yaml", "a: 1\n", "choices"),
        "table": ("rounds.csv", "a,b\n1,2\n", "rounds.csv: has no column round"),
        "classes": (
            "class_accuracy.csv",
            "a\n1\n",
            "class_accuracy.csv: has no column round, class, accuracy",
        ),
    }
    for name, (file, text, message) in damages.items():
        damaged = bare_copy(run, tmp_path / name)
        (damaged / file).write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_finished(damaged)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (
            "forgetting_metric=round_drop",
            "tracker.log_images_every=2",
            "rounds=5",
            "eval_interval=2",
        ),
        (
            "scenario=class_incremental",
            "scenario.num_tasks=2",
            "tracker.log_images_every=2",
            "rounds=2",
        ),
        ("local.lr=1e9", "rounds=6"),  # diverges
    ],
)
def test_pushed_run_equals_the_tracked_run_with_options(fedexp, tmp_path, options):
    """The figures are drawn again."""
    run = make_run(fedexp, *OFFLINE, *options, "figures=true")
    copy = bare_copy(run, tmp_path / "copy")
    assert call("push", [str(copy), "--mode", "offline"]) == 0
    (tracked,), (pushed,) = run_folders(run), run_folders(copy)
    assert content(pushed) == content(tracked)
    assert {path.name for path in (copy / "figures").iterdir()} == {
        path.name for path in (run / "figures").iterdir()
    }


@pytest.mark.slow
def test_killed_offline_run_loses_no_round(fedexp):
    """After kill -9 and resume, the folder that the message names has every round once."""
    program = """
import os, signal, sys
from fedexp.cli.main import main
from fedexp.trackers.wandb_tracker import WandbTracker
log_round = WandbTracker.log_round
def kill(self, record):
    log_round(self, record)
    if record.round == 3:
        os.kill(os.getpid(), signal.SIGKILL)
WandbTracker.log_round = kill
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


def signal_service(number: int):
    """Return a `log_round` that sends a signal to wandb-core after the first round."""
    plain = WandbTracker.log_round

    def log_round(self, record):
        plain(self, record)
        if record.round == 1:
            os.kill(service_process().pid, number)

    return log_round


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["unreachable", "killed", "stopped", "no place"])
def test_run_finishes_if_wandb_fails(fedexp, tmp_path, monkeypatch, fault):
    """The exit code is 0, there is one warning, and the files equal those of an untracked run."""
    fedexp.done(*SMALL, "hydra.run.dir=alone", "rounds=3")
    options = ["tracker=wandb", "tracker.init_timeout=1", "tracker.finish_timeout=1", "rounds=3"]
    monkeypatch.setattr("fedexp.trackers.wandb_tracker.GRACE_SECONDS", 0.5)
    if fault == "unreachable":
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    else:
        options.append("tracker.mode=offline")
    if fault in ("killed", "stopped"):
        number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
        monkeypatch.setattr(WandbTracker, "log_round", signal_service(number))
    (tmp_path / "run").mkdir()
    if fault == "no place":
        (tmp_path / "run" / "wandb").write_text("a file in the way")
    answer = fedexp(*SMALL, "hydra.run.dir=run", *options)
    assert answer.code == 0, answer.err
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count(" WARNING ") == 1, log
    assert "Traceback" not in answer.err + log
    assert ("wandb sync" in answer.err) == (fault != "no place")
    assert load_finished(tmp_path / "run").summary["status"] == "completed"
    for name in ("rounds.csv", "class_accuracy.csv", "clients.csv"):
        pd.testing.assert_frame_equal(
            table(tmp_path / "run", name), table(tmp_path / "alone", name)
        )
