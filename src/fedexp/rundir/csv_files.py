"""The csv tables in a run directory. Only whole rows are added to them."""

import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping, Sequence
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

    def __init__(self, path: Path, columns: Sequence[str], length: int | None = None):
        """Open the file.

        columns: the names of the columns, which never change.
        length: the number of bytes to keep when resuming, or None to start a new file.
        """
        self.path, self.columns, self.length = path, list(columns), length or 0
        self._descriptor: int | None = None
        truncate(path, self.length)  # remove rows written after the checkpoint
        if self.length:
            with storing(path), open(path, newline="", encoding="utf-8") as file:
                self._require_columns(next(csv.reader([file.readline()])))
                self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

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
        if text.tell():
            self._write(text.getvalue().encode())

    def _require_columns(self, found: list[str]) -> None:
        if found != self.columns:
            changed = ", ".join(sorted(set(found) ^ set(self.columns))) or "their order"
            raise ConfigError(
                f"{self.path.name}: the columns must be the same in every round; changed: {changed}"
            )

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


def truncate(path: Path, length: int) -> None:
    """Cut a table to its length in a checkpoint, or remove it if the length is 0."""
    check_length(path, length)
    with storing(path):
        if length:
            os.truncate(path, length)
        else:
            path.unlink(missing_ok=True)


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
        self,
        directory: Path,
        columns: Mapping[str, Sequence[str]],
        lengths: Mapping[str, int] | None = None,
    ):
        self.directory, kept = directory, lengths or {}
        self._files = {
            name: CsvFile(directory / name, names, kept.get(name))
            for name, names in columns.items()
        }

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
