"""Errors that a user can mend: shown as one message without a traceback, exit code 2."""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes beside 0

_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


class ConfigError(ValueError):
    """A setting, file or option that fedexp cannot work with. `str(error)` is the whole message for
    the user."""


class RunFailed(RuntimeError):
    """A ConfigError in a run that has begun: a failure, which is recorded."""


class BudgetSpent(Exception):
    """The time that a command may take is over for this job. What it has saved is kept: no
    failure."""


class StorageError(OSError):
    """A file of a run that cannot be written: no space left, a limit, a directory that was
    removed."""

    def __init__(self, path: object, error: OSError):
        super().__init__(error.errno, error.strerror or str(error), str(path))

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written ({self.strerror})"


def lacks_memory(error: BaseException) -> bool:
    """Return whether the system refused memory, address space (`ulimit -v`) or a thread, in the
    words of whoever asked."""
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
    """Print one message; return the exit code."""
    return say(f"the system gives no more memory ({str(error) or type(error).__name__})", FAILED)


def say(message: str, code: int = BAD_INPUT) -> int:
    """Print one message; return the exit code, that of bad input unless another is given.

    Control characters from a foreign file cannot reach the terminal."""
    shown = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    print(f"fedexp: {''.join(shown)}", file=sys.stderr)
    return code


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint ` (nearest: 'x')` for a misspelt name, in whatever case, or an empty string."""
    by_letters = {candidate.lower(): candidate for candidate in reversed(list(candidates))}
    match = difflib.get_close_matches(name.lower(), list(reversed(by_letters)), n=1, cutoff=0.5)
    return f" (nearest: '{by_letters[match[0]]}')" if match else ""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise ConfigError(`key=value: must be <allowed>`) unless the condition holds; see
    `collecting`."""
    if condition:
        return
    message, collected = f"{key}={value}: must be {allowed}", _collected.get()
    if collected is None:
        raise ConfigError(message)
    collected.append(message)


@contextmanager
def collecting() -> Iterator[None]:
    """Collect every failed `require` inside, and raise all of them as one ConfigError at the
    end."""
    messages: list[str] = []
    token = _collected.set(messages)
    try:
        yield
    except Exception:
        if not messages:  # else it may only be a consequence of the value that has been noted
            raise
    finally:
        _collected.reset(token)
    if messages:
        raise ConfigError("\n".join(messages))


def require_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError naming the allowed values and the nearest one unless `value` is one of
    `choices`."""
    choices = list(choices)
    if value not in choices:  # looking for the nearest one takes longer than all else here
        require(False, key, value, f"one of {', '.join(choices)}{nearest(str(value), choices)}")
