"""Read files with one error each, and write them atomically.

A failure to read a file is one ConfigError that names the file. A new file is written under a
temporary name, synced, and renamed, so it is either complete or missing. torch, numpy and pandas
are imported inside functions, since not every command needs them.
"""

import glob
import io
import json
import os
import shlex
import time
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml

from fedexp.core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from fedexp.core.tree import Tree


def without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. This is an `object_pairs_hook` of json.loads.

    Raises ValueError if a key appears twice. json would use the last value alone.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{key} appears twice")
    return found


def display_path(path: Path) -> Path:
    """Return a path as shown to users. It is relative if the file is in the working directory."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def typed_path(path: Path) -> str:
    """Return a path as a user types it in a command."""
    return shlex.quote(str(display_path(path)))


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

    If the process is killed, the hidden file stays until the run is resumed, which removes all of
    them, or until the report is written again, see `remove_leftovers`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove the temporary files that killed processes have left while they wrote these files.

    These are the ones older than an hour: on a shared disk, a process of another machine may be
    writing, and no file takes that long.
    """
    for path in paths:
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            if left.suffixes[-2][1:].isdecimal():
                with suppress(FileNotFoundError):  # another report has removed it
                    if time.time() - left.stat().st_mtime > 3600:
                        left.unlink()


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
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content)
        if sync_folder:
            sync(path.parent)


def write_texts(folder: Path, contents: Mapping[str, str]) -> list[Path]:
    """Write the files of a folder atomically, and return their paths. contents: text by name."""
    for name, text in contents.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in contents]


def sync(folder: Path) -> None:
    """Sync a folder's directory entries, so that a file moved into it survives a power failure."""
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

    check_plain(value, path.name)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomically(path, buffer.getvalue(), sync_folder)


def check_plain(value: object, where: str) -> None:
    """Raise ConfigError unless `load_tree`, which runs no code, can read a value.

    where: the place of the value, for the message.
    """
    import torch

    kind = type(value)
    if isinstance(value, torch.Tensor):
        return
    if kind in (dict, OrderedDict):
        for key, item in value.items():  # type: ignore[attr-defined]
            check_plain(key, f"a key of {where}")
            check_plain(item, f"{where}[{key!r}]")
    elif kind in (list, tuple, set):
        for item in value:  # type: ignore[attr-defined]
            check_plain(item, where)
    elif kind not in (str, bytes, int, float, bool, NoneType):
        raise ConfigError(
            f"{where}: is a {kind.__module__}.{kind.__qualname__}, which a resumed run could not"
            " read; a state must consist of tensors, dicts, lists and plain numbers and texts, such"
            " as float(x) for a number of NumPy"
        )


def load_tree(path: Path, mapped: bool = False) -> "Tree":
    """Load a tree of tensors to the CPU. Raises ConfigError if the file is not a valid checkpoint.

    mapped: whether to memory-map the file instead of reading it. Values are then read when they are
    accessed, and the checksums are not checked.
    """
    import torch

    if not mapped:
        check_tree(path)
    with reading(path):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:
            if type(error).__name__ != "UnpicklingError":
                raise
            # torch's text advises to run the code in the file
            raise ValueError("has values other than tensors and plain values") from error


def check_tree(path: Path) -> None:
    """Raise ConfigError unless the file exists and the CRC-32 checksums of its records match."""
    with reading(path), zipfile.ZipFile(path) as archive:
        if (wrong := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {wrong} does not match")


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


TEXTS = ("role", "layer")  # the columns of tables that contain text
# the integers that, with the texts, tell the rows of a table apart
KEYS = ("round", "client", "epoch", "class", "domain", "example", "evaluated_task")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ConfigError with the name of the file if the block cannot read it."""
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing") from None
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or repr(error)
        raise ConfigError(f"{path}: cannot be read ({reason[:150]})") from error


def read_values(path: Path) -> Any:
    """Return the plain values in a .json or .yaml file."""
    with reading(path):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=without_repetitions)
        return load_yaml(text)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a .json or .yaml file."""
    content = read_values(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: is not a mapping")
    return content


def read_overrides(path: Path) -> list[str]:
    """Return the list of overrides in .hydra/overrides.yaml."""
    content = read_values(path)
    if not isinstance(content, list) or not all(isinstance(text, str) for text in content):
        raise ConfigError(f"{path}: is not a list of strings")
    return content


def read_csv(source: Path | io.StringIO, **options: Any) -> "pd.DataFrame":
    """Read a .csv file with pandas, and each float as the nearest one to its digits."""
    import pandas as pd

    # pandas 3.1 and later always read floats exactly, and warn about the option
    if tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1):
        options["float_precision"] = "round_trip"
    return pd.read_csv(source, **options)


def read_table(path: Path) -> "pd.DataFrame":
    """Return a .csv file as a table of numbers, in which empty cells are nan.

    The rows are in the order in which a run writes them, even if another program has sorted them.
    Half a row at the end, which a killed run may leave, is left out. Raises ConfigError if the file
    is missing or damaged, or if a row appears twice.
    """
    import pandas as pd

    with reading(path):
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        table = read_csv(io.StringIO(whole), index_col=False)
        for name in table.columns.difference(list(TEXTS)):
            if not pd.api.types.is_numeric_dtype(table[name]):
                raise ValueError(f"the column {name} has cells that are not numbers")
        return sort_rows(table)


def sort_rows(table: "pd.DataFrame") -> "pd.DataFrame":
    """Return a table in the order of its keys, which become integers.

    Raises ValueError if a key is not an integer, or if a row appears twice.
    """
    keys = [name for name in table.columns if name in KEYS]
    for name in keys:
        if not (table[name] % 1 == 0).all():
            raise ValueError(f"the column {name} has cells that are not integers")
    table = table.astype(dict.fromkeys(keys, "int64"))
    if not keys or is_ascending(table[keys].to_numpy()):
        return table
    table = table.sort_values(keys, kind="stable", ignore_index=True)
    names = [*keys, *table.columns.intersection(list(TEXTS))]
    for row in table[table.duplicated(names)][names].head(1).to_dict("records"):
        raise ValueError(f"a row appears twice: {', '.join(f'{k} {v}' for k, v in row.items())}")
    return table


def is_ascending(rows: "np.ndarray") -> bool:
    """Return whether each row comes after the previous one in lexicographic order. rows: [n, k]."""
    import numpy as np

    steps = np.diff(rows, axis=0)
    first = (steps != 0).argmax(axis=1)
    return bool((steps[np.arange(len(steps)), first] > 0).all())


def save_npz(path: Path, **arrays: Any) -> None:
    """Write an .npz file atomically, so that readers see the old or the complete new file."""
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def load_npz(path: Path) -> "dict[str, np.ndarray]":
    """Return all arrays of an .npz file without unpickling.

    Raises ConfigError if the file is missing or cannot be read.
    """
    import numpy as np

    with reading(path), open(path, "rb") as file:
        if not zipfile.is_zipfile(file):  # numpy would advise to unpickle it
            raise ValueError("damaged, or not an .npz archive")
        file.seek(0)
        return dict(np.load(file, allow_pickle=False))


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str) -> Any:
    """Parse a yaml text and return its plain values. Raises ValueError if it is not valid yaml."""
    try:
        return yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def dump_yaml(value: Any) -> str:
    """Return a value as a yaml text, with keys in their order."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
