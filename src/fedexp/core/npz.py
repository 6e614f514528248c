"""Files of arrays (.npz): written whole, and read without unpickling or unpacking more than the
memory may hold."""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.storage import regular, write_atomically

# bytes of an array for one that is packed; fedexp packs none, and numbers seldom pack by more than
# 20
RATIO = 200
SMALL = 2**26  # bytes that are harmless whatever their ratio


def save_npz(path: Path, **arrays: Any) -> None:
    """Write an .npz file atomically: readers see the old file or the complete new one."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(Path(path), buffer.getvalue())


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an .npz file, nothing unpickled. Raises ConfigError when it is missing
    or unreadable."""
    try:
        with open(regular(path), "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an .npz archive")
            assert archive.zip is not None  # it has just been opened
            check_size(archive.zip.infolist())
            return {key: archive[key] for key in archive.files}
    except Exception as error:  # numpy, zipfile and zlib raise many types for a damaged file
        raise ConfigError(
            f"{path}: cannot be read as an .npz file ({getattr(error, 'strerror', None) or error})"
        ) from None


def check_size(members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise ValueError where a few bytes stand for more than the memory may hold. zipfile reads no
    more of a member than the size that it claims."""
    size, packed = (
        sum(getattr(member, name) for member in members) for name in ("file_size", "compress_size")
    )
    if size > SMALL and size > RATIO * packed:
        raise ValueError(f"{packed:,} bytes stand for {size:,}, more than {RATIO} times as many")
