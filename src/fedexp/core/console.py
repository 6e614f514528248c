"""Lines, errors and flags of the console.

A run continues if standard output or standard error cannot be written to, because the terminal is
closed, the disk is full, or the encoding cannot represent a character in a path. The output is then
lost or escaped.
"""

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from fedexp.core.errors import ConfigError

# logger that writes one line per round to run.log; the console displays rounds differently
ROUNDS_LOG = "fedexp.rounds"

problem: str | None = None  # the first output error in this process, for run.log


class SafeStream:
    """A text stream whose `write` and `flush` never raise OSError or UnicodeError.

    If the underlying stream is None, everything written is discarded. Letters that its encoding
    does not have are escaped.
    """

    def __init__(self, stream: Any):
        self.stream = stream  # None if the stream was closed before the process started
        if hasattr(stream, "reconfigure"):
            with self._ignore_errors():  # this flushes, and fails if the stream is closed
                stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        if self.stream is not None:
            with self._ignore_errors():
                self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            with self._ignore_errors():
                self.stream.flush()

    @contextmanager
    def _ignore_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # for example, `head` has exited in `fedexp | head`
            self.discard_output()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            note_problem(error)

    def discard_output(self) -> None:
        """Discard all further output, including output flushed when the process exits."""
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # during unpickling
            raise AttributeError(name)
        return getattr(self.stream, name)


def note_problem(error: Exception) -> None:
    global problem
    reason = getattr(error, "strerror", None) or error
    problem = problem or f"the console cannot be written to ({reason}); the run continues"


def install() -> None:
    """Replace stdout and stderr with safe streams in a process started by a launcher.

    The process of the command uses `safe_streams` instead.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, stream if isinstance(stream, SafeStream) else SafeStream(stream))


@contextmanager
def safe_streams() -> Iterator[None]:
    """Replace stdout and stderr with safe streams inside the block."""
    global problem
    before, problem = (sys.stdout, sys.stderr), None
    install()
    try:
        yield
    finally:
        for safe in (sys.stdout, sys.stderr):
            if isinstance(safe, SafeStream) and safe.stream is not None:
                try:
                    safe.stream.flush()
                except (OSError, ValueError, AttributeError):
                    # otherwise the interpreter flushes again when it exits, and fails with code 120
                    safe.discard_output()
        sys.stdout, sys.stderr = before


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 client`, `1,000 clients` or `2 classes`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


class ToStderr(logging.Handler):
    """Write each line to the current sys.stderr. The live display may have redirected it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_to_console() -> None:
    """Set up console logging for this process."""
    logger = logging.getLogger("fedexp")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        handler = ToStderr(logging.INFO)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def comma_list(text: str) -> tuple[str, ...]:
    """Return the words of a flag that are separated by commas."""
    return tuple(filter(None, text.split(",")))


class Parser(ArgumentParser):
    """A parser that raises ConfigError for invalid arguments."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
