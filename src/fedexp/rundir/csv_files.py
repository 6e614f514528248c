"""The csv tables in a run directory. Only whole rows are added to them."""

import csv
import errno
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError
from fedexp.core.storage import crc_of, reading, storing, write_atomically

ROUND = re.compile(rb"(\d+),")  # the first cell of a row


class TableChanged(ConfigError):
    """A table is not as the run wrote it, so its rows cannot be cut at a length in bytes."""


class CsvFile:
    """A csv file that grows by whole lines and can be truncated to the length in a checkpoint.

    The file is created when the first rows are written. Rows are written in one system call, so
    that a killed process does not leave half a line. If the disk becomes full, these rows are
    removed again.
    """

    def __init__(self, path: Path, columns: Sequence[str], length: int | None = None):
        """Open the file.

        columns: the names of the columns, which never change.
        length: the number of bytes to keep when resuming, or None to start a new file.
        """
        self.path, self.columns, self.length = path, list(columns), length or 0
        truncate(path, self.length)  # remove rows written after the checkpoint
        self.checksum = 0  # CRC-32 of all rows
        if self.length:
            with storing(path):
                self.checksum = crc_of(path, self.length)
            with storing(path), open(path, newline="", encoding="utf-8") as file:
                self._require_columns(next(csv.reader([file.readline()])))

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. A column that a row leaves out becomes an empty cell.

        None and NaN become empty cells too, and floats are written exactly. Raises ConfigError if a
        row has another column, and StorageError if the file cannot be written.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in rows:
            if not self.length and not text.tell():
                writer.writerow(self.columns)
            if not row.keys() <= set(self.columns):
                self._require_columns(list(row))
            writer.writerow([_cell(row.get(name)) for name in self.columns])
        content = text.getvalue().encode()
        if content and not self.length:
            write_atomically(self.path, content)
        elif content:
            with self._opened() as file:
                left = memoryview(content)
                try:
                    while left:
                        left = left[os.write(file.fileno(), left) :]
                except OSError:
                    file.truncate(self.length)
                    raise
        self.length += len(content)
        self.checksum = zlib.crc32(content, self.checksum)

    def state(self) -> dict[str, int]:
        """Return what `check_table` compares: the length in bytes, and the checksum."""
        return {"length": self.length, "checksum": self.checksum}

    def sync(self) -> None:
        """Sync the rows to the disk."""
        if self.length:
            with self._opened() as file:
                os.fsync(file.fileno())

    def _require_columns(self, found: list[str]) -> None:
        if found != self.columns:
            changed = ", ".join(sorted(set(found) ^ set(self.columns))) or "their order"
            raise ConfigError(
                f"{self.path.name}: the columns must be the same in every round; changed: {changed}"
            )

    @contextmanager
    def _opened(self) -> Iterator[io.FileIO]:
        """Open the file at its end. Raises StorageError if it no longer has all rows."""
        with storing(self.path):
            if not self.path.exists() or self.path.stat().st_size != self.length:
                reason = "it was removed or moved during the run, or another program changed it"
                raise OSError(errno.ENOENT, reason)
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(self.length)
                yield file


def truncate(path: Path, length: int) -> None:
    """Cut a table to its length in a checkpoint, or remove it if the length is 0."""
    check_length(path, length)
    with storing(path):
        if length:
            os.truncate(path, length)
        else:
            path.unlink(missing_ok=True)


def check_table(path: Path, length: int, checksum: int | None, last: int) -> None:
    """Raise TableChanged unless a table begins with the rows that a checkpoint recorded.

    length: their length in bytes. checksum: their CRC-32; None: an earlier version saved the
    checkpoint, so only the rows at both sides of the cut are checked. last: the checkpoint's round.
    """
    check_length(path, length)
    if not length:
        return
    with reading(path):
        same = (
            crc_of(path, length) == checksum if checksum is not None else fits(path, length, last)
        )
    if not same:
        raise TableChanged(
            f"{path}: is not as the run wrote it; another program saved it again (a program for"
            " tables writes other numbers or ends of lines). Put the original file back, or remove"
            f" {path.parent} to start again; nothing was changed"
        )


def fits(path: Path, length: int, last: int) -> bool:
    """Return whether a table has whole rows up to a length in bytes, and later rounds after it."""
    content = path.read_bytes()
    lines, later = content[:length].splitlines(keepends=True), content[length:]
    before, after = ROUND.match(lines[-1]), ROUND.match(later)
    return (
        b"\r" not in content
        and lines[-1].endswith(b"\n")
        and (len(lines) == 1 or (before is not None and int(before[1]) <= last))
        and (not later or (after is not None and int(after[1]) > last))
    )


def check_length(path: Path, length: int) -> None:
    """Raise ConfigError if a file has fewer bytes than a checkpoint recorded."""
    if length and (not path.exists() or path.stat().st_size < length):
        raise ConfigError(f"{path}: has fewer bytes than the checkpoint recorded")


def _cell(value: object) -> Any:
    if value is None or value != value:
        return ""
    return repr(float(value)) if isinstance(value, float) else value
