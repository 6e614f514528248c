"""Format tables as Markdown, csv and LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

SOME_DIVERGED = "†"  # mark of a value that leaves out seeds
FORMULA = re.compile(r"[=+@\t\r-].")  # a spreadsheet runs a cell that starts like this
NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?")

IN_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    | {"±": r"$\pm$", SOME_DIVERGED: r"$^\dagger$"}
)


@dataclass(frozen=True)
class Section:
    """A part of a report: a table with explanations."""

    title: str
    table: pd.DataFrame  # the columns may have two levels
    corner: str = ""  # header of the first column
    about: str = ""  # explanation above the table
    legend: str = ""  # explanation of the marks, below the table


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


def latex(part: Section) -> str:
    """Format a table for LaTeX with the package booktabs.

    The caption is its title. The explanations are comments above it.
    """
    corners = [latex_text(part.corner), *[""] * (part.table.columns.nlevels - 1)]
    shown = part.table.rename_axis(columns=corners).rename_axis(index=None)
    style = shown.style.format(latex_text)
    for axis in (0, 1):
        style = style.format_index(latex_text, axis=axis)
    text = style.to_latex(
        hrules=True,
        caption=latex_text(part.title) or None,
        column_format="l" + "r" * shown.shape[1],
        multicol_align="c",
    )
    notes = "".join(f"% {note}\n" for note in (part.about, part.legend) if note)
    return f"{notes}{text}"


def latex_appendix(title: str, lines: Sequence[str], parts: Sequence[Section]) -> str:
    """Format sections as an appendix for LaTeX, with tables that may break over pages.

    All columns of a table have the same width. lines: paragraphs below the title.
    """
    head = f"% needs \\usepackage{{array,booktabs,longtable}}\n\\section{{{latex_text(title)}}}\n"
    texts = [head, *(f"{latex_text(line)}\n" for line in lines if line)]
    for part in parts:
        columns = part.table.shape[1]
        shown = part.table.rename_axis(index=None, columns=latex_text(part.corner))
        style = shown.style.format(latex_text)
        for axis in (0, 1):
            style = style.format_index(latex_text, axis=axis)
        width = 0.9 / (columns + 1)
        form = f">{{\\raggedright\\arraybackslash}}p{{{width:.2f}\\linewidth}}"
        body = style.to_latex(
            hrules=True, environment="longtable", column_format=form * (columns + 1)
        )
        about = f"{latex_text(part.about)}\n" if part.about else ""
        texts.append(f"\\subsection{{{latex_text(part.title)}}}\n{about}{body}")
    return "\n".join(texts)


def latex_text(value: object) -> str:
    """Return text for LaTeX with its special characters escaped.

    Bold text and code in Markdown become commands.
    """
    escaped = re.sub("-(?=-)", "-{}", str(value).translate(IN_LATEX))  # -- would be a dash
    words = re.sub(r"`([^`]+)`", r"\\texttt{\1}", escaped)
    words = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", words)
    return re.sub(r"^(?=[\[*])", "{}", words)  # else an argument of the end of the row before


def heading(column: str) -> str:
    """Return a csv column's name as words, unless it is the key of an option, such as local.lr."""
    return column if re.search(r"\.[a-z]", column) else column.replace("_", " ")


def plain_number(value: Any) -> str:
    if pd.isna(value):
        return "-"
    return str(value) if isinstance(value, str | int | np.integer) else f"{value:.4g}"
