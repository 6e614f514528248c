"""Lay out a reproduced table as in the paper."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from fedexp.analysis.layout import SOME_DIVERGED, Section
from fedexp_papers.judge import (
    ABSOLUTE,
    AGREEING,
    ENDED_EARLY,
    FORGETTING,
    RELATIVE,
    TOO_WIDE,
    VERDICTS,
    strict_tolerance,
)

NO_VIEW, BY_DEFINITION = "not judged: no augmented view", "not judged: by definition"
STRICT, WITHIN, NOISE, ONE_SEED = "*", "+", "#", "¹"
MARKS = {
    "outside": "!",
    "not judged: suspect print": "?",
    "not judged: reduced protocol": "~",
    BY_DEFINITION: "=",
}
PLAIN_ONLY = "^"
DEFAULT = f"{ABSOLUTE['percent']:g} points, {FORGETTING} of F or {RELATIVE:.0%} of rounds"
NOTES = {  # mark -> its explanation in the legend of a table
    ONE_SEED: "one seed",
    STRICT: f"within the strict tolerance, {DEFAULT}",
    WITHIN: "within the wider tolerance that is given (tol.)",
    NOISE: f"within a tolerance of more than {TOO_WIDE:g} strict ones, which tests nothing",
    "!": "outside the tolerance",
    "?": "not judged: the published value cannot be right",
    "~": "not judged: run with another protocol, for too few rounds, or with older code",
    "=": "not judged: the published value holds by definition",
    PLAIN_ONLY: "not judged: the plain last round; the view of the paper's rule was not tested",
    SOME_DIVERGED: "without the seeds that diverged",
}
MARKED = re.compile(r"(?<=[\ddr])[¹*+#!?~=^†‡]+")  # marks after a number, "failed" or "never"
IN_PARENTHESES = re.compile(r"\d\S* \(-?\d(?!\d* of )")
PLAIN = "Plain test"
Rows = Sequence[Mapping[Any, Any]]  # rows of the tidy table
PER_SECTION = 6  # a table with more columns is split by partition, as in the papers


def describe_cells(table: pd.DataFrame) -> str:
    """Return an explanation of the brackets and marks in the cells, or "" if no cell has any."""
    texts = [str(text) for text in table.to_numpy().ravel()]
    every = "\n".join(texts)
    marks = "".join(MARKED.findall(every))
    parts = []
    if "[" in every:
        spread = " ± standard deviation over seeds" * ("±" in every)
        wider = " tol. tolerance, if wider than the strict one" * ("tol." in every)
        missing = "; not run if our value is missing" * any(text[:1] == "[" for text in texts)
        parts.append(f"ours{spread} [published{wider}]{missing}")
    parts += ["forgetting in parentheses"] * bool(IN_PARENTHESES.search(every))
    parts += [f"`{mark}` {note}" for mark, note in NOTES.items() if mark in marks]
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def format_number(value: float | None, unit: str, metric: str = "") -> str:
    """Format a number as in the papers. None and nan become "-"."""
    if pd.isna(value):
        return "-"
    if math.isinf(value) or (metric == "speedup" and value == 0):
        return "never"
    digits = {"percent": 2, "rounds": 0}.get(unit, 2 if metric == "forgetting" else 3)
    return f"{value:.{digits}f}"


def format_column(row: Mapping[str, Any], column: str) -> str:
    """Format one column of a row of the tidy table."""
    return format_number(row[column], row["unit"], row["metric"])


def format_values(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return (measured value ± standard deviation, published value) for a row of the tidy table.

    The measured value is "" if nothing was run.
    """
    printed = "failed" if str(row["note"]).startswith("failed") else format_column(row, "printed")
    if row["note"] == "not_reached" and row["unit"] == "rounds":
        printed = "never"
    if not row["n"]:
        return "", printed
    if row["verdict"] == BY_DEFINITION:
        return printed, printed
    ours = format_column(row, "plain_last" if shows_plain(row) else "mean")
    if row["diverged"] == row["n"]:
        ours = "failed"
    elif ours == "never" and (end := re.match(ENDED_EARLY, row["changes"])):
        ours = f">{end[1]}"
    return ours if pd.isna(row["std"]) else f"{ours} ± {format_column(row, 'std')}", printed


def shows_plain(row: Mapping[str, Any]) -> bool:
    """Return whether a row shows the last plain test instead of the value under the paper's rule.

    This is the case if the runs were not evaluated in the view that the rule requires.
    """
    has_plain_alone = pd.isna(row["mean"]) and not pd.isna(row["plain_last"])
    return row["verdict"] == NO_VIEW or (bool(row["rule"]) and has_plain_alone)


def in_brackets(row: Mapping[str, Any], text: str) -> str:
    """Return the text, in parentheses if the row's value is a forgetting measure."""
    return f"({text})" if row["metric"] == "forgetting" and text else text


def mark_verdict(row: Mapping[str, Any]) -> str:
    """Return the mark of a row's verdict, or "" if it has none.

    A value that is only within a tolerance wider than the strict one has another mark.
    """
    if row["verdict"] not in AGREEING:
        return MARKS.get(row["verdict"], "")
    strict = strict_tolerance(row["unit"], row["metric"], row["printed"])
    if row["verdict"] != "within" or abs(row["difference"]) <= strict:
        return STRICT
    return WITHIN if row["tolerance"] <= TOO_WIDE * strict else NOISE


def format_tolerance(row: Mapping[str, Any]) -> str:
    """Return the tolerance of a measured value, or "" if it is the strict one.

    It has more digits than the value if it would otherwise look like the strict one.
    """
    strict = strict_tolerance(row["unit"], row["metric"], row["printed"])
    if row["verdict"] not in VERDICTS or not row["tolerance"] > strict:
        return ""
    text, digits = format_column(row, "tolerance"), 3
    while float(text) <= strict:
        text, digits = f"{row['tolerance']:.{digits}f}", digits + 1
    return f" tol. {text}"


def format_cell(rows: Rows) -> str:
    """Return the text of a cell: the measured values with marks, then the published values."""
    ours, printed = [], []
    for row in rows:
        value, published = format_values(row)
        if value:
            value += ONE_SEED * bool(row["n"] == 1 and row is rows[0])
            value += mark_verdict(row) + PLAIN_ONLY * bool(shows_plain(row))
            value += SOME_DIVERGED * bool(0 < row["diverged"] < row["n"])
        ours.append(in_brackets(row, value))
        printed.append(in_brackets(row, published + format_tolerance(row)))
    return f"{' '.join(filter(None, ours))} [{' '.join(printed)}]".strip()


def format_plain_cell(rows: Rows) -> str:
    """Return the values of a method in the plain view: the last round and the mean of the last ten.

    Forgetting is in parentheses.
    """
    texts = [
        f"{format_column(row, 'plain_last')}, {format_column(row, 'plain_last10')}" for row in rows
    ]
    return " ".join(map(in_brackets, rows, texts))


def column_names(table: pd.DataFrame) -> list[str]:
    """Return, for each row, the name of its column in the paper's table.

    The name consists of the parts of the setting that differ between columns, without thresholds.
    If the rows of a cell differ in the number of clients, the name also contains this number.
    """
    parts = []
    for row in table.to_dict("records"):
        setting = [part for part in row["setting"].split("; ") if not part.startswith("threshold")]
        given = [part.removeprefix("column ") for part in setting if part.startswith("column ")]
        parts.append(given[:1] or [row["dataset"], row["partition_param"], *setting])
    everywhere = set.intersection(*map(set, parts))
    shown = [[part for part in row if part and part not in everywhere] for row in parts]
    names = [" ".join(dict.fromkeys(row)) for row in shown]
    cells = table.assign(column=names).groupby(["column", "method", "metric"])["clients"]
    sizes = zip(names, table["clients"], cells.transform("nunique"), strict=True)
    return [f"{name} K={k}" if n > 1 else name for name, k, n in sizes]


def with_column_names(table: pd.DataFrame) -> pd.DataFrame:
    """Add the column `column` with the result of `column_names`, unless the table has it.

    A part of a table needs the names of the whole table.
    """
    return table if "column" in table else table.assign(column=column_names(table))


def all_sections(table: pd.DataFrame) -> list[Section]:
    """Return all sections of a reproduced table.

    The sections are the paper's table under the paper's rule, and the plain view of the finished
    runs.
    """
    table = with_column_names(table)
    parts = sections(table)
    known = table[table["plain_last"].notna()]
    for part in sections(known, format_plain_cell) if len(known) else ():
        title = f"{part.title}: {PLAIN}".removeprefix(": ")
        title = f"{title}, last round and mean of the last ten"
        parts.append(Section(title, part.table, legend=part.legend))
    return parts


def list_methods(table: pd.DataFrame) -> list[str]:
    """Return the methods of a table in order, each one's first reading before the others."""
    first = table.drop_duplicates("method")
    readings = " (" + first["reading"] + ")" if "reading" in first else [""] * len(first)
    found: dict[str, list[str]] = {}
    for method, reading in zip(first["method"], readings, strict=True):
        mine = found.setdefault(method.removesuffix(reading), [])
        mine.insert(0 if reading in ("", " ()") else len(mine), method)
    return [method for mine in found.values() for method in mine]


def sections(table: pd.DataFrame, text_of: Callable[[Rows], str] = format_cell) -> list[Section]:
    """Lay out the tidy table as in the paper.

    text_of: a function that returns a cell's text, given the cell's rows.
    """
    named = with_column_names(table)
    wide = named["column"].nunique() > PER_SECTION and named["partition"].nunique() > 1
    groups = named.groupby("partition", sort=False) if wide else [("", named)]
    found = []
    for title, group in groups:
        cells = group.groupby(["method", "column"], sort=False)
        texts = pd.Series({key: text_of(rows.to_dict("records")) for key, rows in cells}).unstack()
        texts = texts.reindex(list_methods(group), columns=group["column"].unique())
        texts = texts.fillna("")
        found.append(Section(str(title), texts, legend=describe_cells(texts)))
    return found
