"""Cache decoded arrays on disk, so that a data set is decoded only once."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.core.storage import temporary_path
from fedexp.data.marks import CACHE, checksum

log = logging.getLogger("fedexp")
# keys: x_train, y_train, x_test, y_test, classes and, if there are natural clients, owners
Arrays = dict[str, np.ndarray]
Labelled = tuple[Any, Any]  # inputs [N, ...] and labels [N]
FORMAT = 2  # increase when the meaning of the cached arrays changes


def make_arrays(train: Labelled, test: Labelled, classes: Iterable[str]) -> Arrays:
    """Return the arrays of a data set as a dict.

    classes: class names, ordered by label.
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

    content: lines that identify the files (`SourceFile.stamp`), in order. If a line or an option
    changes, a new entry is built.
    options: options that the result depends on.
    """
    chosen = checksum(json.dumps([FORMAT, dict(options)], sort_keys=True))[:8]
    entry = f"{name}-{chosen}-{checksum(chr(10).join(content))}.npz"
    path = Path(data_dir, CACHE, entry)
    if (arrays := _read(path)) is None:
        arrays = build()
        _write(path, arrays)
    return arrays


def _read(path: Path) -> Arrays | None:
    try:
        # np.savez does not compress; zip verifies the CRC of every array
        with np.load(path, allow_pickle=False) as entry:
            return dict(entry)
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy and zipfile raise many types for a damaged file
        log.warning("cannot read the cache file %s (%s); decoding the data again", path, error)
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Write a cache entry atomically, then remove outdated entries.

    An entry is outdated if it has the same options but belongs to an earlier version of the files.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_path(path) as temporary:
            with temporary.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        for old in path.parent.glob(path.stem.rpartition("-")[0] + "-*.npz"):
            if old != path:
                old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot save the decoded images in the cache: %s", error)
