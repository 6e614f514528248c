"""Two readings of a printed value: where text and released code differ, each stands in a row of its
own.

A sweep names the sweeps of other readings by `readings: {<sweep>: <label>}`. Their cells stand
below those of the first reading, as `MOON (mu=0.1, released)`; they are never averaged, and the
closer one is named once two are run. A reading that changes no option of the method, but the
clients or the cohorts of all, has a row where it was run.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from fedexp.analysis.layout import Section, number
from fedexp.analysis.sweep import Sweep, cell_of, protocol_of
from fedexp.papers import compare
from fedexp.rundir.reader import RunDirectory

KEY = [*compare.CELL, "metric"]
OF_ALL = ("partition.", "cohorts.")  # begin of the options that change the federation, not a method


def with_readings(
    tidy: pd.DataFrame,
    sweep: Sweep,
    others: Sequence[Sweep],
    jobs_of: Callable[[Sweep], Sequence[RunDirectory]],
) -> pd.DataFrame:
    """Return the tidy table with the rows of other readings below those of the first, and two
    columns more: `reading` ("" of the first) and `closest`, the method of the row that is closest
    to the print of those that were run in full, where there are two."""
    parts = [tidy.assign(reading="")]
    order = {tuple(key): i for i, key in enumerate(tidy[KEY].to_numpy().tolist())}
    for other in others:
        names = rows_of(sweep, other)
        table = compare.cells(other, jobs_of(other))
        keys = [tuple(key) for key in table[KEY].to_numpy().tolist()]
        table = table.assign(
            reading=[names.get(key, "") for key in keys], rho=None, order="", order_by=""
        )
        of_all = table["reading"] == sweep.readings[other.name]
        parts.append(table[(table["reading"] != "") & ~(of_all & (table["n"] == 0))])
    keyed = [
        part.assign(place=[order[tuple(key)] for key in part[KEY].to_numpy().tolist()])
        for part in parts
    ]
    found = (
        pd.concat([part for part in keyed if len(part)], ignore_index=True)
        if len(keyed) > 1
        else keyed[0]
    )
    found = found.sort_values("place", kind="stable", ignore_index=True)
    return with_closest(found).drop(columns="place")


def rows_of(sweep: Sweep, other: Sweep) -> dict[tuple[str, ...], str]:
    """Return the key of every printed value that another sweep reads differently -> the name of
    that reading, with the options that it changes for this method."""
    common = {text for block in sweep.blocks for text in block.fixed}
    printed, found = compare.printed_cells(other), dict[tuple[str, ...], str]()
    for block in other.blocks:
        changes = [text.partition("=") for text in block.fixed if text not in common]
        changed = [
            f"{key.rpartition('.')[2]}={value}"
            for key, _, value in changes
            if not key.startswith(OF_ALL)
        ]
        name = ", ".join(filter(None, (*changed, sweep.readings[other.name])))
        for combination in block.combinations():
            for i, _ in compare.matches(printed, block, block.fields(combination)):
                found[tuple(printed[i][column] for column in KEY)] = name
    return found


def is_of(other: Sweep, run: RunDirectory) -> bool:
    """Return whether a run belongs to another reading, at its protocol."""
    return cell_of(other, run.overrides) is not None and not protocol_of(other, run.overrides)


def with_closest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the column `closest` and with the readings in the names of the
    methods."""
    names = table["method"].where(
        table["reading"] == "", table["method"] + " (" + table["reading"] + ")"
    )
    closest = pd.Series("", index=table.index)
    fit = (table["protocol"] == "full") & table["difference"].notna()
    for _, group in table.groupby("place", sort=False):
        run = group[fit[group.index]]
        if len(run) > 1:
            distances = run["difference"].astype(float).abs().to_numpy()
            closest[run.index] = names[run.index].iloc[int(distances.argmin())]
    return table.assign(method=names, closest=closest)


def first(tidy: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the first reading."""
    return tidy[tidy["reading"] == ""] if "reading" in tidy else tidy


def explained(tidy: pd.DataFrame) -> int:
    """Return how many printed values are outside in the first reading and within in another that
    was run in full."""
    if "reading" not in tidy:
        return 0
    full = tidy[tidy["protocol"] == "full"].fillna({"reading": ""})
    mine = full[(full["reading"] == "") & (full["verdict"] == "outside")]
    other = full[(full["reading"] != "") & (full["verdict"] == "within")]
    methods = [
        name.removesuffix(f" ({how})")
        for name, how in zip(other["method"], other["reading"], strict=True)
    ]
    within = set(map(tuple, other.assign(method=methods)[KEY].to_numpy().tolist()))
    return sum(tuple(key) in within for key in mine[KEY].to_numpy().tolist())


def distances(mine: pd.DataFrame, name: str) -> tuple[float, float, int]:
    """Return the mean distance from the print of one reading and of the first, in the cells in
    which both were run, and the number of these. mine: the rows of a method and metric that were
    run in full."""
    place = [column for column in KEY if column != "method"]
    parts = [mine[mine["method"] == name], mine[mine["reading"] == ""]]
    own, base = (
        part.set_index(place)["difference"].astype(float).abs().to_dict() for part in parts
    )
    both = [(own[cell], base[cell]) for cell in own if cell in base]
    far, first_far = np.array(both).mean(0) if both else (math.nan, math.nan)
    return float(far), float(first_far), len(both)


def sections(tidy: pd.DataFrame) -> list[Section]:
    """Return which reading of a method is closer to the print under the paper's rule, in how many
    of the cells in which it was run, and how far from the print each is in the mean, beside the
    first reading in the same cells; [] where no cell has been run in two readings."""
    known = tidy[tidy["closest"].fillna("") != ""] if "closest" in tidy else tidy[:0]
    if not len(known):
        return []
    known = known.fillna({"reading": ""})
    ends = [f" ({how})" if how else "" for how in known["reading"]]
    known = known.assign(
        base=[name.removesuffix(end) for name, end in zip(known["method"], ends, strict=True)]
    )
    rows: dict[str, dict[str, str]] = {}
    for (method, metric), group in known.groupby(["base", "metric"], sort=False):
        won = Counter(
            name
            for name, closest in zip(group["method"], group["closest"], strict=True)
            if name == closest
        )
        run = Counter(group["method"])
        names = sorted(run, key=lambda name: -won[name])
        row = rows.setdefault(str(method), {})
        row[str(metric)] = ", ".join(f"{name}: {won[name]} of {run[name]}" for name in names)
        row[f"{metric}, mean distance"] = ", ".join(
            filter(None, (apart(group, name) for name in names))
        )
    return [
        Section(
            "Readings of a printed value: the closer one",
            pd.DataFrame.from_dict(rows, orient="index").fillna(""),
        )
    ]


def apart(group: pd.DataFrame, name: str) -> str:
    """Return in words how far a reading is from the print, and the first reading in the same
    cells."""
    far, first_far, cells = distances(group, name)
    if not cells or name == group["base"].iloc[0]:
        return ""
    unit, metric = str(group["unit"].iloc[0]), str(group["metric"].iloc[0])
    return f"{name}: {number(far, unit, metric)} beside {number(first_far, unit, metric)}"
