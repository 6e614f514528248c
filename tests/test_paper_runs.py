"""Runs are the same from run directories and from the table of runs."""

import shutil

import pandas as pd
from reproduction.curves import list_curves
from tools.convert_evidence import convert

from fedexp.papers.runs import MEASURES, read_runs, select_curve
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


def test_curves_have_a_row_for_each_run_view_and_measure(tmp_path):
    make_run(tmp_path / "a", ["algorithm=fedavg"], [0.25, 0.5])
    make_run(tmp_path / "a", ["algorithm=fedntd"], [0.5], views=False)
    curves = list_curves(read_runs([tmp_path / "a"]))
    assert curves.groupby(["run", "view", "measure"]).size().to_dict() == {
        ("run0", "augmented", "accuracy"): 1,
        ("run0", "augmented", "forgetting"): 1,
        ("run0", "plain", "accuracy"): 1,
        ("run0", "plain", "forgetting"): 1,
        ("run1", "plain", "accuracy"): 1,
        ("run1", "plain", "forgetting"): 1,
    }
    first = curves.iloc[0]
    assert (first["rounds"].tolist(), first["values"].tolist()) == ([1, 2], [0.25, 0.5])


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


def test_table_of_runs_gives_the_same_table(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / "a", ["algorithm=fedavg"], [0.25, 1 / 3], seed=seed)
    before = read_runs([tmp_path / "a"])
    convert(tmp_path / "a", tmp_path / "a")
    both = read_runs([tmp_path / "a"])
    for name in ("run0", "run1"):
        shutil.rmtree(tmp_path / "a" / name)
    kept = read_runs([tmp_path / "a"])
    different = ["table", "not_judged"]
    for other in (both, kept):
        pd.testing.assert_frame_equal(before.drop(columns=different), other.drop(columns=different))
        for first, second in zip(before["table"], other["table"], strict=True):
            for measure in MEASURES:
                curve = select_curve(first, measure).to_dict()
                assert select_curve(second, measure).to_dict() == curve
