"""The csv tables in a run directory. Only whole rows are added to them."""

import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.storage import storing, write_atomically
from fedexp.rundir.files import ROUNDS


class CsvFile:
    """A csv file that grows by whole lines and can be truncated to the length in a checkpoint.

    The file is created when the first rows are written. Rows are written in one system call, so
    that a killed process does not leave half a line. If the disk becomes full, these rows are
    removed again.
    """

    def __init__(self, path: Path, length: int | None = None):
        """Open the file.

        length: the number of bytes to keep when resuming, or None to start a new file.
        """
        self.path, self.length = path, length or 0
        self._columns: list[str] | None = None
        self._descriptor: int | None = None
        with storing(path):
            if not self.length:  # remove rows written after the checkpoint
                path.unlink(missing_ok=True)
                return
            check_length(path, self.length)
            with open(path, newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader([file.readline()]))
            os.truncate(path, self.length)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. The first row determines the columns.

        None and NaN become empty cells, and floats are written exactly. Raises ConfigError if the
        columns change, and StorageError if the file cannot be written.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in rows:
            if self._columns is None:
                self._columns = list(row)
                writer.writerow(self._columns)
            if list(row) != self._columns:
                changed = ", ".join(sorted(set(row) ^ set(self._columns))) or "their order"
                raise ConfigError(
                    f"{self.path.name}: the columns must be the same in every round; changed:"
                    f" {changed}"
                )
            writer.writerow([_cell(value) for value in row.values()])
        if text.tell():
            self._write(text.getvalue().encode())

    def _write(self, content: bytes) -> None:
        with storing(self.path):
            if self._descriptor is None:
                write_atomically(self.path, content)
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            else:
                self._extend(self._descriptor, content)
        self.length += len(content)

    def _extend(self, descriptor: int, content: bytes) -> None:
        self.check_in_place()
        left = memoryview(content)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.ftruncate(descriptor, self.length)
            raise

    def check_in_place(self) -> None:
        """Raise StorageError if the file was removed or moved, since written rows would be lost."""
        if self._descriptor is None:
            return
        try:
            there = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            there = False
        if not there:
            raise StorageError(
                self.path, OSError(errno.ENOENT, "it was removed or moved during the run")
            )

    def sync(self) -> None:
        """Sync the appended rows to the disk. Raises StorageError if the file was removed."""
        self.check_in_place()
        if self._descriptor is not None:
            with storing(self.path):
                os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def check_length(path: Path, length: int) -> None:
    """Raise ConfigError if a file has fewer bytes than a checkpoint recorded."""
    if length and (not path.exists() or path.stat().st_size < length):
        raise ConfigError(f"{path}: has fewer bytes than the checkpoint recorded")


def _cell(value: object) -> Any:
    if value is None or value != value:
        return ""
    return repr(float(value)) if isinstance(value, float) else value


class RunFiles:
    """The csv files of a run.

    Checkpoints store `lengths`, so that a resumed run can remove rows that were written after the
    checkpoint.
    """

    def __init__(
        self, directory: Path, names: Iterable[str], lengths: Mapping[str, int] | None = None
    ):
        self.directory = directory
        kept = lengths or {}
        self._files = {name: CsvFile(directory / name, kept.get(name)) for name in names}

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self._files[name].append(rows)

    def lengths(self) -> dict[str, int]:
        """Sync all files and return their lengths in bytes.

        Because of the sync, a checkpoint never records rows that are not yet on the disk.
        """
        for file in self._files.values():
            file.sync()
        return {name: file.length for name, file in self._files.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def last_round(directory: Path) -> int | None:
    """Return the round in the last complete row of rounds.csv, or None if no row is complete."""
    path = directory / ROUNDS
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    rows = text[: text.rfind("\n") + 1].splitlines()[1:]
    number = rows[-1].partition(",")[0] if rows else ""
    return int(number) if number.isdecimal() and len(number) < 10 else None
