"""Full, limited, read-only and removed disks, clocks that jump, and locks of dead processes.

Each fault ends a run with one message and exit code 1 (2 before it has started) and keeps the last
valid state. `resume=` then gives the result of the undisturbed run. test_processes has kills.
"""

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from helpers import SMALL, assert_same_run, summary_of
from kills import Tally, check_all

from fedexp.cli.launchers import COMMAND
from fedexp.cli.sweeps import collect_exit_codes, note_failure
from fedexp.core import storage
from fedexp.core.errors import BAD_INPUT, FAILED, StorageError
from fedexp.rundir import checkpoint
from fedexp.rundir.lock import LOCK, OWNER, occupied
from fedexp.training.recorder import Recorder

RUN = ("algorithm=scaffold", "rounds=4", *SMALL, "local.batch_size=200")  # one step a client


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def whole(fedexp, shelf) -> Path:
    """The undisturbed run, computed once."""
    if not (shelf / "run").exists():
        fedexp.done(*RUN, f"hydra.run.dir={shelf}/run")
    return shelf / "run"


@pytest.fixture
def disk(tmp_path):
    """Return a function that mounts a file system at ./disk or changes its options."""
    folder = tmp_path / "disk"

    def call(options: str) -> None:
        how = (
            ["-o", f"remount,{options}"]
            if folder.is_mount()
            else ["-t", "tmpfs", "-o", options, "tmpfs"]
        )
        folder.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *how, str(folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")

    yield call
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def at_round(number: int, monkeypatch, fault) -> None:
    """Call `fault` after a round has been computed and before it is recorded."""
    write = Recorder.write

    def write_round(self, state, scores, result=None):
        if state.round == number:
            fault(self.directory)
        write(self, state, scores, result)

    monkeypatch.setattr(Recorder, "write", write_round)


def assert_whole_files(directory: Path) -> None:
    tally = Tally()
    check_all(directory, tally)
    assert tally.parsed > 5
    assert not tally.broken


def assert_fails(answer, *words: str) -> None:
    """Assert exit code 1 and one message."""
    assert answer.code == 1, answer.err
    assert "Traceback" not in answer.err + answer.out
    assert answer.err.count("fedexp: ") == 1
    for word in words:
        assert word in answer.err


@pytest.mark.slow
def test_full_disk_keeps_the_last_checkpoint(fedexp, tmp_path, whole, disk):
    """The disk has room for the other files and two and a half checkpoints."""
    page = resource.getpagesize()  # a file takes whole ones
    taken = {
        path: -(-path.stat().st_size // page) * page for path in whole.rglob("*") if path.is_file()
    }
    others = sum(
        size for path, size in taken.items() if "checkpoint" not in path.relative_to(whole).parts
    )
    states = 4 * max(taken[path] for path in whole.glob("checkpoint/clients/*"))
    size = others + 2.5 * taken[whole / "checkpoint/latest.pt"] + states
    disk(f"size={int(size)}")
    run = tmp_path / "disk/run"
    answer = fedexp(*RUN, "hydra.run.dir=disk/run")
    kept = checkpoint.saved_round(run)
    assert kept is not None
    assert kept < 4
    assert_fails(
        answer,
        "disk/run/",
        "cannot be written (No space left on device)",
        f"after round {kept} was saved",
    )
    assert "fedexp resume=disk/run" in answer.err
    assert_whole_files(run)
    assert not list(run.rglob("*.tmp"))
    assert_fails(fedexp("resume=disk/run"), "No space left on device")  # still
    assert checkpoint.saved_round(run) >= kept
    disk(f"size={int(20 * size)}")
    fedexp.done("resume=disk/run")
    assert_same_run(run, whole)


def test_full_disk_before_the_first_checkpoint_lets_the_run_start_again(
    fedexp, tmp_path, monkeypatch
):
    """The printed command starts the run again."""

    def full(path, content):
        raise StorageError(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    monkeypatch.setattr(storage, "save_tree", full)
    answer = fedexp(*RUN, "rounds=1", "hydra.run.dir=run")
    assert_fails(
        answer,
        "No space left on device",
        "No state was saved; start again with:  fedexp resume=run\n",
    )
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    answer = fedexp.done("resume=run", "tracker=none")
    assert "no checkpoint was saved; the run starts again" in answer.err


def test_run_that_hits_the_file_size_limit_keeps_its_checkpoint(
    fedexp, tmp_path, whole, monkeypatch
):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = (whole / "checkpoint/latest.pt").stat().st_size - 1000
    at_round(
        3,
        monkeypatch,
        lambda directory: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1])),
    )
    try:
        answer = fedexp(*RUN, "hydra.run.dir=run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_fails(
        answer,
        "checkpoint/latest.pt: cannot be written (File too large)",
        "after round 2 was saved",
    )
    assert summary_of(tmp_path / "run")["status"] == "failed"
    assert "File too large" in (tmp_path / "run/error.txt").read_text()
    assert_whole_files(tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    answer = fedexp.done("resume=run", "tracker=none")
    assert "resuming after round 2; the later rounds, up to round 3, are run again" in answer.err
    assert not (tmp_path / "run/error.txt").exists()
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_read_only_directory_is_rejected(fedexp, tmp_path, whole, disk):
    disk("size=50m")
    shutil.copytree(whole, tmp_path / "disk/run")
    (tmp_path / "disk/run/summary.json").unlink()
    disk("ro")
    for arguments in (("resume=disk/run",), ("hydra.run.dir=disk/new", *RUN)):
        answer = fedexp.rejected(*arguments)
        assert "cannot be written (Read-only file system)" in answer.err


@pytest.mark.slow
def test_removed_run_directory_is_not_created_again(fedexp, tmp_path, monkeypatch):
    at_round(2, monkeypatch, shutil.rmtree)
    answer = fedexp(*RUN, "hydra.run.dir=run")
    assert_fails(
        answer,
        "removed or moved during the run",
        "No state was saved; start again with:  the same command",
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_moved_run_directory_can_be_resumed(fedexp, tmp_path, whole, monkeypatch):
    at_round(3, monkeypatch, lambda directory: directory.rename(tmp_path / "elsewhere"))
    assert_fails(fedexp(*RUN, "hydra.run.dir=run"), "removed or moved during the run")
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    fedexp.done("resume=elsewhere", "tracker=none")
    assert_same_run(tmp_path / "elsewhere", whole)


@pytest.mark.slow
def test_clock_that_jumps_back_does_not_affect_durations(fedexp, tmp_path, whole, monkeypatch):
    """It jumps by an hour at every call. Durations come from a monotonic clock."""
    now = [time.time()]

    def jumping() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    fedexp.done(*RUN, "hydra.run.dir=run")
    assert_same_run(tmp_path / "run", whole)
    header, *rows = [
        line.split(",") for line in (tmp_path / "run/rounds.csv").read_text().splitlines()
    ]
    seconds = [float(row[header.index("seconds")]) for row in rows[1:]]
    assert all(0 < value < 100 for value in seconds)


def test_sweep_exit_code_ignores_failed_jobs_of_other_commands(tmp_path, monkeypatch):
    """Two commands may work on the same sweep."""
    for command, code in (("ours", BAD_INPUT), ("theirs", FAILED)):
        monkeypatch.setenv(COMMAND, command)
        note_failure(tmp_path, None, code)
    assert collect_exit_codes(tmp_path, "ours") == [BAD_INPUT]
    assert collect_exit_codes(tmp_path, "ours") == []
    assert collect_exit_codes(tmp_path, "theirs") == [FAILED]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "owner",
    [
        {"process": os.getppid(), "host": socket.gethostname(), "since": "2026-01-01 00:00:00"},
        {"process": 1, "host": "another", "since": "2036-01-01 00:00:00"},
        None,
    ],
    ids=["a number that another process has now", "another host, in the future", "half written"],
)
def test_lock_of_a_dead_process_is_taken_over(tmp_path, owner):
    """The operating system releases the lock when its owner dies; process numbers are not used."""
    (tmp_path / LOCK).touch()
    (tmp_path / OWNER).write_text("{" if owner is None else json.dumps(owner))
    with occupied(tmp_path):
        assert json.loads((tmp_path / OWNER).read_text())["process"] == os.getpid()
    assert not (tmp_path / OWNER).exists()
