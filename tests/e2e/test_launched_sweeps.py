"""Sweeps under Hydra's launchers: what is said where one cannot work, and real ones beside the basic one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from helpers import SMALL, SOURCE, assert_same_run
from test_multirun import ALGORITHM

from fedexp import launchers


def test_without_the_extra_it_says_what_to_install(fedexp, monkeypatch, tmp_path):
    monkeypatch.setattr(launchers, "importable", lambda module: False)
    for name, extra in (("joblib", "joblib"), ("submitit_slurm", "slurm"), ("submitit_local", "slurm"), ("ray", "ray")):
        answer = fedexp("--multirun", f"hydra/launcher={name}", "seed=0,1")
        assert answer.code == 2
        assert answer.err == f"fedexp: hydra/launcher={name}: is not installed; pip install 'fedexp[{extra}]' brings it\n"
    assert not list(tmp_path.iterdir())
    preview = fedexp("--multirun", "hydra/launcher=ray", "seed=0,1", "preview=true")  # which launches nothing
    assert preview.out.splitlines()[-1] == "2 jobs: 0 done, 2 new"


def test_a_launcher_that_does_not_exist(fedexp, tmp_path):
    answer = fedexp("--multirun", "hydra/launcher=jolib", "seed=0,1")
    assert answer.code == 2
    launchers_there = "basic, joblib, ray, submitit_local, submitit_slurm"
    assert answer.err == (
        f"fedexp: hydra/launcher=jolib: no such launcher (nearest: 'joblib'); launchers: {launchers_there}\n"
    )
    answer = fedexp("--multirun", "launcher=joblib", "seed=0,1")
    assert (answer.code, answer.err) == (2, "fedexp: launcher: is hydra/launcher\n")
    assert not list(tmp_path.iterdir())


def test_jobs_per_gpu_is_checked(fedexp, tmp_path):
    answer = fedexp("hardware.jobs_per_gpu=0")
    assert (answer.code, answer.err) == (2, "fedexp: hardware.jobs_per_gpu=0: must be at least 1\n")


# Engine and threads are left to the launcher.
SWEEP = ("--multirun", "--config-dir=own", "rounds=2", *SMALL[:-3], "hardware=cpu")


@pytest.fixture
def sweep(fedexp, monkeypatch, tmp_path):
    """`sweep("joblib", ...)` in the directory multirun/joblib, of processes that import what this one does."""
    (tmp_path / "broken_algorithm.py").write_text(ALGORITHM)
    (tmp_path / "own/algorithm").mkdir(parents=True)
    (tmp_path / "own/algorithm/broken.yaml").write_text("# Broken.\n_target_: broken_algorithm.Broken\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), str(tmp_path)]))
    monkeypatch.syspath_prepend(tmp_path)

    def call(name: str, *arguments: str):
        return fedexp(*SWEEP, f"hydra/launcher={name}", f"hydra.sweep.dir=multirun/{name}", *arguments)

    return call


def directories(launcher: str) -> list[Path]:
    return sorted(Path("multirun", launcher).glob("digits_*"))


def check_against_basic(sweep, launcher: str, *options: str) -> None:
    """Four jobs are those of the basic launcher; two that fail leave them alone, and are tried again."""
    grid = ("algorithm=fedavg,fedntd", "seed=0,1")
    assert sweep("basic", *grid).code == 0
    answer = sweep(launcher, "algorithm=fedavg,broken,fedntd", "seed=0,1", *options)
    assert answer.code == 1, answer.err
    assert f"hydra/launcher={launcher}: 6 jobs" in answer.out
    bad = [path for path in directories(launcher) if (path / "error.txt").exists()]
    assert [path.name[:22] for path in bad] == ["digits_lda_broken_seed0", "digits_lda_broken_seed1"]
    assert all("the aggregation broke" in (path / "error.txt").read_text() for path in bad)
    assert [path.name for path in directories("basic")] == [p.name for p in directories(launcher) if p not in bad]
    for directory in directories("basic"):
        assert_same_run(directory, Path("multirun", launcher, directory.name))
    rows = {path.parent.name: path.read_text().splitlines() for path in Path("multirun").glob("*/table.csv")}
    assert len(rows["basic"]) > 4
    assert set(rows["basic"]) <= set(rows[launcher])

    # Once more, with one that is new and cannot be: what is complete stays as it is.
    before = {path: path.stat().st_mtime_ns for path in Path("multirun", launcher).glob("*/summary.json")}
    assert sweep(launcher, "alpha=0.1,-1", "seed=0", *options).code == 2, "bad input, as with the basic launcher"
    changed = {path.parent for path, stamp in before.items() if path.stat().st_mtime_ns != stamp}
    assert changed == set()
    (new,) = set(directories(launcher)) - {path.parent for path in before}
    assert "alpha=-1.0: must be" in (new / "error.txt").read_text()


@pytest.mark.slow
def test_joblib(sweep):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    check_against_basic(sweep, "joblib", "hydra.launcher.n_jobs=2")


@pytest.mark.slow
def test_submitit_local(sweep):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    check_against_basic(sweep, "submitit_local")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray(sweep):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedexp[ray]'")
    ray = pytest.importorskip("ray")
    try:
        check_against_basic(sweep, "ray", "hydra.launcher.ray.init.address=local", "hydra.launcher.ray.init.num_cpus=2")
    finally:
        ray.shutdown()
