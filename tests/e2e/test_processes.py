"""Commands that are killed or interrupted, with workers, and two at a time."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers import FEDERATION, assert_same_run

RUN = (
    "algorithm=scaffold",
    "rounds=6",
    "forgetting_metric=all",
    "seed=3",
    *FEDERATION,
    "local.epochs=2",
    "tracker=none",
)
WORKERS = ("hardware.engine=workers", "hardware.workers=2")


def children(pid: int) -> set[int]:
    """Return the child processes of `pid`."""
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
    """Return whether the processes end within some seconds."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if Path("/proc", str(pid)).exists()]:
        states = [Path("/proc", str(pid), "stat") for pid in alive]
        if all(
            not s.exists() or s.read_text().rpartition(")")[2].split()[0] == "Z" for s in states
        ):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for_rounds(directory: Path, count: int, process) -> None:
    """Wait until rounds.csv has `count` trained rounds."""
    path, deadline = directory / "rounds.csv", time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= count + 2:  # header and round 0
            return
        assert process.poll() is None, "the process has ended"
        time.sleep(0.01)
    raise AssertionError(f"no {count} rounds within two minutes")


def rounds_in(directory: Path) -> int:
    return torch.load(directory / "checkpoint/latest.pt", weights_only=True)["round"]


@pytest.mark.slow
def test_a_run_continues_after_a_signal_and_a_kill(start, fedexp, tmp_path):
    """SIGTERM saves and prints how to resume. A kill leaves rows after the checkpoint, the last one
    incomplete."""
    run = tmp_path / "run"
    process = start(*RUN, "hydra.run.dir=run", "checkpoint_interval=100")
    wait_for_rounds(run, 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130, process.read()
    assert "fedexp resume=run" in process.read()
    assert "Traceback" not in process.read()
    saved = rounds_in(run)
    assert 2 <= saved < 6

    process = start("resume=run", "tracker=none", "checkpoint_interval=100")
    wait_for_rounds(run, saved + 1, process)
    process.kill()
    process.wait()
    assert rounds_in(run) == saved
    assert not (run / "summary.json").exists()
    with open(run / "rounds.csv", "a", encoding="utf-8") as file:
        file.write("6,0.5,0.1")
    (run / "checkpoint" / ".latest.pt.1.tmp").write_bytes(b"half a check")
    answer = fedexp.done("resume=run")
    assert f"resuming after round {saved}; the later rounds" in answer.err
    assert not list(run.rglob("*.tmp"))
    fedexp.done(*RUN, "hydra.run.dir=undisturbed")
    assert_same_run(run, tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_run_continues_after_a_worker_and_its_parent_are_killed(start, fedexp, tmp_path):
    """The sequential engine continues, bit for bit as without kills."""
    process = start(*RUN, *WORKERS, "hydra.run.dir=run")
    wait_for_rounds(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGSTOP)  # so that no rounds pass meanwhile
    first, second = sorted(children(process.pid))
    os.kill(first, signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    while len(later := children(process.pid)) < 2:
        assert process.poll() is None, process.read()
        time.sleep(0.01)
    assert second in later
    wait_for_rounds(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert are_gone(later)
    assert f"(process {first}) ended by signal 9 (SIGKILL" in (tmp_path / "run/run.log").read_text()
    fedexp.done("resume=run", "hardware.engine=sequential", "hardware.workers=null")
    fedexp.done(*RUN, "hydra.run.dir=undisturbed")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_worker(start, tmp_path):
    process = start(*RUN, "hydra.run.dir=run", "hardware.engine=workers", "hardware.workers=1")
    wait_for_rounds(tmp_path / "run", 1, process)
    workers = children(process.pid)
    assert len(workers) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, process.read()
    assert "Traceback" not in process.read()
    assert are_gone(workers)
    assert 1 <= rounds_in(tmp_path / "run") < 6


SWEEP = (
    "--multirun",
    "hydra.sweep.dir=multirun/again",
    "rounds=3",
    "seed=0,1",
    "tracker=none",
    *FEDERATION,
)


@pytest.mark.slow
def test_two_sweeps_do_not_run_one_job_twice(start, fedexp, tmp_path):
    """The second one skips the job of the first one, which is stopped, and names its process."""
    sweep = tmp_path / "multirun/again"
    first = start(*SWEEP)
    while not list(sweep.glob("*/rounds.csv")):
        assert first.poll() is None, first.read()
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    (occupied,) = {path.parent.name for path in sweep.glob("*/rounds.csv")}
    answer = fedexp.done(*SWEEP)
    assert f"{occupied}: process {first.pid} on " in answer.err
    other = fedexp.rejected("rounds=3", *FEDERATION, f"hydra.run.dir={sweep / occupied}")
    assert f"process {first.pid} on " in other.err
    (complete,) = sweep.glob("*/summary.json")
    assert complete.parent.name != occupied
    when = complete.stat().st_mtime_ns
    first.send_signal(signal.SIGCONT)
    assert first.wait() == 0, first.read()
    assert complete.stat().st_mtime_ns == when
    summaries = [json.loads(path.read_text()) for path in sweep.glob("*/summary.json")]
    assert [summary["status"] for summary in summaries] == ["completed"] * 2
    assert [len(path.read_text().splitlines()) for path in sweep.glob("*/rounds.csv")] == [5, 5]
