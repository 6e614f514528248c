"""Measures of forgetting between tasks, against values worked by hand."""

import numpy as np
import pytest

from fedexp.cli.main import main
from fedexp.metrics.task_matrix import MEASURES
from fedexp.rundir import files
from test_report import make_run

# Rows: after tasks 1, 2, 3. Columns: tasks 1, 2, 3.
A = np.array([[0.75, 0.25, 0.0], [0.875, 0.5, 0.125], [0.25, 0.625, 1.0]])
INITIAL = np.array([0.5, 0.125, 0.0625])
BY_HAND = {
    "forgetting_from_best": ((0.875 - 0.25) + (0.5 - 0.625)) / 2,  # best before the end: 0.875, 0.5
    "forgetting_from_any": ((0.875 - 0.25) + (0.625 - 0.625)) / 2,
    "forgetting_from_learning": ((0.75 - 0.25) + (0.5 - 0.625)) / 2,
    # largest of each row: 0.75, 0.875, 1
    "forgetting_over_tasks": ((0.75 - 0.25) + (0.875 - 0.625) + (1.0 - 1.0)) / 3,
    "backward_transfer": ((0.25 - 0.75) + (0.625 - 0.5)) / 2,
    "forward_transfer": ((0.25 - 0.125) + (0.125 - 0.0625)) / 2,
    "average_incremental_accuracy": (0.75 + (0.875 + 0.5) / 2 + (0.25 + 0.625 + 1.0) / 3) / 3,
    "last_accuracy": (0.25 + 0.625 + 1.0) / 3,
}


@pytest.mark.parametrize("later", [0, 2])
@pytest.mark.parametrize("name", MEASURES)
def test_each_measure_equals_hand_calculation(name, later):
    """Tasks that follow do not count."""
    wide, initial = (
        np.pad(A, ((0, 0), (0, later)), constant_values=0.99),
        np.pad(INITIAL, (0, later)),
    )
    assert MEASURES[name](wide, initial) == pytest.approx(BY_HAND[name], abs=1e-15)


@pytest.mark.parametrize("name", MEASURES)
def test_with_one_task_only_accuracies_are_defined(name):
    expected = {"average_incremental_accuracy": 0.75, "last_accuracy": 0.75}
    assert MEASURES[name](A[:1], INITIAL) == pytest.approx(expected.get(name, np.nan), nan_ok=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("matrix", [A[:0], np.empty((0, 0))], ids=["no row", "nothing"])
@pytest.mark.parametrize("name", MEASURES)
def test_without_tasks_all_measures_are_nan(name, matrix):
    assert np.isnan(MEASURES[name](matrix, INITIAL[: matrix.shape[1]]))


def test_forgetting_from_any_equals_the_code_of_mammoth():
    """The released code pads with 0 what was not tested after a task. Task 2 is known at 0.45 after
    task 1, at 0.4 when it is learned, at 0.3 in the end; task 1 falls from 0.5 to 0.35: (0.15 +
    0.15) / 2, and with the padding (0.15 + 0.1) / 2. Its trainer tests the next task too: then
    0.45 counts there as well."""
    matrix = np.array([[0.5, 0.45, 0.1], [0.4, 0.4, 0.2], [0.35, 0.3, 0.9]])
    assert MEASURES["forgetting_from_any"](matrix, INITIAL) == pytest.approx(0.15)
    for tested, expected in ((1, 0.125), (2, 0.15)):
        results = [row[: t + tested].tolist() for t, row in enumerate(matrix)]
        for i in range(2):
            results[i] += [0.0] * (3 - len(results[i]))
        best = np.max(np.array(results), axis=0)
        assert np.mean([best[i] - results[-1][i] for i in range(2)]) == pytest.approx(expected)


# --- fedexp report --metrics


@pytest.fixture
def finished(tmp_path):
    """A directory with one finished run of three tasks and one without tasks."""
    ends = [
        {
            "task": t,
            "average_accuracy": row[:t].mean(),
            "new_task_accuracy": row[t - 1],
            "accuracies": row.tolist(),
        }
        for t, row in enumerate(A, 1)
    ]
    make_run(
        tmp_path / "streams",
        scenario="class_incremental",
        partition="shards",
        tasks=ends,
        task_forgetting=0.1875,
    )
    make_run(tmp_path / "plain")
    rows = [f"0,0,{s},{b}" for s, b in enumerate(INITIAL, 1)]
    for t, row in enumerate(A, 1):
        rows += [f"{2 * t},{t},{s},{a}" for s, a in enumerate(row, 1)]
    (tmp_path / "streams" / files.TASKS).write_text(
        "round,task,evaluated_task,accuracy\n" + "\n".join(rows) + "\n"
    )
    return tmp_path


def test_table_of_all_runs_shows_measures_between_tasks(finished, capsys, tmp_path):
    asked = ["--metrics", ",".join(MEASURES), "--out", str(tmp_path / "all")]
    assert main(["report", str(finished), *asked]) == 0
    capsys.readouterr()
    head, _, *rows = (tmp_path / "all.md").read_text().splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")]
    cells = [
        dict(zip(names, (c.strip() for c in row.strip("|").split("|")), strict=True))
        for row in rows
    ]
    assert len(cells) == 2
    (run,) = (row for row in cells if row["last_accuracy"])
    assert {name: float(run[name]) for name in MEASURES} == pytest.approx(BY_HAND, abs=5e-5)

    # the same flag shows them for one run
    assert main(["report", str(finished / "streams"), *asked[:2], "--no-figures"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()[:3]
    shown = dict(zip(head.split(" | ")[1:], row.split(" | ")[1:], strict=True))
    assert float(shown["Backward transfer"]) == pytest.approx(
        BY_HAND["backward_transfer"], abs=6e-4
    )


def test_table_of_a_sweep_shows_measures_between_tasks(finished, capsys):
    asked = ["--metrics", "backward_transfer,forgetting_from_best", "--no-figures"]
    assert main(["report", str(finished), *asked]) == 0
    text = capsys.readouterr().out
    assert "shards: Backward transfer | shards: Forgetting from best |" in text
    values = [BY_HAND[name] for name in ("backward_transfer", "forgetting_from_best")]
    assert "| FedAvg | - | - | {:.3f} | {:.3f} |".format(*values) in text
