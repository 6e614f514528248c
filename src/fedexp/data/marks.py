"""Marks of data on disk, which are equal if the bytes are equal, wherever the files are.

A mark reads `90 files (bytes 0123456789abcdef)`. If the data changed during a run, it reads `90
files (bytes 0123456789abcdef, then fedcba9876543210)`. The files' checksums are cached in
`<data_dir>/.fedexp_cache`, and files are read again only if a size or a modification time changes.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp.core.storage import write_atomically

log = logging.getLogger("fedexp")
CACHE = ".fedexp_cache"  # folder in a data_dir
BYTES = " (bytes "
MANY = 1000  # number of files from which reading takes seconds
CHUNK = 256  # items that a thread takes at once
Item = TypeVar("Item")
Result = TypeVar("Result")


class SourceFile(NamedTuple):
    """A file, with the size and the modification time that show whether it may have changed."""

    path: str
    size: int  # bytes
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "SourceFile":
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns)

    def stamp(self, data_dir: str) -> str:
        """Return one line that identifies the file.

        The path is relative if the file is below `data_dir`, so that a moved directory keeps its
        cache.
        """
        return f"{self.path.removeprefix(data_dir)} {self.size} {self.mtime_ns}"


def content_mark(find: Callable[[], Sequence[SourceFile]], data_dir: str) -> str | None:
    """Return the mark of the files that `find` returns.

    It covers their bytes and their paths relative to the common folder. Return None if there are no
    files or one cannot be read.
    """
    try:
        if not (files := sorted(find())):
            return None
        stamps = checksum("\n".join(file.stamp(data_dir) for file in files))
        kept = next(Path(data_dir, CACHE).glob(f"files-{stamps}-*.txt"), None)
        digits = (
            write_checksum_list(files, data_dir, stamps)
            if kept is None
            else kept.stem.rpartition("-")[2]
        )
    except (ConfigError, OSError, ValueError):
        return None
    return f"{plural(len(files), 'file')}{BYTES}{digits})"


def write_checksum_list(files: Sequence[SourceFile], data_dir: str, stamps: str) -> str:
    """Return the checksum of sorted files, and list each file's checksum in the cache.

    The list is the file `files-<stamps>-<checksum>.txt`.
    """
    if len(files) >= MANY:
        log.info("reading %s files for their checksum, once", f"{len(files):,}")
    folders = [os.path.dirname(file.path) for file in (files[0], files[-1])]
    start = len(os.path.commonpath(folders))  # common to all files, because they are sorted
    digests = map_in_threads(lambda file: file_checksum(file.path), files)
    lines = [f"{digest} {f.path[start:]}" for digest, f in zip(digests, files, strict=True)]
    digits, folder = checksum("\n".join(lines)), Path(data_dir, CACHE)
    with suppress(OSError):
        for old in folder.glob(f"files-*-{digits}.txt"):
            old.unlink()
        content = "\n".join(lines).encode("utf-8", "surrogateescape")
        write_atomically(folder / f"files-{stamps}-{digits}.txt", content)
    return digits


def count_changed_files(then: str, now: str, data_dir: str) -> int | None:
    """Return how many files differ between two marks, or None if a mark's files are not listed."""
    listed: list[set[bytes]] = []
    for mark in (then, now):
        pattern = f"files-*-{''.join(checksums(mark)[-1:])}.txt"
        path = next(Path(data_dir, CACHE).glob(pattern), None)
        if path is None:
            return None
        listed.append(set(path.read_bytes().splitlines()))
    return len({line.partition(b" ")[2] for line in listed[0] ^ listed[1]})


def checksums(mark: str) -> list[str]:
    """Return the checksums in a mark, the latest last."""
    return re.findall(r"\b[0-9a-f]{16}\b", mark.partition(" (")[2])


def join_marks(before: str, now: str) -> str:
    """Return the mark of a run whose first rounds used one mark's data, and the later rounds
    another's.
    """
    return f"{before.removesuffix(')')}, then {checksums(now)[-1]})"


def checksum(*parts: str | bytes | memoryview) -> str:
    """Return the first 16 hexadecimal digits of SHA-256."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part)
    return digest.hexdigest()[:16]


def file_checksum(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results for all items in order, computed in several threads."""
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        parts = pool.map(lambda chunk: [function(item) for item in chunk], chunks)
        return [result for part in parts for result in part]


def file_mark(path: Path) -> str | None:
    """Return a file's checksum, or None if it is not a readable file."""
    try:
        return file_checksum(path) if path.is_file() else None
    except (OSError, ValueError):
        return None
