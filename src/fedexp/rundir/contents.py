"""Read the files in a run directory as plain values. If a file is damaged, raise Damaged."""

from __future__ import annotations  # pandas takes long to import

import io
import json
import math
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.core import yaml_files
from fedexp.core.storage import check_size
from fedexp.rundir.schema import fits

if TYPE_CHECKING:
    import pandas as pd

EMPTY = "is empty"
HALF_ROW = "ends in the middle of a row"
LENGTH = 150  # maximum number of characters of a value shown in a message
ACROSS = ("class", "evaluated_task", "layer")  # columns that form a matrix with `round`


class Damaged(ValueError):
    """A file differs from what runs write. `str(error)` is the reason, without the file's name."""


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises Damaged if the file is missing, empty, not a regular file or not UTF-8.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise Damaged("is a directory" if stat.S_ISDIR(mode) else "is not a file")
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise Damaged("is missing") from None
    except UnicodeDecodeError:
        raise Damaged("is not text (UTF-8)") from None
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from None
    if not text.strip():
        raise Damaged(EMPTY)
    if "\0" in text:
        raise Damaged("is not text (it contains null bytes)")
    return text


def read_values(path: Path) -> Any:
    """Return the plain values in a .json or .yaml file.

    Raises Damaged if the file cannot be parsed or contains a number that is not finite, or if a
    .yaml file does not end with a newline.
    """
    text, kind = read_text(path), path.suffix[1:]
    try:
        content = json.loads(text) if kind == "json" else yaml_files.load(text)
        check_plain(content)
    except RecursionError:
        raise Damaged(f"is not {kind} (nested too deeply)") from None
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"is not {kind} ({shorten(error)})") from None
    if kind == "yaml" and not text.endswith("\n"):
        raise Damaged("ends in the middle of a line")
    return content


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a .json or .yaml file.

    Raises Damaged unless the content is a mapping with strings as keys.
    """
    content = read_values(path)
    if not fits(content, {str: lambda value: True}):
        raise Damaged(f"is not a mapping with strings as keys ({shorten(content)})")
    found: dict[str, Any] = content
    return found


def read_overrides(path: Path) -> list[str]:
    """Return the content of .hydra/overrides.yaml.

    Raises Damaged unless the content is a list of strings.
    """
    content = read_values(path)
    if not fits(content, [str]):
        raise Damaged(f"is not a list of strings ({shorten(content)})")
    found: list[str] = content
    return found


def check_plain(node: object) -> None:
    """Raise Damaged for values that runs never write.

    Such values are numbers that do not fit into a column of a table, and objects that yaml creates,
    such as dates.
    """
    match node:
        case dict():
            for key, value in node.items():
                if not isinstance(key, str | int):
                    raise Damaged(f"has a key that is not a string ({shorten(key)})")
                check_plain(value)
        case list():
            for value in node:
                check_plain(value)
        case int() if abs(node) >= 2**64:
            raise Damaged("contains a number of more than 64 bits")
        case float() if not math.isfinite(node):
            raise Damaged(f"contains {node}, which is not a finite number")
        case None | str() | int() | float():
            pass
        case _:
            raise Damaged(f"contains a value of type {type(node).__name__}")


@dataclass(frozen=True)
class Columns:
    """The columns that a .csv file must have, and their types."""

    keys: tuple[str, ...]  # non-negative integers
    values: tuple[str, ...] = ()  # numbers
    texts: tuple[str, ...] = ()


def read_table(path: Path, columns: Columns) -> pd.DataFrame:
    """Read a .csv file as a table of numbers. Cells that are not numbers become nan.

    Rows without a valid key are left out, and so is half a row at the end, which a killed run may
    leave. The table's `attrs["problem"]` describes damage that does not prevent reading, or is
    empty. Raises Damaged if the file cannot be read as a table with these columns.
    """
    import pandas as pd

    text, problems = read_text(path), []
    if not text.endswith("\n"):
        problems.append(HALF_ROW)
        text = text[: text.rfind("\n") + 1] or text  # the header may lack the end of its line
    try:
        with warnings.catch_warnings():
            # rows that are longer than the header
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(io.StringIO(text), index_col=False, low_memory=False)
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise Damaged(f"is not a table ({shorten(error)})") from None
    if missing := [name for name in (*columns.keys, *columns.values) if name not in table]:
        raise Damaged(f"has no column {', '.join(missing)}")
    for name in table.columns.difference(list(columns.texts), sort=False):
        if not pd.api.types.is_numeric_dtype(table[name]):
            numbers = table[name].map(as_number).astype(float)
            odd = table[name][numbers.isna() & table[name].notna()]
            problems += [f"has {shorten(value)!r} in the column {name}" for value in odd[:1]]
            table[name] = numbers
    valid = are_counts(table[list(columns.keys)]).all(axis=1)
    if not valid.all():
        problems.append(f"has a row in which {' or '.join(columns.keys)} is not a whole number")
    table = table[valid]
    check_extent(table, columns)
    table.attrs["problem"] = problems[0] if problems else ""
    return table


def check_extent(table: pd.DataFrame, columns: Columns) -> None:
    """Raise Damaged if a matrix built from the table would need far more memory than the table."""
    for name in [name for name in ACROSS if name in table and len(table)]:
        width = table[name].nunique() if name in columns.texts else int(table[name].max()) + 1
        try:
            check_size(8 * table["round"].nunique() * width, 8 * len(table))
        except ValueError as error:
            raise Damaged(
                f"has {len(table)} rows, but the matrix of its values would be too large ({error})"
            ) from None


def as_number(cell: Any) -> float:
    """Convert a cell to a float: nan if it is not a number, infinity if it is too large."""
    try:
        return float(cell)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return math.nan


def are_counts(values: pd.DataFrame) -> pd.DataFrame:
    """Return a bool table that is True for integers from 0 to 10^9 - 1."""
    return (values >= 0) & (values < 1e9) & (values == np.floor(values))


def shorten(value: object) -> str:
    """Return a value or error as a short text on one line."""
    text = " ".join(str(value).split()) or type(value).__name__
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}..."
