"""When a run forgets (`forgetting_metric=[phases,absence]`): values by hand, resume, figures."""

import json

import numpy as np
import pandas as pd
import pytest

import fedexp
from fedexp.figures import list_figures
from fedexp.figures.load import load_run_data
from fedexp.metrics.record import Record
from fedexp.metrics.timing import Absence, ForgettingPhases, absence, curve_of_absence, phase_ends
from fedexp.rundir.reader import RunDirectory
from quick_runs import SMALL

nan = float("nan")
# Rounds 0 to 6 of three classes. The third has no test examples.
ACCURACY = [[0.9, 0.9], [0.4, 0.2], [0.6, 0.2], [0.2, 0.8], [0.0, 0.8], [0.6, 0.2], [0.5, 0.6]]


def history(rounds=6):
    """Client 0 has classes 0 and 2, client 1 has class 1. One of them trains in each round."""
    record = Record(np.array([[3, 0, 1], [0, 2, 0]]))
    record.add(0, np.array([*ACCURACY[0], nan]))
    for number, client in zip(range(1, rounds + 1), [0, 0, 1, 1, 0, 1], strict=False):
        record.add_cohort(number, [client])
        record.add(number, np.array([*ACCURACY[number], nan]))
    return record


def test_phases_equal_hand_calculation():
    # Best so far, minus now. Class 0: 0, 0, 0.4, 0.6, 0, 0.1. Class 1: 0, 0, 0, 0, 0.6, 0.2.
    # G: 0, 0, 0.2, 0.3, 0.3, 0.15. The thirds end with rounds 2, 4 and 6.
    values = ForgettingPhases().summary(history())
    wanted = {"early_forgetting": 0.0, "middle_forgetting": 0.3, "late_forgetting": -0.15}
    assert values == pytest.approx(wanted | {"lost_accuracy": 0.15})
    assert ForgettingPhases().round_values(history(3)) == pytest.approx({"lost_accuracy": 0.2})


def test_phases_end_with_the_last_evaluated_round_of_each_third():
    # T = 12: the thirds end with 4, 8 and 12. Of rounds 1 to 4, none is evaluated in the second.
    assert phase_ends(np.array([3, 6, 9, 12])).tolist() == [0, 1, 3]
    assert phase_ends(np.array([5, 10, 12])) is None
    for rounds in (0, 1, 2):
        values = ForgettingPhases().summary(history(rounds))
        assert np.isnan(values["early_forgetting"])
        assert np.isnan(values["lost_accuracy"]) == (rounds == 0)


def test_absence_equals_hand_calculation():
    record = history()
    # Round 4: client 0 last trained in round 2. Round 1: no client has had class 1.
    np.testing.assert_array_equal(absence(record, 4), [2, 0, 2])
    np.testing.assert_array_equal(absence(record, 1), [0, nan, 0])
    # Best earlier round minus now, in rounds 2 to 6.
    # Class 0: -0.2, 0.4, 0.6, 0.0, 0.1, with absences 0, 1, 2, 0, 1.
    # Class 1:    -, -0.6, 0.0, 0.6, 0.2, with absences -, 0, 0, 1, 0.
    steps, means, pairs = curve_of_absence(record)
    np.testing.assert_array_equal(steps, [0, 1, 2])
    np.testing.assert_array_equal(pairs, [5, 3, 1])
    np.testing.assert_allclose(means, [-0.6 / 5, 1.1 / 3, 0.6])
    wanted = {"present_forgetting": -0.12, "absent_forgetting": 1.7 / 4}
    assert Absence().summary(record) == pytest.approx(wanted)
    last = {"present_forgetting": 0.2, "absent_forgetting": 0.1}
    assert Absence().round_values(record) == pytest.approx(last)
    first = {"present_forgetting": nan, "absent_forgetting": nan}
    assert Absence().round_values(history(1)) == pytest.approx(first, nan_ok=True)


def test_counts_of_the_round_decide_who_holds_a_class():
    """A schedule exchanges the clients' data in round 2, so client 0 then has class 1."""
    counts, cohorts = np.array([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]), {1: [0], 2: [0]}
    record = Record(counts, starts=(1, 2), cohorts=cohorts)
    np.testing.assert_array_equal(absence(record, 2), [1, 0])


def test_resumed_run_has_the_same_values_and_both_figures(tmp_path):
    """Every second round is evaluated, but the cohorts of all rounds count."""
    options = [*SMALL, "forgetting_metric=[phases,absence]", "eval_interval=2", "alpha=0.05"]
    whole = fedexp.run([*options, "rounds=6"], directory=tmp_path / "whole")
    begun = fedexp.run([*options, "rounds=2"], directory=tmp_path / "run")
    fedexp.run([f"resume={begun.directory}", "rounds=6"])
    ended = RunDirectory(tmp_path / "run")
    columns = ["lost_accuracy", "present_forgetting", "absent_forgetting"]
    assert ended.rounds is not None
    pd.testing.assert_frame_equal(ended.rounds[columns], whole.rounds[columns])
    cohorts = whole.clients.groupby("round")["client"].agg(tuple).to_dict()
    assert ended.record().cohorts == cohorts
    assert len(cohorts) == 6
    saved = json.loads((tmp_path / "whole/summary.json").read_text())
    again = Absence().summary(RunDirectory(tmp_path / "whole").record())
    assert again == {name: saved[name] for name in again}
    pictures = dict(list_figures(load_run_data(whole.directory)))
    assert pictures["phases"]().axes
    assert pictures["absence"]().axes
