"""Claims of a paper's text about its table: the largest and smallest speed-up of a method over the
others.

A sweep names them by `claims: <table of tables.csv>`. Of Flashback these are four: the most times
sooner that it reaches a target than any baseline, on each data set, and the fewest over all. A
baseline that never reaches the target has no ratio, as in the paper.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from fedexp.analysis.layout import MARKS, Section, number
from fedexp.analysis.sweep import Sweep
from fedexp.papers import compare
from fedexp.papers.judge import tolerance

SETTING = ("dataset", "partition_param", "metric")  # a setting and a target
TARGET = "rounds_to_"
ALL = "all"  # the data set of a claim about all of them


def with_claims(tidy: pd.DataFrame, sweep: Sweep) -> pd.DataFrame:
    """Return the tidy table of a sweep with a row for each claim of the text at its end."""
    rows = (
        [claim(tidy, row) for row in compare.printed_cells(sweep, sweep.claims)]
        if sweep.claims
        else []
    )
    return (
        pd.concat([tidy, pd.DataFrame(rows, columns=tidy.columns)], ignore_index=True)
        if rows
        else tidy
    )


def of_text(tidy: pd.DataFrame) -> pd.Series:
    """Return which rows of a tidy table are claims of the text."""
    return tidy["table"].astype(str).str.startswith("text")


def claim(tidy: pd.DataFrame, row: Mapping[str, str]) -> dict[str, Any]:
    """Return the row of one claim; it is judged where all cells in its scope were run at the full
    protocol."""
    cells = tidy[tidy["metric"].str.startswith(TARGET)]
    if row["dataset"] != ALL:
        cells = cells[cells["dataset"] == row["dataset"]]
    full = cells[cells["protocol"] == "full"]
    ours, table = (
        extreme(row, list(speedups(part, row["method"], of)))
        for part, of in ((full, "mean"), (cells, "printed"))
    )
    printed = float(row["value"])
    difference = None if ours is None else ours - printed
    return {
        **{name: row[name] for name in ("paper", "table", *compare.CELL, "metric", "unit")},
        "status": f"{len(full)} of {len(cells)} cells",
        "n": int(full["n"].min()) if len(full) else 0,
        "diverged": int(full["diverged"].sum()),
        "mean": ours,
        "printed": printed,
        "difference": difference,
        "tolerance": tolerance(row),
        "verdict": verdict(row, cells, difference, table),
        "protocol": "full" if len(full) else "",
        "note": (
            row["note"] if table is None else f"{row['note']}; Table 1 itself gives {table:.1f}"
        ),
    } | dict.fromkeys(
        (
            "rule",
            "error_from",
            "changes",
            "from",
            "order",
            "order_by",
            "released",
            "reading",
            "closest",
        ),
        "",
    )


def speedups(cells: pd.DataFrame, method: str, of: str) -> Iterator[float]:
    """Yield the rounds of every other method over those of this one in each setting, to each
    target; of: a column."""
    for _, group in cells.groupby(list(SETTING), sort=False):
        known = group.dropna(subset=of)
        mine = known.loc[known["method"] == method, of]
        if len(mine):
            yield from known.loc[known["method"] != method, of] / mine.iloc[0]


def extreme(row: Mapping[str, str], ratios: list[float]) -> float | None:
    """Return the maximum or minimum that a claim is about; None of nothing."""
    if not ratios:
        return None
    return float(min(ratios) if "minimum" in row["setting"] else max(ratios))


def rounds_to(number: float, printed: str) -> bool:
    """Return whether a number is within half a unit of the last digit of a printed one."""
    digits = len(printed.partition(".")[2])
    return abs(number - float(printed)) <= 0.5 * 10**-digits * (1 + 1e-9)


def verdict(
    row: Mapping[str, str], cells: pd.DataFrame, difference: float | None, table: float | None
) -> str:
    """Return the verdict on a claim; table: what the paper's own table gives for it."""
    full = int((cells["protocol"] == "full").sum())
    if not (cells["n"] > 0).any():
        return "not run"
    if not full:
        return "not judged: reduced protocol"
    if table is not None and not rounds_to(table, row["value"]):
        return "not judged: suspect print"
    if full < len(cells):
        return f"not judged: {full} of {len(cells)} cells run"
    if difference is None:
        return "not judged: no number"
    return "within" if abs(difference) <= tolerance(row) else "outside"


def sections(tidy: pd.DataFrame) -> list[Section]:
    """Return the speed-ups over each baseline and the claims about them; [] where nothing is
    claimed."""
    said = tidy[of_text(tidy)]
    if not len(said):
        return []
    cells = tidy[~of_text(tidy) & tidy["metric"].str.startswith(TARGET)]
    method = str(said["method"].iloc[0])
    found = [
        over_each(group, f"{name}: speed-up of {method} over each baseline, ours [printed]", method)
        for name, group in cells.groupby("dataset", sort=False)
    ]
    rows = [
        [
            number(row["mean"], "ratio") + MARKS.get(row["verdict"], ""),
            number(row["printed"], "ratio"),
            row["verdict"],
            row["note"],
        ]
        for row in said.to_dict("records")
    ]
    columns = ["ours", "printed", "verdict", "note"]
    index = said["setting"].str.partition(" (")[0] + " (" + said["dataset"] + ")"
    return [
        *found,
        Section("What the text claims of them", pd.DataFrame(rows, index=index, columns=columns)),
    ]


def over_each(cells: pd.DataFrame, title: str, method: str) -> Section:
    """Return a row for each baseline, and a column for each setting and target."""
    columns: dict[str, dict[str, str]] = {}
    for key, group in cells.groupby(list(SETTING[1:]), sort=False):
        rounds = group.set_index("method")
        ours = rounds["mean"].where(rounds["protocol"] == "full").astype(float)
        ratios = pd.DataFrame({"ours": ours, "printed": rounds["printed"].astype(float)})
        ratios = ratios.div(ratios.loc[method]).drop(index=method)
        x = str(key[1]).removeprefix(TARGET).removesuffix("A") or "1"
        columns[f"{key[0]} x={x}"] = {
            str(name): text(row["ours"], row["printed"]) for name, row in ratios.iterrows()
        }
    return Section(title, pd.DataFrame(columns))


def text(ours: float, printed: float) -> str:
    shown = [number(value, "ratio").replace("-", "") for value in (ours, printed)]
    return f"{shown[0]} [{shown[1] or '-'}]".strip()
