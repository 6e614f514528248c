"""Marks of data on disk: equal where the data are, wherever they lie."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


def folder_mark(root: Path, splits: Sequence[str]) -> str | None:
    """Return `<number> files <checksum of their names and sizes>` of the files in these folders of
    `root`; None where one of them is not there. Hidden files and folders do not count: the cache of
    decoded images is one."""
    digest, count = hashlib.sha256(), 0
    try:
        for split in dict.fromkeys(splits):
            lines = sorted(entries(root / split))
            count += len(lines)
            digest.update(f"{split} {len(lines)}\n".encode())
            digest.update("\n".join(lines).encode("utf-8", "surrogateescape"))
    except (OSError, ValueError):
        return None
    return f"{count} files {digest.hexdigest()[:16]}"


def entries(folder: Path) -> Iterator[str]:
    """Yield a line for each file below a folder: its path from there and its bytes. Follows links,
    each folder once."""
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        raise error

    for path, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        stat = os.stat(path)
        if (stat.st_dev, stat.st_ino) in seen:
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        # In sorted order, so that of two links to a folder always the same one is followed.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = Path(os.path.relpath(path, folder)).as_posix()
        yield from (
            f"{below}/{name} {size(path, name)}" for name in names if not name.startswith(".")
        )


def size(folder: str, name: str) -> int:
    """Return the bytes of a file; -1 for a link to nothing."""
    try:
        return os.stat(os.path.join(folder, name)).st_size
    except FileNotFoundError:
        return -1


def file_mark(path: Path) -> str | None:
    """Return `<checksum of its bytes>`; None where it is no readable file."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, ValueError):
        return None
