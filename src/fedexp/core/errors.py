"""Errors that a user can fix. They are shown as one message without a traceback (exit code 2)."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes other than 0

_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


class ConfigError(ValueError):
    """An invalid setting, file or option. `str(error)` is the whole message for the user."""


class RunFailed(RuntimeError):
    """A ConfigError in a run that has begun. It is recorded as a failure."""


class BudgetSpent(Exception):
    """The command's time budget is over. The job keeps its saved state and has not failed."""


class StorageError(OSError):
    """A run's file cannot be written, because of a full disk, a limit or a removed directory."""

    def __init__(self, path: object, error: OSError):
        super().__init__(error.errno, error.strerror or str(error), str(path))

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written ({self.strerror})"


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that the system refused memory or a thread.

    This includes address space (`ulimit -v`). Libraries raise different types, so messages are
    compared too.
    """
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    words = (
        "failed to map segment",
        "allocate memory",
        "not enough memory",
        "start new thread",
        "bad_alloc",
    )
    return isinstance(error, ImportError | RuntimeError | OSError) and any(
        word in str(error) for word in words
    )


def say_no_memory(error: BaseException) -> int:
    """Print that memory is missing; return the exit code."""
    return say(f"out of memory ({str(error) or type(error).__name__})", FAILED)


def say(message: str, code: int = BAD_INPUT) -> int:
    """Print one message to stderr; return the exit code.

    Control characters are escaped, so that text from other people's files cannot control the
    terminal.
    """
    shown = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    print(f"fedexp: {''.join(shown)}", file=sys.stderr)
    return code


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint ` (nearest: 'x')` for a misspelt name, or an empty string if none is similar.

    Upper and lower case are not distinguished.
    """
    by_letters = {candidate.lower(): candidate for candidate in reversed(list(candidates))}
    match = difflib.get_close_matches(name.lower(), list(reversed(by_letters)), n=1, cutoff=0.5)
    return f" (nearest: '{by_letters[match[0]]}')" if match else ""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise ConfigError(`key=value: must be <allowed>`) unless the condition is true.

    Inside `collecting`, the error is raised at the end of the block.
    """
    if condition:
        return
    message, collected = f"{key}={value}: must be {allowed}", _collected.get()
    if collected is None:
        raise ConfigError(message)
    collected.append(message)


@contextmanager
def collecting() -> Iterator[None]:
    """Collect every failed `require` in the block and raise one ConfigError for all at the end."""
    messages: list[str] = []
    token = _collected.set(messages)
    try:
        yield
    except Exception:
        if not messages:  # otherwise a value in `messages` may be the cause
            raise
    finally:
        _collected.reset(token)
    if messages:
        raise ConfigError("\n".join(messages))


def require_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`.

    The message has the allowed values and the nearest one.
    """
    choices = list(choices)
    if value not in choices:  # finding the nearest value is slow, so do it only if needed
        require(False, key, value, f"one of {', '.join(choices)}{nearest(str(value), choices)}")
