"""Record the file operations of a process, and the files that a stop may leave.

`record` stores the whole folder after each operation: a file opened for writing, written, synced,
truncated, linked, moved or removed, a folder made, removed or synced. It also stores the content
that survives a power failure: that of a file at its last fsync, and the entries of a folder at its
last fsync. `disks` yields the folders that a stop at a moment may leave.
"""

import builtins
import hashlib
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = (
    "rename",
    "replace",
    "link",
    "symlink",
    "unlink",
    "remove",
    "mkdir",
    "rmdir",
    "truncate",
    "ftruncate",
    "write",
)
UNIMPORTANT = ("run.log", ".lock", ".owner.json", "multirun.yaml")  # not read by a resumed run
Entries = Mapping[int, Mapping[str, int]]  # number of a folder -> name -> number of the entry
Contents = Mapping[int, bytes]  # number of a file -> content
Disk = dict[str, bytes | None]  # path -> content; None for a folder
ROOT = 0


@dataclass(frozen=True)
class Moment:
    """The folder after an operation. Every file and folder has a unique number."""

    operation: str
    entries: Entries
    contents: Contents
    synced_entries: Entries
    synced_contents: Contents


class Recorder:
    """Write moments to a file until the process ends."""

    def __init__(self, folder: Path, journal: Path):
        self.folder = folder
        self._file = open(journal, "wb")  # noqa: SIM115 (open until the process ends)
        # one pickler, so that unchanged content is written once
        self._pickler = pickle.Pickler(self._file)
        # (device, inode) -> number, for the current files
        self._numbers: dict[tuple[int, int], int] = {}
        self._next, self._busy = ROOT, False
        self.entries: dict[int, dict[str, int]] = {}
        self.contents: dict[int, bytes] = {}
        self.synced_entries: dict[int, dict[str, int]] = {}
        self.synced_contents: dict[int, bytes] = {}
        self._look()
        self.synced_entries, self.synced_contents = dict(self.entries), dict(self.contents)
        self._note("the beginning")

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._noting(name, getattr(os, name)))
        sync = os.fsync

        def fsync(descriptor: Any) -> None:
            sync(descriptor)
            self.after("fsync", descriptor if isinstance(descriptor, int) else descriptor.fileno())

        os.fsync = fsync
        sys.addaudithook(self._opened)

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self.after(f"{name} {args[0]}" if isinstance(args[0], str | os.PathLike) else name)
            return result

        return noted

    def _opened(self, event: str, args: tuple[Any, ...]) -> None:
        """Record the folder before a file is opened for writing."""
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self.after(f"before opening {args[0]}")

    def after(self, operation: str, synced: int | None = None) -> None:
        """Record the folder. synced: the descriptor of a synced file or folder."""
        if self._busy:
            return
        self._busy = True
        try:
            self._look()
            if synced is not None:
                found = os.fstat(synced)
                number = self._numbers.get((found.st_dev, found.st_ino))
                if number in self.entries:
                    self.synced_entries[number] = self.entries[number]
                elif number is not None:
                    self.synced_contents[number] = self.contents[number]
            self._note(operation)
        finally:
            self._busy = False

    def _note(self, operation: str) -> None:
        sides = (self.entries, self.contents, self.synced_entries, self.synced_contents)
        self._pickler.dump(Moment(operation, *map(dict, sides)))
        self._file.flush()

    def _look(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._former, self.entries, self.contents = self.contents, {}, {}
        self._look_into(str(self.folder), os.stat(self.folder))
        self._numbers = {key: number for key, number in self._numbers.items() if key in self._seen}

    def _look_into(self, path: str, found: os.stat_result) -> int:
        key = found.st_dev, found.st_ino
        self._seen.add(key)
        if key not in self._numbers:
            self._numbers[key], self._next = self._next, self._next + 1
        number = self._numbers[key]
        if stat.S_ISDIR(found.st_mode):
            self.entries[number] = {}
            self.synced_entries.setdefault(number, {})
            with os.scandir(path) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
            for entry in inside:
                if not entry.name.startswith(".output"):  # output of the process
                    self.entries[number][entry.name] = self._look_into(
                        entry.path, entry.stat(follow_symlinks=False)
                    )
        elif number not in self.contents:
            with builtins.open(path, "rb") as file:
                content, former = file.read(), self._former.get(number)
            self.contents[number] = former if former is not None and former == content else content
            self.synced_contents.setdefault(number, b"")
        return number


def record(folder: Path, journal: Path) -> None:
    """Record all operations of this process below a folder from now on."""
    Recorder(folder, journal).install()


def read(journal: Path) -> list[Moment]:
    moments = []
    with open(journal, "rb") as file:
        unpickler = pickle.Unpickler(file)
        while True:
            try:
                moments.append(unpickler.load())
            except EOFError:
                return moments


# --- the files that a stop leaves


def disks(before: Moment, now: Moment) -> Iterator[tuple[str, Disk]]:
    """Yield (kind of stop, files) for a stop right after the operation of `now`."""
    yield "killed", build_disk(now.entries, now.contents)
    for kind, part in (("half written", 2), ("just opened", 0)):
        if new := changed_files(before, now):
            cut = {
                number: truncated(before.contents.get(number), now.contents[number], part)
                for number in new
            }
            yield kind, build_disk(now.entries, {**now.contents, **cut})
    yield "what was not synced is gone", build_disk(now.synced_entries, now.synced_contents)
    yield (
        "names are kept, what was not synced in files is gone",
        build_disk(now.entries, now.synced_contents),
    )
    entries = {
        folder: {
            name: number for name, number in names.items() if name in now.entries.get(folder, {})
        }
        for folder, names in now.synced_entries.items()
    }
    contents = {
        n: cut_back(content, now.contents.get(n, content))
        for n, content in now.synced_contents.items()
    }
    yield "removals are kept, what was not synced is gone", build_disk(entries, contents)


def changed_files(before: Moment, now: Moment) -> list[int]:
    """Return the files to which something was written."""
    return [
        n
        for n, content in now.contents.items()
        if not before.contents.get(n, b"").startswith(content)
    ]


def truncated(before: bytes | None, now: bytes, part: int) -> bytes:
    """Return the content with one `part`-th of the new bytes (0: none)."""
    kept = len(before) if before is not None and now.startswith(before) else 0
    return now[: kept + ((len(now) - kept) // part if part else 0)]


def cut_back(synced: bytes, now: bytes) -> bytes:
    return now if synced.startswith(now) else synced


def build_disk(entries: Entries, contents: Contents) -> Disk:
    disk: Disk = {}

    def add(number: int, path: str) -> None:
        for name, inside in entries.get(number, {}).items():
            disk[f"{path}{name}"] = contents.get(inside)
            if inside not in contents:
                add(inside, f"{path}{name}/")

    add(ROOT, "")
    return disk


def key_of(disk: Disk) -> bytes:
    """Return a key that is equal for disks with the same relevant files."""
    digest = hashlib.sha256()
    for path, content in sorted(disk.items()):
        if path.rpartition("/")[2] not in UNIMPORTANT:
            digest.update(repr((path, content and hashlib.sha256(content).digest())).encode())
    return digest.digest()


def restore(disk: Disk, folder: Path) -> None:
    """Write the files of a disk to a new folder."""
    folder.mkdir(parents=True)
    for path, content in sorted(disk.items()):
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
