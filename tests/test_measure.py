"""`fedexp.measure`: measures of forgetting for an array of accuracies."""

import numpy as np
import pandas as pd
import pytest
import torch

import fedexp
from fedexp.core.errors import ConfigError
from quick_runs import SMALL

NAN = float("nan")
ROUNDS, TASKS = ("round", "class"), ("task", "evaluated_task")
# accuracies of two classes after rounds 1, 2 and 3
CLASSES = [[0.5, 0.2], [0.9, 0.1], [0.6, 0.4]]
# accuracies on three tasks after each of them; the third task was not tested before
MATRIX = [[0.9, 0.1, NAN], [0.6, 0.8, NAN], [0.4, 0.9, 0.7]]


def test_measures_of_rounds_equal_hand_calculation():
    """F: the best earlier accuracies are 0.9 and 0.2, so (0.9 - 0.6 + 0.2 - 0.4) / 2 = 0.05.

    The drops are (0 + 0.1) / 2 in round 2 and (0.3 + 0) / 2 in round 3, with the mean 0.1. The
    cosines of consecutive rounds are 0.47 / sqrt(0.29 * 0.82) and 0.58 / sqrt(0.82 * 0.52).
    """
    found = fedexp.measure(CLASSES, ROUNDS)
    cosines = [0.47 / np.sqrt(0.29 * 0.82), 0.58 / np.sqrt(0.82 * 0.52)]
    assert found == pytest.approx(
        {"forgetting": 0.05, "round_forgetting": 0.1, "consistency": np.mean(cosines)}
    )
    assert fedexp.measure(np.transpose(CLASSES), ("class", "round")) == pytest.approx(found)
    absent = [[*row, NAN] for row in CLASSES]  # a class without test examples
    assert fedexp.measure(absent, ROUNDS) == pytest.approx(found)
    first = fedexp.measure(CLASSES, ROUNDS, initial=[0.5, 0.2])["consistency"]
    assert first == pytest.approx(np.mean([1, *cosines]))
    assert all(np.isnan(value) for value in fedexp.measure(CLASSES[:1], ROUNDS).values())


def test_measures_of_tasks_equal_hand_calculation():
    """Since they were learned, the first two tasks lost 0.9 - 0.4 = 0.5 and 0.8 - 0.9 = -0.1.

    Their best earlier accuracies are 0.9 and 0.8, so the drop from them has the same mean, 0.2. The
    best ever include the last model: (0.5 + 0) / 2. LANDER's measure takes the maxima over tasks
    0.9, 0.8 and 0.9: (0.9 - 0.4 + 0.8 - 0.9 + 0.9 - 0.7) / 3 = 0.2. The mean accuracies after each
    task are 0.9, 0.7 and 2 / 3.
    """
    found = fedexp.measure(MATRIX, TASKS)
    assert np.isnan(found.pop("forward_transfer"))  # needs the initial model
    assert found == pytest.approx(
        {
            "average_accuracy": 2 / 3,
            "new_task_accuracy": 0.7,
            "task_forgetting": 0.2,
            "forgetting_from_best": 0.2,
            "forgetting_from_any": 0.25,
            "forgetting_from_learning": 0.2,
            "forgetting_over_tasks": 0.2,
            "backward_transfer": -0.2,
            "average_incremental_accuracy": (0.9 + 0.7 + 2 / 3) / 3,
            "last_accuracy": 2 / 3,
        }
    )
    # 0.1 - 0.05 on task 2, and 0.3 - 0.2 on task 3
    tested = [MATRIX[0], [0.6, 0.8, 0.3], MATRIX[2]]
    forward = fedexp.measure(tested, TASKS, initial=[0.3, 0.05, 0.2])["forward_transfer"]
    assert forward == pytest.approx(0.075)
    transposed = fedexp.measure(np.transpose(MATRIX), TASKS[::-1])
    assert transposed["backward_transfer"] == pytest.approx(-0.2)


def test_measures_of_a_run_equal_its_summary(tmp_path):
    run = fedexp.run([*SMALL, "rounds=3", "forgetting_metric=consistency"], tmp_path / "run")
    table = run.class_accuracy.pivot(index="round", columns="class", values="accuracy").to_numpy()
    found = fedexp.measure(table[1:], ROUNDS, initial=table[0])
    assert found == pytest.approx({key: run.summary[key] for key in found}, abs=1e-12)


@pytest.mark.parametrize(
    ("accuracy", "axes", "words"),
    [
        ([[50.0, 20.0]], ROUNDS, r"accuracy\[0, 0\]=50: must be in \[0, 1\]; divide percentages"),
        ([[0, 0.5], [1, 0.6], [2, 0.7]], ROUNDS, "numbers of rounds, tasks or classes"),
        ([[0, 0.5], [1, 0.6]], ROUNDS, "numbers of the two rounds, or accuracies"),
        ([[0, 1], [0.5, 0.6]], ROUNDS[::-1], "numbers of the two rounds, or accuracies"),
        ([[0, 0.5, 0.1], [1, 0.6, 0.8]], TASKS, "first task look like numbers of rows"),
        ([[-0.1]], ROUNDS, "must be in"),
        ([[np.inf]], ROUNDS, "must be in"),
        ([[NAN]], ROUNDS, "is nan everywhere"),
        (pd.DataFrame(CLASSES), ROUNDS, r"is a DataFrame.*table\.to_numpy\(\)"),
        (pd.DataFrame(CLASSES, columns=["0.5", "0.2"]), ROUNDS, "is a DataFrame"),
        ([[0.5], [0.5, 0.6]], ROUNDS, "the rows must have equal lengths"),
        ([["0.5", "0.6"]], ROUNDS, "must contain only numbers"),
        ([["a", 0.6]], ROUNDS, "must contain only numbers"),
        ([[None, 0.6]], ROUNDS, "with nan for accuracies that were not tested"),
        ([[True, False]], ROUNDS, "must contain only numbers"),
        ([0.5, 0.6], ROUNDS, "must have 2 axes"),
        ([], ROUNDS, "must have 2 axes"),
        ([[0.5, NAN], [0.5, 0.6]], ROUNDS, "tested in every given round or in none"),
        (CLASSES, ("class", "task"), r"axes=\('class', 'task'\): must be \('round', 'class'\)"),
        (CLASSES, TASKS, "has 3 tasks, but only 2 evaluated tasks"),
        ([[0.9, 0, 0], [0.6, 0.8, 0], [0.4, 0.9, 0.7]], TASKS, "before a task .*use nan"),
        # PILOT prints the evaluated tasks as rows
        ([[0.9, 0.6], [0, 0.8]], TASKS, r"after a later task .*axes=\('evaluated_task', 'task'\)"),
        ([[0.9, 0.6], [0, 0.8]], TASKS[::-1], "before a task was learned are 0"),
    ],
)
def test_input_that_needs_a_guess_is_rejected(accuracy, axes, words):
    with pytest.raises(ConfigError, match=words):
        fedexp.measure(accuracy, axes)


def masked(values):
    """A masked array whose values are 0 where they are missing, as a table of results may be."""
    return np.ma.array(np.nan_to_num(values), mask=np.isnan(values))


@pytest.mark.parametrize(
    "convert",
    [
        masked,
        lambda values: [masked(row) for row in values],
        lambda values: torch.tensor(values, dtype=torch.float64, requires_grad=True),
        lambda values: [torch.tensor(row, dtype=torch.float64) for row in values],
    ],
)
def test_masked_accuracies_are_not_tested_and_tensors_are_read(convert):
    forgotten = [*MATRIX[:2], [NAN, 0.9, 0.7]]  # the first task was not tested at the end
    for matrix in (MATRIX, forgotten):
        wanted = fedexp.measure(matrix, TASKS)
        assert fedexp.measure(convert(matrix), TASKS) == pytest.approx(wanted, nan_ok=True)
    assert np.isnan(wanted["task_forgetting"])


def test_masked_initial_accuracies_are_unknown():
    starts = [[0.5, NAN], masked([0.5, NAN]), torch.tensor([0.5, NAN], requires_grad=True)]
    found = [fedexp.measure(CLASSES, ROUNDS, initial=start) for start in starts]
    assert found[0] == found[1] == found[2] == fedexp.measure(CLASSES, ROUNDS)
    start = masked([0.3, NAN, 0.2])
    assert np.isnan(fedexp.measure(MATRIX, TASKS, initial=start)["forward_transfer"])


def test_half_precision_tensors_are_read_with_their_rounding():
    rounded = torch.tensor(CLASSES, dtype=torch.bfloat16)
    found = fedexp.measure(rounded, ROUNDS)
    assert found == fedexp.measure(rounded.double().tolist(), ROUNDS)
    assert found["forgetting"] == pytest.approx(0.05, abs=0.01)


def test_initial_accuracies_have_the_length_of_a_row():
    with pytest.raises(ConfigError, match="initial: has 1 values, but accuracy has 2"):
        fedexp.measure(CLASSES, ROUNDS, initial=[0.5])


def test_measured_zeros_are_accepted():
    """A model that forgets everything: 0.9 of the first task is lost."""
    found = fedexp.measure([[0.9, NAN], [0.0, 0.8]], TASKS, zeros_are_measured=True)
    assert found["task_forgetting"] == pytest.approx(0.9)
