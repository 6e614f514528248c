"""Combine alternative readings of a paper's table, and check the claims in the paper's text.

A reading is an interpretation of the protocol. If a paper's text and its released code differ, the
sweep's file lists further sweeps, one per alternative reading: `readings: {<sweep>: <label>}`. The
cells of an alternative reading are in separate rows, such as `MOON (released)`, and are never
averaged with cells of the first reading.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from fedexp.analysis.layout import Section
from fedexp_papers import layout
from fedexp_papers.cells import CELL, cells, published_cells
from fedexp_papers.layout import format_number
from fedexp_papers.sweeps import PaperSweep, all_paper_sweeps, load_paper_sweep

KEY = [*CELL, "metric"]
SETTING = ["dataset", "partition_param", "metric"]  # identifies a row of Flashback's table
TARGET = "rounds_to_"


def compare_everything(root: Path) -> tuple[dict[str, PaperSweep], dict[str, pd.DataFrame]]:
    """Return (sweeps, tables) for the directory `root/multirun`.

    sweeps: name -> sweep, for all sweeps that reproduce a table or figure of a paper. tables: name
    -> comparison.csv, for the sweeps that have published values and runs. Raises ConfigError if the
    file of any run is damaged.
    """
    sweeps = {sweep.name: sweep for sweep in all_paper_sweeps()}
    folders = {name: root / "multirun" / name for name in sweeps}
    every = {n: join_readings(sweeps[n], path) for n, path in folders.items() if path.is_dir()}
    tables = {name: table for name, table in every.items() if len(table) and table["n"].any()}
    return sweeps, tables


def join_readings(sweep: PaperSweep, directory: Path) -> pd.DataFrame:
    """Return comparison.csv of a sweep: its cells, each followed by its alternative readings.

    The directories of alternative readings are siblings of the sweep's directory. Alternative
    readings that were not run are left out.
    """
    directory = directory.absolute()
    parts = [cells(sweep, directory).assign(reading="")]
    for other, label in sweep.readings.items():
        table = cells(load_paper_sweep(other), directory.parent / other)
        run = table[table["n"] > 0]
        if len(run):
            known = label or other.removeprefix(f"{sweep.name}_")
            names = run["method"] + f" ({known})"
            parts.append(run.assign(reading=known, method=names))
    return pd.concat(parts).sort_index(kind="stable").reset_index(drop=True)


def first_reading(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the first reading: one for each published value."""
    return table[table["reading"] == ""]


def pair_readings(table: pd.DataFrame) -> pd.DataFrame:
    """Pair each alternative reading of a published value with the first reading of the same value.

    Only values that were run at the full protocol in both readings are included. Columns of the
    first reading have the suffix _first.
    """
    full = table[(table["protocol"] == "full") & np.isfinite(table["difference"])]
    ends = " (" + full["reading"] + ")"
    named = [m.removesuffix(end) for m, end in zip(full["method"], ends, strict=True)]
    full = full.assign(method=named)
    others = full[full["reading"] != ""]
    return others.merge(first_reading(full), on=KEY, suffixes=("", "_first"))


def summarise_readings(table: pd.DataFrame) -> list[Section]:
    """Compare how far alternative readings and the first reading are from the published values.

    The mean distances of both readings are computed over the same cells.
    """
    both = pair_readings(table)
    rows = {}
    for (method, reading, metric), group in both.groupby(["method", "reading", "metric"]):
        unit, far = group["unit"].iloc[0], group[["difference", "difference_first"]].abs()
        closer = int((far["difference"] < far["difference_first"]).sum())
        distances = [format_number(value, unit, str(metric)) for value in far.mean()]
        rows[f"{method} ({reading}), {metric}"] = [*distances, f"{closer} of {len(group)}"]
    names = ["mean distance", "of the first reading", "closer to the published value"]
    shown = pd.DataFrame.from_dict(rows, orient="index", columns=names)
    return [Section("Other readings of published values", shown)] if rows else []


def check_claims(sweep: PaperSweep, table: pd.DataFrame) -> list[Section]:
    """Compare the claims in the paper's text with the published table and with our runs.

    A claim states the largest or the smallest ratio between the rounds that other methods need and
    the rounds that a given method needs. As in the paper, a method that never reaches a target has
    no ratio.
    """
    if not sweep.claims:
        return []
    rounds = first_reading(table)
    rounds = rounds[rounds["metric"].str.startswith(TARGET)]
    rounds = rounds.assign(ours=rounds["mean"].where(rounds["protocol"] == "full"))
    rows: dict[str, list[str]] = {}
    for claim in published_cells(sweep, sweep.claims).to_dict("records"):
        mine = rounds[(rounds["dataset"] == claim["dataset"]) | (claim["dataset"] == "all")]
        found = []
        for of in ("printed", "ours"):
            wide = mine.pivot(index=SETTING, columns="method", values=of).replace(np.inf, np.nan)
            ratios = wide.drop(columns=claim["method"]).div(wide[claim["method"]], axis=0)
            known = ratios.stack().dropna()
            found.append(known.min() if "minimum" in claim["setting"] else known.max())
        name = f"{claim['setting'].partition(' (')[0]} ({claim['dataset']})"
        run = f"{mine['ours'].notna().sum()} of {len(mine)}"
        rows[name] = [claim["value"], *(format_number(value, "ratio") for value in found), run]
    names = ["text", "printed table", "ours", "cells run"]
    shown = pd.DataFrame.from_dict(rows, orient="index", columns=names)
    return [Section("What the text claims of speed-ups", shown)]


def report_sections(sweep: PaperSweep, table: pd.DataFrame) -> list[Section]:
    """Return the sections of a sweep's report."""
    return [*layout.all_sections(table), *summarise_readings(table), *check_claims(sweep, table)]
