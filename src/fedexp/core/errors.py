"""Errors that a user can fix, shown as one message without a traceback (exit code 2)."""

import difflib
import errno
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from traceback import walk_tb

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes other than 0

_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


class ConfigError(ValueError):
    """An invalid setting, file or option. `str(error)` is the whole message for the user."""


class RunFailed(RuntimeError):
    """A user error after the run has started. The run is recorded as failed."""


class RankDied(RunFailed):
    """Another process of the run has ended. The state after the last complete round is saved."""


class HookFailed(RuntimeError):
    """A hook of a part, which may be a user's, has raised an exception.

    The message names the hook and the line.
    """


class JobFailed(RuntimeError):
    """A job of a command failed. The error has already been printed and recorded.

    message: the last line of the error. code: the exit code.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message, code)  # so that it can be pickled by launchers
        self.message, self.code = message, code


class StorageError(OSError):
    """A file of a run cannot be written.

    For example, the disk is full, a limit is reached, or the directory was removed.
    """

    def __init__(self, path: object, error: OSError):
        super().__init__(error.errno, error.strerror or str(error), str(path))

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written ({self.strerror})"


def reason_of(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, if it has any."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}".removesuffix(": ")


def line_of(kind: type, error: BaseException) -> str:
    """Return ` (file, line)`: where in the file of a class an exception passed last, if it did."""
    lines = [
        f" ({Path(frame.f_code.co_filename).name}, line {line})"
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == kind.__module__
    ]
    return "".join(lines[-1:])


@contextmanager
def naming_hook(group: str, hook: str, kind: type) -> Iterator[None]:
    """Call a hook of a class in the block. An exception becomes a HookFailed, with its name.

    Errors that say themselves what is wrong, and errors of files and memory, stay as they are.
    """
    try:
        yield
    except Exception as error:
        own = isinstance(error, ConfigError | RunFailed | OSError | HookFailed)
        if own or lacks_memory(error):
            raise
        where = f"{group}: {hook} of {kind.__name__}{line_of(kind, error)}"
        raise HookFailed(f"{where}: {describe(error)}") from error


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that the system could not provide memory or a thread.

    This includes limits on address space (`ulimit -v`). Libraries raise different exception types,
    so the text of the error is checked too.
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
    """Print an out-of-memory message and return the exit code."""
    return say(f"out of memory ({str(error) or type(error).__name__})", FAILED)


def say(message: str, code: int = BAD_INPUT) -> int:
    """Print a message to stderr and return the exit code.

    Control characters are escaped, so that text from other people's files cannot control the
    terminal.
    """
    shown = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    print(f"fedexp: {''.join(shown)}", file=sys.stderr)
    return code


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the hint ` (nearest: 'x')` for a misspelt name.

    Return an empty string if no candidate is similar. The comparison ignores case, and a candidate
    with dots is also compared by its last word.
    """
    by_letters: dict[str, str] = {}
    for candidate in candidates:
        by_letters.setdefault(candidate.lower(), candidate)
    for candidate in list(by_letters.values()):
        by_letters.setdefault(candidate.lower().rpartition(".")[2], candidate)
    cutoff = 0.5 if len(name) < 4 else 0.6  # of short names, one letter is a third or a half
    match = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=cutoff)
    return f" (nearest: '{by_letters[match[0]]}')" if match else ""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise ConfigError(`key=value: must be <allowed>`) unless the condition is true.

    Inside a `collecting` block, the error is raised at the end of the block.
    """
    if condition:
        return
    message, collected = f"{key}={value}: must be {allowed}", _collected.get()
    if collected is None:
        raise ConfigError(message)
    collected.append(message)


@contextmanager
def collecting() -> Iterator[None]:
    """Collect the failed `require` calls in the block and raise one ConfigError at its end."""
    messages: list[str] = []
    token = _collected.set(messages)
    try:
        yield
    except Exception:
        if not messages:  # otherwise, a value that `messages` reports as invalid may be the cause
            raise
    finally:
        _collected.reset(token)
    if messages:
        raise ConfigError("\n".join(messages))


def reject_password(key: str, text: str) -> None:
    """Raise ConfigError if an address contains a user name or a password. They are not shown.

    The part after ? of an address of data may be a password, too.
    """
    if re.search(r"://[^/?#\s]*@", text) or re.search(r"\burl\W+\w+://\S*\?", f"{key}={text}"):
        raise ConfigError(
            f"{key}: an address must not contain a user name, a password or a query (?...),"
            " because it is stored with every run, and downloads do not use them. Download the"
            " files yourself into data_dir (without dataset.url, a message lists them)"
        )


def require_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`.

    The message lists the allowed values and suggests the nearest one.
    """
    choices = list(choices)
    if value not in choices:  # finding the nearest value is slow, so do it only if needed
        require(False, key, value, f"one of {', '.join(choices)}{nearest(str(value), choices)}")
