"""Tables of a paper with other readings of its cells, and what the paper's text claims of them.

Where text and released code differ, a sweep names the sweeps of other readings by `readings:
{<sweep>: <label>}`. Their cells stand below those of the first reading, as `MOON (released)`; they
are never averaged.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.layout import Section, number
from fedexp.analysis.sweep import Sweep, load_sweep
from fedexp.config.options import conf_directory
from fedexp.papers.cells import CELL, cells, printed_cells
from fedexp.papers.runs import counted_runs

KEY = [*CELL, "metric"]
SETTING = ["dataset", "partition_param", "metric"]  # of Flashback's table: a setting and a target
TARGET = "rounds_to_"


def table_of(sweep: Sweep, directory: Path, everything: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return table.csv of a sweep: its cells, and those of its other readings that were run, whose
    directories lie beside its own. everything: as of `counted_runs`."""
    tables = {"": cells(sweep, counted_runs(sweep, directory, everything))}
    for name, label in sweep.readings.items():
        other, beside = load_sweep(name, [conf_directory()]), directory.absolute().parent / name
        known = label or name.removeprefix(f"{sweep.name}_")
        tables[known] = cells(other, counted_runs(other, beside, everything))
    return with_readings(tables)


def with_readings(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the cells of the first reading, those of others below them where they were run.

    tables: by label, the first reading's is empty; all have the same index."""
    parts = [tables[""].assign(reading="")]
    for label, table in tables.items():
        run = table[table["n"] > 0] if label else table[:0]
        names = run["method"] + f" ({label})"
        if len(run):
            parts.append(run.assign(reading=label, method=names, order="", order_by="", rho=np.nan))
    return pd.concat(parts).sort_index(kind="stable").reset_index(drop=True)


def first(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the first reading: one for every printed value."""
    return table[table["reading"] == ""]


def in_two_readings(table: pd.DataFrame) -> pd.DataFrame:
    """Return the printed values that were run in full in the first reading (columns with the end
    _first) and in another one."""
    full = table[(table["protocol"] == "full") & table["difference"].notna()]
    ends = " (" + full["reading"] + ")"
    named = [m.removesuffix(end) for m, end in zip(full["method"], ends, strict=True)]
    full = full.assign(method=named)
    others = full[full["reading"] != ""]
    return others.merge(first(full), on=KEY, suffixes=("", "_first"))


def explained(table: pd.DataFrame) -> int:
    """Return how many printed values are outside in the first reading and within in another."""
    both = in_two_readings(table)
    found = both[(both["verdict_first"] == "outside") & (both["verdict"] == "within")]
    return len(found.drop_duplicates(KEY))


def readings_section(table: pd.DataFrame) -> list[Section]:
    """Return how far from the print each reading is in the mean, beside the first reading in the
    same cells."""
    both = in_two_readings(table)
    rows = {}
    for (method, reading, metric), group in both.groupby(["method", "reading", "metric"]):
        unit, far = group["unit"].iloc[0], group[["difference", "difference_first"]].abs()
        closer = int((far["difference"] < far["difference_first"]).sum())
        distances = [number(value, unit, str(metric)) for value in far.mean()]
        rows[f"{method} ({reading}), {metric}"] = [*distances, f"{closer} of {len(group)}"]
    names = ["mean distance", "of the first reading", "closer to the print"]
    shown = pd.DataFrame.from_dict(rows, orient="index", columns=names)
    return [Section("Other readings of printed values", shown)] if rows else []


def claims_section(sweep: Sweep, table: pd.DataFrame) -> list[Section]:
    """Return what the paper's text claims of its table: the largest and smallest ratio of the
    rounds of another method to those of one, beside what the printed table and our runs give. A
    method that never reaches a target has no ratio, as in the paper."""
    if not sweep.claims:
        return []
    rounds = first(table)
    rounds = rounds[rounds["metric"].str.startswith(TARGET)]
    rounds = rounds.assign(ours=rounds["mean"].where(rounds["protocol"] == "full"))
    rows: dict[str, list[str]] = {}
    for claim in printed_cells(sweep, sweep.claims).to_dict("records"):
        mine = rounds[(rounds["dataset"] == claim["dataset"]) | (claim["dataset"] == "all")]
        found = []
        for of in ("printed", "ours"):
            wide = mine.pivot(index=SETTING, columns="method", values=of)
            ratios = wide.drop(columns=claim["method"]).div(wide[claim["method"]], axis=0)
            known = ratios.stack().replace(np.inf, np.nan).dropna()
            found.append(known.min() if "minimum" in claim["setting"] else known.max())
        name = f"{claim['setting'].partition(' (')[0]} ({claim['dataset']})"
        run = f"{mine['ours'].notna().sum()} of {len(mine)}"
        rows[name] = [claim["value"], *(number(value, "ratio") for value in found), run]
    names = ["text", "printed table", "ours", "cells run"]
    shown = pd.DataFrame.from_dict(rows, orient="index", columns=names)
    return [Section("What the text claims of speed-ups", shown)]


def all_sections(
    sweep: Sweep, table: pd.DataFrame, shown: pd.DataFrame | None = None
) -> list[Section]:
    """Return the sections of a sweep's report, made from its table.csv. shown: the rows of the
    paper's table itself that are shown, where these are not all."""
    laid_out = layout.all_sections(table if shown is None else shown)
    return laid_out + readings_section(table) + claims_section(sweep, table)
