"""Callbacks of a run: when they are called, what they see, how they end and resume a run."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedexp
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.rundir import checkpoint, files
from fedexp.trackers.base import Callback, CallbackConfig, name_states
from fedexp.training.callbacks import create_all
from fedexp.training.recorder import Recorder
from fedexp.training.rounds import run_rounds
from quick_runs import SMALL
from toy_federation import TWO_TASKS, make_simulation


class Listening(Callback):
    def __init__(self, ends_after=None):
        self.calls, self.models, self.ends_after = [], [], ends_after

    def after_round(self, record):
        self.calls.append(("round", record.round, record.values["test_accuracy"]))
        self.models.append({k: v.clone() for k, v in record.model["params"].items()})
        return "enough" if record.round == self.ends_after else None

    def after_task(self, record):
        self.calls.append(("task", record.round))

    def state_dict(self):
        return {"count": len(self.calls)}


def play(simulation, directory, callback):
    recorder = Recorder(directory, simulation, [callback], None)
    return run_rounds(simulation, simulation.initial_state(), recorder)


def test_callback_sees_each_round_and_task_with_its_model(tmp_path):
    callback = Listening()
    state = play(make_simulation(scenario=TWO_TASKS), tmp_path, callback)
    assert [call[:2] for call in callback.calls] == [
        *(("round", number) for number in (0, 1, 2)),
        ("task", 2),
        *(("round", number) for number in (3, 4)),
        ("task", 4),
    ]
    assert [call[2] for call in callback.calls if len(call) > 2] == list(state.record.accuracy)
    for name, value in state.server["params"].items():
        assert torch.equal(callback.models[-1][name], value)
    saved = storage.load_tree(tmp_path / files.CHECKPOINT)
    assert saved["callbacks"] == {callback.key: {"count": 7}}


def test_callback_ends_a_run_with_its_reason(tmp_path):
    state = play(make_simulation(rounds=5), tmp_path, Listening(ends_after=2))
    assert (state.round, state.status) == (2, "stopped")
    assert state.stopped == {"by": "callback", "reason": "enough"}
    assert checkpoint.load(tmp_path).state["status"] == "stopped"


def test_interrupt_before_the_first_new_round_leaves_a_run_as_it_is(tmp_path):
    recorder = Recorder(tmp_path, make_simulation(), [], None)
    state = run_rounds(recorder.simulation, recorder.simulation.initial_state(), recorder)
    recorder.begin = lambda: pytest.fail("the summary would be removed")
    before = (tmp_path / files.CHECKPOINT).stat().st_mtime_ns
    recorder.save_checkpoint(state)
    assert (tmp_path / files.CHECKPOINT).stat().st_mtime_ns == before


class Wrong(Callback):
    def __init__(self, kind):
        self.kind = kind

    def after_round(self, record):
        if self.kind == "model":
            next(iter(record.model["params"].values())).zero_()
        return True if self.kind == "reason" else None

    def after_task(self, record):
        if self.kind == "model in after_task":
            next(iter(record.model["params"].values())).zero_()

    def state_dict(self):
        return {"best": [np.float64(0.5)]} if self.kind == "state" else {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("model", "a callback changed the global model"),
        ("model in after_task", "a callback changed the global model"),
        ("reason", "after_round returned True; must be a text"),
        ("state", r"\['best'\]: is a numpy\.float64, which a resumed run could not read"),
    ],
)
def test_callback_that_would_spoil_a_run_is_rejected(tmp_path, kind, message):
    with pytest.raises(ConfigError, match=message):
        play(make_simulation(scenario=TWO_TASKS), tmp_path, Wrong(kind))


def test_callbacks_of_one_class_have_a_state_each(tmp_path):
    callbacks = [Listening(), Listening(), Wrong("nothing")]
    callbacks[1].calls.append("another")
    recorder = Recorder(tmp_path, make_simulation(), callbacks, None)
    run_rounds(recorder.simulation, recorder.simulation.initial_state(), recorder)
    saved = storage.load_tree(tmp_path / files.CHECKPOINT)["callbacks"]
    read = {name: saved[name] for name, each in name_states(callbacks).items()}
    first, second = (len(each.calls) for each in callbacks[:2])
    assert list(read.values()) == [{"count": first}, {"count": second}, {}]
    assert first + 1 == second


OWN = """
from fedexp.trackers.base import Callback, CallbackConfig, Tracker, TrackerConfig

class Counter(Callback):
    seen = 0

    def after_round(self, record):
        self.seen += 1
        record.analysed["seen"] = self.seen
        return "seen 3" if self.seen == 3 else None

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def finish(self, summary, figures, tables):
        print("seen", self.seen)

class Counting(CallbackConfig):
    def create(self):
        return Counter()

class Shown(Tracker):
    def after_round(self, record):
        print("shown", record.analysed)

class Showing(TrackerConfig):
    def create(self):
        return Shown()
"""


def test_own_callback_is_an_option_and_keeps_its_state(here: Path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(here)
    (here / "counting.py").write_text(OWN)
    for group, name in (("callback", "Counting"), ("tracker", "Showing")):
        (here / "conf_mine" / group).mkdir(parents=True)
        option = f"# @package {group}.mine\n_target_: counting.{name}\n"
        (here / "conf_mine" / group / "mine.yaml").write_text(option)
    options = [*SMALL, "callback=mine", "tracker=mine", "rounds=6"]
    run = fedexp.run(options, directory=here / "run", config_dir=here / "conf_mine")
    assert run.summary["stopped"] == {"by": "callback", "reason": "seen 3"}
    assert run.summary["rounds"] == 2  # rounds 0, 1 and 2
    printed = capsys.readouterr().out
    assert "seen 3" in printed
    assert "shown {'seen': 3}" in printed
    again = fedexp.run([f"resume={run.directory}"], config_dir=here / "conf_mine")
    assert again.summary["status"] == "completed"
    assert "seen 7" in capsys.readouterr().out


def test_option_that_creates_no_callback_is_named():
    class Forgotten(CallbackConfig):
        def create(self):
            Listening()

    with pytest.raises(
        ConfigError, match=r"^Forgotten: create returns None, but must return a \S+"
    ):
        create_all([Forgotten()], Callback)


@pytest.mark.parametrize("value", ["[none,keep]", "null"])
def test_none_is_not_combined(value):
    with pytest.raises(fedexp.ConfigError, match="callback="):
        fedexp.run([*SMALL, f"callback={value}"])
