"""The fixture `nothing_left` of all tests: what it names, restores and ends."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from leftovers import Watch, children


def test_a_process_a_thread_and_variables_that_are_left_are_named(monkeypatch):
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    watch, stop = Watch(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="a thread")
    thread.start()
    command = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        os.environ |= {"CHANGED": "after", "ADDED": "after"}
        del os.environ["REMOVED"]
        seen = process.pid in children()  # nothing is seen without /proc
        left = watch.clear(seconds=0.1)
    stop.set()
    thread.join()
    named = [f"process {process.pid}: {' '.join(command)}"] if seen else []
    variables = [f"environment variable {name}" for name in ("ADDED", "CHANGED", "REMOVED")]
    assert left == [*named, "thread a thread", *variables]
    assert (os.environ["CHANGED"], os.environ["REMOVED"]) == ("before", "before")
    assert "ADDED" not in os.environ
    assert process.returncode == (-9 if seen else 0)
    assert watch.clear(seconds=0.1) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_ranks_of_a_shared_engine_are_not_named():
    watch = Watch()
    with subprocess.Popen(["sleep", "100"]) as process:
        watch.keep_ranks(SimpleNamespace(_world=SimpleNamespace(processes=[process])))
        assert watch.clear(seconds=0.1) == []
        process.kill()
