"""Tables as people read them: laid out like the paper's, in Markdown and LaTeX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

MARKS = {"within": "*", "failed as printed": "*", "not reached as printed": "*", "outside": "!",
         "not judged: suspect print": "?", "not judged: reduced protocol": "~"}  # fmt: skip
LEGEND = (
    "Ours ± standard deviation over seeds (forgetting) [printed (forgetting)]. "
    "`*` within the tolerance of the print, `!` outside, `?` the print cannot be right and is not judged, "
    "`~` run at another protocol and not judged; without ours: not run."
)
PER_SECTION = 6  # a table with more columns is cut where the partition changes, as the papers do


@dataclass(frozen=True)
class Section:
    """A part of a table: methods x settings."""

    title: str
    table: pd.DataFrame


def number(value: float | None, unit: str, metric: str = "") -> str:
    """As the papers print it; - where there is none."""
    if value is None or value != value:
        return "-"
    digits = {"percent": 2, "rounds": 0}.get(unit, 2 if metric == "forgetting" else 3)
    return f"{value:.{digits}f}"


def both(row: Mapping[str, Any]) -> tuple[str, str]:
    """(ours ± standard deviation, the printed one) of a row of the tidy table; "" where nothing was run."""
    printed = "failed" if str(row["note"]).startswith("failed") else number(row["printed"], row["unit"], row["metric"])
    if not row["n"]:
        return "", printed
    ours = number(row["mean"], row["unit"], row["metric"])
    if row["diverged"] == row["n"]:
        ours = "failed"
    if row["std"] is not None and row["std"] == row["std"]:
        ours += f" ± {number(row['std'], row['unit'], row['metric'])}"
    return ours, printed


def one_number(row: Mapping[str, Any]) -> tuple[str, str]:
    """(ours with its mark, the printed one); forgetting in parentheses."""
    bracket = "({})" if row["metric"] == "forgetting" else "{}"
    ours, printed = both(row)
    marked = ours + MARKS.get(row["verdict"], "")
    return bracket.format(marked) if row["n"] else "", bracket.format(printed)


def one_cell(group: pd.DataFrame) -> str:
    """All numbers of a method in a setting."""
    texts = [one_number(row) for row in group.to_dict("records")]  # type: ignore[arg-type]
    ours, printed = (" ".join(text for text in side if text) for side in zip(*texts, strict=True))
    return f"{ours} [{printed}]".strip()


def column_names(table: pd.DataFrame) -> list[str]:
    """Of each row, the column of the paper's table that it stands in: what differs between the columns."""
    parts = [
        [row["dataset"], row["partition_param"], *setting_parts(row["setting"])]
        for row in table.to_dict("records")
    ]  # fmt: skip
    named = [next(([p.removeprefix("column ")] for p in row if p.startswith("column ")), row) for row in parts]
    everywhere = set.intersection(*map(set, named))
    names = [" ".join(dict.fromkeys(part for part in row if part and part not in everywhere)) for row in named]
    where = table.assign(column=names).groupby(["column", "method", "metric"])["clients"].transform("nunique")
    return [f"{name} K={k}" if n > 1 else name for name, k, n in zip(names, table["clients"], where, strict=True)]


def setting_parts(setting: str) -> list[str]:
    """What a column of tables.csv says of its setting, without the value that a threshold works out at."""
    return [part for part in setting.split("; ") if not part.startswith("threshold")]


def sections(table: pd.DataFrame) -> list[Section]:
    """The tidy table as the paper has it."""
    named = table.assign(column=column_names(table))
    wide = named["column"].nunique() > PER_SECTION and named["partition"].nunique() > 1
    groups = named.groupby("partition", sort=False) if wide else [("", named)]
    found = []
    for title, group in groups:
        text = {key: one_cell(cells) for key, cells in group.groupby(["method", "column"], sort=False)}
        methods, columns = group["method"].unique(), group["column"].unique()
        rows = [[text.get((m, c), "") for c in columns] for m in methods]
        found.append(Section(str(title), pd.DataFrame(rows, index=methods, columns=columns)))
    return found


def markdown(table: pd.DataFrame) -> str:
    """Without another package; the index is the first column."""
    lines = ["| | " + " | ".join(map(str, table.columns)) + " |", "|" + " --- |" * (len(table.columns) + 1)]
    for name, row in zip(table.index, table.to_numpy(), strict=True):
        lines.append("| " + " | ".join([str(name), *map(str, row)]) + " |")
    return "\n".join(lines) + "\n"


def all_markdown(parts: Sequence[Section], level: int = 3) -> str:
    """level: of the headings of sections."""
    return "\n".join((f"{'#' * level} {part.title}\n\n" if part.title else "") + markdown(part.table) for part in parts)


def latex(parts: Sequence[Section]) -> str:
    """A tabular of booktabs for each section, for `\\input` in a table environment."""
    texts = []
    for part in parts:
        body = part.table.to_latex(escape=True, column_format="l" + "c" * len(part.table.columns))
        texts.append((f"% {part.title}\n" if part.title else "") + body.replace("±", r"$\pm$"))
    return "\n".join(texts)


def plain_number(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return str(value) if isinstance(value, str | int | np.integer) else f"{value:.4g}"
