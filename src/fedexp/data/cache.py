"""Cache decoded arrays on disk, so that a data set is decoded only once."""

import hashlib
import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.memory import size_of
from fedexp.core.storage import crc_of, replacing
from fedexp.data.mapped import CRC_BYTES, ImageFile

log = logging.getLogger("fedexp")
# Arrays of a data set: x_train, y_train, x_test, y_test, classes and, with natural clients, owners,
# and test_owners if they have test examples of their own.
# Images that do not fit into memory are a fedexp.data.mapped.Chosen, all others numpy arrays.
Arrays = dict[str, Any]
Labelled = tuple[Any, Any]  # inputs [N, ...] and labels [N]
CACHE = ".fedexp_cache"  # name of the cache folder in a data_dir
FORMAT = 2  # increase when the meaning of the cached arrays changes


class SourceFile(NamedTuple):
    """A file, and the values that show whether it has changed.

    Copies and unpacked archives may have equal sizes and modification times. No program can set the
    time of the last change of the file's status, and another file has another inode.
    """

    path: str
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path | str) -> "SourceFile":
        stat = os.stat(path)
        return cls(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def stamps(files: Iterable[SourceFile], data_dir: str) -> list[str]:
    """Return lines that identify this version of the files.

    Paths are relative to `data_dir`, so that the cache stays valid if the directory is moved, and
    if a path is given in another way.
    """
    folders: dict[str, str] = {}
    lines = []
    for path, *values in files:
        folder, name = os.path.split(path)
        if folder not in folders:
            folders[folder] = relative(folder, data_dir)
        lines.append(" ".join([f"{folders[folder]}/{name}", *map(str, values)]))
    return lines


def relative(folder: str, data_dir: str) -> str:
    """Return a folder's path relative to `data_dir`, whether the two are absolute or not."""
    return os.path.relpath(folder or ".", data_dir or ".")


def make_arrays(train: Labelled, test: Labelled, classes: Iterable[str]) -> Arrays:
    """Return the arrays of a data set as a dict.

    train, test: pairs of inputs [N, ...] and labels [N]. classes: class names, ordered by label.
    """
    return {
        "x_train": train[0],
        "y_train": np.asarray(train[1], np.int64),
        "x_test": test[0],
        "y_test": np.asarray(test[1], np.int64),
        "classes": np.array(list(classes)),
    }


def load_cached(
    data_dir: str,
    name: str,
    content: Iterable[str],
    options: Mapping[str, Any],
    build: Callable[[], Arrays],
) -> Arrays:
    """Return the result of `build`, or load it from the cache in `<data_dir>/.fedexp_cache`.

    If a cache entry cannot be read, it is built again. If the cache cannot be written, a warning is
    logged, and the next run builds the arrays again.

    content: lines that identify the source files (`stamps`), in order. If a line or an
    option changes, a new entry is built.
    options: options that affect the result.
    """
    path = _entry(data_dir, name, content, options, ".npz")
    if (arrays := _read(path)) is None:
        arrays = build()
        _write(path, arrays)
    return arrays


def load_mapped(
    data_dir: str,
    name: str,
    content: Iterable[str],
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    build: Callable[[], Iterable[np.ndarray]],
) -> ImageFile:
    """Return a file of decoded images from the cache. A missing or damaged file is written first.

    The images are followed by their CRC-32 checksum, which is checked once per process. Files of
    earlier versions of the images are kept, because other runs may be reading them.

    shape: the shape of all images together, (N, height, width, channels).
    build: yields the images in pieces, uint8 [n, height, width, channels]. Only one piece at a time
    is in memory.

    See `load_cached` for the other parameters. Raises ConfigError if the file cannot be written.
    """
    path, size = _entry(data_dir, name, content, options, ".u8"), math.prod(shape)
    if not (path.is_file() and _is_intact(path, size, path.stat().st_mtime_ns)):
        for old in _outdated(path):
            log.info("%s has earlier images; remove this file if no run uses it", old)
        log.info("storing %s of decoded images in %s; this is done only once", size_of(size), path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                crc = 0
                for piece in build():
                    file.write(piece.data)
                    crc = zlib.crc32(piece.data, crc)
                file.write(crc.to_bytes(CRC_BYTES))
        except OSError as error:
            raise ConfigError(
                f"data_dir={data_dir}: {size_of(size)} of decoded images cannot be stored in"
                f" {path.parent} ({error.strerror}); data sets of this size are not kept in memory"
            ) from error
    return ImageFile(str(path), shape)


def _entry(
    data_dir: str, name: str, content: Iterable[str], options: Mapping[str, Any], suffix: str
) -> Path:
    """Return the path of a cache entry."""
    chosen = checksum(json.dumps([FORMAT, dict(options)], sort_keys=True))[:8]
    return Path(data_dir, CACHE, f"{name}-{chosen}-{checksum(chr(10).join(content))}{suffix}")


def checksum(text: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 hash of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _outdated(path: Path) -> list[Path]:
    """Return cache entries with the same options for earlier versions of the source files."""
    pattern = f"{path.stem.rpartition('-')[0]}-*{path.suffix}"
    return [old for old in path.parent.glob(pattern) if old != path]


@cache
def _is_intact(path: Path, size: int, mtime_ns: int) -> bool:
    """Return whether a file of decoded images has this size and its checksum, without the latter.

    mtime_ns: modification time, so that a file that changes is checked again.
    """
    if path.stat().st_size == size + CRC_BYTES:
        log.info("checking %s of decoded images in %s", size_of(size), path)
        with path.open("rb") as file:
            file.seek(size)
            if file.read() == crc_of(path, size).to_bytes(CRC_BYTES):
                return True
    log.warning("the cache file %s is damaged; decoding the images again", path)
    return False


def _read(path: Path) -> Arrays | None:
    try:
        # Damaged files are detected, because zip verifies the CRC of every array.
        with np.load(path, allow_pickle=False) as entry:
            return dict(entry)
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy and zipfile raise many types for a damaged file
        log.warning("cannot read the cache file %s (%s); decoding the data again", path, error)
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Write a cache entry atomically, then remove outdated entries."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]
        for old in _outdated(path):
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot save the decoded images in the cache: %s", error)
