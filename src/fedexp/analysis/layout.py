"""Lay out a reproduced table as in the paper, in Markdown and LaTeX."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

NO_VIEW = "not judged: no augmented view"
MARKS = {
    "within": "*",
    "failed as printed": "*",
    "not reached as printed": "*",
    "outside": "!",
    "not judged: suspect print": "?",
    "not judged: reduced protocol": "~",
}
PLAIN_ONLY, SOME_DIVERGED = "^", "†"
NOTES = {  # mark -> its explanation in the legend of a table
    "*": "within the tolerance",
    "!": "outside the tolerance",
    "?": "not judged: the published value cannot be right",
    "~": "not judged: run with another protocol or with older code of the method",
    PLAIN_ONLY: "not judged: the plain last round; the view of the paper's rule was not tested",
    SOME_DIVERGED: "without the seeds that diverged",
}
MARKED = re.compile(r"(?<=[\dd])[*!?~^†‡]+")  # marks after a number or after "failed"
SYMBOLS = {
    "±": r"$\pm$",
    SOME_DIVERGED: r"\textsuperscript{\textdagger}",
}
IN_PARENTHESES = re.compile(r"\d\S* \(-?\d(?!\d* of )")
PLAIN = "Plain test"
FORMULA = re.compile(r"[=+@\t\r-].")  # a spreadsheet runs a cell that starts like this
NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?")
Rows = Sequence[Mapping[Any, Any]]  # rows of the tidy table
PER_SECTION = 6  # a table with more columns is split by partition, as in the papers


@dataclass(frozen=True)
class Section:
    """A part of a table, with methods as rows and settings as columns."""

    title: str
    table: pd.DataFrame  # the columns may have two levels
    corner: str = ""  # header of the first column
    about: str = ""  # explanation above the table

    @property
    def legend(self) -> str:
        """Return an explanation of brackets and marks in the cells, or "" if no cell has any."""
        texts = [str(text) for text in self.table.to_numpy().ravel()]
        parts = []
        if any("[" in text for text in texts):
            spread = " ± standard deviation over seeds" * any("±" in text for text in texts)
            missing = "; not run if our value is missing" * any(text[:1] == "[" for text in texts)
            parts.append(f"ours{spread} [published]{missing}")
        parts += ["forgetting in parentheses"] * any(map(IN_PARENTHESES.search, texts))
        parts += [f"`{mark}` {NOTES[mark]}" for mark in marks_in(texts)]
        text = "; ".join(parts)
        return f"{text[:1].upper()}{text[1:]}." if text else ""


def marks_in(texts: Iterable[str]) -> list[str]:
    """Return the marks that occur in the cells of a table, in the order of NOTES."""
    found = {mark for text in texts for mark in "".join(MARKED.findall(text.replace("**", "")))}
    return [mark for mark in NOTES if mark in found]


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
    if not row["n"]:
        return "", printed
    ours = format_column(row, "plain_last" if shows_plain(row) else "mean")
    if row["diverged"] == row["n"]:
        ours = "failed"
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


def format_cell(rows: Rows) -> str:
    """Return the text of a cell: the measured values with marks, then the published values."""
    ours, printed = [], []
    for row in rows:
        value, published = format_values(row)
        if value:
            value += MARKS.get(row["verdict"], "") + PLAIN_ONLY * bool(shows_plain(row))
            value += SOME_DIVERGED * bool(0 < row["diverged"] < row["n"])
        ours.append(in_brackets(row, value))
        printed.append(in_brackets(row, published))
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

    The sections are the paper's table under the paper's rule, the plain view of the finished runs,
    and the order of the methods in each column.
    """
    table = with_column_names(table)
    parts = sections(table)
    known = table[table["plain_last"].notna()]
    for part in sections(known, format_plain_cell) if len(known) else ():
        title = f"{part.title}: {PLAIN}".removeprefix(": ")
        parts.append(Section(f"{title}, last round and mean of the last ten", part.table))
    if len(ordered := tabulate_orders(table)):
        title = "Order of the methods in each column: Spearman's rho, and swaps beyond noise"
        parts.append(Section(title, ordered))
    return parts


def tabulate_orders(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each column of the paper's table that has enough methods.

    The columns are Spearman's rho, the verdict, and the values that the verdict is based on.
    """
    keys = ["partition", "column", "metric"]
    named = with_column_names(table).assign(rho=table["rho"].map(plain_number))
    rows = named[named["order_by"].fillna("") != ""].drop_duplicates(keys)
    names = rows["partition"] + " " + rows["column"] + " " + rows["metric"]
    shown = rows[["rho", "order", "order_by"]].rename(columns={"order_by": "judged by"})
    return shown.set_axis(names.str.split().str.join(" "), axis="index")


def sections(table: pd.DataFrame, text_of: Callable[[Rows], str] = format_cell) -> list[Section]:
    """Lay out the tidy table as in the paper.

    text_of: a function that returns a cell's text, given the cell's rows.
    """
    named = with_column_names(table)
    wide = named["column"].nunique() > PER_SECTION and named["partition"].nunique() > 1
    groups = named.groupby("partition", sort=False) if wide else [("", named)]
    found = []
    for title, group in groups:
        cells: dict[tuple[str, str], list[Mapping[Any, Any]]] = {}
        for row in group.to_dict("records"):
            cells.setdefault((row["method"], row["column"]), []).append(row)
        texts = pd.Series({key: text_of(rows) for key, rows in cells.items()}).unstack()
        texts = texts.reindex(group["method"].unique(), columns=group["column"].unique())
        found.append(Section(str(title), texts.fillna("")))
    return found


def markdown(table: pd.DataFrame, corner: str = "") -> str:
    """Format a table as Markdown, with the index as the first column.

    pandas would need an additional package for this. Cells may contain text of other people, so
    HTML and column separators in it are escaped.
    """
    levels = [table.columns.get_level_values(i) for i in range(table.columns.nlevels)]
    heads = [": ".join(filter(None, map(str, names))) for names in zip(*levels, strict=True)]
    lines = [f"| {corner} | " if corner else "| | "]
    lines[0] += " | ".join(map(markdown_text, heads)) + " |"
    lines.append("|" + " --- |" * (len(heads) + 1))
    for name, row in zip(table.index, table.to_numpy(), strict=True):
        lines.append("| " + " | ".join(map(markdown_text, [name, *row])) + " |")
    return "\n".join(lines) + "\n"


def markdown_text(value: object) -> str:
    """Return a value as text for a cell or line of Markdown, without HTML or separators."""
    return " ".join(str(value).replace("<", "&lt;").replace("|", "\\|").splitlines())


def csv(table: pd.DataFrame) -> str:
    """Format a table as csv, without the index.

    A quote is put before text that a spreadsheet would run as a formula.
    """
    return table.map(csv_cell).to_csv(index=False)


def csv_cell(value: Any) -> Any:
    is_formula = isinstance(value, str) and FORMULA.match(value) and not NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value


def all_markdown(parts: Sequence[Section], level: int = 3) -> str:
    """Format all sections as Markdown, each with its legend. level: the level of the headings."""
    texts: list[str] = []
    for part in parts:
        title = f"{'#' * level} {part.title}" if part.title else ""
        table = markdown(part.table, part.corner).strip()
        texts += filter(None, [title, part.about, table, part.legend])
    return "\n\n".join(texts) + "\n"


def latex(parts: Sequence[Section]) -> str:
    """Return one booktabs tabular per section, for `\\input` in a table environment."""
    return "\n".join(map(tabular, parts))


def tabular(part: Section) -> str:
    """Return a section as a booktabs tabular.

    Additional rows explain the marks that need a LaTeX command.
    """
    table = part.table.rename_axis(columns=part.corner) if part.corner else part.table
    heads = list(table.columns.get_level_values(0)) * (table.columns.nlevels > 1)
    if heads and not any(heads):
        table, heads = table.droplevel(0, axis="columns"), []
    wide = len(table.columns)
    text = table.to_latex(column_format="l" + "c" * wide, escape=True, multicolumn_format="c")
    text = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
    rules, start = [], 2
    for _, group in itertools.groupby(heads):
        start, first = start + len(list(group)), start
        rules.append(f"\\cmidrule(lr){{{first}-{start - 1}}}")
    if rules:
        text = text.replace("\\\\\n", f"\\\\\n{' '.join(rules)}\n", 1)
    notes = [mark for mark in marks_in(map(str, table.to_numpy().ravel())) if mark in SYMBOLS]
    rows = [f"\\multicolumn{{{wide + 1}}}{{l}}{{{mark} {NOTES[mark]}}} \\\\\n" for mark in notes]
    text = text.replace("\\end{tabular}", "".join([*rows, "\\end{tabular}"]))
    for mark, command in SYMBOLS.items():
        text = text.replace(mark, command)
    about = [part.title, part.about, part.legend, "Needs the package booktabs."]
    return "".join(f"% {line}\n" for line in about if line) + text


def plain_number(value: Any) -> str:
    if pd.isna(value):
        return "-"
    return str(value) if isinstance(value, str | int | np.integer) else f"{value:.4g}"
