"""What a test may not leave: processes, threads and changed environment variables."""

import os
import signal
import threading
import time
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

# What libraries keep until the process ends: processes of multiprocessing and joblib, threads of
# tqdm and wandb, and variables that scikit-learn and torch.compile set when they are imported.
KEPT = (
    "resource_tracker",
    "tqdm_monitor",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "OtelBatchLogRecordProcessor",
    "OtelPeriodicExportingMetricReader",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "OtelBatchLogRecordProcessor",
    "OtelBatchSpanRecordProcessor",
    "OtelPeriodicExportingMetricReader",
)


def children(pid: int | str = "self") -> dict[int, str]:
    """Return the process ids and command lines of a process's living children.

    Empty on systems without /proc/<pid>/task/<tid>/children.
    """
    found: dict[int, str] = {}
    for path in glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):  # the thread has just ended
            for child in map(int, Path(path).read_text().split()):
                with suppress(OSError):  # the process has just ended
                    if state_of(child):
                        line = Path(f"/proc/{child}/cmdline").read_bytes()
                        found[child] = line.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def state_of(pid: int) -> str:
    """Return the state of a process as in /proc, such as "T" for stopped; "" if it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state in "ZX" else state


class Watch:
    """Remembers the processes, threads and variables that exist when it is created."""

    def __init__(self) -> None:
        self._children, self._threads = set(children()), set(threading.enumerate())
        self._variables = dict(os.environ)

    def keep_ranks(self, world: Any) -> None:
        """Allow the ranks of an engine that several tests share.

        world: the module fedexp.engine.ranks.world.
        """
        if world._world is not None:
            self._children |= {process.pid for process in world._world.processes}

    def clear(self, seconds: float = 10.0) -> list[str]:
        """Return one line for each thing that is new, and restore the variables.

        Processes and threads that are ending get some seconds; a process that stays is killed.
        """
        end = time.monotonic() + seconds
        while (processes := self._processes()) or self._living_threads():
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = [f"process {pid}: {line}" for pid, line in processes.items()]
        left += [f"thread {thread.name}" for thread in self._living_threads()]
        return left + self._restore_variables()

    def _processes(self) -> dict[int, str]:
        return {
            pid: line
            for pid, line in children().items()
            if pid not in self._children and not any(kept in line for kept in KEPT)
        }

    def _living_threads(self) -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread not in self._threads and thread.name not in KEPT
        ]

    def _restore_variables(self) -> list[str]:
        names = self._variables.keys() | os.environ.keys()
        changed = sorted(
            name
            for name in names
            if os.environ.get(name) != self._variables.get(name) and name not in KEPT
        )
        for name in changed:
            if name in self._variables:
                os.environ[name] = self._variables[name]
            else:
                del os.environ[name]
        return [f"environment variable {name}" for name in changed]
