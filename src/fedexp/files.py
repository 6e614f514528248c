"""The tidy files of a run directory: the truth, of which trackers are views.

torch is imported late: figures and tables are made without it.
"""

import csv
import errno
import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from fedexp.tree import Tree

ROUNDS, CLASSES, CLIENTS, TASKS = "rounds.csv", "class_accuracy.csv", "clients.csv", "tasks.csv"
CONFIG, SUMMARY, PARTITION, LOCAL = "config.yaml", "summary.json", "partition.npz", "local_class_accuracy.npz"
CHECKPOINT, PREVIOUS, CLIENT_STATES = "checkpoint/latest.pt", "checkpoint/previous.pt", "checkpoint/clients"
ERROR = "error.txt"


def shorten(path: Path) -> Path:
    """Relative to the working directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class TableDamaged(ConfigError):
    """A csv file is not what the checkpoint says."""


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """What the system says against writing a file, as StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(path, error) from error


@contextmanager
def temporary_of(path: Path) -> Iterator[Path]:
    """A hidden name beside it, to be moved to its place when it is complete; see `remove_temporaries`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_atomically(path: Path, content: bytes, sync_folder: bool = True) -> None:
    """The file is either the old one or the whole new one, also after a crash or a loss of power.

    sync_folder: its new entry in the folder, too, is on the disk before this returns. Raises StorageError.
    """
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_of(path) as temporary:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        if sync_folder:
            sync(path.parent)


def sync(folder: Path) -> None:
    """The entries of a folder, so that a file that was moved there stays there after a loss of power."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows, where folders cannot be opened
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(directory: Path) -> None:
    """What a run that was killed while it wrote has left behind."""
    for folder in (".", ".hydra", "checkpoint", CLIENT_STATES, "figures"):
        for path in (directory / folder).glob(".*.tmp"):
            if not path.is_dir():
                path.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_tree(path: Path, value: "Tree", sync_folder: bool = True) -> None:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomically(path, buffer.getvalue(), sync_folder)


def load_tree(path: Path, mapped: bool = False) -> "Tree":
    """Checked, unless mapped: then it is read from the file when looked at, and never kept in memory for good."""
    import torch

    if not mapped:
        check_tree(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise ConfigError(f"{path}: not a readable checkpoint ({type(error).__name__})") from error


def check_tree(path: Path) -> None:
    """Raises ConfigError unless the file is there and its records are those that were written (CRC-32)."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing") from None
    except Exception as error:  # zipfile raises many types for a damaged file
        raise ConfigError(f"{path}: damaged ({error or type(error).__name__})") from error
    if wrong is not None:
        raise ConfigError(f"{path}: damaged (the checksum of {wrong} is wrong)")


class CsvFile:
    """A csv file that grows by whole lines and can be cut back to a checkpoint's length.

    It appears with its first rows. Rows that are appended are handed to the system in one call, so that a kill does not
    part a line, and are taken back where they do not fit on the disk.
    """

    def __init__(self, path: Path, length: int | None = None):
        """length: bytes to keep of an existing file (resume); None starts a new file."""
        self.path, self.length, self.checksum = path, length or 0, 0
        self._columns: list[str] | None = None
        self._descriptor: int | None = None
        with storing(path):
            if not self.length:  # whatever was written after the checkpoint
                path.unlink(missing_ok=True)
                return
            if not path.exists() or path.stat().st_size < self.length:
                raise ConfigError(f"{path}: shorter than its checkpoint says; this run cannot be resumed")
            with open(path, newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader([file.readline()]))
            os.truncate(path, self.length)
            self.checksum = checksum(path, self.length)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The first row fixes the columns. None and NaN become empty cells; floats are written exactly."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in rows:
            if self._columns is None:
                self._columns = list(row)
                writer.writerow(self._columns)
            assert list(row) == self._columns, f"{self.path.name}: columns changed to {list(row)}"
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
        self.checksum = zlib.crc32(content, self.checksum)

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
        """Raises StorageError where somebody has removed or moved the file: what is written would be lost."""
        if self._descriptor is None:
            return
        try:
            there = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            there = False
        if not there:
            raise StorageError(self.path, OSError(errno.ENOENT, "it was removed or moved while the run went on"))

    def sync(self) -> None:
        """What was appended is on the disk, in a file that is still there."""
        self.check_in_place()
        if self._descriptor is not None:
            with storing(self.path):
                os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def checksum(path: Path, length: int) -> int:
    """CRC-32 of the first `length` bytes."""
    found = 0
    with open(path, "rb") as file:
        while length > 0 and (part := file.read(min(length, 2**20))):
            found, length = zlib.crc32(part, found), length - len(part)
    return found


def check_beginning(path: Path, length: int, expected: int | None) -> None:
    """Raises TableDamaged unless the first `length` bytes are whole rows, those whose checksum is `expected`
    (None: it was not kept)."""
    try:
        if not length:
            return
        if path.stat().st_size < length:
            raise TableDamaged(f"{path}: shorter than its checkpoint says")
        with open(path, "rb") as file:
            file.seek(length - 1)
            ends = file.read(1) == b"\n"
        if not ends or (expected is not None and checksum(path, length) != expected):
            raise TableDamaged(f"{path}: changed since its checkpoint was written")
    except OSError as error:
        raise TableDamaged(f"{path}: cannot be read ({error.strerror})") from error


def _cell(value: Any) -> Any:
    if value is None or value != value:
        return ""
    return repr(float(value)) if isinstance(value, float) else value


class RunFiles:
    """The growing files of a run; `lengths` and `checksums` go into the checkpoint, so that resume can tell whether
    they are whole and cut later rows off."""

    def __init__(self, directory: Path, names: Iterable[str], lengths: Mapping[str, int] | None = None):
        self.directory = directory
        kept = lengths or {}
        self._files = {name: CsvFile(directory / name, kept.get(name)) for name in names}

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self._files[name].append(rows)

    def lengths(self) -> dict[str, int]:
        """Bytes on disk now; synced, so that a checkpoint never promises more than there is."""
        for file in self._files.values():
            file.sync()
        return {name: file.length for name, file in self._files.items()}

    def checksums(self) -> dict[str, int]:
        """CRC-32 of each file up to its length, kept while rows are appended."""
        return {name: file.checksum for name, file in self._files.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def last_round(directory: Path) -> int | None:
    """The number in the last whole row of rounds.csv; None where it has none."""
    path = directory / ROUNDS
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    rows = text[: text.rfind("\n") + 1].splitlines()[1:]
    number = rows[-1].partition(",")[0] if rows else ""
    return int(number) if number.isdecimal() and len(number) < 10 else None


def finished_summary(directory: Path) -> dict[str, Any] | None:
    """The summary of a run that has come to its end; None where there is more to do."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ended = isinstance(summary, dict) and summary.get("status") in ("completed", "diverged")
    return summary if ended else None
