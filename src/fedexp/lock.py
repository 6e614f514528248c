"""One process at a time in a run directory.

The lock is the operating system's, so it ends with its owner, also after kill -9; a file beside it says who that is.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedexp.errors import ConfigError

LOCK, OWNER = ".lock", ".owner.json"


class Occupied(ConfigError):
    """Another process works in the directory."""


@contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Holds the directory, which must exist; raises Occupied, which names the owner, where another process does."""
    lock = FileLock(directory / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise Occupied(f"{directory}: {owner_of(directory)} is working there") from None
    try:
        owner = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        (directory / OWNER).write_text(json.dumps(owner), encoding="utf-8")
        yield
    finally:
        for name in (OWNER, LOCK):
            (directory / name).unlink(missing_ok=True)
        lock.release()


def owner_of(directory: Path) -> str:
    """Who holds it, in words."""
    try:
        owner = json.loads((directory / OWNER).read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']} (since {owner['since']})"
    except (OSError, ValueError, KeyError):
        return "another process"


def is_occupied(directory: Path) -> bool:
    """Whether a living process holds it now."""
    if not (directory / LOCK).exists():
        return False
    lock = FileLock(directory / LOCK, timeout=0)
    try:
        with lock:
            return False
    except Timeout:
        return True
