"""How many published values our runs agree with, and how many would agree without skill."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedexp_papers.agreement import (
    count_agreement,
    count_coverage,
    exchange_methods,
    judged_values,
    permuted_sums,
)
from fedexp_papers.cells import CELL
from fedexp_papers.sweeps import load_paper_sweep

MULTIRUN = Path(__file__).parents[2] / "multirun"


def row(method, printed, mean, column="s=2", **others):
    """Return a judged row: a percentage with a tolerance of 3 points, if not stated otherwise."""
    place = dict.fromkeys(CELL, "") | {"dataset": "CIFAR-10", "partition_param": column}
    known = {"paper": "FedNTD", "table": "1", "method": method, "metric": "accuracy"}
    known |= {"unit": "percent", "printed": printed, "mean": mean, "tolerance": 3.0, "reading": ""}
    known |= {"n": 1, "diverged": 0, "note": "", "verdict": "outside", "part": ""}
    return place | known | others


F = {"metric": "forgetting", "unit": "fraction", "tolerance": 0.05}
# Ours is within 3 points in all but MOON's cell, within 2 points only in FedAvg's.
ROWS = [
    row("FedAvg", 40.0, 41.0),
    row("FedAvg", 0.50, 0.54, **F),
    row("FedNTD", 44.0, 46.5),
    row("FedNTD", 0.40, 0.44, **F),
    row("MOON", 43.0, 38.0),
    row("MOON", 0.60, 0.54, **F),
    row("FedNTD", 70.0, 70.0, column="s=3"),
]


def test_values_and_cells_are_counted_by_both_tolerances():
    """The last row's column has no FedAvg, so the null models cannot count it."""
    strict, wide = (count_agreement(pd.DataFrame(ROWS), strict) for strict in (True, False))
    assert (strict.values, strict.agree, strict.cells, strict.full_cells) == (7, 4, 4, 2)
    assert (wide.values, wide.agree, wide.cells, wide.full_cells) == (7, 5, 4, 3)
    assert (strict.comparable, strict.comparable_agree, wide.comparable_agree) == (6, 3, 4)


def test_a_tolerance_that_tests_nothing_counts_as_the_strict_one():
    """Ours is 4 and 1 points away; 5.1 points are more than 2.5 strict tolerances, 5 are not."""
    for tolerance, agree in ((5.0, 2), (5.1, 1)):
        rows = [row(name, 40.0, mean, tolerance=tolerance) for name, mean in (("A", 44), ("B", 41))]
        assert count_agreement(pd.DataFrame(rows), strict=False).agree == agree


def test_null_models_equal_a_calculation_by_hand():
    """The published values of FedAvg, FedNTD and MOON are in rows, our results in columns. Ours of
    FedAvg, 41 (0.54), agrees with 40 (0.50), with the 43 of MOON, and by 3 points with the 44 of
    FedNTD; that of FedNTD with its own F, and by 3 points with its accuracy; that of MOON, 38
    (0.54), with both values of FedAvg."""
    rows = pd.DataFrame(ROWS[:6])
    assert exchange_methods(rows, strict=True).tolist() == [[2, 0, 2], [0, 1, 0], [1, 0, 0]]
    assert exchange_methods(rows, strict=False).tolist() == [[2, 0, 2], [1, 2, 0], [1, 0, 0]]
    strict, wide = (count_agreement(rows, strict) for strict in (True, False))
    assert (strict.baseline, wide.baseline) == (3, 4)  # the columns of FedAvg
    # the six orders of our results give 3, 2, 0, 1, 2 and 4 strictly, else 4, 2, 1, 1, 3 and 5
    assert strict.chance * 6 == pytest.approx([1, 1, 2, 1, 1])
    assert wide.chance * 6 == pytest.approx([0, 2, 1, 1, 1, 1])
    assert (strict.expected, wide.expected) == (pytest.approx(2), pytest.approx(16 / 6))
    assert (strict.p_value, wide.p_value) == (pytest.approx(2 / 6), pytest.approx(2 / 6))
    assert (strict.interval(), strict.interval(0.5)) == ((0, 4), (1, 3))


def test_interval_has_a_number_whose_share_is_exactly_that_of_an_end():
    """0 or less has 2.5 %, 1 or less 97.5 %; (1 - 0.95) / 2 is above 0.025 in floating point."""
    found = replace(
        count_agreement(pd.DataFrame(ROWS), True), chance=np.array([0.025, 0.95, 0.025])
    )
    assert found.interval() == (0, 1)


def test_columns_are_independent():
    """With the same column twice, the distribution is that of the sum of two orders."""
    twice = [*ROWS[:6], *({**each, "partition_param": "s=5"} for each in ROWS[:6])]
    sums = [3, 2, 0, 1, 2, 4]
    wanted = np.bincount([a + b for a, b in itertools.product(sums, sums)]) / 36
    assert count_agreement(pd.DataFrame(twice), strict=True).chance == pytest.approx(wanted)


def test_permuted_sums_equal_all_permutations():
    counts = np.random.default_rng(0).integers(0, 3, (5, 5))
    orders = itertools.permutations(range(5))
    wanted = np.bincount([sum(counts[i, order[i]] for i in range(5)) for order in orders]) / 120
    found = permuted_sums(counts)
    assert found[: len(wanted)] == pytest.approx(wanted)
    assert not found[len(wanted) :].any()


def test_targets_that_were_never_reached_and_failed_runs_are_exchanged_too():
    """MOON never reaches the target in print, FedDF never for us. FedDyn fails in print and for us,
    with either method's result it would not."""
    rounds = {"unit": "rounds", "metric": "rounds_to_A"}
    never = {**rounds, "tolerance": float("nan"), "note": "not_reached"}
    rows = [
        row("FedAvg", 100.0, 120.0, **rounds | {"tolerance": 25.0}),
        row("FedDF", 130.0, float("inf"), **rounds | {"tolerance": 32.5}),
        row("MOON", float("nan"), 125.0, **never),
        row("FedDyn", float("nan"), float("nan"), **never | {"note": "failed", "diverged": 1}),
    ]
    found = exchange_methods(pd.DataFrame(rows), strict=True)
    assert found.tolist() == [[1, 0, 1, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]


def test_repeated_values_count_once_and_columns_of_the_rule_are_not_held_out():
    """Table 8 repeats a column of Table 1, from which the rule was inferred."""
    first = [row("FedAvg", 40.0, 41.0, local_epochs="5", participation="0.1")]
    first.append({**first[0], "method": "FedAvg (released)", "reading": "released", "mean": 42.0})
    repeated = {**first[0], "table": "8", "setting": "E=5"}
    other = {**repeated, "setting": "E=1", "local_epochs": "1", "printed": 29.0, "mean": 30.0}
    not_run = {**other, "setting": "E=3", "local_epochs": "3", "verdict": "not run"}
    names = ("fedntd_table1", "fedntd_table1_released", "fedntd_table8")
    speedup = {**other, "metric": "speedup", "unit": "ratio"}  # repeats a number of rounds
    parts = [first, first, [repeated, other, not_run, speedup]]
    parts = [pd.DataFrame(each) for each in parts]
    tables = dict(zip(names, parts, strict=True))
    sweeps = {name: load_paper_sweep(name) for name in tables}
    rows = judged_values(sweeps, tables)
    assert rows["mean"].tolist() == [41.0, 42.0, 30.0]
    assert rows["method"].tolist() == ["FedAvg"] * 3
    assert rows["held_out"].tolist() == [False, False, True]
    # E=1, its speed-up, and the repeated value twice
    assert count_coverage(tables, "FedNTD").judged == 4
    assert count_coverage(tables, "FedKA").judged == 0


def test_failed_values_of_several_tables_count_each():
    """They have no number that a table could repeat."""
    failed = row("SCAFFOLD", float("nan"), float("nan"), note="failed", diverged=1)
    failed |= {"verdict": "failed as printed"}
    parts = {"fedntd_table1": failed, "fedntd_table11": {**failed, "table": "11"}}
    tables = {name: pd.DataFrame([each]) for name, each in parts.items()}
    sweeps = {name: load_paper_sweep(name) for name in tables}
    assert judged_values(sweeps, tables)["table"].tolist() == ["1", "11"]


def test_counts_of_the_committed_table_equal_a_recount():
    """FedNTD Table 1, from comparison.csv without the functions under test."""
    table = pd.read_csv(MULTIRUN / "fedntd_table1" / "comparison.csv", keep_default_na=False)
    numbers = ["mean", "printed", "tolerance"]
    table[numbers] = table[numbers].apply(pd.to_numeric)
    mine = table[(table["reading"] == "") & table["verdict"].isin(["within", "outside"])]
    strict = mine["metric"].map({"accuracy": 2.0, "forgetting": 0.05})
    wide = mine["tolerance"].where(mine["tolerance"] <= 2.5 * strict, strict)
    for is_strict, limit in ((True, strict), (False, wide)):
        near = (mine["mean"] - mine["printed"]).abs() <= limit
        place = [mine["dataset"], mine["partition_param"]]
        both = near.groupby([*place, mine["method"]]).all().sum()
        fedavg = mine[mine["method"] == "FedAvg"].set_index(
            ["dataset", "partition_param", "metric"]
        )
        keys = pd.MultiIndex.from_frame(mine[["dataset", "partition_param", "metric"]])
        theirs = fedavg["mean"].reindex(keys).to_numpy()
        baseline = (abs(theirs - mine["printed"]) <= limit).sum()
        expected = sum(
            sum(
                (abs(row.mean - mine["printed"]) <= limit)[same].sum()
                for row in column.itertuples()
            )
            / column["method"].nunique()
            for key, column in mine.groupby(["dataset", "partition_param", "metric"])
            if key in fedavg.index and (same := keys == key).any()
        )
        found = count_agreement(mine.assign(part="", n=1, diverged=0), is_strict)
        counts = (found.values, found.agree, found.cells, found.full_cells, found.baseline)
        cells = len(mine.groupby([*place, mine["method"]]))
        assert counts == (len(mine), near.sum(), cells, both, baseline)
        assert found.expected == pytest.approx(expected)
