"""Count the published values that our runs agree with, and how many would agree without skill.

A value is compared by two tolerances: the *strict* one (`judge.strict_tolerance`), and the sweep's,
which is wider where the noise of our value or the published standard deviation is larger. Two null
models tell how much an agreement says: the results of the methods are exchanged at random within
each column, or the result of FedAvg is used for every method of its column.

A *cell* has all values of one method in one column, such as accuracy and forgetting. The cells of a
column differ only in the method.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedexp_papers.cells import CELL, load_entries
from fedexp_papers.judge import AGREEING, TOO_WIDE, VERDICTS, judge, strict_tolerance
from fedexp_papers.sweeps import PaperSweep

BASELINE = "FedAvg"
PLACE = ["paper", "table", *(name for name in CELL if name not in ("setting", "method")), "part"]
SAME_METRIC = ("threshold", "x=")  # parts of a setting that only repeat the metric


@dataclass(frozen=True)
class Agreement:
    """Numbers of values that agree, by one tolerance.

    The null models need FedAvg's result, so they count the `comparable` values: those in columns in
    which FedAvg was measured.
    """

    values: int
    agree: int
    cells: int
    full_cells: int  # cells in which all values agree
    comparable: int
    comparable_agree: int
    baseline: int  # comparable values that agree if FedAvg's result is used for every method
    chance: np.ndarray  # probability of each number of agreements with exchanged methods

    @property
    def expected(self) -> float:
        """The mean number of agreements with exchanged methods."""
        return float(np.arange(len(self.chance)) @ self.chance)

    def interval(self, share: float = 0.95) -> tuple[int, int]:
        """Return the central range of the number of agreements with exchanged methods."""
        edges = np.array([(1 - share) / 2, (1 + share) / 2])
        low, high = np.searchsorted(self.chance.cumsum().round(12), edges.round(12))
        return int(low), int(high)

    @property
    def p_value(self) -> float:
        """The probability of at least as many agreements with exchanged methods as with ours."""
        return float(self.chance[self.comparable_agree :].sum())


def judged_values(
    sweeps: Mapping[str, PaperSweep], tables: Mapping[str, pd.DataFrame]
) -> pd.DataFrame:
    """Return the judged rows of all tables, one for each value and reading.

    A value that several tables of a paper repeat, for us and in print, is returned once, and a
    speed-up is not returned, as it repeats the number of rounds beside it. sweeps, tables: by name,
    from `readings.compare_everything`. These columns are added:

    sweep: the name of the sweep; rows of another reading are among those of the first one
    held_out: whether no setting of the sweep was inferred from the row's column
    part: the parts of the setting that do not repeat the metric
    """
    others = {name for sweep in sweeps.values() for name in sweep.readings}
    own = {name: table for name, table in tables.items() if name not in others}
    rows = pd.concat([table.assign(sweep=name) for name, table in own.items()], ignore_index=True)
    rows = select_judged(rows[rows["metric"] != "speedup"])
    rows["held_out"] = [is_held_out(sweeps[row["sweep"]], row) for _, row in rows.iterrows()]
    parts = rows["setting"].str.split("; ")
    rows["part"] = ["; ".join(p for p in each if not p.startswith(SAME_METRIC)) for each in parts]
    same = ["paper", "metric", "reading", "printed", "mean"]
    first = rows.groupby(same, dropna=False)["table"].transform("first")
    # values that failed are equal in all tables
    return rows[(rows["table"] == first) | rows["printed"].isna()]


def select_judged(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the judged rows, with the names of methods that the paper uses.

    rows: of comparison.csv, in which the name of a method is followed by the reading.
    """
    rows = rows[rows["verdict"].isin(VERDICTS)]
    named = zip(rows["method"], rows["reading"], strict=True)
    return rows.assign(method=[method.removesuffix(f" ({label})") for method, label in named])


def is_held_out(sweep: PaperSweep, row: Any) -> bool:
    """Return whether no setting of the sweep was inferred from the column of a row."""
    return not any(
        all(row[name] == value for name, value in column.items()) for column in sweep.inferred_from
    )


def count_agreement(rows: pd.DataFrame, strict: bool) -> Agreement:
    """Count the values that agree.

    rows: judged rows of one reading, from `judged_values`. strict: whether to use the strict
    tolerance instead of the sweep's.
    """
    agree = np.array([agrees(row, row, strict) for row in rows.to_dict("records")], dtype=bool)
    cells = rows.assign(agree=agree).groupby([*PLACE, "method"], dropna=False)["agree"].all()
    chance, comparable, comparable_agree, baseline = np.ones(1), 0, 0, 0
    for _, column in rows.groupby(PLACE, dropna=False):
        methods = column["method"].unique()
        if BASELINE not in methods:
            continue
        counts = exchange_methods(column, strict)
        comparable += len(column)
        comparable_agree += int(counts.trace())
        baseline += int(counts[:, list(methods).index(BASELINE)].sum())
        chance = np.convolve(chance, permuted_sums(counts))
    return Agreement(
        values=len(rows),
        agree=int(agree.sum()),
        cells=len(cells),
        full_cells=int(cells.sum()),
        comparable=comparable,
        comparable_agree=comparable_agree,
        baseline=baseline,
        chance=chance,
    )


def agrees(row: Mapping[Any, Any], ours: Mapping[Any, Any], strict: bool) -> bool:
    """Return whether the measured value of one row agrees with the published value of another.

    row: the row of the published value, whose tolerance is used; the strict one is used instead of
    one that is too wide to test anything. ours: the row of the measured value.
    """
    tolerance = strict_tolerance(row["unit"], row["metric"], row["printed"])
    if not strict and row["tolerance"] <= TOO_WIDE * tolerance:
        tolerance = row["tolerance"]
    both = {"mean": ours["mean"], "difference": ours["mean"] - row["printed"]}
    diverged = [run < ours["diverged"] for run in range(ours["n"])]
    return judge({**row, **both, "tolerance": tolerance}, diverged) in AGREEING


def exchange_methods(column: pd.DataFrame, strict: bool) -> np.ndarray:
    """Compare each method's published values in a column with each method's measured values.

    Return int [methods, methods]: how many published values of the first method agree with the
    second one's. Methods are in order of their first row.
    """
    groups = {method: rows for method, rows in column.groupby("method", sort=False)}
    known = {
        method: {row["metric"]: row for row in rows.to_dict("records")}
        for method, rows in groups.items()
    }
    return np.array(
        [
            [
                sum(agrees(row, ours[name], strict) for name, row in mine.items() if name in ours)
                for ours in known.values()
            ]
            for mine in known.values()
        ]
    )


def permuted_sums(counts: np.ndarray) -> np.ndarray:
    """Return the distribution of sum_i counts[i, p(i)] over all permutations p.

    counts: int [n, n]. Return the probability of each sum, float [largest sum + 1]. The rows are
    assigned one after the other; for each set of columns that is used, given by its bits, the
    number of ways to each sum is kept. This takes n^2 2^n steps instead of n!.
    """
    found = {0: np.eye(1, int(counts.max(1).sum()) + 1)[0]}
    for row in counts:
        after: dict[int, np.ndarray] = {}
        for used, ways in found.items():
            for j, gain in enumerate(row):
                if not used >> j & 1:
                    # the sum cannot exceed the largest one, so nothing is rolled over the end
                    after[used | 1 << j] = after.get(used | 1 << j, 0) + np.roll(ways, gain)
        found = after
    (ways,) = found.values()
    return ways / ways.sum()


@dataclass(frozen=True)
class Coverage:
    """How many entries of the published tables are judged."""

    published: int  # entries, including those without a number, such as "not reached"
    judged: int  # by any reading


def count_coverage(tables: Mapping[str, pd.DataFrame], paper: str = "") -> Coverage:
    """Count the judged entries of a paper's tables, or of all papers.

    tables: from `readings.compare_everything`. An entry that is judged by several readings counts
    once, one that a paper repeats in several tables counts each time.
    """
    entries = load_entries()
    published = int((entries["paper"] == paper).sum()) if paper else len(entries)
    rows = select_judged(pd.concat(tables.values()))
    rows = rows[rows["paper"].eq(paper) | (paper == "")]
    judged = rows.drop_duplicates(["paper", "table", *CELL, "metric"])
    return Coverage(published, len(judged))
