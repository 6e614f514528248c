"""Runs of two ranks on this machine."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers import SMALL, SOURCE, add_class, assert_same_run, summary_of
from test_processes import rounds_in, wait_for_rounds

# Has client states, and fails in one rank.
ALGORITHM = """
import os
from dataclasses import dataclass

from fedexp.core import tree
from fedexp.algorithms.base import FedAvg


@dataclass(frozen=True, kw_only=True)
class Drifting(FedAvg):
    fails_in: str = "no rank"

    def client_init(self, params, info):
        return {"drift": tree.zeros_like(params)}

    def finish(self, net, params, data, ctx):
        if os.environ.get("RANK") == self.fails_in:
            raise RuntimeError("by the test")
        drift = {k: (ctx.client["drift"][k] + params[k] - ctx.server["params"][k]) / 2 for k in params}
        return {"params": {k: params[k] + 0.1 * drift[k] for k in params}}, {"drift": drift}
"""
FEDEXP = ("-m", "fedexp")
RUN = (
    *(
        "--config-dir=own",
        "algorithm=drifting",
        "rounds=8",
        "forgetting_metric=all",
        "seed=3",
        *SMALL,
    ),
    *("hardware.engine=distributed", "tracker=none"),
)


def environment(folder: Path) -> dict[str, str]:
    paths = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}", "FEDEXP_DATA": str(folder / "no data")}
    return os.environ | paths | {"OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


class Pair:
    """Two ranks, whose output goes to files."""

    def __init__(self, folder: Path, *arguments: str):
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.logs = [folder / f"rank{rank}.log" for rank in range(2)]
        self.processes = []
        for rank, path in enumerate(self.logs):
            place = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as log:
                command = [sys.executable, *arguments]
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment(folder) | place,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def end(self) -> tuple[list[int], list[str]]:
        """Wait until both processes end, and return their exit codes and output."""
        return [process.wait(timeout=240) for process in self.processes], [
            path.read_text() for path in self.logs
        ]


@pytest.fixture
def pair(tmp_path) -> Iterator:
    """`pair(*arguments)` starts two ranks in a folder with the algorithm."""
    add_class(tmp_path, "algorithm", "drifting", ALGORITHM, "fails_in: no rank\n")
    started: list[Pair] = []

    def call(*arguments: str) -> Pair:
        started.append(Pair(tmp_path, *arguments))
        return started[-1]

    yield call
    for process in [process for two in started for process in two.processes]:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_torchrun_equals_one_process_bit_for_bit(fedexp, monkeypatch, tmp_path):
    """Also client states and local accuracy. Only rank 0 prints and writes."""
    add_class(tmp_path, "algorithm", "drifting", ALGORITHM, "fails_in: no rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    fedexp.done(*RUN, "hardware.engine=sequential", "hydra.run.dir=alone")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "fedexp",
    ]
    answer = subprocess.run(
        [*launcher, *RUN],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    (directory,) = tmp_path.glob("outputs/*/*")
    assert_same_run(directory, tmp_path / "alone")
    summary = summary_of(directory)
    assert (summary["hardware"]["engine"], summary["hardware"]["workers"]) == ("distributed", 2)
    assert answer.stderr.count("hardware: cpu") == 1
    assert answer.stdout.count("round 8/8") == 1


@pytest.mark.slow
def test_a_run_continues_after_a_lost_rank_and_a_signal(pair, fedexp, monkeypatch, tmp_path):
    """Rank 1 is killed, rank 0 interrupted, then one process continues, bit for bit as without
    stops."""
    run = tmp_path / "run"
    two = pair(*FEDEXP, *RUN, "hydra.run.dir=run")
    wait_for_rounds(run, 1, two.processes[0])
    two.processes[1].send_signal(signal.SIGKILL)
    codes, (said, _) = two.end()
    assert codes == [1, -signal.SIGKILL]
    assert "the connection to rank 1 is broken" in said
    assert "Traceback" not in said

    rows = (run / "rounds.csv").read_bytes().count(b"\n") - 2
    two = pair(*FEDEXP, RUN[0], "resume=run")
    wait_for_rounds(run, rows + 1, two.processes[0])
    two.processes[0].send_signal(signal.SIGTERM)
    codes, (said, other) = two.end()
    assert codes == [130, 1]
    assert "fedexp --config-dir=own resume=run" in said
    assert "Traceback" not in said
    assert other.startswith("fedexp: rank 1 on ")
    assert other.count("\n") == 1
    assert rows < rounds_in(run) < 8

    monkeypatch.syspath_prepend(tmp_path)
    fedexp.done(RUN[0], "resume=run", "hardware.engine=sequential")
    fedexp.done(*RUN, "hardware.engine=sequential", "hydra.run.dir=undisturbed")
    assert_same_run(run, tmp_path / "undisturbed")


def fails_in(job: Path) -> str:
    """Return the job's algorithm.fails_in."""
    told = yaml.safe_load((job / ".hydra" / "overrides.yaml").read_text())
    return next(text.partition("=")[2] for text in told if text.startswith("algorithm.fails_in="))


@pytest.mark.slow
def test_a_failed_rank_ends_only_its_job(pair, tmp_path):
    """In three jobs, rank 1 fails, rank 0 fails, and no rank fails."""
    codes, (said, quiet) = pair(
        *FEDEXP, "--multirun", *RUN, "rounds=1", "algorithm.fails_in='1','0',nobody"
    ).end()
    assert codes == [1, 0]
    assert quiet == ""
    assert "Traceback" not in said
    jobs = sorted(
        (path for path in (tmp_path / "multirun").glob("*/*") if path.is_dir()),
        key=lambda job: ["'1'", "'0'", "nobody"].index(fails_in(job)),
    )
    summaries = [summary_of(job) for job in jobs]
    assert [summary["status"] for summary in summaries] == ["failed", "failed", "completed"]
    reports = [(job / "error.txt").read_text() for job in jobs[:2]]
    assert all("in finish of Drifting: by the test" in report for report in reports)
    assert ["in rank 1:" in report for report in reports] == [True, False]
    assert "in worker 0 " in reports[1]
