"""Let only one process at a time use a run directory.

When a process ends, even by kill -9, the operating system releases the process's lock. So no code
has to check whether the process is alive. The file .owner.json names the process.
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

LOCK, OWNER = ".lock", ".owner.json"
# seconds to wait for the lock, since `is_occupied` holds it briefly
PATIENCE = 0.5


class Occupied(ConfigError):
    """Another process is using the directory."""


@contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which is created if necessary, inside the block.

    Raises Occupied if another process holds the lock. The message names this process.
    """
    lock = FileLock(directory / LOCK, timeout=PATIENCE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=0.02)
    except Timeout:
        raise Occupied(f"{directory}: {owner_of(directory)} is using this directory") from None
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from error
    try:
        owner = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with suppress(OSError):  # the file is only for messages
            (directory / OWNER).write_text(json.dumps(owner), encoding="utf-8")
        yield
    finally:
        # The lock file must stay. If it were removed, a process that has it open and a process
        # that creates it again could both hold the lock.
        with suppress(OSError):
            (directory / OWNER).unlink()
        lock.release()


def owner_of(directory: Path) -> str:
    """Describe the process that holds the lock of a directory."""
    try:
        owner = json.loads((directory / OWNER).read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']} (since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def is_occupied(directory: Path) -> bool:
    """Return whether a running process holds the lock of a directory."""
    # if the lock is a link, opening it would truncate the link's target
    if not (directory / LOCK).is_file() or (directory / LOCK).is_symlink():
        return False
    lock = FileLock(directory / LOCK, timeout=0)
    try:
        with lock:
            return False
    except Timeout:
        return True
    except OSError:  # for example, the directory cannot be written
        return False
