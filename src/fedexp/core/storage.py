"""Write files atomically: write a temporary file, sync it, and rename it.

A new file is therefore either complete or missing. torch is imported inside functions, since
figures and tables do not need it.
"""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedexp.core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from fedexp.core.tree import Tree


def display_path(path: Path) -> Path:
    """Return a path as shown to users. It is relative if the file is in the working directory."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raise StorageError if the block raises OSError. path: the file that the block writes."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(path, error) from error


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a hidden path in a file's folder. The caller writes to this path and then renames it.

    If the process is killed, the hidden file stays until `remove_temporaries` removes it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, which replaces the file at `path` at the end, when it is on disk."""
    with temporary_path(path) as temporary:
        with suppress(FileNotFoundError):
            temporary.unlink()
        # "x" fails if a link exists, so nothing is written through it
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def crc_of(path: Path, length: int) -> int:
    """Return the CRC-32 checksum of the first `length` bytes of a file."""
    found = 0
    with open(path, "rb") as file:
        while length > 0 and (part := file.read(min(length, 2**20))):
            found, length = zlib.crc32(part, found), length - len(part)
    return found


def write_atomically(path: Path, content: bytes, sync_folder: bool = True) -> None:
    """Write a file so that it has either the old content or the complete new content.

    This also holds after a crash or a power failure. sync_folder: also sync the file's folder
    before returning. Raises StorageError if the file cannot be written.
    """
    with storing(path):
        make_folder(path.parent)
        with replacing(path) as file:
            file.write(content)
        if sync_folder:
            sync(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and sync their directory entries to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_parents(folder, 1)


def sync_parents(folder: Path, levels: int) -> None:
    """Sync the directory entries of up to `levels` parents of a folder.

    If new parents are not synced, a power failure can lose the folder and everything in it.
    A parent that cannot be opened is skipped.
    """
    for above in list(folder.absolute().parents)[:levels]:
        with suppress(OSError):
            sync(above)


def sync(folder: Path) -> None:
    """Sync a folder's directory entries, so that a file moved into it survives a power failure."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows, where folders cannot be opened
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; OSError or ValueError if it cannot be read."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_tree(path: Path, value: "Tree", sync_folder: bool = True) -> None:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomically(path, buffer.getvalue(), sync_folder)


def load_tree(path: Path, mapped: bool = False) -> "Tree":
    """Load a tree of tensors to the CPU. Raises ConfigError if the file is not a valid checkpoint.

    mapped: whether to memory-map the file instead of reading it. Values are then read when they are
    accessed, and the checksums are not checked.
    """
    import torch

    if not mapped:
        check_tree(path)
    try:
        found: Tree = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise ConfigError(
            f"{path}: cannot be read as a checkpoint ({type(error).__name__})"
        ) from error
    return found


def check_tree(path: Path) -> None:
    """Raise ConfigError unless the file exists and the CRC-32 checksums of its records match."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing") from None
    except Exception as error:  # zipfile raises many exception types for a damaged file
        raise ConfigError(f"{path}: damaged ({error or type(error).__name__})") from error
    if wrong is not None:
        raise ConfigError(f"{path}: damaged (the checksum of {wrong} does not match)")


def remove_if_empty(directory: Path, here: Path) -> None:
    """Remove the empty directory that Hydra created for a run or sweep that did not start.

    Empty parent directories inside `here` are removed too.
    """
    for candidate in (directory, *directory.parents):
        if candidate != directory and here not in candidate.parents:
            return
        try:
            candidate.rmdir()
        except OSError:
            return
