"""Keep a run alive if standard output or error cannot be written.

The terminal may be closed, the disk with the output may be full, or the encoding may lack a letter
of a path. The output is then lost and the run continues.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# logger for one line per round in run.log; the console shows rounds in another way
ROUNDS_LOG = "fedexp.rounds"

problem: str | None = None  # the first error of this process, for run.log


class SafeStream:
    """A text stream whose `write` and `flush` never raise OSError or UnicodeError.

    If the underlying stream is None, everything written is discarded.
    """

    def __init__(self, stream: Any):
        self.stream = stream  # None if it was closed before the process began

    def write(self, text: str) -> int:
        if self.stream is not None:
            with self._ignore_errors():
                self._write(text)
        return len(text)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeError as error:
            note_problem(error)
            encoding = self.stream.encoding or "ascii"
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        if self.stream is not None:
            with self._ignore_errors():
                self.stream.flush()

    @contextmanager
    def _ignore_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # for example, `fedexp | head` has ended
            self.discard_output()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            note_problem(error)

    def discard_output(self) -> None:
        """Discard all further output, also at the end of the process."""
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # during unpickling
            raise AttributeError(name)
        return getattr(self.stream, name)


def note_problem(error: Exception) -> None:
    global problem
    reason = getattr(error, "strerror", None) or error
    problem = problem or f"the console cannot be written ({reason}); the run continues"


def install() -> None:
    """Replace both streams in a launcher's process. The command's process uses `safe_streams`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, stream if isinstance(stream, SafeStream) else SafeStream(stream))


@contextmanager
def safe_streams() -> Iterator[None]:
    """Replace both streams in the block."""
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
                    # otherwise the interpreter tries again at its end, and exits with 120
                    safe.discard_output()
        sys.stdout, sys.stderr = before


def plural(count: int, noun: str) -> str:
    """Return `1 client`, `1,000 clients` or `2 classes`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"
