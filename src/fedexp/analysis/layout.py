"""Format tables as Markdown, csv and LaTeX."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

SOME_DIVERGED = "†"  # mark of a value that leaves out seeds
FORMULA = re.compile(r"[=+@\t\r-].")  # a spreadsheet runs a cell that starts like this
BREAK = "\u200b"  # where a long word may be broken
NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?")

IN_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    | {"±": r"$\pm$", SOME_DIVERGED: r"$^\dagger$", BREAK: r"\allowbreak{}"}
)
NEEDS = r"needs \usepackage{booktabs,graphicx}"
APPENDIX_NEEDS = r"needs \usepackage{array,booktabs,longtable}, and \onecolumn in two columns"
# makes a table as narrow as the text, if it is wider
FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}"
# begins a new page if the heading and some rows of a table do not fit on this one
KEPT = r"\par\ifdim\dimexpr\pagegoal-\pagetotal<10\baselineskip\newpage\fi"


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
    """Format a table for LaTeX with the packages booktabs and graphicx.

    The caption is its title. The explanations are comments above it. A table that is wider than the
    text is made smaller.
    """
    table = part.table
    if table.columns.nlevels > 1 and not any(table.columns.get_level_values(0)):
        table = table.droplevel(0, axis="columns")  # of the only setting, which has no name
    corners = [latex_text(part.corner), *[""] * (table.columns.nlevels - 1)]
    column_format = "l" + "r" * table.shape[1]
    style = latex_style(table.rename_axis(columns=corners))
    text = style.to_latex(hrules=True, column_format=column_format, multicol_align="c")
    if table.columns.nlevels > 1:
        text = with_rules(text, table.columns.get_level_values(0))
    notes = "".join(f"% {note}\n" for note in (NEEDS, part.about, part.legend) if note)
    caption = f"\\caption{{{latex_text(part.title)}}}\n" if part.title else ""
    return (
        f"{notes}\\begin{{table}}\n\\centering\n{caption}{FITTED}{{%\n{text.strip()}}}\n"
        "\\end{table}\n"
    )


def latex_style(table: pd.DataFrame) -> Styler:
    """Return a table's style, in which all cells and headers are text for LaTeX."""
    style = table.rename_axis(index=None).style.format(latex_text)
    for axis in (0, 1):
        style = style.format_index(latex_text, axis=axis)
    return style


def with_rules(text: str, names: Iterable[str]) -> str:
    """Draw a rule below each name that stands above several columns of a LaTeX table.

    names: the name above each column.
    """
    rules, column = [], 2  # the first column has the rows' names
    for _, same in itertools.groupby(names):
        last = column + len(list(same)) - 1
        rules.append(f"\\cmidrule(lr){{{column}-{last}}}")
        column = last + 1
    top, first, rest = text.partition("\\toprule\n")
    head, line, below = rest.partition("\n")
    return "".join([top, first, head, line, " ".join(rules), "\n", below])


def latex_appendix(title: str, lines: Sequence[str], parts: Sequence[Section]) -> str:
    """Format sections as an appendix for LaTeX, with tables that may break over pages.

    lines: paragraphs below the title.
    """
    head = f"% {APPENDIX_NEEDS}\n\\section{{{latex_text(title)}}}\n"
    texts = [head, *(f"{latex_text(line)}\n" for line in lines if line)]
    for part in parts:
        shown = part.table.rename_axis(columns=part.corner)
        form = "".join(
            f">{{\\raggedright\\arraybackslash}}p{{\\dimexpr {share:.3f}\\linewidth-2\\tabcolsep}}"
            for share in shares(shown)
        )
        body = latex_style(breakable(shown)).to_latex(
            hrules=True, environment="longtable", column_format=form
        )
        about = f"{latex_text(part.about)}\n" if part.about else ""
        texts.append(f"{KEPT}\n\\subsection{{{latex_text(part.title)}}}\n{about}{body}")
    return "\n".join(texts)


def shares(table: pd.DataFrame) -> list[float]:
    """Return the share of the width for each column of a table, the names of the rows first.

    It grows with the length of the longest text, between limits. The shares add up to 1.
    """
    heads = [table.columns.name, *table.columns]
    columns = [table.index, *(table.iloc[:, k] for k in range(table.shape[1]))]
    lengths = [
        min(max(map(len, map(str, [head, *column])), default=0), 40) + 4
        for head, column in zip(heads, columns, strict=True)
    ]
    return [length / sum(lengths) for length in lengths]


def breakable(table: pd.DataFrame) -> pd.DataFrame:
    """Allow line breaks within the long words of a table's cells and of its rows' names."""
    return table.map(break_words).rename(index=break_words)


def break_words(value: object) -> str:
    """Mark where long words may be broken: after punctuation, or else after ten characters."""
    found = re.sub(
        r"\S{16,}", lambda word: re.sub(r"(?<=[._/,=])(?=\w)", BREAK, word[0]), str(value)
    )
    return re.sub(r"\w{20,}", lambda word: re.sub(r"(\w{10})(?=\w)", rf"\1{BREAK}", word[0]), found)


def latex_text(value: object) -> str:
    """Return text for LaTeX with its special characters escaped.

    Bold text and code in Markdown become commands, and the sign of a number a minus.
    """
    escaped = re.sub("-(?=-)", "-{}", str(value).translate(IN_LATEX))  # -- would be a dash
    parts = escaped.split("`")  # every second one is code
    parts[::2] = [re.sub(r"(^|(?<=[ \[=*(]))-(?=\d)", "$-$", part) for part in parts[::2]]
    escaped = "`".join(parts)
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
