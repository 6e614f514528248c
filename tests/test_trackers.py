"""W&B runs are read back with wandb's own client (`wandb leet inspect`); no test needs a network."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import wandb
from omegaconf import OmegaConf

from fedexp.errors import ConfigError
from fedexp.trackers.base import NoTracker, RoundRecord, RunInfo, Tracker, display_path
from fedexp.trackers.wandb_service import bounded, logged_in, set_environment
from fedexp.trackers.wandb_tracker import Wandb, WandbTracker

CONF = Path(__file__).parents[1] / "conf" / "tracker"
CLASSES = ("cat", "dog", "bird")
TABLE = pd.DataFrame({"round": [0, 0, 1], "class": ["cat", "dog", "cat"], "accuracy": [0.1, 0.2, np.nan]})


@pytest.fixture(autouse=True)
def clean_home(tmp_path, monkeypatch):
    """No key, no settings of the user, an empty home and working directory that must stay empty."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    places = {"HOME": tmp_path / "home", "NETRC": tmp_path / "home" / "netrc"}
    for name in ("home", "cwd"):
        (tmp_path / name).mkdir()
    for name, path in places.items():
        monkeypatch.setenv(name, str(path))
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert not {"WANDB_SILENT", "WANDB_DATA_DIR", "WANDB_RUN_ID", "WANDB_SERVICE", "WANDB__SERVICE"} & os.environ.keys()
    assert not list((tmp_path / "cwd").iterdir())
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file() and p.name != "netrc"]
    assert not children("wandb-core")


def children(name: str) -> list[str]:
    """Command lines of this process's living children that contain `name`."""
    listing = subprocess.run(["ps", "-o", "stat=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [line for line in listing.stdout.splitlines() if name in line and not line.startswith("Z")]


def make_config(**changes) -> Wandb:
    values = OmegaConf.to_container(OmegaConf.load(CONF / "wandb.yaml"))
    values.pop("_target_")
    return Wandb(**values | {"tags": (), "init_timeout": 20.0, "finish_timeout": 20.0} | changes)


def make_info(directory: Path, **changes) -> RunInfo:
    info = RunInfo(
        directory=directory,
        config={"algorithm": {"name": "fedntd", "tau": 1.0}, "alpha": 0.1, "targets": [0.5], "resume": None},
        name="digits_fedntd",
        group="sweep",
        job_type="fedntd",
        tags=("digits", "lda"),
        total_rounds=3,
        first_round=0,
        classes=CLASSES,
        wandb_id=None,
    )
    return replace(info, **changes)


def make_record(number: int) -> RoundRecord:
    accuracy = np.array([0.1 * number, 0.5, np.nan]) if number != 2 else None
    return RoundRecord(number, {"test_accuracy": 0.2 * number, "forgetting": number / 4 if number else None}, accuracy)


def track(tracker: Tracker, info: RunInfo, rounds=range(4)) -> None:
    from PIL import Image

    tracker.start(info)
    for number in rounds:
        tracker.log_round(make_record(number))
    picture = info.directory / "curves.png"
    Image.new("RGB", (20, 10), "red").save(picture)
    summary = {"status": "completed", "accuracy": 0.6, "rounds_to_target": {"0.5": 3, "0.9": None}, "commit": None}
    tracker.finish(summary, [picture], {"class_accuracy": TABLE})


def inspect(folder: Path, *options: str) -> str:
    """What wandb's client says about a run folder."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    if "No such command" in answer.stderr or "No such option" in answer.stderr:
        pytest.skip(f"wandb {wandb.__version__} has no `wandb leet inspect --json`")
    assert answer.returncode == 0, answer.stderr
    for left in (Path(os.environ["HOME"]) / name for name in (".cache", ".config", ".local")):
        shutil.rmtree(left, ignore_errors=True)  # the client's own, not the tracker's
    return answer.stdout


def read_run(folder: Path) -> tuple[dict, list[dict], list[dict]]:
    """Summary of the run, its history rows with nested keys joined by dots, and all records."""
    records = [json.loads(line) for line in inspect(folder).splitlines()]
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    return json.loads(inspect(folder, "--summary")), history, records


def run_folders(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("*run-*"))


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "fedexp"]


def test_offline_run_reads_back(tmp_path, caplog, capfd):
    caplog.set_level(logging.INFO, logger="fedexp")
    tracker = make_config(tags=("mine",)).create()
    track(tracker, make_info(tmp_path))
    (folder,) = run_folders(tmp_path)
    run, history, records = read_run(folder)
    assert run["config"] == make_info(tmp_path).config
    assert (run["run_id"], run["name"], run["project"]) == (tracker.run_id, "digits_fedntd", "fedexp")
    assert run["tags"] == ["digits", "lda", "mine"]
    assert (run["state"], run["exit_code"]) == ("finished", 0)
    record = next(r["run"] for r in records if r["type"] == "run")
    assert (record["run_group"], record["job_type"]) == ("sweep", "fedntd")

    metrics = [r["metric"] for r in records if r["type"] == "metric"]
    assert any(m.get("glob_name") == "*" and m["step_metric"] == "round" for m in metrics)
    rounds = history[:4]
    assert [row["round"] for row in rounds] == [row["_step"] for row in rounds] == [0, 1, 2, 3]
    assert [row["test_accuracy"] for row in rounds] == pytest.approx([0, 0.2, 0.4, 0.6])
    assert "forgetting" not in rounds[0]  # undefined stays empty
    assert rounds[3]["forgetting"] == pytest.approx(0.75)
    assert rounds[3]["class_accuracy/cat"] == pytest.approx(0.3)
    assert not any("class_accuracy/bird" in row for row in rounds)  # nan: a class without examples
    assert not any("class_accuracy/cat" in row for row in rounds if row["round"] == 2)  # not evaluated
    assert all(row["round"] == 3 for row in history[4:] if "round" in row)

    assert run["summary"]["accuracy"] == 0.6
    assert run["summary"]["rounds_to_target"] == {"0.5": 3, "0.9": None}
    image, table = run["summary"]["figures/curves"], run["summary"]["tables/class_accuracy"]
    assert (image["width"], image["height"]) == (20, 10)
    assert (folder / "files" / image["path"]).read_bytes() == (tmp_path / "curves.png").read_bytes()
    assert (table["nrows"], table["ncols"]) == (3, 3)
    assert json.loads((folder / "files" / table["path"]).read_text())["columns"] == list(TABLE.columns)

    assert warnings(caplog) == []
    assert [m for m in caplog.messages if "wandb sync" in m] == [f"W&B is offline; upload with: wandb sync {folder}"]
    assert capfd.readouterr() == ("", "")


def test_log_names_no_path_of_the_machine(tmp_path):
    tracker = make_config(mode="offline").create()
    tracker.start(make_info(tmp_path / "run"))
    tracker.log_round(make_record(1))
    tracker.finish({}, [], {})
    (folder,) = run_folders(tmp_path / "run")
    record = next(r["run"] for r in read_run(folder)[2] if r["type"] == "run")
    assert not record.get("host")
    content = next(folder.glob("*.wandb")).read_bytes()
    for secret in (str(tmp_path), sys.prefix):
        assert secret.encode() not in content


def test_runs_of_one_process_are_distinct(tmp_path):
    runs = []
    for tau in (1.0, 3.0):
        tracker = make_config(mode="offline").create()
        tracker.start(make_info(tmp_path / str(tau), config={"tau": tau}))
        tracker.log_round(make_record(1))
        tracker.finish({"accuracy": tau}, [], {})
        (folder,) = run_folders(tmp_path / str(tau))
        runs.append(read_run(folder)[0])
    assert runs[0]["run_id"] != runs[1]["run_id"]
    assert [run["config"] for run in runs] == [{"tau": 1.0}, {"tau": 3.0}]
    assert [run["summary"]["accuracy"] for run in runs] == [1.0, 3.0]


def test_aborted_run_resumes_under_its_id(tmp_path):
    first = make_config(mode="offline").create()
    first.start(make_info(tmp_path))
    first.log_round(make_record(1))
    first.abort()
    first.abort()  # a second time is allowed
    time.sleep(1)  # wandb names its folders by the second
    second = make_config(mode="offline").create()
    track(second, make_info(tmp_path, wandb_id=first.run_id, first_round=1), range(2, 4))
    assert second.run_id == first.run_id
    (before, _, _), (after, history, _) = (read_run(folder) for folder in run_folders(tmp_path))
    assert before["run_id"] == after["run_id"] == first.run_id
    assert (before["exit_code"], after["exit_code"]) == (1, 0)
    assert [row["_step"] for row in history[:2]] == [2, 3]  # steps go on, so an upload of both fits together


def test_failing_init_does_not_stop_the_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **_: sys.exit(3))
    track(make_config().create(), make_info(tmp_path))
    (warning,) = warnings(caplog)
    assert warning.startswith("W&B cannot start; the run goes on without it")


def test_failing_log_does_not_stop_the_run(tmp_path, caplog):
    tracker = make_config(mode="offline").create()
    tracker.start(make_info(tmp_path))
    tracker._run.log = lambda *_, **__: 1 / 0
    for number in range(3):
        tracker.log_round(make_record(number))
    tracker.finish({}, [], {})
    (warning,) = warnings(caplog)
    assert "W&B could not log a round; the run goes on without it (ZeroDivisionError" in warning
    assert "wandb sync" in warning


def test_hanging_finish_is_given_up(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("fedexp.trackers.wandb_tracker.GRACE_SECONDS", 0.5)
    tracker = make_config(mode="offline", finish_timeout=0.5).create()
    tracker.start(make_info(tmp_path))
    tracker._run.finish = lambda _: time.sleep(60)
    started = time.monotonic()
    tracker.finish({}, [], {})
    assert time.monotonic() - started < 5
    (warning,) = warnings(caplog)
    assert "could not finish in time" in warning


def test_background_process_that_dies_is_one_warning(tmp_path, caplog):
    from fedexp.trackers.wandb_service import _service_process

    tracker = make_config(mode="offline").create()
    tracker.start(make_info(tmp_path))
    process = _service_process()
    process.kill()
    process.wait()
    for number in range(3):
        tracker.log_round(make_record(number))
    tracker.finish({"accuracy": 1.0}, [], {})
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("server", ["refuses", "never answers"])
def test_unreachable_server_falls_back_to_offline(tmp_path, caplog, capfd, monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr("fedexp.trackers.wandb_tracker.GRACE_SECONDS", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    port = 9 if server == "refuses" else listener.getsockname()[1]
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    tracker = make_config(mode="online", init_timeout=1.0).create()
    started = time.monotonic()
    track(tracker, make_info(tmp_path))
    assert time.monotonic() - started < 10
    (folder,) = run_folders(tmp_path)  # nothing is left of the attempt
    assert folder.name.startswith("offline-run-")
    run, history, _ = read_run(folder)
    assert run["run_id"] == tracker.run_id
    assert [row["round"] for row in history[:4]] == [0, 1, 2, 3]
    (warning,) = warnings(caplog)
    assert "cannot be reached; the run goes on offline" in warning
    listener.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_no_key_no_question(tmp_path, mode):
    """In a process of its own with a terminal for wandb to ask in: it does not."""
    pty = pytest.importorskip("pty")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import logging; logging.basicConfig(format='%(message)s')\n"
        "from pathlib import Path; from test_trackers import *\n"
        "t = make_config(mode=sys.argv[3]).create(); t.start(make_info(Path(sys.argv[2])))\n"
        "t.log_round(make_record(1)); t.finish({}, [], {}); print('end')"
    )
    master, slave = pty.openpty()
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path / "run"), mode]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, close_fds=True, env=environment)
    os.close(slave)
    assert process.wait(timeout=30) == 0
    output = os.read(master, 100_000).decode().split("\r\n")
    os.close(master)
    warning = [line for line in output[:-1] if line != "end"]
    assert len(warning) == (1 if mode == "online" else 0), output
    (folder,) = run_folders(tmp_path / "run")
    assert folder.name.startswith("offline-run-")


def test_wandb_mode_of_the_environment_is_respected(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    track(make_config().create(), make_info(tmp_path))
    assert not run_folders(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = make_config().create()
    tracker.start(make_info(tmp_path))
    tracker.finish({}, [], {})
    assert [folder.name.startswith("offline-run-") for folder in run_folders(tmp_path)] == [True]
    assert warnings(caplog) == []


def test_images_every_n_rounds(tmp_path, monkeypatch):
    from PIL import Image

    def draw(directory: Path) -> list[Path]:
        Image.new("RGB", (8, 8)).save(directory / "map.png")
        return [directory / "map.png"]

    monkeypatch.setattr("fedexp.figures.make_figures", draw)
    tracker = make_config(mode="offline", log_images_every=3).create()
    tracker.start(make_info(tmp_path))
    for number in range(1, 5):
        tracker.log_round(make_record(number))
    tracker.finish({}, [], {})
    _, history, _ = read_run(run_folders(tmp_path)[0])
    assert [row["round"] for row in history if any(key.startswith("figures/map") for key in row)] == [3]


def test_logged_in_reads_netrc(monkeypatch, tmp_path):
    url = "https://api.wandb.ai"
    assert not logged_in(None, url)
    assert logged_in("key", url)
    Path(os.environ["NETRC"]).write_text("machine other.org login user password x\n")
    assert not logged_in(None, url)
    Path(os.environ["NETRC"]).write_text("machine api.wandb.ai login user password x\n")
    assert logged_in(None, url)
    assert not logged_in(None, "https://wandb.example.org")
    Path(os.environ["NETRC"]).write_text("machine machine machine")
    assert not logged_in(None, url)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert logged_in(None, url)


def test_bounded():
    assert bounded(lambda: 3, 5) == 3
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, 5)
    with pytest.raises(RuntimeError, match="end the process"):
        bounded(lambda: sys.exit(1), 5)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        bounded(lambda: time.sleep(10), 0.1)
    assert time.monotonic() - started < 2


def test_environment_keeps_the_users_places(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_CACHE_DIR", "/elsewhere")
    restore = set_environment(tmp_path)
    assert os.environ["WANDB_CACHE_DIR"] == "/elsewhere"
    assert os.environ["WANDB_DATA_DIR"] == str(tmp_path / "data")
    restore()
    assert "WANDB_DATA_DIR" not in os.environ


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "onlin"}, r"tracker.mode=onlin: .*nearest: 'online'"),
        ({"project": ""}, "tracker.project"),
        ({"log_images_every": -1}, "tracker.log_images_every=-1"),
        ({"init_timeout": 0.0}, "tracker.init_timeout"),
        ({"finish_timeout": 0.0}, "tracker.finish_timeout"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**change)


def test_none_does_nothing_and_disabled_is_none(tmp_path):
    for tracker in (NoTracker().create(), make_config(mode="disabled").create()):
        assert type(tracker) is Tracker
        track(tracker, make_info(tmp_path))
        tracker.abort()
        assert tracker.run_id is None
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["curves.png"]
    assert isinstance(make_config().create(), WandbTracker)


def test_yaml_satisfies_its_schema():
    for name, schema in (("wandb", Wandb), ("none", NoTracker)):
        node = OmegaConf.load(CONF / f"{name}.yaml")
        assert node.pop("_target_") == f"{schema.__module__}.{schema.__name__}"
        assert set(node) == set(schema.__dataclass_fields__)
        OmegaConf.merge(OmegaConf.structured(schema), node)


def test_display_path(tmp_path):
    assert display_path(Path.cwd() / "a" / "b.png") == str(Path("a/b.png"))
    assert display_path(tmp_path / "b.png") == str(tmp_path / "b.png")
