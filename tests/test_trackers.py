"""The W&B tracker with a fake wandb. Slow tests use wandb itself, without a network."""

import io
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import wandb

import fedexp
from fedexp.core.errors import ConfigError
from fedexp.metrics.record import Record
from fedexp.rundir.csv_files import CsvFile
from fedexp.trackers.base import Callbacks, RoundRecord, RunInfo, Tracker
from fedexp.trackers.names import (
    SUMMARIES,
    class_metrics,
    flat_summary,
    metric_names,
    metric_values,
)
from fedexp.trackers.wandb_tracker import WandbTracker, is_logged_in
from quick_runs import SMALL
from wandb_runs import (  # noqa: F401 (fixtures)
    CONF,
    FakeRun,
    clean_home,
    make_config,
    make_fake_wandb,
    make_info,
    read_run,
    run_folders,
)

HISTORY = Record(np.ones((4, 3), dtype=np.int64))
HISTORY.add(0, np.array([0.0, 0.5, np.nan]))
TABLE = pd.DataFrame(
    {"round": [0, 0, 1], "class": ["cat", "dog", "cat"], "accuracy": [0.1, 0.2, np.nan]}
)


@pytest.fixture(autouse=True)
def empty_cwd(tmp_path, monkeypatch):
    """Change to a working directory, which must stay empty."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert not list((tmp_path / "cwd").iterdir())


def make_record(number: int) -> RoundRecord:
    history = HISTORY.upto(0)
    if number not in (0, 2):
        history.add(number, np.array([0.1 * number, 0.5, np.nan]))
    values = {"test_accuracy": 0.2 * number, "test_loss": [2.0, 0.5, 0.75, 1.0, 1.0][number]}
    values["forgetting"] = number / 4 if number else None
    return RoundRecord(number, values, {"plain": history})


def track(tracker: Tracker, info: RunInfo, rounds=(0, 1, 2, 3)) -> None:
    from PIL import Image

    callbacks = Callbacks([tracker])
    callbacks.call("start", info)
    for number in rounds:
        callbacks.call("after_round", make_record(number))
    picture = info.directory / "curves.png"
    Image.new("RGB", (20, 10), "red").save(picture)
    summary = {
        "status": "completed",
        "accuracy": 0.6,
        "rounds_to_target": {"0.5": 3, "0.9": None},
        "commit": None,
    }
    figures = [picture, picture.with_suffix(".pdf")]
    callbacks.call("finish", summary, figures, {"class_accuracy": TABLE})


def warnings(caplog) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and r.name == "fedexp"
    ]


def make_tracker(**changes) -> Tracker:
    return make_config(**changes).create()


def test_a_run_is_logged_with_its_configuration_metrics_and_results(
    tmp_path, fake_wandb, caplog, capfd
):
    caplog.set_level(logging.INFO, logger="fedexp")
    tracker = make_tracker(mode="offline", tags=("mine",))
    track(tracker, make_info(tmp_path))
    (run,) = fake_wandb.runs
    assert run.asked["config"] == make_info(tmp_path).config
    assert (run.asked["id"], run.asked["mode"]) == (id_of(tracker), "offline")
    assert (run.asked["name"], run.asked["project"]) == ("digits_fedntd", "fedexp")
    assert (run.asked["group"], run.asked["job_type"]) == ("sweep", "fedntd")
    assert run.asked["settings"].finish_timeout == 20
    assert run.asked["tags"] == ["digits", "lda", "mine"]
    assert set(run.metrics) == {"round", *SUMMARIES}

    *rounds, results, tables = run.rows()
    assert [row["round"] for row in rounds] == [0, 1, 2, 3]
    assert [row["test/accuracy"] for row in rounds] == [0.2 * number for number in range(4)]
    assert "forgetting/F" not in rounds[0]  # undefined stays empty
    assert rounds[3]["forgetting/F"] == 0.75
    assert rounds[3]["class/cat"] == 0.1 * 3
    assert not any("class/bird" in row for row in rounds)  # nan: a class without examples
    assert "class/cat" not in rounds[2]  # not evaluated
    assert results.keys() == {"round", "figures/curves"}
    assert tables["tables/class_accuracy"].columns == list(TABLE.columns)
    assert tables["tables/class_accuracy"].data[2] == [1, "cat", None]
    assert run.summary == {
        "status": "completed",
        "accuracy": 0.6,
        "rounds_to_50pct": 3,
        "rounds_to_90pct": None,  # never
        "commit": None,
    }
    assert run.code == 0
    assert caplog.messages == [f"W&B is offline; upload with: wandb sync {Path(run.dir).parent}"]
    assert capfd.readouterr() == ("", "")


def id_of(tracker):
    return tracker.state_dict()["id"]


def test_an_aborted_run_is_resumed_under_its_id(tmp_path, fake_wandb):
    first, second = make_tracker(), make_tracker()
    first.start(make_info(tmp_path / "a"))
    first.abort()
    second.load_state_dict(first.state_dict())
    track(second, make_info(tmp_path, first_round=1), range(2, 4))
    before, after = fake_wandb.runs
    assert before.asked["id"] == after.asked["id"] == id_of(first) == id_of(second)
    assert (before.asked["resume"], after.asked["resume"]) == (None, "allow")
    assert (before.code, after.code) == (1, 0)
    other = make_tracker()
    other.start(make_info(tmp_path / "b"))
    assert id_of(other) != id_of(first)


def test_run_without_a_saved_state_starts_again_under_its_id(tmp_path, fake_wandb):
    first, second = make_tracker(), make_tracker()
    first.start(make_info(tmp_path))
    first.abort()
    (folder,) = run_folders(tmp_path)
    folder.rename(folder.with_name(f"run-20260101_120000-{id_of(first)}"))  # of an earlier day
    track(second, make_info(tmp_path))
    assert id_of(second) == id_of(first)
    assert fake_wandb.runs[1].asked["resume"] == "allow"


@pytest.mark.parametrize(("mode", "logged"), [("online", [2, 3]), ("offline", [0, 1, 2, 3])])
def test_resumed_run_logs_the_rounds_that_wandb_lacks(
    tmp_path, fake_wandb, monkeypatch, mode, logged
):
    """The server has the rounds 0 and 1; the files have 0 to 2. An offline run is written anew."""
    if mode == "online":
        fake_wandb.step = 11
    tracker = make_tracker(mode=mode)
    past = [make_record(number) for number in range(3)]
    tracker.load_state_dict({"id": "abc"})
    tracker.start(make_info(tmp_path, first_round=2, resumed=True, past=lambda: past))
    tracker.after_round(make_record(3))
    tracker.abort()
    (run,) = fake_wandb.runs
    assert [row["round"] for row in run.rows()] == logged
    assert (run.asked["id"], run.asked["resume"]) == ("abc", {"online": "allow"}.get(mode))


class Killed(BaseException):
    """The end of a process."""


def test_start_removes_what_one_that_was_killed_in_round_0_has_left(
    tmp_path, fake_wandb, monkeypatch
):
    """Another configuration also gets another W&B run, and the same one the same."""
    run, append = tmp_path / "run", CsvFile.append

    def killed(table, rows):
        if table.path.name == "rounds.csv":
            raise Killed
        append(table, rows)

    given = [*(each for each in SMALL if each != "tracker=none"), "rounds=1", "tracker=wandb"]
    for year in ("2024", "2025"):
        with monkeypatch.context() as patch:
            patch.setattr(CsvFile, "append", killed)
            with pytest.raises(Killed):
                fedexp.run([*given, "validation.fraction=0.2"], directory=run)
        (folder,) = run.glob("wandb/run-2026*")
        folder.rename(folder.with_name(folder.name.replace("2026", year)))  # of an earlier day
    assert (run / "class_accuracy_validation.csv").exists()
    fedexp.run(given, directory=run)
    first, second, third = [each.asked["id"] for each in fake_wandb.runs]
    assert first == second != third
    assert [path.name for path in run_folders(run)] == [f"run-20261125-{third}"]
    assert not (run / "class_accuracy_validation.csv").exists()


def raising(error: BaseException):
    def function(*_, **__):
        raise error

    return function


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("init", OSError("no"), "W&B could not start; the run continues without it (OSError: no"),
        ("log", ZeroDivisionError(), "W&B could not log a round; the run continues without it (Ze"),
        ("finish", OSError("no"), "W&B could not finish; the run continues without it (OSError: n"),
    ],
)
def test_a_failing_call_logs_one_warning(
    tmp_path, fake_wandb, monkeypatch, caplog, call, error, message
):
    if call == "init":
        monkeypatch.setattr("wandb.init", raising(error))
    else:
        monkeypatch.setattr(FakeRun, call, raising(error))
    track(make_tracker(mode="offline"), make_info(tmp_path))
    (warning,) = warnings(caplog)
    assert warning.startswith(message)
    assert ("wandb sync" in warning) == (call != "init")


def test_run_is_logged_offline_without_an_answer_from_the_server(
    tmp_path, fake_wandb, caplog, monkeypatch
):
    begin = wandb.init

    def init(**asked):
        return begin(**asked) if asked["mode"] == "offline" else raising(OSError("refused"))()

    monkeypatch.setattr("wandb.init", init)
    tracker = make_tracker(mode="online")
    track(tracker, make_info(tmp_path))
    (run,) = fake_wandb.runs
    assert run.asked["id"] == id_of(tracker)
    (warning,) = warnings(caplog)
    assert warning == "W&B cannot be reached; the run continues offline (OSError: refused)"


@pytest.mark.parametrize(
    ("mode", "of_wandb", "key", "tried"),
    [
        ("auto", "online", "key", ("online", "offline")),
        ("auto", "online", None, ("offline",)),
        ("auto", "offline", "key", ("offline",)),
        ("auto", "dryrun", "key", ("offline",)),
        ("auto", "disabled", "key", ("disabled",)),
        ("online", "offline", "key", ("online", "offline")),
        ("offline", "online", "key", ("offline",)),
    ],
)
def test_modes_follow_settings_and_login(fake_wandb, mode, of_wandb, key, tried):
    fake_wandb.settings.mode, fake_wandb.settings.api_key = of_wandb, key
    assert make_config(mode=mode).modes() == tried


def test_online_without_a_key_logs_a_warning(tmp_path, fake_wandb, caplog):
    fake_wandb.settings.api_key = None
    track(make_tracker(mode="online"), make_info(tmp_path))
    assert fake_wandb.runs[0].offline
    (warning,) = warnings(caplog)
    assert "W&B has no API key" in warning


@pytest.mark.parametrize("view", ["plain", "validation"])
def test_images_are_logged_every_n_rounds(view, tmp_path, fake_wandb):
    from PIL import Image

    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, format="png")
    drawn = {"map": picture.getvalue()}
    tracker = make_tracker(log_images_every=2)
    tracker.start(make_info(tmp_path, total_rounds=6, pictures=lambda records: drawn))
    for number in (0, 1, 3, 4, 6):
        record = make_record(min(number, 4))
        tracker.after_round(replace(record, round=number, records={view: record.records["plain"]}))
    rows = fake_wandb.runs[0].rows()
    assert [row["round"] for row in rows if "figures/map" in row] == [4]  # not the last


@pytest.mark.parametrize(
    ("every", "rounds", "interval"),
    [(0, 200, None), (7, 200, 7), (0.1, 200, 20), (0.1, 30, 10), (0.25, 3000, 750)],
)
def test_interval_of_logged_images_follows_from_its_option(every, rounds, interval):
    assert make_config(log_images_every=every).image_interval(rounds) == interval


def test_names_in_trackers_stay_as_they_are():
    """Dashboards and queries of users refer to them. Lines are only added."""
    text = (Path(__file__).parent / "golden" / "tracker_names.txt").read_text(encoding="utf-8")
    golden = dict(line.split() for line in text.splitlines())
    names = metric_names()
    assert {name: names.get(name) for name in golden} == golden
    assert len(set(names.values())) == len(names)
    sections = {"test", "validation", "forgetting", "local", "personal", "time", "comm"}
    assert {name.partition("/")[0] for name in names.values()} == sections
    assert all(name.count("/") == 1 for name in names.values())
    assert class_metrics(["001.ak/47", "b"]) == ["class/001_ak_47", "class/b"]


def test_classes_and_values_with_similar_names_are_distinct():
    """One was shown instead of both."""
    record = make_record(1)
    found = metric_values(record, ["a/b", "a_b", "c"])
    assert (found["class/0_a_b"], found["class/1_a_b"]) == (0.1, 0.5)
    record.analysed.update({"cka.l1": 0.5, "cka_l1": 0.25})
    with pytest.raises(ConfigError, match="two values have the name analysis/cka_l1: cka"):
        metric_values(record, ["a", "b", "c"])


def test_values_of_own_metrics_have_names(tmp_path):
    """They are measures of forgetting, also if their class has not been loaded."""
    record = replace(make_record(1), values={"worst.class_forgetting": 0.5, "test_loss": 1.0})
    found = metric_values(record, [str(each) for each in range(len(record.tested["plain"]))])
    assert found["forgetting/worst_class"] == 0.5
    assert found["test/loss"] == 1.0


def test_flat_summary_has_one_number_per_target():
    summary = {
        "accuracy": 0.5,
        "rounds_to_target": {"0.5": 7, "0.375": 3, "0.9*best": 12, "1.0*best": None},
    }
    flat = {
        "rounds_to_50pct": 7,
        "rounds_to_37_5pct": 3,
        "rounds_to_90pct_of_best": 12,
        "rounds_to_100pct_of_best": None,
    }
    assert flat_summary(summary) == {"accuracy": 0.5} | flat
    assert flat_summary({}) == {}


@pytest.mark.parametrize(
    ("netrc", "found"),
    [
        ("machine other.org login user password x", False),
        ("machine api.wandb.ai login user password x", True),
        ("machine machine machine", False),
    ],
)
def test_login_is_read_from_netrc(netrc, found, fake_wandb):
    fake_wandb.settings.api_key = None
    assert not is_logged_in(fake_wandb.settings)
    Path(os.environ["NETRC"]).write_text(netrc)
    assert is_logged_in(fake_wandb.settings) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "onlin"}, r"tracker.mode=onlin: .*nearest: 'online'"),
        ({"project": ""}, "tracker.project"),
        ({"log_images_every": -1}, "tracker.log_images_every=-1"),
        ({"log_images_every": 2.5}, "tracker.log_images_every=2.5"),
        ({"init_timeout": 0.0}, "tracker.init_timeout"),
        ({"finish_timeout": 0.0}, "tracker.finish_timeout"),
    ],
)
def test_invalid_settings_are_rejected(change, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**change)


def test_tracker_none_does_nothing(tmp_path):
    for tracker in (Tracker(), make_config(mode="disabled").create()):
        assert type(tracker) is Tracker
        track(tracker, make_info(tmp_path))
        tracker.abort()
        assert tracker.state_dict() == {}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["curves.png"]
    assert isinstance(make_config().create(), WandbTracker)


# --- with wandb itself


@pytest.mark.slow
def test_log_contains_no_paths_of_the_machine(tmp_path):
    tracker = make_tracker(mode="offline")
    tracker.start(make_info(tmp_path / "run"))
    tracker.after_round(make_record(1))
    tracker.finish({}, [], {})
    (folder,) = run_folders(tmp_path / "run")
    record = next(r["run"] for r in read_run(folder)[2] if r["type"] == "run")
    assert not record.get("host")
    content = next(folder.glob("*.wandb")).read_bytes()
    for secret in (str(tmp_path), sys.prefix):
        assert secret.encode() not in content
