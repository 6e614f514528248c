"""W&B runs of whole runs. Pushed runs equal tracked ones, and a run finishes if W&B fails."""

import os
import shutil
import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    assert error == "fedexp: empty: holds no finished run (summary.json is missing)"
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


# -- faults
# -------------------------------------------------------------------------------------------------


@contextmanager
def server(status: int | None):
    """Yield the address of a server that answers every request with this status; None: it never
    answers.
    """
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if status is None:
                done.wait(60)
            self.send_response(status or 503)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"errors": [{"message": "invalid credentials"}]}')

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}"
    finally:
        done.set()
        listening.shutdown()
        thread.join()
        listening.server_close()


def signal_service(number: int):
    """Return a `log_round` that sends a signal to wandb-core after the first round."""
    plain = WandbTracker.log_round

    def log_round(self, record):
        plain(self, record)
        if record.round == 1:
            os.kill(service_process().pid, number)

    return log_round


def slow_disk(pipe: Path):
    """Return an `_interim_images` that waits forever after the first round."""
    plain = WandbTracker._interim_images

    def images(self, record):
        if record.round == 1:
            pipe.read_bytes()
        return plain(self, record)

    return images


REFERENCE: dict[str, pd.DataFrame] = {}
CSV = ("rounds.csv", "class_accuracy.csv", "clients.csv")
SERVERS = {"unreachable": None, "invalid key": 401, "slow server": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["invalid key", "slow disk", "unreachable", "slow server", "killed", "stopped", "no place"],
)
def test_run_finishes_if_wandb_fails(fedexp, tmp_path, monkeypatch, fault):
    """The exit code is 0, there is one warning, and the files equal those of an untracked run."""
    # An invalid key is refused at once, but wandb-core may need seconds to start.
    seconds = 20 if fault == "invalid key" else 1
    options = [
        "tracker=wandb",
        f"tracker.init_timeout={seconds}",
        "tracker.finish_timeout=1",
        "rounds=3",
    ]
    with monkeypatch.context() as broken, server(SERVERS.get(fault)) as address:
        broken.setattr("fedexp.trackers.wandb_tracker.GRACE_SECONDS", 0.5)
        if fault in SERVERS:
            broken.setenv("WANDB_API_KEY", "a" * 40)
            broken.setenv(
                "WANDB_BASE_URL", "http://127.0.0.1:9" if fault == "unreachable" else address
            )
        else:
            options.append("tracker.mode=offline")
        (tmp_path / "run").mkdir()
        if fault in ("killed", "stopped"):
            number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
            broken.setattr(WandbTracker, "log_round", signal_service(number))
        elif fault == "slow disk":
            os.mkfifo(tmp_path / "pipe")
            broken.setattr(WandbTracker, "_interim_images", slow_disk(tmp_path / "pipe"))
            broken.setattr("fedexp.trackers.wandb_tracker.LOCAL_SECONDS", 5.0)
        elif fault == "no place":
            (tmp_path / "run" / "wandb").write_text("a file in the way")
        answer = fedexp(*SMALL, "hydra.run.dir=run", *options)
    assert answer.code == 0, answer.err
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count(" WARNING ") == 1, log
    assert "Traceback" not in answer.err + log
    assert len([line for line in answer.err.splitlines() if "wandb sync" in line]) == (
        fault != "no place"
    )
    assert load_finished(tmp_path / "run").summary["status"] == "completed"
    if not REFERENCE:
        fedexp.done(*SMALL, "hydra.run.dir=alone", "rounds=3")
        REFERENCE.update({name: table(tmp_path / "alone", name) for name in CSV})
    for name, frame in REFERENCE.items():
        pd.testing.assert_frame_equal(table(tmp_path / "run", name), frame)
    if fault == "killed":
        assert (
            call("push", ["run", "--mode", "offline"]) == 0
        )  # a push uploads all of it under the same id
        *_, pushed = run_folders(tmp_path / "run")
        assert [row["round"] for row in read_run(pushed)[1]][:4] == [0, 1, 2, 3]
