"""Read the files of a run directory as plain values. Raise Damaged, with the reason, on failure."""

from __future__ import annotations  # pandas takes long to import

import io
import json
import math
import stat
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.core import yaml_files
from fedexp.core.storage import check_size

if TYPE_CHECKING:
    import pandas as pd

EMPTY = "is empty"
LENGTH = 150  # most characters of a value shown in a reason
ACROSS = ("class", "evaluated_task", "layer")  # columns that form a matrix with `round`


class Damaged(ValueError):
    """A file is not as a run writes it. `str(error)` is a short reason without the file's name."""


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
        raise Damaged("is not text (it holds null bytes)")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a .json file. Raises Damaged, also for numbers that are not finite."""
    return mapping(parsed(read_text(path), json.loads, "json"))


def read_yaml(path: Path) -> Any:
    """Return the plain values in a .yaml file.

    Raises Damaged, also if the last line does not end with a newline.
    """
    text = read_text(path)
    content = parsed(text, yaml_files.load, "yaml")
    if not text.endswith("\n"):
        raise Damaged("ends in the middle of a line")
    return content


def parsed(text: str, parse: Callable[[str], Any], kind: str) -> Any:
    """Parse a text to plain values. Raises Damaged if this fails.

    kind: the name of the format for messages.
    """
    try:
        content = parse(text)
        check_plain(content)
    except RecursionError:
        raise Damaged(f"is no {kind} (nested too deeply)") from None
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"is no {kind} ({shown(error)})") from None
    return content


def check_plain(node: object) -> None:
    """Raise Damaged for values that a run never writes.

    These are numbers that do not fit in a table's column, and objects that yaml makes, such as
    dates.
    """
    match node:
        case dict():
            for key, value in node.items():
                if not isinstance(key, str | int):
                    raise Damaged(f"has a key that is no text ({shown(key)})")
                check_plain(value)
        case list():
            for value in node:
                check_plain(value)
        case int() if abs(node) >= 2**64:
            raise Damaged("holds a number of more than 64 bits")
        case float() if not math.isfinite(node):
            raise Damaged(f"holds {node}, which is no finite number")
        case None | str() | int() | float():
            pass
        case _:
            raise Damaged(f"holds a {type(node).__name__}")


def mapping(content: object) -> dict[str, Any]:
    """Return the content if it is a mapping with string keys. Raises Damaged otherwise."""
    if not isinstance(content, dict):
        raise Damaged(f"holds no mapping ({shown(content)})")
    if odd := next((key for key in content if not isinstance(key, str)), None):
        raise Damaged(f"has a key that is no text ({shown(odd)})")
    return content


def read_overrides(path: Path) -> list[str]:
    """Return the list of strings in .hydra/overrides.yaml. Raises Damaged."""
    content = read_yaml(path)
    if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
        raise Damaged(f"holds no list of texts ({shown(content)})")
    return content


def read_table(
    path: Path, keys: Iterable[str], columns: Iterable[str] = (), texts: Iterable[str] = ()
) -> pd.DataFrame:
    """Return a .csv file as a table of numbers. A cell without a number is nan.

    `frame.attrs["problem"]` describes damage that leaves the table readable, or is empty.

    keys: required columns of non-negative integers. columns: other required columns. texts: columns
    of text. A row without a valid key is left out, since a killed run may leave half a row. Raises
    Damaged if the file is not such a table.
    """
    import pandas as pd

    text, keys, words, problem = read_text(path), list(keys), {*texts}, ""
    try:
        with warnings.catch_warnings():
            # rows that are longer than the header
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(io.StringIO(text), index_col=False, low_memory=False)
    except (ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise Damaged(f"is no table ({shown(error)})") from None
    if missing := [key for key in (*keys, *columns) if key not in table]:
        raise Damaged(f"has no column {', '.join(missing)}")
    for name in [name for name in table if name not in words]:
        if table[name].dtype == object or not pd.api.types.is_numeric_dtype(table[name]):
            numbers = table[name].map(as_number).astype(float)
            odd = table[name][numbers.isna() & table[name].notna()]
            if len(odd) and not problem:
                problem = f"has {shown(odd.iloc[0])!r} in the column {name}"
            table[name] = numbers
    good = pd.Series(np.logical_and.reduce([whole(table[key]) for key in keys]), index=table.index)
    if not good.all():
        problem = problem or f"has a row whose {' or '.join(keys)} is no whole number"
    table = table[good]
    for name in [name for name in ACROSS if name in table and len(table)]:
        width = table[name].nunique() if name in words else int(table[name].max()) + 1
        try:
            check_size(8 * table["round"].nunique() * width, 8 * len(table))
        except ValueError as error:
            raise Damaged(f"has {len(table)} rows too far apart ({error})") from None
    table.attrs["problem"] = problem or (
        "" if text.endswith("\n") else "ends in the middle of a row"
    )
    return table


def as_number(cell: Any) -> float:
    """Return a cell as a float: nan if it is not a number, infinity if it is too large."""
    try:
        return float(cell)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return math.nan


def whole(column: pd.Series) -> np.ndarray:
    """Return a bool array [rows] that is True for integers from 0 to 10^9 - 1."""
    values = column.to_numpy(dtype=float)
    with np.errstate(invalid="ignore"):
        return np.isfinite(values) & (values >= 0) & (values < 1e9) & (values == np.floor(values))


def shown(value: object) -> str:
    """Return a value or error as a short text on one line."""
    text = " ".join(str(value).split()) or type(value).__name__
    return text if len(text) <= LENGTH else f"{text[:LENGTH]}..."
