"""Read the files of a run directory. Each failure is one ConfigError that names the file."""

from __future__ import annotations  # pandas takes long to import

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core import yaml_files
from fedexp.core.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

TEXTS = ("role", "layer")  # the columns of tables that contain text


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
        return json.loads(text) if path.suffix == ".json" else yaml_files.load(text)


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


def read_table(path: Path) -> pd.DataFrame:
    """Return a .csv file as a table of numbers, in which empty cells are nan.

    Half a row at the end, which a killed run may leave, is left out.
    """
    import pandas as pd

    with reading(path):
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        # pandas 3.1 and later always read floats exactly, and warn about the option
        exact = tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1)
        options: dict[str, Any] = {} if exact else {"float_precision": "round_trip"}
        table = pd.read_csv(io.StringIO(whole), index_col=False, **options)
        for name in table.columns.difference(list(TEXTS)):
            if not pd.api.types.is_numeric_dtype(table[name]):
                raise ValueError(f"the column {name} has cells that are not numbers")
        return table
