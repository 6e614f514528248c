"""Callbacks of a run: when they are called, what they see, how they end and resume a run."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import fedexp
from fedexp.algorithms.base import FedAvg
from fedexp.cli import main
from fedexp.core import storage
from fedexp.core.errors import ConfigError, HookFailed
from fedexp.rundir import checkpoint, files
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import job_directories
from fedexp.testing import assert_equal, record
from fedexp.trackers.base import Callback, CallbackConfig, Callbacks, Tracker, name_states
from fedexp.trackers.wandb_tracker import WandbTracker
from fedexp.training.callbacks import callbacks_of, create_all
from fedexp.training.recorder import Recorder
from fedexp.training.rounds import run_rounds
from quick_runs import SMALL
from toy_federation import ALL, TWO_TASKS, make_simulation


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
    recorder = Recorder(directory, simulation, Callbacks([callback]), None)
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


def test_stopped_run_is_tested_in_its_last_round(tmp_path):
    """Its results were those of an earlier model, here of the initial one."""
    options = {"eval_interval": 3, "forgetting_metric": ALL}
    simulation = make_simulation(rounds=5, **options)
    state = play(simulation, tmp_path, Listening(ends_after=1))
    assert (state.round, state.status) == (2, "stopped")
    (tmp_path / "shorter").mkdir()
    shorter = play(make_simulation(rounds=2, **options), tmp_path / "shorter", Listening())
    assert_equal(state.server, shorter.server)
    np.testing.assert_equal(vars(state.record), vars(shorter.record))
    assert state.record.rounds == (0, 2)
    assert state.record.local_rounds == (2,)


def test_interrupt_before_the_first_new_round_leaves_a_run_as_it_is(tmp_path):
    recorder = Recorder(tmp_path, make_simulation(), Callbacks([]), None)
    state = run_rounds(recorder.simulation, recorder.simulation.initial_state(), recorder)
    recorder = Recorder(tmp_path, recorder.simulation, Callbacks([]), None)
    recorder.begin = lambda: pytest.fail("the summary would be removed")
    before = (tmp_path / files.CHECKPOINT).stat().st_mtime_ns
    recorder.save_checkpoint(state)
    assert (tmp_path / files.CHECKPOINT).stat().st_mtime_ns == before


@dataclass  # which makes it unhashable
class Interrupted(Callback):
    """Interrupts a round as Ctrl+C or a dead rank would, between two other observers."""

    def after_round(self, record):
        if record.round == 2:
            raise KeyboardInterrupt


def test_round_is_saved_only_after_all_callbacks_have_seen_it(tmp_path):
    simulation, last = make_simulation(rounds=3), Listening()
    recorder = Recorder(tmp_path, simulation, Callbacks([Listening(), Interrupted(), last]), None)
    with pytest.raises(KeyboardInterrupt):
        run_rounds(simulation, simulation.initial_state(), recorder)
    saved = checkpoint.load(tmp_path).state
    assert saved["round"] == 1
    assert list(saved["callbacks"].values()) == [{"count": 2}, {}, {"count": 2}]

    (tmp_path / "whole").mkdir()
    whole = play(simulation, tmp_path / "whole", Listening())
    again = Callbacks([Listening(), Listening()])
    resumed = record(simulation, tmp_path, resume=True, observers=again)
    assert_equal(resumed.server, whole.server)
    for name in (files.CLIENTS, "class_accuracy.csv"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


class Shown(Tracker):
    """A tracker with a state, which fails in round 1."""

    def __init__(self):
        self.state = {}

    def after_round(self, record):
        if record.round == 1:
            raise OSError("full")

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_states_of_trackers_are_kept_without_them(tmp_path):
    """They are needed when the run has the tracker again. A callback's own state is refused."""
    shown = Shown()
    shown.state = {"id": "a"}
    play(make_simulation(), tmp_path, shown)
    saved = checkpoint.load(tmp_path).state
    assert saved["callbacks"] == {shown.key: {"id": "a"}}
    other = Callbacks([Listening()])
    other.load_states(saved)
    assert other.states()["callbacks"][shown.key] == {"id": "a"}
    again = Shown()
    Callbacks([again]).load_states(saved)
    assert again.state == {"id": "a"}

    with pytest.raises(ConfigError, match=r"the checkpoint has a state of \S+Listening, which"):
        Callbacks([again]).load_states({"callbacks": other.states()["callbacks"]})
    Callbacks([]).load_states({"callbacks": {"one without a state": {}}})


def test_id_of_a_run_in_wandb_is_read_from_earlier_checkpoints():
    tracker, saved = WandbTracker(None), {"callbacks": {}, "wandb_id": "abc"}
    Callbacks([tracker]).load_states(saved)
    assert tracker.state_dict() == {"id": "abc"}


class Wrong(Callback):
    def __init__(self, kind):
        self.kind = kind

    def after_round(self, record):
        self.ends_runs = self.kind != "undeclared"
        return {"reason": True, "undeclared": "enough"}.get(self.kind)

    def after_task(self, record):
        if self.kind == "model in after_task":
            next(iter(record.model["params"].values())).zero_()

    def state_dict(self):
        return {"best": [np.float64(0.5)]} if self.kind == "state" else {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("model in after_task", r"callback: after_task of Wrong changes record.model\['params'\]"),
        ("reason", "after_round returned True; must be a text"),
        ("undeclared", r"Wrong ended the run \(enough\), but .+ does not declare ends_runs"),
        ("state", r"\['best'\]: is a numpy\.float64, which a resumed run could not read"),
    ],
)
def test_callback_that_would_spoil_a_run_is_rejected(tmp_path, kind, message):
    with pytest.raises(ConfigError, match=message):
        play(make_simulation(scenario=TWO_TASKS), tmp_path, Wrong(kind))


class Changing(Callback):
    def __init__(self, change):
        self.change = change

    def after_round(self, record):
        if record.round == 1:
            self.change(record)


class ChangingTracker(Tracker):
    __init__, after_round = Changing.__init__, Changing.after_round


def halve(params):
    for name in params:
        params[name] = params[name] / 2


CHANGES = {
    r"record\.model\['params'\]\[": lambda record: halve(record.model["params"]),
    r"record\.model\['params'\]": lambda record: record.model["params"].clear(),
    r"record\.values\['test_accuracy'\]": lambda record: record.values.update(test_accuracy=1.0),
    r"record\.records": lambda record: record.records.clear(),
    r"record\.result\.server\['count'\]": lambda record: record.result.server["count"].add_(1),
    r"record\.result\.before\['count'\]": lambda record: record.result.before["count"].add_(1),
    r"record\.result\.client_states\[0\]\['n'\]": (
        lambda record: record.result.client_states[0]["n"].add_(1)
    ),
    r"record\.result\.exchanges\[0\]\.trained\['messages'\]\['params'\]": (
        lambda record: halve(record.result.exchanges[0].trained.messages["params"])
    ),
}


class Counting(FedAvg):
    def server_init(self, params, federation):
        return {"params": params, "count": torch.zeros(1)}

    def client_init(self, params, federation):
        return {"n": torch.zeros(1)}

    def aggregate(self, server, messages, round):
        return super().aggregate(server, messages, round) | {"count": server["count"] + 1}


@pytest.mark.parametrize("kind", [Changing, ChangingTracker])
@pytest.mark.parametrize(("what", "change"), CHANGES.items(), ids=CHANGES)
def test_callback_that_changes_what_it_observes_is_refused(tmp_path, what, change, kind):
    group = "tracker" if kind is ChangingTracker else "callback"
    message = rf"^{group}: after_round of {kind.__name__} changes {what}.*; it must not change"
    with pytest.raises(ConfigError, match=message):
        play(make_simulation(Counting()), tmp_path, kind(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.records["plain"].accuracy.sort(),
        lambda record: setattr(record.records["plain"], "accuracy", ()),
    ],
)
def test_error_of_a_callback_names_its_hook_and_line(tmp_path, change):
    message = r"callback: after_round of Changing \(test_callbacks.py, line \d+\): \w+Error: .*"
    with pytest.raises(HookFailed, match=message):
        play(make_simulation(), tmp_path, Changing(change))


@pytest.mark.parametrize("kind", [Changing, ChangingTracker])
@pytest.mark.parametrize(
    ("call", "change"),
    [
        (r"grad_enabled\(False\)", lambda record: torch.set_grad_enabled(False)),
        (r"default_dtype\(torch.float64\)", lambda record: torch.set_default_dtype(torch.float64)),
    ],
)
def test_callback_that_leaves_other_modes_of_torch_is_named(tmp_path, kind, call, change):
    """Local training was blamed, or computed with other numbers."""
    message = rf"after_round of {kind.__name__} leaves torch\.set_{call} to the run"
    with pytest.raises(ConfigError, match=message):
        play(make_simulation(), tmp_path, kind(change))
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_callback_that_changes_the_configuration_or_the_summary_changes_no_file(tmp_path):
    class Careless(Callback):
        def start(self, info):
            info.config.clear()

        def draw(self, summary):
            summary.clear()
            return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fedexp.training.run.callbacks_of", lambda built: [*callbacks_of(built), Careless()]
        )
        run = fedexp.run([*SMALL, "rounds=1"], directory=tmp_path / "run")
    assert run.config["rounds"] == 1
    assert run.summary["rounds"] == 1


def test_callbacks_of_one_class_have_a_state_each(tmp_path):
    callbacks = [Listening(), Listening(), Wrong("nothing")]
    callbacks[1].calls.append("another")
    recorder = Recorder(tmp_path, make_simulation(), Callbacks(callbacks), None)
    run_rounds(recorder.simulation, recorder.simulation.initial_state(), recorder)
    saved = storage.load_tree(tmp_path / files.CHECKPOINT)["callbacks"]
    read = {name: saved[name] for name, each in name_states(callbacks).items()}
    first, second = (len(each.calls) for each in callbacks[:2])
    assert list(read.values()) == [{"count": first}, {"count": second}, {}]
    assert first + 1 == second


OWN = """
from fedexp.trackers.base import Callback, CallbackConfig, Tracker, TrackerConfig

class Counter(Callback):
    def __init__(self, last):
        self.seen, self.last = 0, last

    def after_round(self, record):
        self.seen += 1
        record.analysed["seen"] = self.seen
        return f"seen {self.last}" if self.seen == self.last else None

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def finish(self, summary, figures, tables):
        print("seen", self.seen)

class Counting(CallbackConfig):
    ends_runs = True
    last: int = 3

    def create(self):
        return Counter(self.last)

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
        option += "last: 3\n" * (group == "callback")
        (here / "conf_mine" / group / "mine.yaml").write_text(option)
    options = [*SMALL, "callback=mine", "tracker=mine", "rounds=6"]
    run = fedexp.run(options, directory=here / "run", config_dir=here / "conf_mine")
    assert run.summary["stopped"] == {"by": "callback", "reason": "seen 3"}
    assert run.summary["rounds"] == 2  # rounds 0, 1 and 2
    printed = capsys.readouterr().out
    assert "seen 3" in printed
    assert "shown {'seen': 3}" in printed
    limited = [f"resume={run.directory}", "callback.mine.last=5"]
    longer = fedexp.run(limited, config_dir=here / "conf_mine")
    assert longer.summary["stopped"] == {"by": "callback", "reason": "seen 5"}
    assert longer.config["callback"]["mine"]["last"] == 5
    again = fedexp.run([f"resume={run.directory}"], config_dir=here / "conf_mine")
    assert again.summary["status"] == "completed"
    assert "seen 7" in capsys.readouterr().out


def test_misspelt_hook_of_a_callback_is_refused_before_the_data_are_read(here: Path, capsys):
    """Also by the preview of a sweep, which reads no data."""
    (here / "misspelt.py").write_text(OWN.replace("def state_dict", "def state_dcit"))
    (here / "conf_mine" / "callback").mkdir(parents=True)
    option = "# @package callback.mine\n_target_: misspelt.Counting\nlast: 3\n"
    (here / "conf_mine" / "callback" / "mine.yaml").write_text(option)
    given = [*SMALL, "callback=mine", "dataset=image_folder", "dataset.root=missing"]
    for mode in ([], ["--multirun", "preview=true"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(here)
            assert main.main([*mode, "--config-dir", str(here / "conf_mine"), *given]) == 2
        message = capsys.readouterr().err
        assert "state_dcit: is not used by fedexp (nearest: 'state_dict')" in message
        assert "missing" not in message


def test_job_that_a_callback_stopped_is_done_for_the_same_command(here: Path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(here)
    (here / "counting.py").write_text(OWN)
    (here / "conf_mine/callback").mkdir(parents=True)
    option = "# @package callback.mine\n_target_: counting.Counting\nlast: 3\n"
    (here / "conf_mine/callback/mine.yaml").write_text(option)
    command = ["--multirun", "--config-dir=conf_mine", *SMALL, "rounds=5", "stop.minutes=30"]
    command += ["hydra.sweep.dir=s"]
    for callback, jobs in (("mine", [2]), ("mine", [2]), ("none", [2, 5])):
        assert main.main([*command, f"callback={callback}"]) == 0
        found = [RunDirectory(path).summary["rounds"] for path in job_directories(here / "s")]
        assert sorted(found) == jobs


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
