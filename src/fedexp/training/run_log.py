"""Write the log of a run to run.log, including the lines that are logged before it exists."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from fedexp.core import console, storage

log = logging.getLogger("fedexp")
EARLY_LINES = 1000  # the largest number of lines kept until run.log is opened


class RunLog(logging.FileHandler):
    """Handler for run.log that ignores write errors, for example if the disk is full.

    The same lines are shown on the console, and write errors in more important files are reported.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error, so that no traceback is printed for every line."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class EarlyLines(MemoryHandler):
    """Handler that keeps the first log lines of a run until run.log exists."""

    def emit(self, record: logging.LogRecord) -> None:
        """Format and keep the line, or drop it if EARLY_LINES lines are already kept."""
        if len(self.buffer) < self.capacity:
            record.msg, record.args = record.getMessage(), None
            self.buffer.append(record)


def from_this_thread() -> Callable[[logging.LogRecord], bool]:
    """Return a filter for the log lines from the current thread.

    If a process executes several runs, each run has a separate thread.
    """
    thread = threading.get_ident()
    return lambda record: record.thread == thread


@contextmanager
def early_lines() -> Iterator[EarlyLines]:
    """Keep this thread's first log lines for run.log."""
    early = EarlyLines(EARLY_LINES, flushOnClose=False)
    early.addFilter(from_this_thread())
    log.addHandler(early)
    try:
        yield early
    finally:
        log.removeHandler(early)


@contextmanager
def run_log(directory: Path, early: EarlyLines) -> Iterator[None]:
    """Write the log to run.log while the block runs, starting with the early lines."""
    path = directory / "run.log"
    with storage.storing(path):
        handler = RunLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(from_this_thread())
    log.removeHandler(early)
    early.setTarget(handler)
    early.flush()
    log.addHandler(handler)
    rounds = logging.getLogger(console.ROUNDS_LOG)
    rounds.propagate = False  # do not show the lines on the console
    rounds.setLevel(logging.INFO)
    rounds.addHandler(handler)
    try:
        yield
    finally:
        if console.problem is not None:  # log only to run.log, because the console failed
            handler.handle(
                log.makeRecord(log.name, logging.WARNING, __file__, 0, console.problem, (), None)
            )
        log.removeHandler(handler)
        rounds.removeHandler(handler)
        handler.close()
