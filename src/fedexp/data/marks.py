"""Marks: short texts that identify the contents of data files.

Two marks are equal if the bytes of the files are equal, even if the files are in different folders.
A mark looks like `90 files (bytes 0123456789abcdef)` or, if the data changed during a run, `90
files (bytes 0123456789abcdef, then fedcba9876543210)`. The checksums of the files are cached in
`<data_dir>/.fedexp_cache`. Files are read again only if a size or a modification time changes.
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
CACHE = ".fedexp_cache"  # name of the cache folder in a data_dir
BYTES = " (bytes "
MANY = 1000  # reading this many files takes seconds, so a message is logged
CHUNK = 256  # number of items that a thread processes at a time
Item = TypeVar("Item")
Result = TypeVar("Result")


class SourceFile(NamedTuple):
    """A file, and the size and modification time that show whether it has changed."""

    path: str
    size: int  # bytes
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "SourceFile":
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns)

    def stamp(self, data_dir: str) -> str:
        """Return a line that identifies this version of the file.

        The path of a file in `data_dir` is relative to `data_dir`, so that the cache stays valid if
        the directory is moved.
        """
        return f"{self.path.removeprefix(data_dir)} {self.size} {self.mtime_ns}"


def content_mark(find: Callable[[], Sequence[SourceFile]], data_dir: str) -> str | None:
    """Return the mark of the files that `find` returns.

    The mark depends on the bytes of the files and on their paths relative to their common folder.
    Returns None if `find` returns no files or if a file cannot be read.
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
    """Return the joint checksum of sorted files, and save the checksum of each file in the cache.

    The cache file is named `files-<stamps>-<checksum>.txt`, where <checksum> is the joint checksum.

    stamps: checksum of the results of `SourceFile.stamp` for all files.
    """
    if len(files) >= MANY:
        log.info("computing the checksum of %s files; this is done only once", f"{len(files):,}")
    folders = [os.path.dirname(file.path) for file in (files[0], files[-1])]
    start = len(os.path.commonpath(folders))  # valid for all files, because they are sorted
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
    """Return the number of files that differ between two marks.

    then, now: the marks. The result is None if the cache has no list of the files of one of them.
    """
    listed: list[set[bytes]] = []
    for mark in (then, now):
        pattern = f"files-*-{''.join(checksums(mark)[-1:])}.txt"
        path = next(Path(data_dir, CACHE).glob(pattern), None)
        if path is None:
            return None
        listed.append(set(path.read_bytes().splitlines()))
    return len({line.partition(b" ")[2] for line in listed[0] ^ listed[1]})


def checksums(mark: str) -> list[str]:
    """Return the checksums in a mark, from the oldest to the latest."""
    return re.findall(r"\b[0-9a-f]{16}\b", mark.partition(" (")[2])


def join_marks(before: str, now: str) -> str:
    """Return the mark of a run whose data changed from the mark `before` to the mark `now`."""
    return f"{before.removesuffix(')')}, then {checksums(now)[-1]})"


def checksum(*parts: str | bytes | memoryview) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 hash of all parts together."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part)
    return digest.hexdigest()[:16]


def file_checksum(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Apply a function to all items in several threads, and return the results in order."""
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
