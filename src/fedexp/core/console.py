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

problem: str | None = None  # the first thing that went wrong in this process, for run.log


class View:
    """A text stream whose `write` and `flush` never raise OSError or UnicodeError.

    If the underlying stream is None, everything written is discarded.
    """

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        if self.stream is None:  # closed before the process began
            return len(text)
        with self.forgiving():
            try:
                self.stream.write(text)
            except UnicodeError as error:
                note(error)
                encoding = self.stream.encoding or "ascii"
                self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        if self.stream is not None:
            with self.forgiving():
                self.stream.flush()

    @contextmanager
    def forgiving(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # the reader of `fedexp | head` has seen enough
            self.give_up()
        except (OSError, ValueError) as error:  # ValueError: it has been closed
            note(error)

    def give_up(self) -> None:
        """Discard all further output, also at the end of the process."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.stream, name)


def note(error: Exception) -> None:
    global problem
    reason = getattr(error, "strerror", None) or error
    problem = problem or f"the console cannot be written ({reason}); the run continues"


def install() -> None:
    """Install the views in a launcher's process. The command line's process uses `views`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, stream if isinstance(stream, View) else View(stream))


@contextmanager
def views() -> Iterator[None]:
    """Replace both streams with views inside the context."""
    global problem
    before, problem = (sys.stdout, sys.stderr), None
    install()
    try:
        yield
    finally:
        for view in (sys.stdout, sys.stderr):
            if isinstance(view, View) and view.stream is not None:
                try:
                    view.stream.flush()
                except (OSError, ValueError, AttributeError):
                    view.give_up()  # otherwise the interpreter tries again and exits with 120
        sys.stdout, sys.stderr = before


def plural(count: int, noun: str) -> str:
    """Return `1 client`, `1,000 clients` or `2 classes`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"
