"""Runs in the view of the paper's rule beside the same runs in the plain test: a table for notes of
REPRODUCTION.md.

A line `::: both_views <sweep>` of a note stands for it, so that no number in it is typed by hand.
"""

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedexp.analysis import layout
from fedexp.papers import parts

MARKER = re.compile(r"^::: both_views (\w+)$", re.MULTILINE)
JUDGED = ("within", "outside")
COLUMNS = (
    "precision",
    "under the rule",
    "plain test, last round",
    "plain test, mean of the last ten",
    "printed",
)


def filled(note: str, tables: Mapping[str, pd.DataFrame | None]) -> str:
    """Return a note with its tables. tables: table.csv of each sweep, None where there is none."""

    def table(found: re.Match[str]) -> str:
        tidy = tables.get(found[1])
        return "No run has both views yet." if tidy is None else both_views(tidy)

    return MARKER.sub(table, note)


def both_views(tidy: pd.DataFrame) -> str:
    """Return a row for each method and setting with a verdict on a run that has the plain test,
    too: accuracy and F."""
    table = parts.printed_once(tidy)
    named = table.assign(column=layout.column_names(table))
    known = named[
        named["verdict"].isin(JUDGED) & named["plain_last"].notna() & (named["protocol"] == "full")
    ]
    columns = list(named["column"].unique())
    groups = known.groupby(["column", "method"], sort=False)
    # stable: methods as the paper has them
    ordered = sorted(groups, key=lambda each: columns.index(each[0][0]))
    rows = {f"{column}, {method}": row(group) for (column, method), group in ordered}
    return layout.markdown(
        pd.DataFrame(list(rows.values()), index=list(rows), columns=list(COLUMNS))
    ).strip()


def row(group: pd.DataFrame) -> list[str]:
    """Return a row of the table for the values of one method in one setting."""
    records: list[Mapping[Any, Any]] = list(group.to_dict("records"))
    used = sorted({text for each in records for text in re.findall(r", (\w+)\)", each["hardware"])})
    ours = [layout.both(each)[0] + layout.MARKS[each["verdict"]] for each in records]
    plain = [
        [layout.number(each[name], each["unit"], each["metric"]) for each in records]
        for name in ("plain_last", "plain_last10")
    ]
    printed = [layout.both(each)[1] for each in records]
    metrics = [each["metric"] for each in records]
    return [", ".join(used), *(named(metrics, texts) for texts in (ours, *plain, printed))]


def named(metrics: list[str], texts: list[str]) -> str:
    """Return the values in one cell, forgetting with an F before it."""
    pairs = zip(metrics, texts, strict=True)
    return ", ".join(f"F {text}" if metric == "forgetting" else text for metric, text in pairs)
