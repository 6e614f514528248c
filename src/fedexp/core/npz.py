"""Write .npz files atomically, and read them without unpickling."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.storage import write_atomically


def save_npz(path: Path, **arrays: Any) -> None:
    """Write an .npz file atomically, so that readers see the old or the complete new file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(Path(path), buffer.getvalue())


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an .npz file without unpickling.

    Raises ConfigError if the file is missing or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an .npz archive")
            return dict(archive)
    except Exception as error:  # numpy, zipfile and zlib raise many exception types
        raise ConfigError(
            f"{path}: cannot be read as an .npz file ({getattr(error, 'strerror', None) or error})"
        ) from None
