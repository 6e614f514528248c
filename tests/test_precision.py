"""`hardware.precision=auto`: the precision is chosen by timing, and kept by a resumed run."""

import logging
from dataclasses import replace

import pandas as pd
import pytest
import torch

import fedexp
from fedexp.engine.hardware import Hardware
from fedexp.engine.network import FunctionalNetwork
from fedexp.rundir import origin
from fedexp.training import precision, resuming
from fedexp.training.precision import choose_precision, time_steps
from quick_runs import SMALL
from toy_federation import HARDWARE, LOCAL, make_simulation


@pytest.fixture(autouse=True)
def cost(monkeypatch):
    """A CPU with bf16 instructions."""
    costs = [1.0]
    monkeypatch.setattr("fedexp.engine.hardware.bf16_slowdown", lambda: costs[0])
    return costs


def resolved(**changes):
    options = HARDWARE | {"engine": "sequential", "precision": "auto"} | changes
    return Hardware(**options).resolve(cohort_size=4)


def single():
    """A runtime whose model is in single precision."""
    runtime = make_simulation().runtime
    net = FunctionalNetwork(runtime.net.module.float(), "fp32", runtime.net.trained)
    return replace(runtime, net=net, dtype=torch.float32)


def choose(monkeypatch, seconds, before=None, **changes):
    monkeypatch.setattr(precision, "time_steps", lambda *_: seconds)
    return choose_precision(resolved(**changes), make_simulation().runtime, 4, before)


def test_the_fastest_precision_is_chosen_and_noted(monkeypatch, caplog):
    seconds = {"fp32": 3.0, "bf16": 2.0}
    with caplog.at_level(logging.INFO, "fedexp"):
        chosen = choose(monkeypatch, seconds)
    assert chosen.precision == "bf16"
    assert caplog.messages == [
        "hardware.precision=auto: fp32 3000.0 ms, bf16 2000.0 ms per step; using bf16"
    ]
    assert chosen.as_dict()["seconds_of_a_step"] == seconds
    decisive = chosen.arithmetic()
    assert (decisive["precision"], decisive["by_timing"]) == ("bf16", ["precision"])
    assert "seconds_of_a_step" not in decisive
    assert choose(monkeypatch, {"fp32": 1.0, "bf16": 2.0}).precision == "fp32"


@pytest.mark.parametrize("named", ["fp32", "bf16", "fp64"])
def test_a_named_precision_is_not_timed(monkeypatch, named):
    chosen = choose(monkeypatch, None, precision=named)
    assert (chosen.precision, chosen.timed) == (named, None)


def test_fp32_is_chosen_if_the_cpu_emulates_bf16(monkeypatch, cost):
    cost[0] = 10.0
    chosen = choose(monkeypatch, None)
    assert (chosen.precision, chosen.timed) == ("fp32", None)


def test_tf32_is_timed_and_suggested_on_gpus_that_have_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for ampere, names in ((True, ["fp32", "tf32", "bf16"]), (False, ["fp32"])):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, has=ampere: has
        )
        assert resolved(device="cuda").precisions == names
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
        sentence = resolved(device="cuda", precision="fp32").sentence()
        assert ("fp32 (tf32 is faster" in sentence) == ampere


def test_a_resumed_run_keeps_its_precision(monkeypatch, tmp_path):
    new = choose(monkeypatch, {"fp32": 3.0, "bf16": 2.0})
    kept = choose(monkeypatch, None, before="fp32")
    assert (kept.precision, kept.timed) == ("fp32", {})
    # one span of rounds, not two
    assert kept.arithmetic()["by_timing"] == new.arithmetic()["by_timing"]
    # begun on a GPU, in a precision that a CPU does not have
    assert choose(monkeypatch, {"fp32": 1.0, "bf16": 2.0}, before="tf32").precision == "fp32"
    assert resuming.recorded_precision(tmp_path) is None
    # as noted by a version that timed convolutions too
    way = {"precision": "bf16", "convolution": "winograd"}
    origin.record(tmp_path, {}, make_simulation().runtime.data, {}, way)
    assert resuming.recorded_precision(tmp_path) == "bf16"


@pytest.mark.parametrize(("has_gpu", "precision"), [(False, "fp32"), (True, "tf32")])
def test_only_a_cpu_replaces_the_tf32_of_a_resumed_run(monkeypatch, has_gpu, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    begun = Hardware(**HARDWARE | {"precision": "tf32", "device": "auto"})
    assert begun.resumed() == replace(begun, precision=precision)
    exact = replace(begun, precision="fp64")
    assert exact.resumed() == exact


def test_a_resumed_run_in_tf32_ends_on_a_cpu(monkeypatch, tmp_path, capsys):
    """The first round is recorded as tf32, but this CPU computes it in fp32."""
    whole = fedexp.run([*SMALL, "rounds=2"], directory=tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(Hardware, "_check", lambda self, resolved: None)
        begun = [*SMALL, "rounds=1", "hardware.precision=tf32"]
        fedexp.run(begun, directory=tmp_path / "run")
    ended = fedexp.run([f"resume={tmp_path / 'run'}", "rounds=2"])
    warning = "hardware.precision=tf32: this CPU continues the run in fp32"
    assert warning in capsys.readouterr().err
    spans = ended.summary["determinism"]["spans"]
    assert [(span["rounds"], span["precision"]) for span in spans] == [
        ([0, 1], "tf32"),
        ([2, 2], "fp32"),
    ]
    pd.testing.assert_frame_equal(ended.class_accuracy, whole.class_accuracy)


@pytest.mark.parametrize(
    "engine", ["sequential", "vectorised", pytest.param("workers", marks=pytest.mark.slow)]
)
def test_auto_precision_times_the_engine_that_trains(engine):
    """With the real clock. The model does not change."""
    runtime = single()
    before = {name: value.clone() for name, value in runtime.net.parameters().items()}
    found = time_steps(resolved(engine=engine), runtime, 4, ["fp32", "bf16"])
    assert found.keys() == {"fp32", "bf16"}
    assert all(0 < seconds < 10 for seconds in found.values())
    torch.testing.assert_close(runtime.net.parameters(), before, rtol=0, atol=0)
    assert runtime.net.precision == "fp32"


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_steps_of_one_client_or_of_all_are_timed(engine, monkeypatch):
    """The vectorised engine is timed with all clients of a round."""
    calls = []
    hardware = resolved(engine=engine)
    cls = type(hardware.trainer)
    train = cls.train

    def counted(self, shared, cohort, *rest):
        calls.append((shared.runtime.net.precision, [each.steps for each in cohort.schedules]))
        return train(self, shared, cohort, *rest)

    monkeypatch.setattr(cls, "train", counted)
    time_steps(hardware, single(), 4, ["fp32", "bf16"])
    steps = [precision.STEPS] * (4 if engine == "vectorised" else 1)
    assert calls == [("fp32", steps), ("bf16", steps)] * (1 + precision.CALLS)
    assert LOCAL.batch_size == 4
