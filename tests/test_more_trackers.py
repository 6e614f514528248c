"""TensorBoard, whose logs are read with its own reader, and several trackers."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from fedexp.cli.sweeps import tracker_of
from fedexp.config.arguments import hydra_arguments
from fedexp.config.build import build
from fedexp.config.values import resolve
from fedexp.core.errors import ConfigError, HookFailed
from fedexp.metrics.record import Record
from fedexp.trackers.base import Callback, Callbacks, RoundRecord, RunInfo, Tracker
from fedexp.trackers.names import metric_values
from fedexp.trackers.tensorboard_tracker import TensorBoard
from fedexp.trackers.wandb_tracker import Wandb
from test_trackers import make_record, track, warnings
from toy_federation import composed
from wandb_runs import make_info


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def events(folder: Path):
    """Return the event files of a folder, read by TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def test_tensorboard_has_the_metrics_of_a_run(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    track(TensorBoard(logdir=None).create(), make_info(tmp_path))
    found = events(tmp_path / "tensorboard")
    accuracy = [(event.step, event.value) for event in found.Scalars("test/accuracy")]
    assert accuracy == [(number, pytest.approx(0.2 * number)) for number in range(4)]
    # undefined stays empty
    assert [event.step for event in found.Scalars("forgetting/F")] == [1, 2, 3]
    # round 2 was not evaluated
    assert [event.step for event in found.Scalars("class/cat")] == [0, 1, 3]
    assert "class/bird" not in found.Tags()["scalars"]  # nan: a class without examples
    (image,) = found.Images("figures/curves")
    assert (image.step, image.width, image.height) == (3, 20, 10)
    texts = {
        tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in found.Tags()["tensors"]
    }
    assert '"accuracy": 0.6' in texts["summary/text_summary"]
    assert "    " in texts["config/text_summary"]
    assert warnings(caplog) == []


@pytest.mark.parametrize("saved", [0, 1])
def test_resumed_run_replaces_repeated_rounds_in_tensorboard(saved, tmp_path):
    """Rounds 0 to 3 were written, and the checkpoint is of round 0 or 1.

    The configuration is logged once.
    """
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(logdir=None).create()
    tracker.start(make_info(tmp_path))
    for number in range(4):
        tracker.after_round(make_record(number))
    tracker.abort()
    info = replace(make_info(tmp_path), first_round=saved, resumed=True)
    second = TensorBoard(logdir=None).create()
    second.load_state_dict({"round": saved})
    track(second, info, rounds=range(saved + 1, 4))
    found = events(tmp_path / "tensorboard")
    assert [event.step for event in found.Scalars("test/accuracy")] == [0, 1, 2, 3]
    assert len(found.Tensors("config/text_summary")) == 1


@pytest.mark.parametrize("before", [None, 0])
def test_tensorboard_has_the_rounds_that_were_run_without_it(before, tmp_path):
    """It is new in a run that is resumed after round 2, or has failed after round 0."""
    pytest.importorskip("tensorboard")
    first, second = (TensorBoard(logdir=None).create() for _ in range(2))
    if before is not None:
        first.start(make_info(tmp_path))
        first.after_round(make_record(before))
        first.abort()
        second.load_state_dict(first.state_dict())
    past = [make_record(number) for number in range(3)]
    info = make_info(tmp_path, first_round=2, resumed=True, past=lambda: past)
    track(second, info, rounds=[3])
    found = events(tmp_path / "tensorboard")
    assert [event.step for event in found.Scalars("test/accuracy")] == [0, 1, 2, 3]
    assert len(found.Tensors("config/text_summary")) == 1


def test_tensorboard_forgets_a_start_without_a_saved_state(tmp_path):
    pytest.importorskip("tensorboard")
    first = TensorBoard(logdir=None).create()
    first.start(make_info(tmp_path))
    first.after_round(replace(make_record(1), round=0))
    first.abort()
    track(TensorBoard(logdir=None).create(), make_info(tmp_path), rounds=[0, 1])
    values = [event.value for event in events(tmp_path / "tensorboard").Scalars("test/accuracy")]
    assert values == [0, pytest.approx(0.2)]


def test_tensorboard_logdir_has_a_folder_for_each_run(tmp_path, monkeypatch):
    """The second run is resumed in another working directory."""
    pytest.importorskip("tensorboard")
    config = TensorBoard(logdir=str(tmp_path / "all"))
    places = [made(tmp_path / "outputs" / name / "seed0") for name in ("fedavg", "fedntd")]
    track(config.create(), make_info(places[0]), rounds=[0])
    tracker, resumed = config.create(), config.create()
    track(tracker, make_info(places[1]), rounds=[0, 1])
    resumed.load_state_dict(tracker.state_dict())
    monkeypatch.chdir(places[0])
    track(resumed, make_info(places[1], first_round=1, resumed=True), rounds=[2, 3])
    for name, rounds in (("fedavg", [0]), ("fedntd", [0, 1, 2, 3])):
        found = events(tmp_path / "all" / "outputs" / name / "seed0").Scalars("test/accuracy")
        assert [event.step for event in found] == rounds
    assert not (places[0] / "tensorboard").exists()


def test_tensorboard_has_nothing_of_a_run_that_was_replaced(tmp_path):
    pytest.importorskip("tensorboard")
    config = TensorBoard(logdir=str(tmp_path / "all"))
    for rounds in (range(4), [0, 1]):
        track(config.create(), make_info(made(tmp_path / "run")), rounds)
    found = events(tmp_path / "all" / "run").Scalars("test/accuracy")
    assert [event.step for event in found] == [0, 1]


def test_tensorboard_resumes_a_run_of_a_version_that_stored_nothing(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(logdir=None).create()
    tracker.load_state_dict({})
    past = [make_record(number) for number in range(3)]
    info = make_info(tmp_path, first_round=2, resumed=True, past=lambda: past)
    track(tracker, info, rounds=[3])
    found = events(tmp_path / "tensorboard").Scalars("test/accuracy")
    assert [event.step for event in found] == [0, 1, 2, 3]


def test_new_logdir_of_a_resumed_run_gets_all_rounds(tmp_path):
    pytest.importorskip("tensorboard")
    first, second = (TensorBoard(logdir=str(tmp_path / name)).create() for name in "ab")
    info = make_info(made(tmp_path / "run"))
    track(first, info, rounds=[0, 1, 2])
    second.load_state_dict(first.state_dict())
    past = [make_record(number) for number in range(3)]
    track(second, replace(info, first_round=2, resumed=True, past=lambda: past), rounds=[3])
    found = events(tmp_path / "b" / "run").Scalars("test/accuracy")
    assert [event.step for event in found] == [0, 1, 2, 3]


def test_logdir_may_be_a_number():
    (written,) = hydra_arguments(["tracker=tensorboard", "tracker.tensorboard.logdir=2026_11"])
    assert build(composed(*written)).tracker == [TensorBoard(logdir="2026_11")]


# --- failures


def test_missing_package_is_one_message(monkeypatch):
    (config,) = build(composed("tracker=tensorboard")).tracker
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        ConfigError,
        match=r"^tracker=tensorboard: .*; install it with pip install -e .* \(tensorboard.*\)$",
    ):
        config.check()


# --- several


class FailingTracker(Tracker):
    """A tracker that records its calls and fails in round 0."""

    def __init__(self):
        self.calls: list[object] = []

    def start(self, info: RunInfo) -> None:
        self.calls.append("start")

    def after_round(self, record: RoundRecord) -> None:
        self.calls.append(record.round)
        if type(self) is FailingTracker:
            raise OSError("full")

    def finish(self, summary, figures, tables) -> None:
        self.calls.append("finish")

    def abort(self) -> None:
        self.calls.append("abort")


class WorkingTracker(FailingTracker):
    """The same without the failure."""


def test_failed_tracker_and_finished_trackers_are_not_called_again(tmp_path, caplog):
    failing, working = FailingTracker(), WorkingTracker()
    callbacks = Callbacks([failing, working])
    callbacks.call("start", make_info(tmp_path))
    for number in range(2):
        callbacks.call("after_round", make_record(number))
    callbacks.call("finish", {}, [], {})
    callbacks.call("abort")
    assert failing.calls == ["start", 0]
    assert working.calls == ["start", 0, 1, "finish"]
    assert len(warnings(caplog)) == 1


class Refusing(Callback):
    """A callback that fails whenever it can."""

    def start(self, info: RunInfo) -> None:
        raise ZeroDivisionError

    def abort(self) -> None:
        raise AttributeError("file")


def test_all_that_were_started_are_aborted_even_if_one_fails(tmp_path, caplog):
    first, second, never = WorkingTracker(), WorkingTracker(), WorkingTracker()
    first.calls = second.calls
    callbacks = Callbacks([first, second, Refusing(), never])
    second.abort = lambda: second.calls.append("abort of the second")
    with pytest.raises(HookFailed, match=r"start of Refusing .*: ZeroDivisionError"):
        callbacks.call("start", make_info(tmp_path))
    callbacks.call("abort")
    assert first.calls == ["start", "start", "abort of the second", "abort"]
    assert never.calls == []
    (line,) = warnings(caplog)
    assert "Refusing could not finish" in line
    assert callbacks.members == []


def test_unevaluated_round_has_no_class_accuracy():
    """The last test of a view is from an earlier round. nan and None are left out."""
    history = Record(np.ones((1, 2), dtype=np.int64))
    history.add(2, np.array([0.25, math.nan]))
    found = [
        metric_values(RoundRecord(number, {}, {"augmented": history}), ["a", "b"])
        for number in (2, 3)
    ]
    assert list(found[0].values()) == [0.25]
    assert found[1] == {}


def test_trackers_have_separate_options():
    two = composed("tracker=[wandb,tensorboard]", "tracker.wandb.mode=offline")
    wandb, board = build(two).tracker
    assert isinstance(wandb, Wandb)
    assert wandb.mode == "offline"
    assert board == TensorBoard(logdir=None)
    assert tracker_of(resolve(two)).mode == "offline"
    assert tracker_of(resolve(composed("tracker=none"))) is None
    assert build(composed("tracker=none")).tracker == []


def test_option_without_its_own_name_is_rejected():
    """Hydra would merge two such options into one node."""
    config = composed("tracker=none")
    OmegaConf.update(config, "tracker", {"_target_": "mine.Lines"}, force_add=True)
    with pytest.raises(ConfigError, match="must be `# @package tracker"):
        build(config)
