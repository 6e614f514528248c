"""Hydra's launchers with fedexp's defaults, and what a job knows of its place."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from fedexp.cli.job import read_place
from fedexp.config import launchers
from fedexp.config.composition import quoted
from fedexp.config.launchers import jobs_at_once, register
from fedexp.config.options import list_options
from fedexp.engine import hardware
from fedexp.engine.ranks.rank import Rank
from fedexp.engine.sequential import Sequential
from fedexp.training.job import Place
from toy_federation import CONF, HARDWARE

NAMES = list_options("launcher", [CONF])


def launching(*overrides: str):
    """Return the configuration of the process that launches the jobs."""
    register()
    with warnings.catch_warnings(), initialize_config_dir(str(CONF), **launchers.DEFAULTS):
        warnings.simplefilter("error")
        loader = GlobalHydra.instance().config_loader()
        return loader.load_configuration("config", list(overrides), run_mode=RunMode.MULTIRUN)


@pytest.mark.parametrize("name", NAMES)
def test_every_launcher_composes_with_its_plugin(monkeypatch, name):
    monkeypatch.setattr(launchers, "count_gpus", lambda: 3)
    node = OmegaConf.to_container(launching(f"hydra/launcher={name}").hydra.launcher, resolve=True)
    ours = OmegaConf.to_container(OmegaConf.load(CONF / "launcher" / f"{name}.yaml"))
    plain = {key: value for key, value in ours.items() if "$" not in str(value)}
    assert {key: node[key] for key in plain} == plain
    if name == "joblib":
        assert node["n_jobs"] == 3
    if name == "submitit_local":
        assert node["gpus_per_node"] == 3
    if name == "ray":
        assert "object_store_memory" in node["ray"]["init"], (
            "the plugin would set it, and Ray refuse a running cluster"
        )


@pytest.mark.parametrize(
    ("gpus", "changes", "expected"),
    [
        (0, {}, 8),
        (2, {}, 2),
        (2, {"device": "cuda:1"}, 1),
        (2, {"engine": "workers"}, 1),  # a run on all GPUs
        (2, {"device": "cpu"}, 8),
    ],
)
def test_number_of_parallel_jobs_fits_the_hardware(monkeypatch, gpus, changes, expected):
    monkeypatch.setattr(launchers, "count_gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    assert jobs_at_once(**{"device": "auto", "engine": "auto"} | changes) == expected


def test_parallel_jobs_share_the_cores(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    launcher = launching("hydra/launcher=joblib", "hydra.launcher.n_jobs=4").hydra.launcher
    assert read_place(launcher, 5) == Place(2, 5, alone=False)


@pytest.mark.parametrize("text", ["/plain", "/with space", "/it's", "/a\\b", "/{x},[y]", "/a=b"])
def test_hydra_reads_a_quoted_path(text):
    (override,) = OverridesParser.create().parse_overrides([f"hydra.sweep.dir={quoted(text)}"])
    assert override.value() == text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["hydra/launcher=basic"], Place(None, 5, alone=True)),
        (
            ["hydra/launcher=submitit_local", "hydra.launcher.cpus_per_task=2"],
            Place(2, 5, alone=True),
        ),
        (["hydra/launcher=submitit_slurm"], Place(4, alone=True)),
        (
            ["hydra/launcher=ray", "hydra.launcher.ray.remote.num_cpus=3"],
            Place(3, alone=False),
        ),
        (
            ["hydra/launcher=ray", "hydra.launcher.ray.remote.num_cpus=0.5"],
            Place(1, alone=False),
        ),
    ],
)
def test_cores_and_gpus_of_a_job_follow_from_the_launcher(overrides, expected):
    assert read_place(launching(*overrides).hydra.launcher, 5) == expected


def test_jobs_use_the_gpus_in_turn(monkeypatch):
    asked = hardware.Hardware(**HARDWARE | {"device": "auto"})
    assert asked.for_job(1) is asked  # no GPU here
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [asked.for_job(number).device for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    # the user has requested no device
    reason = "the jobs use the GPUs in turn"
    assert asked.for_job(1).resolve(4).reason == reason
    assert asked.for_job(1).resumed("fp32").resolve(4).reason == reason
    for changes in ({"device": "cpu"}, {"device": "cuda:1"}, {"engine": "workers"}):
        other = replace(asked, **changes)
        assert other.for_job(0) is other


@pytest.mark.parametrize(
    ("device", "processes", "devices"),
    [
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),  # not more than clients
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:1", 1, ["cuda:1"]),
        ("cpu", 3, ["cpu", "cpu", "cpu"]),
    ],
)
def test_each_rank_uses_another_gpu_unless_one_is_named(monkeypatch, device, processes, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    monkeypatch.setattr(
        hardware.Resolved, "apply", lambda resolved: applied.append(str(resolved.device))
    )
    applied, runtime = [], SimpleNamespace(to=str)
    asked = hardware.Hardware(**HARDWARE | {"device": device, "engine": "workers"})
    resolved = asked.resolve(cohort_size=3)
    assert resolved.workers == processes
    for number in range(processes):
        Rank().begin(resolved, number, Sequential(), runtime)
    assert applied == devices


@pytest.mark.parametrize(
    ("share", "changes", "expected"),
    [
        (None, {}, ("workers", 6, 1)),
        (4, {}, ("workers", 4, 1)),
        (1, {}, ("sequential", 1, 1)),
        (4, {"threads": 2}, ("workers", 2, 2)),
        (4, {"engine": "sequential"}, ("sequential", 1, 4)),
        (99, {}, ("workers", 6, 1)),  # 6 clients; the share exceeds the cores
        (1, {"workers": 3}, ("workers", 3, 1)),  # as given
    ],
)
def test_jobs_share_the_cores(monkeypatch, share, changes, expected):
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    chosen = hardware.Hardware(**HARDWARE | changes).resolve(cohort_size=6, share=share)
    assert (chosen.engine, chosen.workers, chosen.threads) == expected
