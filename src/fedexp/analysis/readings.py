"""Two readings of a printed value: where text and released code differ, each stands in a row of its own.

A sweep names the sweeps of other readings by `readings: {<sweep>: <label>}`. Their cells stand below those of the
first reading, as `MOON (mu=0.1, released)`; they are never averaged, and the closer one is named once two are run. A
reading that changes no option of the method, but the clients or the cohorts of all, has a row where it was run.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import pandas as pd

from fedexp.analysis import compare
from fedexp.analysis.layout import Section, number
from fedexp.analysis.sweep import Sweep, cell_of, protocol_of
from fedexp.rundir.reader import RunDirectory

KEY = [*compare.CELL, "metric"]
OF_ALL = ("partition.", "cohorts.")  # begin of the options that change the federation, not a method


def with_readings(
    tidy: pd.DataFrame, sweep: Sweep, others: Sequence[Sweep], jobs_of: Callable[[Sweep], Sequence[RunDirectory]]
) -> pd.DataFrame:
    """Return the tidy table with the rows of other readings below those of the first, and two columns more: `reading`
    ("" of the first) and `closest`, the method of the row that is closest to the print of those that were run in full,
    where there are two."""
    parts = [tidy.assign(reading="")]
    order = {tuple(key): i for i, key in enumerate(tidy[KEY].to_numpy().tolist())}
    for other in others:
        names = rows_of(sweep, other)
        table = compare.cells(other, jobs_of(other))
        keys = [tuple(key) for key in table[KEY].to_numpy().tolist()]
        table = table.assign(reading=[names.get(key, "") for key in keys], rho=None, order="", order_by="")
        of_all = table["reading"] == sweep.readings[other.name]
        parts.append(table[(table["reading"] != "") & ~(of_all & (table["n"] == 0))])
    keyed = [part.assign(place=[order[tuple(key)] for key in part[KEY].to_numpy().tolist()]) for part in parts]
    found = pd.concat([part for part in keyed if len(part)], ignore_index=True) if len(keyed) > 1 else keyed[0]
    found = found.sort_values("place", kind="stable", ignore_index=True)
    return with_closest(found).drop(columns="place")


def rows_of(sweep: Sweep, other: Sweep) -> dict[tuple[str, ...], str]:
    """Return the key of every printed value that another sweep reads differently -> the name of that reading, with the
    options that it changes for this method."""
    common = {text for block in sweep.blocks for text in block.fixed}
    printed, found = compare.printed_cells(other), dict[tuple[str, ...], str]()
    for block in other.blocks:
        changes = [text.partition("=") for text in block.fixed if text not in common]
        changed = [f"{key.rpartition('.')[2]}={value}" for key, _, value in changes if not key.startswith(OF_ALL)]
        name = ", ".join(filter(None, (*changed, sweep.readings[other.name])))
        for combination in block.combinations():
            for i, _ in compare.matches(printed, block, block.fields(combination)):
                found[tuple(printed[i][column] for column in KEY)] = name
    return found


def is_of(other: Sweep, run: RunDirectory) -> bool:
    """Return whether a run belongs to another reading, at its protocol."""
    return cell_of(other, run.overrides) is not None and not protocol_of(other, run.overrides)


def with_closest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the column `closest` and with the readings in the names of the methods."""
    names = table["method"].where(table["reading"] == "", table["method"] + " (" + table["reading"] + ")")
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
    """Return how many printed values are outside in the first reading and within in another that was run in full."""
    if "reading" not in tidy:
        return 0
    full = tidy[tidy["protocol"] == "full"].fillna({"reading": ""})
    mine = full[(full["reading"] == "") & (full["verdict"] == "outside")]
    other = full[(full["reading"] != "") & (full["verdict"] == "within")]
    methods = [name.removesuffix(f" ({how})") for name, how in zip(other["method"], other["reading"], strict=True)]
    within = set(map(tuple, other.assign(method=methods)[KEY].to_numpy().tolist()))
    return sum(tuple(key) in within for key in mine[KEY].to_numpy().tolist())


def distances(tidy: pd.DataFrame, cells: pd.DataFrame) -> pd.Series:
    """Return reading -> mean distance from the print over these cells of the first reading of a method."""
    place = [name for name in KEY if name != "method"]
    method = str(cells["method"].iloc[0])
    mine = (tidy["method"] == method) | tidy["method"].str.startswith(f"{method} (")
    same = tidy[mine].merge(cells[place].drop_duplicates(), on=place)
    return same["difference"].astype(float).abs().groupby(same["method"], sort=False).mean()


def sections(tidy: pd.DataFrame) -> list[Section]:
    """Return which reading of a method is closer to the print under the paper's rule, in how many of its cells, and how
    far from the print each is in the mean; [] where no cell has been run in all its readings."""
    known = first(tidy)
    known = known[known["closest"] != ""] if "closest" in known else known[:0]
    if not len(known):
        return []
    rows: dict[str, dict[str, str]] = {}
    for (method, metric), group in known.groupby(["method", "metric"], sort=False):
        count = Counter(group["closest"])
        rows.setdefault(str(method), {})[str(metric)] = ", ".join(
            f"{name}: {n} of {len(group)}" for name, n in count.most_common()
        )
        far = distances(tidy, group).sort_values(kind="stable")
        unit = str(group["unit"].iloc[0])
        rows[str(method)][f"{metric}, mean distance"] = ", ".join(
            f"{name}: {number(value, unit, str(metric))}" for name, value in far.items()
        )
    return [
        Section("Readings of a printed value: the closer one", pd.DataFrame.from_dict(rows, orient="index").fillna(""))
    ]
