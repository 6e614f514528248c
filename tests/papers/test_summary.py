"""The generated parts of REPRODUCTION.md, with numbers worked by hand."""

import pandas as pd
import pytest

from fedexp_papers.agreement import count_agreement
from fedexp_papers.cells import load_entries
from fedexp_papers.summary import (
    correlate_gains,
    count_same_order,
    describe_agreeing,
    describe_baseline,
    describe_chance,
    describe_errors,
    gains_over_baseline,
    list_groups,
    load_verdicts,
    summarise,
    tabulate_agreement,
    tabulate_distances,
    tabulate_methods,
)
from test_agreement import ROWS, F, row

ROUNDS = {"unit": "rounds", "metric": "rounds_to_A", "tolerance": 25.0}
NEVER = float("inf")


def test_each_paper_has_a_short_verdict_and_a_page():
    known = load_verdicts()
    assert set(known.index) == set(load_entries()["paper"])
    assert known["verdict"].str.split().str.len().max() <= 7


def test_first_screen_has_a_row_for_each_paper():
    """FedNTD's two tables have 480 entries. The column of the last row has no FedAvg."""
    rows = pd.DataFrame(ROWS).assign(held_out=True)
    lines = summarise(rows, {"fedntd_table1": rows}).splitlines()
    agree = "| **4** of 7; **3** of 6 | 2.0 of 6 (0 to 4) | 3 of 6 |"
    assert lines[2].startswith(f"| [FedNTD](docs/papers/fedntd.md) | 480 | 7 {agree}")
    assert [line.split(" | ")[2:6] for line in lines[3:6]] == [["0", "-", "-", "-"]] * 3
    assert lines[-1].startswith("**7 of the 874 published entries are judged (1 %)**")
    assert "FedNTD 7 of 480" in lines[-1]
    assert not any("held out" in line for line in lines)
    rows["held_out"] = rows["partition_param"] == "s=3"
    held = summarise(rows, {"fedntd_table1": rows}).splitlines()[3]
    assert held == "| FedNTD, held out |  | 1 | **1** of 1 | - | - |  |"
    others = [rows[:2].assign(reading=name) for name in ("released clients", "released")]
    lines = summarise(pd.concat([rows, *others]), {"fedntd_table1": rows}).splitlines()
    assert lines[4].startswith("| FedNTD, released clients |  | 2 | **")
    same = (
        "| FedNTD, the same values, our settings |  | 2 | **2** of 2 | 2.0 of 2 (2 to 2) | 2 of 2 |"
    )
    assert lines[5].startswith(same)
    assert not any("released |" in line for line in lines)


def test_counts_of_columns_with_fedavg_are_given_once_if_these_are_all_columns():
    found = count_agreement(pd.DataFrame(ROWS[:6]), strict=True)
    texts = (describe_agreeing(found), describe_chance(found), describe_baseline(found))
    assert texts == ("**3** of 6", "2.0 of 6 (0 to 4)", "3 of 6")


def test_held_out_columns_tables_and_readings_are_groups():
    rows = pd.DataFrame(ROWS[:4]).assign(held_out=[False, False, True, True])
    other = rows.assign(table="8", held_out=True)
    released = rows.assign(reading="released")
    groups = list_groups(pd.concat([rows, other, released]), detailed=True)
    sizes = {name: len(each) for name, each in groups}
    assert sizes == {
        "FedNTD": 8,
        "FedNTD, held-out columns": 6,
        "FedNTD Table 1": 4,
        "FedNTD Table 8": 4,
        "FedNTD (released)": 4,
        "FedNTD (released), held-out columns": 2,
    }
    short = list_groups(pd.concat([rows, other, released]), detailed=False)
    assert [name for name, _ in short] == ["FedNTD", "FedNTD, held-out columns"]


def test_row_of_the_wider_tolerance_is_left_out_if_it_changes_nothing():
    """Without MOON and FedNTD, the tolerances agree. P of the strict counts by hand: 2 of 6."""
    rows = pd.DataFrame(ROWS).assign(held_out=True)
    lines = tabulate_agreement(rows[:6]).splitlines()[2:]
    assert lines[0] == "| FedNTD | strict | 3 of 6 | 1 of 3 | 3 of 6 | 2.0 (0 to 4) | 0.33 | 3 |"
    assert lines[1] == "|  | wider | 4 of 6 | 2 of 3 | 4 of 6 | 2.7 (1 to 5) | 0.33 | 4 |"
    assert len(tabulate_agreement(rows[:2]).splitlines()) == 3


def test_errors_are_in_points_and_gains_are_differences_from_fedavg():
    """Errors of accuracy: 1, 2.5, -5; of fractions, a hundredth counts as a point. F: 0.04, 0.04,
    -0.06."""
    rows = pd.DataFrame(ROWS[:6])
    rows["difference"] = rows["mean"] - rows["printed"]
    accuracy, forgetting = (describe_errors(rows, name) for name in ("accuracy", "forgetting"))
    assert (accuracy, forgetting) == ("3.28 (-0.50)", "0.048 (+0.007)")
    fractions = pd.DataFrame([row("FedAvg", 0.40, 0.41, unit="fraction", difference=0.01)])
    assert describe_errors(fractions, "accuracy") == "1.00 (+1.00)"
    gains = gains_over_baseline(rows)
    ours = gains.loc[gains["metric"] == "accuracy", "ours"].tolist()
    published = gains.loc[gains["metric"] == "forgetting", "published"].tolist()
    assert (ours, published) == (pytest.approx([5.5, -3.0]), pytest.approx([-0.1, 0.1]))
    assert correlate_gains(gains, "accuracy") == "-"
    three = pd.DataFrame({"metric": "accuracy", "ours": [1.0, 2.0, 3.0], "published": [3, 1, 2]})
    assert correlate_gains(three, "accuracy") == "-0.50"
    assert correlate_gains(three.assign(ours=1.0), "accuracy") == "-"


def test_errors_of_methods_are_of_cells_with_accuracy_and_forgetting():
    """FedNTD: accuracy +2.5 and -2.5 points, F +0.04 and +0.01, so the sum +0.065 and -0.015; its
    cell at s=3 has no F. FedCurv's fractions: +0.01 and -0.02."""
    rows = [
        *ROWS[:4],
        ROWS[6],
        row("FedNTD", 70.0, 67.5, column="s=5"),
        row("FedNTD", 0.10, 0.11, column="s=5", **F),
        row("FedCurv", 0.40, 0.41, unit="fraction", reading="later"),
        row("FedCurv", 0.30, 0.28, reading="later", **F),
        row("FedKA", 60.0, 61.0, column="s=5", paper="FedKA"),
    ]
    table = pd.DataFrame(rows)
    table["difference"] = table["mean"] - table["printed"]
    assert tabulate_methods(table).splitlines()[2:] == [
        "| FedNTD | FedAvg | 1 | 1.00 (+1.00) | 0.040 (+0.040) | 0.050 (+0.050) |",
        "| FedNTD | FedNTD | 2 | 2.50 (+0.00) | 0.029 (+0.025) | 0.047 (+0.025) |",
        "| FedNTD | FedCurv (later) | 1 | 1.00 (+1.00) | 0.020 (-0.020) | 0.010 (-0.010) |",
    ]


def test_pairs_are_counted_with_targets_that_were_never_reached():
    """In print, MOON is last and FedDF is as fast as FedAvg, which is no order. For us, FedDF is
    last, as it never reaches the target."""
    rows = [
        row("FedAvg", 100.0, 50.0, **ROUNDS),
        row("FedDF", 100.0, NEVER, **ROUNDS),
        row("FedNTD", 130.0, 40.0, **ROUNDS),
        row("MOON", float("nan"), 55.0, **ROUNDS, note="not_reached"),
    ]
    # MOON after FedAvg and after FedNTD as published; FedNTD before FedAvg, FedDF after both others
    assert count_same_order(pd.DataFrame(rows)) == (2, 5)
    gains = gains_over_baseline(pd.DataFrame(rows))
    assert gains["ours"].tolist() == [NEVER, -10.0, 5.0]
    assert gains["published"].tolist() == [0.0, 30.0, NEVER]
    assert count_same_order(pd.DataFrame([*ROWS[:1], row("FedNTD", 0.5, 0.4, **F)])) == (0, 0)


def test_a_tie_in_print_has_neither_a_side_of_fedavg_nor_an_order():
    """In print, FedDF is as fast as FedAvg and FedNTD slower; for us, both are faster."""
    rows = [
        row("FedAvg", 100.0, 50.0, **ROUNDS),
        row("FedDF", 100.0, 30.0, **ROUNDS),
        row("FedNTD", 130.0, 40.0, **ROUNDS),
    ]
    table = pd.DataFrame(rows).assign(held_out=True, difference=0.0)
    line = tabulate_distances(table).splitlines()[2]
    assert [cell.strip() for cell in line.split("|")[4:6]] == ["0 of 1", "1 of 2"]
    assert "- | - |" in tabulate_distances(table[:2]).splitlines()[2]
