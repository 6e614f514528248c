"""Metrics against matrices worked by hand, plain loops and identities; the history against its
files."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import Partition, task_partition_name
from fedexp.metrics import forgetting
from fedexp.metrics.accuracy import class_accuracy, class_mean, overall_accuracy
from fedexp.metrics.forgetting_metric import (
    BackwardTransfer,
    ClientDrop,
    Consistency,
    ForgettingDegree,
    InOutLocal,
    Metrics,
    RoundDrop,
)
from fedexp.metrics.personal import own_mean
from fedexp.metrics.record import Record
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir.reader import RunDirectory
from fedexp_papers.analyses.weight_divergence import distribution_distance
from toy_federation import ALL

nan = float("nan")
fraction = st.floats(0, 1)
few = settings(max_examples=60, deadline=None)


@st.composite
def matrices(draw, min_rows=3, with_nan=False):
    """Class accuracies [rows, classes]; with_nan: some classes (not all) are absent in every
    round."""
    rows, classes = draw(st.integers(min_rows, 7)), draw(st.integers(2, 5))
    cw = draw(arrays(np.float64, (rows, classes), elements=fraction))
    if with_nan:
        cw[:, draw(st.integers(1, classes - 1)) :] = nan
    return cw


# Initial model, then rounds 1, 2, 3; two classes.
CW = np.array([[0.9, 0.9], [0.5, 0.2], [0.8, 0.1], [0.6, 0.1]])


# ------------------------------------------------------------------ accuracy
def test_class_accuracy_equals_hand_calculation():
    accuracy = class_accuracy(np.array([3, 0, 0]), np.array([4, 5, 0]))
    np.testing.assert_array_equal(accuracy, [0.75, 0.0, nan])
    np.testing.assert_array_equal(
        class_accuracy([[1, 2], [0, 4]], [2, 4]), [[0.5, 0.5], [0.0, 1.0]]
    )
    assert overall_accuracy(np.array([3, 0, 0]), np.array([4, 5, 0])) == 3 / 9
    assert math.isnan(overall_accuracy(np.array([0]), np.array([0])))
    classes = np.array([[1.0, nan, 3.0], [nan, nan, nan]])
    np.testing.assert_array_equal(class_mean(classes), [2.0, nan])


# ------------------------------------------------------------------ forgetting F
def test_forgetting_f_equals_hand_calculation():
    # class 0: max(0.5, 0.8) - 0.6 = 0.2; class 1: max(0.2, 0.1) - 0.1 = 0.1; the initial 0.9 does
    # not count
    np.testing.assert_allclose(forgetting.forgetting_per_class(CW), [0.2, 0.1])
    assert forgetting.forgetting_f(CW) == pytest.approx(0.15)
    # class 0 ends at its peak: 0.3 - 0.7 = -0.4; class 1: 0.5 - 0.5 = 0
    negative = np.array([[0.0, 0.0], [0.3, 0.5], [0.7, 0.5]])
    assert forgetting.forgetting_f(negative) == pytest.approx(-0.2)
    for rounds in (0, 1, 2):
        assert math.isnan(forgetting.forgetting_f(CW[:rounds]))
    assert not math.isnan(forgetting.forgetting_f(CW[:3]))


@few
@given(matrices(with_nan=True))
def test_absent_classes_are_ignored(cw):
    present = cw[:, ~np.isnan(cw[0])]
    assert forgetting.forgetting_f(cw) == pytest.approx(forgetting.forgetting_f(present))
    np.testing.assert_allclose(forgetting.round_drop(cw), forgetting.round_drop(present))
    np.testing.assert_allclose(forgetting.consistency(cw), forgetting.consistency(present))
    width = present.shape[1]
    np.testing.assert_allclose(
        forgetting.normalised_heat_map(cw)[:, :width],
        forgetting.normalised_heat_map(present),
        rtol=1e-12,
    )
    assert np.isnan(forgetting.normalised_heat_map(cw)[:, width:]).all()


# ------------------------------------------------------------------ forgetting degree
def test_forgetting_degree_equals_hand_calculation():
    before = np.array([0.5, 0.0, 0.8])
    local = np.array([[0.25, 0.1, 0.8], [0.0, 0.0, 1.0]])
    degree = forgetting.forgetting_degree(before, local, xi=1e-6)
    # half lost; unknown class gained: -0.1 / 1e-6; kept | all lost; 0 / xi; -0.2 / 0.8
    np.testing.assert_allclose(degree, [[0.5, -1e5, 0.0], [1.0, 0.0, -0.25]], rtol=1e-5)
    assert degree.max() <= 1
    # a larger xi damps: 0.25 / (0.5 + 0.5)
    assert forgetting.forgetting_degree(before, local, xi=0.5)[0, 0] == pytest.approx(0.25)


@pytest.mark.filterwarnings("error")
def test_client_without_examples_gives_nan():
    """The first client has classes 0 and 1 as 3 : 1, the second has no examples: 0.8 * 3/4 + 0.4 /
    4 = 0.7; the shares of (0.8, 0.4) are 2/3 and 1/3, each 1/12 away from 3/4 and 1/4."""
    accuracy, counts = np.array([0.8, 0.4]), np.array([[3, 1], [0, 0]])
    inside, outside = forgetting.in_out_local(accuracy, counts)
    np.testing.assert_allclose(inside, [0.7, nan])
    np.testing.assert_allclose(outside, [0.5, nan])  # 0.8 / 4 + 0.4 * 3/4
    np.testing.assert_allclose(own_mean(accuracy, counts), [0.7, nan])
    np.testing.assert_allclose(distribution_distance(accuracy, counts), [1 / 6, nan])
    assert np.isnan(forgetting.in_out_joint(accuracy, counts[1:])).all()


def test_in_out_local_ignores_absent_classes():
    # p = (1/4, 1/4, 1/2) -> known classes (1/2, 1/2); out = (3/8, 3/8, 1/4) -> (1/2, 1/2)
    inside, outside = forgetting.in_out_local(np.array([0.2, 0.6, nan]), np.array([1, 1, 2]))
    assert (float(inside), float(outside)) == (pytest.approx(0.4), pytest.approx(0.4))
    # only the absent class is inside: undefined
    inside, outside = forgetting.in_out_local(np.array([0.2, 0.6, nan]), np.array([0, 0, 2]))
    assert math.isnan(inside)
    assert outside == pytest.approx(0.4)
    inside, outside = forgetting.in_out_local(np.array([0.7]), np.array([5]))
    assert inside == pytest.approx(0.7)
    assert math.isnan(outside)


# ------------------------------------------------------------------ heat map, consistency
def test_normalised_heat_map_equals_hand_calculation():
    cw = np.array([[0.2, 0.6], [0.0, 0.0], [0.5, 0.0]])
    np.testing.assert_allclose(
        forgetting.normalised_heat_map(cw), [[0.25, 0.75], [0.0, 0.0], [1.0, 0.0]]
    )


def test_consistency_equals_hand_calculation():
    # (3,4).(4,3) = 24 of 5 * 5; orthogonal; a zero vector: 0/0 -> 0, twice
    cw = np.array([[0.3, 0.4], [0.4, 0.3], [0.0, 0.0], [0.5, 0.0], [0.0, 0.5], [0.0, 1.0]])
    np.testing.assert_allclose(forgetting.consistency(cw), [0.96, 0.0, 0.0, 0.0, 1.0])


# ------------------------------------------------------------------ rounds to target
def test_rounds_to_target_equal_hand_calculation():
    rounds, accuracy = [0, 5, 10, 15, 20], [0.9, 0.4, None, 0.6, 0.5]
    assert rounds_to_target(
        rounds, accuracy, targets=[0.4, 0.5, 0.61], fractions=[0.5, 0.9, 1]
    ) == {
        "0.4": 5,  # first crossing; the initial model does not count
        "0.5": 15,
        "0.61": None,
        "0.5*best": 5,  # best = 0.6
        "0.9*best": 15,
        "1.0*best": 15,
    }
    for rounds in ([], [0]):
        found = rounds_to_target(rounds, [0.9] * len(rounds), [0.5], [0.9])
        assert found == {"0.5": None, "0.9*best": None}


def test_rounds_to_target_tolerates_rounding_errors():
    """0.1 + 0.2 is one unit in the last place above 0.3; 1e-11 is more than that."""
    assert 0.1 + 0.2 > 0.3
    rounds, accuracy = [0, 1, 2], [0.0, 0.3, 1.0]
    assert rounds_to_target(rounds, accuracy, [0.1 + 0.2], []) == {"0.30000000000000004": 1}
    assert rounds_to_target(rounds, accuracy, [0.3 + 1e-11], []) == {"0.30000000001": 2}


# ------------------------------------------------------------------ history and its files
def make_history(rounds=3, local=True, classes=4, absent=False):
    generator = np.random.default_rng(5)
    labels = np.tile(np.arange(classes), 20)
    partition = Partition.build(
        np.split(generator.permutation(80), [3, 20, 45]), labels, classes, {}
    )
    history = Record(counts=partition.counts)
    for r in range(rounds + 1):
        if local and r:
            history.add_local(
                r,
                np.sort(generator.permutation(4)[:2]),
                _accuracies(generator, (2, classes), absent),
            )
        history.add(r, _accuracies(generator, classes, absent))
    return history, partition


def _accuracies(generator, shape, absent):
    accuracy = generator.random(shape)
    if absent:
        accuracy[..., 1] = nan
    return accuracy


def write_run(directory, history, partition):
    """Write the files of a run directory."""
    classes = [str(c) for c in range(history.counts.shape[1])]
    partition.save(directory / "partition.npz", classes=classes)
    accuracies, tables = (pd.DataFrame({"round": history.rounds}), {})
    accuracies.to_csv(directory / "rounds.csv", index=False)
    for number in history.rounds:
        for name, rows in history.upto(number).new_rows(number).items():
            tables.setdefault(name, []).extend(rows)
    for name, rows in tables.items():
        pd.DataFrame(rows).to_csv(directory / name, index=False)


def assert_same(one: Record, other: Record):
    np.testing.assert_equal(vars(one), vars(other))


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_record_is_restored_from_files(rounds, local, absent, tmp_path):
    history, partition = make_history(rounds, local, absent=absent)
    write_run(tmp_path, history, partition)
    loaded = RunDirectory(tmp_path).record()
    assert_same(loaded, history)
    metric = ALL
    np.testing.assert_equal(metric.round_values(loaded), metric.round_values(history))
    np.testing.assert_equal(metric.summary(loaded), metric.summary(history))


@pytest.mark.parametrize("per_task", [1, 2])
def test_restored_record_counts_the_examples_of_all_tasks_so_far(per_task, tmp_path):
    history, partition = make_history(2, local=False)
    first = replace(partition, info={"rounds_per_task": per_task})
    write_run(tmp_path, history, first)
    labels = np.tile(np.arange(4), 5)
    second = Partition.build(np.split(np.arange(20), [2, 9, 13]), labels, 4, {})
    second.save(tmp_path / task_partition_name(2), classes=list("0123"))
    loaded = RunDirectory(tmp_path).record()
    np.testing.assert_array_equal(loaded.counts_until(per_task), first.counts)
    both = first.counts + second.counts
    np.testing.assert_array_equal(loaded.counts_until(per_task + 1), both)


def test_record_as_it_was_after_a_round_has_the_cohorts_until_then():
    history, _ = make_history()
    for number, clients in {1: (0, 1), 2: (2, 3), 3: (0, 2)}.items():
        history.add_cohort(number, clients)
    assert history.upto(2).cohorts == {1: (0, 1), 2: (2, 3)}
    assert history.upto(0).cohorts == {}


def test_damaged_or_missing_file_of_a_run_is_named(tmp_path):
    history, partition = make_history()
    with pytest.raises(ConfigError, match=r"partition\.npz"):
        RunDirectory(tmp_path).record()
    write_run(tmp_path, history, partition)
    table = tmp_path / "class_accuracy.csv"
    good = table.read_text()
    for bad in ("round,class\n0,0\n", good + "3,99,0.5\n", good + "3,x,0.5\n", good + "3\n"):
        table.write_text(bad)
        with pytest.raises(ConfigError, match=r"class_accuracy\.csv"):
            RunDirectory(tmp_path).record()
    table.unlink()
    with pytest.raises(ConfigError, match=r"class_accuracy\.csv"):
        RunDirectory(tmp_path).record()


# ------------------------------------------------------------------ the objects of the group
def hand_history():
    """CW with two classes and two clients; client 0 has only class 0, client 1 has one example of
    class 0 and three of class 1."""
    history = Record(counts=np.array([[2, 0], [1, 3], [9, 1]]))
    locals_ = [[[0.9, 0.4], [0.5, 0.9]], [[1.0, 0.0], [0.25, 0.2]], [[0.8, 0.0], [0.4, 0.3]]]
    history.add(0, CW[0])
    for r in (1, 2, 3):
        history.add_local(r, np.array([0, 1]), np.array(locals_[r - 1]))
        history.add(r, CW[r])
    return history


def test_round_drop_columns_equal_hand_calculation():
    history = hand_history()
    # local, round 3 against round 2 = (0.8, 0.1): client 0 loses 0 and 0.1: 0.05; client 1 loses
    # 0.4 and 0: 0.2 round 2 against (0.5, 0.2): 0 + 0.2 -> 0.1; 0.25 + 0 -> 0.125. round 1 against
    # (0.9, 0.9): 0.5 -> 0.25; 0.4 -> 0.2
    assert RoundDrop(local=False).round_values(history) == {"round_forgetting": pytest.approx(0.1)}
    assert RoundDrop(local=False).client_values(history) == {}
    metric = RoundDrop(local=True)
    assert metric.round_values(history) == pytest.approx(
        {"round_forgetting": 0.1, "local_round_forgetting": 0.125}
    )
    np.testing.assert_allclose(metric.client_values(history)["local_round_forgetting"], [0.05, 0.2])
    # means over rounds from the second on: (0.05 + 0.1) / 2 and (0.1125 + 0.125) / 2
    assert np.isnan(metric.local_values(history, 0)["local_round_forgetting"]).all(), (
        "the initial model forgets nothing"
    )
    assert metric.summary(history) == pytest.approx(
        {"round_forgetting": 0.075, "local_round_forgetting": 0.11875}
    )
    assert metric.needs_local
    assert not RoundDrop(local=False).needs_local


def test_client_drop_equals_hand_calculation():
    """Client 0 pauses in round 2, and client 2 trains only there. Round 3: client 0 has the peak
    (0.9, 0.1) and loses 0.4 and nothing: 0.2. Client 1 has the peaks 0.6 of round 2 and 0.8 of
    round 1 and loses 0.5 and nothing: 0.25."""
    sampled = [np.array(clients) for clients in ([0, 1], [1, 2], [0, 1])]
    local = [[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.7, 0.7]], [[0.5, 0.3], [0.1, 0.9]]]
    local = [np.array(each) for each in local]
    np.testing.assert_allclose(forgetting.client_drop(sampled, local), [0.2, 0.25])
    np.testing.assert_allclose(forgetting.client_drop(sampled[:2], local[:2]), [0.2, nan])
    np.testing.assert_array_equal(forgetting.client_drop(sampled[:1], local[:1]), [nan, nan])


@few
@given(st.integers(1, 4), st.data())
def test_client_drop_of_all_clients_is_the_published_formula(clients, data):
    rounds = data.draw(arrays(np.float64, (4, clients, 3), elements=fraction))
    total = 0.0
    for c in range(3):
        for k in range(clients):
            total += min(0.0, rounds[-1, k, c] - max(rounds[i, k, c] for i in range(4)))
    everyone = [np.arange(clients)] * 4
    found = forgetting.client_drop(everyone, list(rounds))
    np.testing.assert_allclose(-found.mean(), total / (3 * clients), atol=1e-12)


def test_client_drop_columns_equal_hand_calculation():
    history = hand_history()
    # round 3: client 0 has the peaks (1, 0.4) and loses 0.2 and 0.4: 0.3; client 1 has (0.5, 0.9)
    # and loses 0.1 and 0.6: 0.35
    values = ClientDrop().client_values(history)["client_forgetting"]
    np.testing.assert_allclose(values, [0.3, 0.35])
    assert ClientDrop().round_values(history) == {"client_forgetting": pytest.approx(0.325)}
    assert ClientDrop().summary(history) == {"client_forgetting": pytest.approx(0.325)}
    assert np.isnan(ClientDrop().round_values(history.upto(1))["client_forgetting"])


def test_forgetting_degree_columns_equal_hand_calculation():
    history = hand_history()
    metric = ForgettingDegree(xi=1e-9)
    # round 3, before (0.8, 0.1): client 0: 0 and 1 -> 0.5; client 1: 0.5 and -0.2 / 0.1 = -2,
    # clipped -1: -0.25
    np.testing.assert_allclose(
        metric.client_values(history)["forgetting_degree"], [0.5, -0.25], atol=1e-7
    )
    assert metric.round_values(history)["forgetting_degree"] == pytest.approx(0.125)
    # round 2, before (0.5, 0.2): (-1, 1) -> 0; (0.5, 0) -> 0.25. round 1, before (0.9, 0.9): (0,
    # 5/9); (4/9, 0)
    assert metric.summary(history)["forgetting_degree"] == pytest.approx((0.125 + 0.125 + 0.25) / 3)
    with pytest.raises(ConfigError, match=r"forgetting_metric\.xi=0"):
        ForgettingDegree(xi=0)


def test_in_out_local_columns_equal_hand_calculation():
    history = hand_history()
    # round 3. client 0: p = (1, 0), out = (0, 1): 0.8 and 0.0. client 1: p = (1/4, 3/4): 0.1 +
    # 0.225 = 0.325; out = (3/4, 1/4): 0.3 + 0.075 = 0.375. std of (0.8, 0.325) = 0.2375, of (0,
    # 0.375) = 0.1875. global (0.6, 0.1), joint p = (3/6, 3/6): 0.35 both
    values = InOutLocal().round_values(history)
    assert values == pytest.approx(
        {
            "in_local_accuracy": 0.5625,
            "in_local_accuracy_std": 0.2375,
            "out_local_accuracy": 0.1875,
            "out_local_accuracy_std": 0.1875,
            "global_in_accuracy": 0.35,
            "global_out_accuracy": 0.35,
        }
    )
    clients = InOutLocal().client_values(history)
    np.testing.assert_allclose(clients["in_local_accuracy"], [0.8, 0.325])
    np.testing.assert_allclose(clients["out_local_accuracy"], [0.0, 0.375])
    assert InOutLocal().summary(history) == values


def test_consistency_columns_equal_hand_calculation():
    # (0.9, 0.9), (0.5, 0.2), (0.8, 0.1), (0.6, 0.1): 0.63 / (0.9 sqrt(2) sqrt(0.29)), 0.42 /
    # sqrt(0.29 * 0.65) and 0.49 / sqrt(0.65 * 0.37)
    cosines = [0.7 / 0.58**0.5, 0.42 / 0.1885**0.5, 0.49 / 0.2405**0.5]
    assert Consistency().round_values(hand_history()) == {
        "consistency": pytest.approx(cosines[-1], abs=1e-15)
    }
    assert Consistency().summary(hand_history()) == {
        "consistency": pytest.approx(sum(cosines) / 3, abs=1e-15)
    }
    assert not Consistency().needs_local


def test_previous_round_is_the_previous_evaluated_round():
    """Rounds 0, 2, 4, 5: the previous round is the previous evaluated round."""
    history = Record(counts=np.ones((2, 2), dtype=np.int64))
    for r, row in zip([0, 2, 4, 5], CW, strict=True):
        history.add(r, row)
    both = Metrics(members=[BackwardTransfer(), RoundDrop(local=False)])
    assert both.round_values(history) == pytest.approx(
        {"forgetting": 0.15, "round_forgetting": 0.1}
    )
    assert not both.needs_local


def test_local_values_need_local_models_of_the_last_round():
    history, _ = make_history(2)
    history.add(3, np.zeros(4))  # evaluated without local models
    assert ALL.client_values(history) == {}
    assert math.isnan(ALL.round_values(history)["local_round_forgetting"])
