"""Runs on several processes: the same numbers, and nobody left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers import SMALL, assert_same_run
from test_resume import RUN, rounds_in, wait_for_rounds

WORKERS = ("hardware.engine=workers", "hardware.workers=2")


def children(pid: int) -> set[int]:
    """Processes whose parent is `pid`."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has just ended
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if int(parent) == pid and state != "Z":
            found.add(int(stat.parent.name))
    return found


def are_gone(pids: set[int], seconds: float = 5.0) -> bool:
    """Whether they end within some time."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if Path("/proc", str(pid)).exists()]:
        states = [Path("/proc", str(pid), "stat") for pid in alive]
        if all(not s.exists() or s.read_text().rpartition(")")[2].split()[0] == "Z" for s in states):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.slow  # half a minute; it stands on parts that are tested one by one
def test_workers_die_the_parent_dies_and_the_run_is_the_same(start, fedexp, tmp_path):
    """One worker killed, then the parent, then continued on the sequential engine: the undisturbed run, bit for bit."""
    process = start(*RUN, *WORKERS, "hydra.run.dir=run")
    wait_for_rounds(tmp_path / "run", 1, process)
    first, second = sorted(children(process.pid))
    os.kill(first, signal.SIGKILL)
    wait_for_rounds(tmp_path / "run", 3, process)
    later = children(process.pid)
    assert len(later) == 2
    assert second in later
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert are_gone(later)
    assert f"(process {first}) ended by signal 9 (SIGKILL" in (tmp_path / "run/run.log").read_text()
    assert fedexp("resume=run", "hardware.engine=sequential", "hardware.workers=null").code == 0
    assert fedexp(*RUN, "hydra.run.dir=undisturbed").code == 0
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


def test_interrupted_runs_leave_no_worker(start, tmp_path):
    process = start(*RUN, *WORKERS, "hydra.run.dir=run")
    wait_for_rounds(tmp_path / "run", 1, process)
    workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in output) == (130, False), output
    assert are_gone(workers)
    assert 1 <= rounds_in(tmp_path / "run") < 6


def test_the_choice_is_made_and_said(fedexp, tmp_path):
    answer = fedexp(*SMALL, "rounds=1", "hardware.engine=auto", "hydra.run.dir=run")
    cores = len(os.sched_getaffinity(0))
    expected = (
        f"cpu ({min(cores, 4)} workers of 1 thread each), fp32" if cores > 1 else "cpu (1 thread), engine sequential"
    )
    assert expected in answer.err
