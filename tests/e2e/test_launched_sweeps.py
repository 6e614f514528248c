"""Sweeps with each of Hydra's launchers give the same runs as the basic launcher."""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import ALGORITHM, SMALL, SOURCE, add_class, assert_same_run

from fedexp.config import launchers
from fedexp.core.packages import how_to_install


def test_missing_launcher_names_its_extra(fedexp, monkeypatch, tmp_path):
    for module, _ in launchers.NEEDED.values():
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "fedexp.cli.search", raising=False)
    for name, extra in (("joblib", "joblib"), ("submitit_local", "slurm")):
        answer = fedexp("--multirun", f"hydra/launcher={name}", "seed=0,1")
        assert answer.code == 2
        assert answer.err.startswith(f"fedexp: hydra/launcher={name}: ")
        assert answer.err.endswith(f"; install it with {how_to_install(extra)}\n")
    (line,) = fedexp.rejected("-m", "hydra/sweeper=optuna").err.splitlines()
    assert line.startswith("fedexp: hydra/sweeper=optuna: ")
    assert "pip install -e '.[optuna]'" in line
    assert not list(tmp_path.iterdir())
    # a preview launches nothing
    preview = fedexp("--multirun", "hydra/launcher=ray", "seed=0,1", "preview=true")
    assert preview.out.splitlines()[-1] == "2 jobs: 0 done, 2 new"
    preview = fedexp("--multirun", "seed=0", "preview=true")
    assert preview.out.splitlines()[-1] == "1 job: 0 done, 1 new"


@pytest.fixture
def sweep(fedexp, fresh_processes, monkeypatch, tmp_path):
    """Return a function that runs a sweep with a launcher in sweeps/<launcher>.

    Its processes have the same import path.
    """
    add_class(tmp_path, "algorithm", "broken", ALGORITHM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), str(tmp_path)]))
    monkeypatch.syspath_prepend(tmp_path)

    def call(name: str, *arguments: str):
        where = (f"hydra/launcher={name}", f"hydra.sweep.dir=sweeps/{name}")
        return fedexp("--multirun", "--config-dir=own", "rounds=2", *SMALL, *where, *arguments)

    return call


def check_against_basic(sweep, launcher: str, *options: str) -> None:
    """Check that runs and tables equal those of the basic launcher, and that failing jobs do not
    affect others.
    """
    answer = sweep(launcher, *GRID, *options)
    assert answer.code == 0, answer.err
    assert f"sweeps/{launcher}: 2 jobs" in answer.out
    there, basic = Path("sweeps", launcher), Path("sweeps/basic")
    assert len(list(basic.glob("digits_*"))) == 2
    for directory in basic.glob("digits_*"):
        assert_same_run(directory, there / directory.name)
    assert (there / "rounds_to_target.csv").read_bytes() == (
        basic / "rounds_to_target.csv"
    ).read_bytes()

    old = {path.name[:-9] for path in there.glob("digits_*")}
    before = {path: path.stat().st_mtime_ns for path in there.glob("digits_*/summary.json")}
    answer = sweep(launcher, "algorithm=broken,fedavg", "seed=1", *options)
    assert answer.code == 1, answer.err
    assert {path: path.stat().st_mtime_ns for path in before} == before, (
        "what is complete stays as it is"
    )
    results = {
        path.parent.name[:-9]: json.loads(path.read_text())
        for path in there.glob("digits_*/summary.json")
    }
    new = {name: result["status"] for name, result in results.items() if name not in old}
    assert new == {"digits_lda_fedavg_seed1": "completed", "digits_lda_broken_seed1": "failed"}
    for path in there.glob("digits_lda_broken_*"):
        assert "the aggregation broke" in (path / "error.txt").read_text()

    assert sweep(launcher, "alpha=-1", *options).code == 2, "bad input in another process"


GRID = ("algorithm=fedavg,scaffold", "seed=0")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_joblib_and_submitit_equal_the_basic_launcher(sweep):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    assert sweep("basic", *GRID).code == 0
    check_against_basic(sweep, "joblib", "hydra.launcher.n_jobs=2")
    check_against_basic(sweep, "submitit_local")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sweep_continues_after_a_killed_joblib_process(sweep, tmp_path):
    """joblib stops all jobs if a process is killed. The same command continues them."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    arguments = ("seed=0,1", "rounds=30", "hydra.launcher.n_jobs=2")
    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill_one, tmp_path / "sweeps/joblib")
        answer = sweep("joblib", *arguments)
    assert answer.code == 1
    assert "Traceback" not in answer.err
    assert "hydra/launcher=joblib: TerminatedWorkerError: " in answer.err
    assert "Continue the sweep with:  fedexp --multirun" in answer.err
    answer = sweep("joblib", *arguments)
    assert answer.code == 0, answer.err
    assert "resuming after round" in (killed.result() / "run.log").read_text()
    assert sweep("basic", "seed=0,1", "rounds=30").code == 0
    for directory in Path("sweeps/basic").glob("digits_*"):
        assert_same_run(directory, Path("sweeps/joblib", directory.name))


def first_job(sweep: Path) -> Path:
    """Wait for a job with several rounds; return its directory."""
    while not (
        found := [
            path for path in sweep.glob("*/rounds.csv") if len(path.read_text().splitlines()) > 3
        ]
    ):
        time.sleep(0.05)
    return found[0].parent


def kill_one(sweep: Path) -> Path:
    """Kill the process of the first job; return the job's directory."""
    job = first_job(sweep)
    os.kill(json.loads((job / ".owner.json").read_text())["process"], signal.SIGKILL)
    return job


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_equals_the_basic_launcher(sweep):
    reason = "Ray's launcher is not installed: pip install 'fedexp[ray]'"  # [bench] has Ray alone
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason=reason)
    ray = pytest.importorskip("ray")
    assert sweep("basic", *GRID).code == 0
    try:
        check_against_basic(
            sweep,
            "ray",
            "hydra.launcher.ray.init.address=local",
            "hydra.launcher.ray.init.num_cpus=2",
        )
    finally:
        ray.shutdown()
