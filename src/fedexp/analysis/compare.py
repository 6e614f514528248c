"""Find where the results of two runs differ first, and which options and versions differ."""

from pathlib import Path

import pandas as pd

from fedexp.core.errors import ConfigError
from fedexp.core.storage import load_npz
from fedexp.rundir import files, origin
from fedexp.rundir.identity import flatten
from fedexp.rundir.reader import RunDirectory, require_run

TIMES = ("seconds", "_per_second")  # ends of the names of columns that differ between equal runs


def compare_runs(one: Path, other: Path) -> tuple[list[str], list[str]]:
    """Return (differences of the results, differences of options, versions and machines).

    Each list has one line per difference. The results are all tables of the runs, without times,
    and the partition of the first task. Raises ConfigError if a directory has no run, a run has no
    rounds.csv or a file cannot be read.
    """
    runs = require_run(one), require_run(other)
    for run in runs:
        if not run.has(files.ROUNDS):
            raise ConfigError(
                f"{run.directory / files.ROUNDS}: is missing, so nothing can be compared"
            )
    found = []
    for name in files.TABLES:
        found += first_difference(name, *(run.read_table(name) for run in runs))
    results = [text for _, text in sorted(found)]
    hashes = [str(load_npz(run.directory / files.PARTITION)["hash"]) for run in runs]
    if hashes[0] != hashes[1]:
        results.insert(0, f"{files.PARTITION}: the clients have different examples")
    mine, theirs = facts_of(*runs), facts_of(*reversed(runs))
    facts = []
    for key in sorted(mine.keys() | theirs.keys()):
        before, after = (str(side.get(key, "(absent)")) for side in (mine, theirs))
        if before != after:
            facts.append(f"{key}: {before} and {after}")
    return results, facts


def facts_of(run: RunDirectory, other: RunDirectory) -> dict[str, object]:
    """Return the options that affect results, the versions and the machines, by dotted key.

    Lists that the other run lacks, because an earlier version started it, are left out. If the
    other run was resumed more often, the last part of this run stands for its further parts, too.
    """
    known, parts = origin.read(run.directory), []
    lists = [set(part) for part in origin.read(other.directory)["parts"]]
    for part in known["parts"]:
        kept = {
            k: v for k, v in part.items() if k != "packages" or any(k in each for each in lists)
        }
        named = {k: v for k, v in kept.get("packages", {}).items() if k not in part["versions"]}
        parts.append(kept | ({"packages": named} if named else {}))
    going_on = {key: value for key, value in parts[-1].items() if key != "first_round"}
    parts += [going_on] * (len(lists) - len(parts))
    return {**known["values"], **flatten(parts, "parts"), "status": run.status}


def first_difference(
    name: str, one: pd.DataFrame | None, other: pd.DataFrame | None
) -> list[tuple[int, str]]:
    """Return the first round in which a table differs, with a description, or [] if it is equal.

    name: the name of the file. A missing table differs in round 0.
    """
    if one is None or other is None:
        missing = "first" if one is None else "second"
        return [] if one is other else [(0, f"{name}: is missing in the {missing} run")]
    if only := sorted(map(str, set(one) ^ set(other))):
        return [(0, f"{name}: only one of the runs has the column {only[0]}")]
    columns = [column for column in map(str, one) if not column.endswith(TIMES)]
    rows = min(len(one), len(other))
    left, right = (table.loc[: rows - 1, columns].reset_index(drop=True) for table in (one, other))
    unequal = left.ne(right) & ~(left.isna() & right.isna())
    for row in unequal.index[unequal.any(axis="columns")][:1]:
        column = unequal.loc[row].idxmax()
        number = int(left.loc[row, "round"])
        values = f"{left.loc[row, column]} and {right.loc[row, column]}"
        return [(number, f"round {number}, {name}, {column}: {values}")]
    if len(one) != len(other):
        longer, missing = (one, "second") if len(one) > rows else (other, "first")
        number = int(longer["round"].iloc[rows])
        return [(number, f"round {number}, {name}: is missing in the {missing} run")]
    return []
