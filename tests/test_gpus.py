"""Jobs that share the GPUs of a machine, with real processes and simulated GPUs."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedexp.config.build import build
from fedexp.engine import hardware
from fedexp.engine.hardware import Hardware, Resolved
from fedexp.engine.processes.worker import Worker
from fedexp.training import gpus
from fedexp.training.job import Place
from fedexp.training.run import on_a_gpu
from toy_federation import HARDWARE, composed

SOURCE = Path(__file__).parents[1] / "src"
# Takes a GPU, notes it, and releases it after a line on standard input, or after a time.
JOB = """
import sys, time
from pathlib import Path
from fedexp.training.gpus import reserve_gpu

names, most, folder, hold = sys.argv[1].split(","), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
print("ready", flush=True)
notes = (folder / "notes").open("a", buffering=1)
with reserve_gpu(names, most, folder, interval=0.01) as position:
    notes.write(f"+{position}\\n")
    print(position, flush=True)
    time.sleep(float(hold)) if hold != "told" else sys.stdin.readline()
    notes.write(f"-{position}\\n")
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`job("0,1", 2)` starts a process that needs one of two GPUs for at most two jobs each."""
    running = []

    def start(names: str, most: int, hold: str = "told") -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", JOB, names, str(most), str(tmp_path), hold],
            env={"PYTHONPATH": str(SOURCE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def taken(process: subprocess.Popen) -> int:
    """Wait until a process has a GPU, and return its number."""
    assert process.stdout.readline() == "ready\n"
    return int(process.stdout.readline())


def test_a_job_takes_the_gpu_with_the_fewest_live_jobs(job, tmp_path):
    jobs = [job("a,b", 2)]
    assert taken(jobs[0]) == 0
    for expected in (1, 0, 1):  # one after the other, so that it is known who comes first
        jobs.append(job("a,b", 2))
        assert taken(jobs[-1]) == expected
    waiting = job("a,b", 2)
    assert waiting.stdout.readline() == "ready\n"
    jobs[1].kill()  # without cleanup
    assert int(waiting.stdout.readline()) == 1
    jobs[2].communicate("done")
    assert taken(job("a,b", 2)) == 0
    # a job with limit 1 waits for a GPU without jobs
    alone = job("a,b", 1)
    assert alone.stdout.readline() == "ready\n"
    for other in (jobs[3], waiting):
        assert other.poll() is None
        other.communicate("done")
    assert int(alone.stdout.readline()) == 1


@pytest.mark.slow
def test_jobs_that_start_together_respect_the_limit(job, tmp_path):
    """Six jobs, two GPUs, at most two on each."""
    for process in [job("0,1", 2, hold="0.1") for _ in range(6)]:
        assert process.wait(timeout=60) == 0
    running, total = Counter(), Counter()
    for line in (tmp_path / "notes").read_text().splitlines():
        running[line[1:]] += 1 if line[0] == "+" else -1
        total[line[1:]] += line[0] == "+"
        assert max(running.values()) <= 2
    assert sum(total.values()) == 6
    assert not any(running.values())


def test_a_waiting_job_logs_a_message(monkeypatch, tmp_path, caplog):
    def interrupt(seconds: float) -> None:
        raise TimeoutError(f"waits {seconds} s")

    monkeypatch.setattr(gpus.time, "sleep", interrupt)
    caplog.set_level("INFO", "fedexp")
    with (
        gpus.reserve_gpu(["0"], 2, tmp_path),
        gpus.reserve_gpu(["0"], 2, tmp_path),
        pytest.raises(TimeoutError, match="waits 7 s"),
        gpus.reserve_gpu(["0"], 2, tmp_path, interval=7),
    ):
        raise AssertionError("it must wait")
    assert [record.message for record in caplog.records] == [
        "waiting for a GPU: each GPU already has hardware.jobs_per_gpu=2 jobs"
    ]
    with gpus.reserve_gpu(["0"], 1, tmp_path) as position:  # they were given back
        assert position == 0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, ["0", "1", "2"]), ({"CUDA_VISIBLE_DEVICES": "4, 2,GPU-8f"}, ["4", "2", "GPU-8f"])],
)
def test_gpu_names_come_from_the_environment_or_the_machine(monkeypatch, environment, expected):
    monkeypatch.setattr(gpus, "count_gpus", lambda: 3)
    assert gpus.visible(environment) == expected


def test_a_job_runs_on_its_gpu(monkeypatch, tmp_path):
    built = build(composed())
    monkeypatch.setattr(gpus, "default_folder", lambda: tmp_path / "locks")
    with on_a_gpu(built, Place(finds_gpu=True)) as same:  # no GPU here
        assert same is built
    assert not (tmp_path / "locks").exists()

    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with (
        on_a_gpu(built, Place(finds_gpu=True)) as first,
        on_a_gpu(built, Place(finds_gpu=True)) as second,
    ):
        assert [each.hardware.device for each in (first, second)] == ["cuda:0", "cuda:1"]
        assert replace(second.hardware, device="auto") == built.hardware
        for changes in ({"device": "cpu"}, {"device": "cuda:1"}, {"engine": "workers"}):
            chosen = replace(built.hardware, **changes)
            asked = replace(built, hardware=chosen)
            with on_a_gpu(asked, Place(finds_gpu=True)) as same:  # would wait otherwise
                assert same is asked
    with on_a_gpu(built, Place()) as same:  # Slurm or Ray has given it one
        assert same is built


@pytest.mark.parametrize(
    ("device", "processes", "devices"),
    [
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),  # not more than clients
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:1", 1, ["cuda:1"]),
        ("cpu", 3, ["cpu", "cpu", "cpu"]),
    ],
)
def test_each_worker_uses_another_gpu_unless_one_is_named(monkeypatch, device, processes, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    monkeypatch.setattr(Resolved, "apply", lambda resolved: applied.append(str(resolved.device)))
    applied = []
    asked = Hardware(**HARDWARE | {"device": device, "engine": "workers"})
    resolved = asked.resolve(cohort_size=3)
    assert resolved.workers == processes
    for number in range(processes):
        Worker(number).begin(resolved)
    assert applied == devices
