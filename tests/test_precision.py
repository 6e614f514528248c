"""`hardware.precision=auto` depends on the device, and a resumed run keeps its precision."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import fedexp
from fedexp.analysis.evaluation import choose_hardware
from fedexp.engine.hardware import Hardware
from fedexp.rundir import origin
from fedexp.training.folder import RunFolder
from quick_runs import SMALL
from toy_federation import HARDWARE


def resolved(**changes):
    return Hardware(**HARDWARE | changes).resolve(cohort_size=4)


def test_auto_is_bf16_only_on_gpus_that_have_it(monkeypatch):
    """On other GPUs and on CPUs, it is fp32. The log suggests tf32 where it is faster."""
    assert resolved(device="cpu", precision="auto").precision == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for ampere, auto in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, has=ampere: has
        )
        assert resolved(device="cuda", precision="auto").precision == auto
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
        sentence = resolved(device="cuda", precision="fp32").sentence()
        assert ("fp32 (tf32 is faster" in sentence) == ampere


def test_a_resumed_run_keeps_its_precision(tmp_path):
    begun = Hardware(**HARDWARE | {"precision": "auto", "device": "cpu"})
    # begun on a GPU: a CPU does not have tf32
    for before, now in (("bf16", "bf16"), ("fp32", "fp32"), ("tf32", "fp32")):
        assert begun.resumed(before).resolve(cohort_size=4).precision == now
    for first, precision in ((0, "tf32"), (2, "fp32")):  # the rounds on a GPU, then on a CPU
        part = {"first_round": first, "hardware": {"precision": precision}}
        before = origin.read(tmp_path) if first else None
        known = origin.write(tmp_path, {}, [], part, before)
    folder = SimpleNamespace(continues=True, origin=known)
    assert RunFolder.precision.fget(folder) == "tf32"


@pytest.mark.parametrize(("has_gpu", "precision"), [(False, "fp32"), (True, "tf32")])
def test_only_a_cpu_replaces_the_tf32_of_a_resumed_run(monkeypatch, has_gpu, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    begun = Hardware(**HARDWARE | {"precision": "tf32", "device": "auto"})
    assert begun.resumed("tf32") == replace(begun, precision=precision)
    exact = replace(begun, precision="fp64")
    assert exact.resumed("fp64") == exact


@pytest.mark.parametrize(
    ("hardware", "used", "precision", "exact"),
    [
        ({"precision": "fp64"}, "fp64", "fp64", "fp64"),
        ({"precision": "bf16"}, "bf16", "bf16", "fp32"),
        ({"precision": "auto"}, "bf16", "bf16", "fp32"),
        ({"precision": "tf32"}, "tf32", "fp32", "fp32"),  # a CPU does not have tf32
        ("cpu", "fp32", "fp32", "fp32"),  # not a node of options
    ],
)
def test_evaluation_uses_the_precision_of_the_run(hardware, used, precision, exact):
    run = SimpleNamespace(config={"hardware": hardware}, summary={"hardware": {"precision": used}})
    assert choose_hardware(run, "cpu").precision == precision
    assert choose_hardware(run, "cpu", exact=True).precision == exact


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
    parts = ended.summary["parts"]
    assert [(part["first_round"], part["hardware"]["precision"]) for part in parts] == [
        (0, "tf32"),
        (2, "fp32"),
    ]
    pd.testing.assert_frame_equal(ended.class_accuracy, whole.class_accuracy)
