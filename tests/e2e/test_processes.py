"""Commands that are killed or interrupted, with several ranks, and two at a time."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from helpers import FEDERATION, SMALL, SOURCE, assert_same_run

from leftovers import children, state_of

RUN = (
    "algorithm=scaffold",
    "rounds=4",
    "forgetting_metric=all",
    "seed=3",
    *SMALL,
    "local.epochs=2",
    "tracker=none",
)
# An import of torch takes half a minute on a busy machine, and a test starts up to seven processes.
pytestmark = pytest.mark.timeout(600)
WORKERS = ("hardware.engine=workers", "hardware.workers=2")


def wait_for(condition: Callable[[], bool], process, seconds: float = 240.0) -> None:
    """Wait while the process runs until a condition holds. It may take long on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.read()
        assert time.monotonic() < deadline, process.read()
        time.sleep(0.1)


def wait_until_stopped(directory: Path, rounds: int, process) -> None:
    """Wait until STOP_AFTER has stopped the process after a number of rounds."""
    path = directory / "rounds.csv"
    lines = rounds + 2  # header and round 0
    wait_for(
        lambda: (
            path.exists()
            and path.read_bytes().count(b"\n") == lines
            and state_of(process.pid) == "T"
        ),
        process,
    )


def send(process, number: int) -> None:
    """Send a signal to a stopped process, and let it continue."""
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)


def wait_for_end(pids: Iterable[int], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if state_of(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def rounds_in(directory: Path) -> int:
    return torch.load(directory / "checkpoint/latest.pt", weights_only=True)["round"]


def test_a_killed_run_continues_bit_for_bit(start, fedexp, tmp_path):
    """Ranks are killed below."""
    engines = ("sequential", "vectorised")
    command = ("algorithm=scaffold", "rounds=4", *SMALL)
    command = (*command, "forgetting_metric=all", "tracker=none")
    process = start(*command, STOP_AFTER="2", ENGINES=" ".join(engines))
    wait_for(lambda: [*map(state_of, children(process.pid))] == ["T", "T"], process)
    for pid in children(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    for engine in engines:
        run = tmp_path / engine
        assert rounds_in(run) == 2
        assert not (run / "summary.json").exists()
        fedexp.done(f"resume={engine}")
        fedexp.done(*command, f"hardware.engine={engine}", "hydra.run.dir=undisturbed")
        assert_same_run(run, tmp_path / "undisturbed")
        shutil.rmtree(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_run_continues_after_a_signal_and_a_kill(start, fedexp, tmp_path):
    """SIGTERM saves and prints how to resume. A kill leaves rows after the checkpoint, the last one
    incomplete."""
    run = tmp_path / "run"
    process = start(*RUN, "hydra.run.dir=run", "checkpoint_interval=100", STOP_AFTER="2")
    wait_until_stopped(run, 2, process)
    send(process, signal.SIGTERM)
    assert process.wait() == 130, process.read()
    assert "fedexp resume=run" in process.read()
    assert "Traceback" not in process.read()
    assert rounds_in(run) == 2

    process = start("resume=run", "checkpoint_interval=100", STOP_AFTER="3")
    wait_until_stopped(run, 3, process)
    process.kill()
    process.wait()
    assert rounds_in(run) == 2
    assert not (run / "summary.json").exists()
    with open(run / "rounds.csv", "a", encoding="utf-8") as file:
        file.write("4,0.5,0.1")
    (run / "checkpoint" / ".latest.pt.1.tmp").write_bytes(b"half a check")
    answer = fedexp.done("resume=run")
    assert "resuming after round 2; the later rounds" in answer.err
    assert not list(run.rglob("*.tmp"))
    fedexp.done(*RUN, "hydra.run.dir=undisturbed")
    assert_same_run(run, tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_run_continues_after_a_rank_and_then_rank_0_are_killed(start, fedexp, tmp_path):
    """Bit for bit as without kills, with other numbers of ranks. No rank outlives rank 0."""
    run = tmp_path / "run"
    process = start(*RUN, *WORKERS, "hydra.run.dir=run", "checkpoint_interval=100", STOP_AFTER="1")
    wait_until_stopped(run, 1, process)
    (rank,) = children(process.pid)
    os.kill(rank, signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 1, process.read()
    said = process.read()
    assert re.search(rf"round 2, .*: rank 1 \(process {rank} on .*\) ended by signal 9 ", said)
    assert "Traceback" not in said
    assert "The state after round 1 was saved. Continue with:  fedexp resume=run" in said
    assert rounds_in(run) == 1

    process = start("resume=run", "hardware.workers=3", STOP_AFTER="2")
    wait_until_stopped(run, 2, process)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    wait_for_end(ranks)
    fedexp.done("resume=run", "hardware.engine=sequential", "hardware.workers=null")
    fedexp.done(*RUN, "hydra.run.dir=undisturbed")
    assert_same_run(run, tmp_path / "undisturbed")


@pytest.mark.slow
def test_no_rank_outlives_an_interrupt(start, tmp_path):
    """A terminal sends Ctrl-C to all ranks."""
    process = start(*RUN, *WORKERS, "hydra.run.dir=run", "checkpoint_interval=100", STOP_AFTER="1")
    wait_until_stopped(tmp_path / "run", 1, process)
    (rank,) = children(process.pid)
    os.kill(rank, signal.SIGINT)
    send(process, signal.SIGINT)
    assert process.wait() == 130, process.read()
    wait_for_end([rank])
    assert "Traceback" not in process.read()
    assert rounds_in(tmp_path / "run") == 1


def test_a_rank_says_for_whom_it_waits_and_ends_on_a_signal(start):
    """Variables that an earlier program has left behind look like those of a slow rank."""
    ranks = []
    for rank, number in ((0, signal.SIGINT), (1, signal.SIGTERM)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        told["MASTER_PORT"] = port
        words = f"rank {rank} of 2 waits for rank {1 - rank} (all meet at 127.0.0.1:{port})"
        process = start("rounds=1", "hydra.run.dir=run", **told)
        ranks.append((process, number, words))
    for process, number, words in ranks:
        wait_for(lambda process=process, words=words: words in process.read(), process)
        process.send_signal(number)
    for process, _, words in ranks:
        assert process.wait() == 130, process.read()
        (line,) = [line for line in process.read().splitlines() if "waits" in line]
        assert line.startswith(f"fedexp: {words}, because RANK=")
        assert line.endswith("if this is the only process, unset RANK")


@pytest.mark.slow
def test_two_agents_of_torchrun_train_one_run(fedexp, tmp_path):
    """Two nodes on the loopback interface, with one and two ranks. Only rank 0 writes files, and
    each node loads the data."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ("algorithm=scaffold", "rounds=2", *SMALL, "tracker=none")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2")
    torchrun = (*torchrun, "--master-addr=127.0.0.1", f"--master-port={port}")
    variables = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = [
        subprocess.Popen(
            (
                *(*torchrun, f"--node-rank={node}", f"--nproc-per-node={node + 1}"),
                *("-m", "fedexp", *command, "hardware.engine=auto", "hydra.run.dir=run"),
            ),
            cwd=tmp_path,
            env=os.environ | variables,
        )
        for node in range(2)
    ]
    try:
        assert [agent.wait(500) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.terminate()  # it then ends its ranks
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["hardware"]["workers"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    fedexp.done(*command, "hydra.run.dir=undisturbed")
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


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
    first = start(*SWEEP, STOP_AFTER="1")
    wait_for(lambda: state_of(first.pid) == "T", first)
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
