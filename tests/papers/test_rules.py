"""Reporting rules and tolerances, with numbers worked by hand."""

import math

import numpy as np
import pytest

from fedexp_papers.judge import compute_tolerance, judge
from fedexp_papers.rules import Rule, ema, read_rule


def test_exponential_moving_average_equals_hand_calculation():
    """Weights 0.6 and 0.4 on 1, 0, 2: 1, then 0.6, then 0.36 + 0.8 = 1.16. With 0.4 and 0.6: 1,
    0.4, 0.16 + 1.2 = 1.36."""
    assert ema([1.0], 0.6) == 1
    assert ema([1.0, 0.0], 0.6) == pytest.approx(0.6)
    assert ema([1.0, 0.0, 2.0], 0.6) == pytest.approx(1.16)
    assert ema([1.0, 0.0, 2.0], 0.4) == pytest.approx(1.36)
    values = np.random.default_rng(0).random(50)
    weights = 0.4 * 0.6 ** np.arange(49)[::-1]  # of x_2, ..., x_50; x_1 has the rest, 0.6^49
    assert ema(values.tolist(), 0.6) == pytest.approx(
        0.6**49 * values[0] + weights @ values[1:], abs=1e-14
    )


@pytest.mark.parametrize(
    ("value", "accuracy", "forgetting"),
    [
        ("last", 0.3, 0.4),
        ("best", 0.5, 0.1),
        ("mean_of_last(2)", 0.4, 0.25),
        ("mean_of_last(10)", 0.3, 0.3),
    ],
)
def test_reported_value_of_each_rule_equals_hand_calculation(value, accuracy, forgetting):
    """Accuracies 0.1, 0.5, 0.3; forgetting 0.4, 0.1, 0.4."""
    rule = Rule(value)
    assert rule.reported([0.1, 0.5, 0.3], "accuracy") == pytest.approx(accuracy)
    assert rule.reported([0.4, 0.1, 0.4], "forgetting") == pytest.approx(forgetting)
    assert rule.reported([], "accuracy") is None


@pytest.mark.parametrize(
    "value", ["ema", "ema(1)", "ema(1.5)", "mean_of_last(0)", "mean_of_last", "median"]
)
def test_invalid_rule_is_rejected(value):
    with pytest.raises(ValueError, match=r"report\.value="):
        Rule(value)


def test_standard_error_of_a_reported_value_equals_hand_calculation():
    """The last ten rounds alternate between 1 and 3: s = sqrt(10/9) = 1.0541. One round has the
    error s, the mean of ten s / sqrt(10) = 1/3, EMA(0.6) s sqrt(0.4 / 1.6) = s / 2. Earlier rounds
    do not count."""
    values = [100.0] + [1.0, 3.0] * 5
    s = math.sqrt(10 / 9)
    assert Rule("last").standard_error(values) == pytest.approx(s)
    assert Rule("best").standard_error(values) == pytest.approx(s)
    assert Rule("mean_of_last(10)").standard_error(values) == pytest.approx(1 / 3)
    assert Rule("ema(0.6)").standard_error(values) == pytest.approx(s / 2)
    assert Rule("last").standard_error([1.0]) is None


def test_known_spread_is_used_for_fewer_than_three_seeds():
    """One seed has the error 0.03, the mean of two 0.03 / sqrt(2). Three seeds have their own."""
    rule = read_rule({"value": "last", "spread": {"accuracy": 0.03}})
    assert rule.error_over_seeds("accuracy", 1) == 0.03
    assert rule.error_over_seeds("accuracy", 2) == pytest.approx(0.0212132, abs=1e-7)
    assert rule.error_over_seeds("accuracy", 3) is None
    assert rule.error_over_seeds("accuracy", 0) is None
    assert rule.error_over_seeds("forgetting", 1) is None


def test_tolerance_includes_noise():
    accuracy = {"unit": "percent", "metric": "accuracy", "value": "40", "std": ""}
    assert [compute_tolerance(accuracy, error) for error in (None, 0.9, 1.5)] == [2.0, 2.0, 3.0]
    assert [compute_tolerance(accuracy | {"std": "1.4"}, error) for error in (None, 1.3, 1.5)] == [
        2.8,
        2.8,
        3.0,
    ]
    lost = {"unit": "fraction", "metric": "forgetting", "value": "0.4", "std": ""}
    assert [compute_tolerance(lost, error) for error in (None, 0.02, 0.04)] == [0.05, 0.05, 0.08]
    rounds = {"unit": "rounds", "metric": "rounds_to_A", "value": "100", "std": ""}
    assert [compute_tolerance(rounds, error) for error in (None, 10.0, 20.0)] == [25.0, 25.0, 40.0]


def test_cell_is_judged_by_the_runs_that_did_not_diverge():
    """If half of the runs diverged, the others are judged. A published failure needs all runs to
    diverge, or an accuracy at chance."""
    accuracy = {"note": "", "metric": "accuracy", "mean": 9.0, "difference": 1.0, "tolerance": 2.0}
    half, failed = [True, False], 'failed; printed "10.00 (Failure)"'
    assert judge(accuracy, half) == "within"
    assert judge(accuracy, [True, True]) == "outside"
    printed = accuracy | {"note": failed}
    for runs, mean, expected in (
        (half, 40.0, "outside"),
        ([True, True], 40.0, "failed as printed"),
        ([True, True], math.nan, "failed as printed"),
        # 10 +- 2
        (half, 12.0, "failed as printed"),
        (half, 8.0, "failed as printed"),
        (half, 12.5, "outside"),
    ):
        assert judge(printed | {"mean": mean}, runs) == expected
    lost = printed | {"metric": "forgetting"}
    assert judge(lost, half) == "not judged: no printed number"
    assert judge(lost, [True, True]) == "failed as printed"
    unknown = printed | {"mean": math.nan}
    assert judge(unknown, half, "no augmented view") == "not judged: no augmented view"
    assert judge(unknown, [True, True], "no augmented view") == "failed as printed"
