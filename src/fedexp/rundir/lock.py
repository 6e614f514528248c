"""One process at a time in a run directory.

The lock is the operating system's: it ends with its owner, also after kill -9, and nothing has to
find out whether that owner still lives. A file beside it says who it is.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedexp.core.errors import ConfigError
from fedexp.core.storage import regular

LOCK, OWNER = ".lock", ".owner.json"
# seconds: who only looks whether a directory is in use (`is_occupied`) has the lock for a moment
PATIENCE = 0.5


class Occupied(ConfigError):
    """Error: another process works in the directory."""


@contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Hold the directory, which must exist; raise Occupied, which names the owner, where another
    process does."""
    lock = FileLock(directory / LOCK, timeout=PATIENCE)
    try:
        lock.acquire(poll_interval=0.02)
    except Timeout:
        raise Occupied(f"{directory}: {owner_of(directory)} is working there") from None
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from error
    try:
        owner = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with suppress(OSError):  # it is told, not relied on
            (directory / OWNER).write_text(json.dumps(owner), encoding="utf-8")
        yield
    finally:
        # The lock's own file stays: without it, one who has opened it and one who makes it anew
        # would both hold it.
        with suppress(OSError):
            (directory / OWNER).unlink()
        lock.release()


def owner_of(directory: Path) -> str:
    """Return in words who holds the directory."""
    try:
        owner = json.loads(regular(directory / OWNER).read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']} (since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def is_occupied(directory: Path) -> bool:
    """Return whether a living process holds the directory now."""
    # opening it would cut what it points to
    if not (directory / LOCK).is_file() or (directory / LOCK).is_symlink():
        return False
    lock = FileLock(directory / LOCK, timeout=0)
    try:
        with lock:
            return False
    except Timeout:
        return True
    except OSError:  # a folder in the place of the lock, or a directory that cannot be written
        return False
