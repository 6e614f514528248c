"""Files that are whole or not there: written beside their place, synced and moved to it.

torch is imported late: figures and tables are made without it.
"""

import errno
import io
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from fedexp.core.tree import Tree

# bytes in memory for one in a file; fedexp packs none, and numbers seldom pack by more than 20
RATIO = 200
SMALL = 2**26  # bytes that are harmless whatever their ratio


def display_path(path: Path) -> Path:
    """Return the path as one would type it: relative where it lies below the working directory."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def regular(path: Path) -> Path:
    """Return the path of a file that is to be read. Raises OSError for whatever else is there: in
    a foreign directory it may be a named pipe, which would be waited for, or a device."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return path


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raise what the system says against writing a file as StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(path, error) from error


@contextmanager
def temporary_of(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside the file, to be moved to its place when complete; see
    `remove_temporaries`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_atomically(path: Path, content: bytes, sync_folder: bool = True) -> None:
    """Write a file that is either the old one or the whole new one, also after a crash or a loss of
    power.

    sync_folder: its new entry in the folder, too, is on the disk before this returns. Raises
    StorageError.
    """
    with storing(path):
        make_folder(path.parent)
        with temporary_of(path) as temporary:
            with suppress(FileNotFoundError):
                temporary.unlink()
            # never through a foreign link
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        if sync_folder:
            sync(path.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it; their entries are on the disk before this returns."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_above(folder, 1)


def sync_above(folder: Path, levels: int) -> None:
    """The entries of the folders above one, which may be as new as it is: else all that is synced
    in it is lost with its name. One that cannot be opened is left out."""
    for above in list(folder.absolute().parents)[:levels]:
        with suppress(OSError):
            sync(above)


def sync(folder: Path) -> None:
    """Sync the entries of a folder, so that a file that was moved there stays there after a loss of
    power."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows, where folders cannot be opened
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_tree(path: Path, value: "Tree", sync_folder: bool = True) -> None:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomically(path, buffer.getvalue(), sync_folder)


def load_tree(path: Path, mapped: bool = False) -> "Tree":
    """Load a tree, checked, unless mapped: then it is read from the file when looked at, and never
    kept in memory for good."""
    import torch

    from fedexp.core import tree

    if not mapped:
        check_tree(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise ConfigError(f"{path}: not a readable checkpoint ({type(error).__name__})") from error
    try:
        for leaf in tree.leaves(found):
            if leaf.layout != torch.strided or leaf.is_meta:
                raise ValueError("a tensor is sparse or has no values")
            check_size(leaf.numel() * leaf.element_size(), leaf.untyped_storage().nbytes())
    except ValueError as error:
        raise ConfigError(f"{path}: not a checkpoint ({error})") from error
    return found


def check_tree(path: Path) -> None:
    """Raise ConfigError unless the file is there and its records are those that were written
    (CRC-32), which torch does not compress."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(record.compress_type for record in archive.infolist()):
                raise ValueError("its records are compressed")
            wrong = archive.testzip()
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing") from None
    except Exception as error:  # zipfile raises many types for a damaged file
        raise ConfigError(f"{path}: damaged ({error or type(error).__name__})") from error
    if wrong is not None:
        raise ConfigError(f"{path}: damaged (the checksum of {wrong} is wrong)")


def check_size(size: int, packed: int) -> None:
    """Raise ValueError where so few bytes of a file stand for more than the memory may hold."""
    if size > SMALL and size > RATIO * packed:
        raise ValueError(f"{packed:,} bytes stand for {size:,}, more than {RATIO} times as many")


def remove_if_empty(directory: Path, here: Path) -> None:
    """Take back the directories that Hydra made for a run or sweep that never began; of parents
    only those below `here`."""
    for candidate in (directory, *directory.parents):
        if candidate != directory and here not in candidate.parents:
            return
        try:
            candidate.rmdir()
        except OSError:
            return
