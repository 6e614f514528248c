"""Runs are the same from run directories and from the table of runs."""

import pandas as pd
from reproduction.curves import list_curves

from fedexp.papers.runs import read_runs, select_curve
from test_compare import make_run


def test_table_has_a_row_for_each_run(tmp_path):
    make_run(tmp_path / "a", ["algorithm=fedavg"], [0.25, 0.5], seed=3, hardware={"precision": "p"})
    make_run(tmp_path / "a", ["algorithm=fedntd"], [0.5], views=False)
    table = read_runs([tmp_path / "a"])
    assert table["run"].tolist() == ["run0", "run1"]
    first = table.iloc[0]
    assert first[["sweep", "made_by", "status", "seed", "precision"]].tolist() == [
        "a",
        "a",
        "completed",
        3,
        "p",
    ]
    assert select_curve(first["table"]).to_dict() == {1: 0.25, 2: 0.5}
    assert select_curve(table["table"][1], view="augmented").empty


def test_curve_of_a_task_has_the_rounds_of_the_task(tmp_path):
    make_run(tmp_path / "a", ["algorithm=cfed"], [0.25, 0.5, 0.75])
    path = tmp_path / "a" / "run0" / "rounds.csv"
    pd.read_csv(path).assign(task=[0, 1, 1, 2]).to_csv(path, index=False)
    runs = read_runs([tmp_path / "a"])
    (table,) = runs["table"]
    assert select_curve(table, task=1).tolist() == [0.25, 0.5]
    assert select_curve(table, task=2).tolist() == [0.75]
    assert select_curve(table).tolist() == [0.25, 0.5, 0.75]
    assert list_curves(runs).empty
