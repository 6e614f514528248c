"""The tidy files of a run directory: the truth, of which trackers are views."""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.errors import ConfigError

if TYPE_CHECKING:
    from fedexp.tree import Tree

ROUNDS, CLASSES, CLIENTS, TASKS = "rounds.csv", "class_accuracy.csv", "clients.csv", "tasks.csv"
CONFIG, SUMMARY, PARTITION, LOCAL = "config.yaml", "summary.json", "partition.npz", "local_class_accuracy.npz"
CHECKPOINT, CLIENT_STATES, ERROR = "checkpoint/latest.pt", "checkpoint/clients", "error.txt"


def write_atomically(path: Path, content: bytes) -> None:
    """The file is either the old one or the whole new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_tree(path: Path, value: "Tree") -> None:
    import torch  # late: tables and pages are made without it

    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomically(path, buffer.getvalue())


def load_tree(path: Path, mapped: bool = False) -> "Tree":
    """mapped: read from the file when looked at, and never kept in memory for good."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no checkpoint there; only a run that has finished a round can be resumed") from None
    except Exception as error:
        raise ConfigError(f"{path}: not a readable checkpoint ({type(error).__name__})") from error


class CsvFile:
    """A csv file that grows by whole lines and can be cut back to a checkpoint's length."""

    def __init__(self, path: Path, length: int | None = None):
        """length: bytes to keep of an existing file (resume); None starts a new file."""
        self.path = path
        self._columns: list[str] | None = None
        if length is None:
            self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
            return
        if not path.exists() or path.stat().st_size < length:
            raise ConfigError(f"{path}: shorter than its checkpoint says; this run cannot be resumed")
        self._file = open(path, "r+", newline="", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        if length:  # an empty file has no header to keep, whatever was written after the checkpoint
            self._columns = next(csv.reader([self._file.readline()]))
        self._file.seek(length)
        self._file.truncate()

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
        self._file.write(text.getvalue())
        self._file.flush()

    @property
    def length(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cell(value: Any) -> Any:
    if value is None or value != value:
        return ""
    return repr(float(value)) if isinstance(value, float) else value


class RunFiles:
    """The growing files of a run; `lengths` goes into the checkpoint so that resume can cut later rows off."""

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

    def close(self) -> None:
        for file in self._files.values():
            file.close()
