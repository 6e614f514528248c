"""Local models tested in fewer rounds and on a part of the test set."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import torch

from fedexp.config.settings import LocalEvaluation, Seeds
from fedexp.core.errors import ConfigError
from fedexp.data.held_out import Validation
from fedexp.engine.base import Shared
from fedexp.figures.draw import round_picture
from fedexp.metrics.forgetting_metric import All, RoundDrop
from fedexp.rundir import checkpoint, files
from fedexp.testing import record
from fedexp.training.checkpoint_fit import Mismatch, check_history
from fedexp.training.evaluation import standard_error_bound
from fedexp.training.summary import summary_of
from test_continual import TWO_TASKS
from test_views import every_engine
from toy_federation import assemble, make_simulation, play

BOTH = ["plain", "augmented"]


def make(every=None, examples=None, **options):
    chosen = LocalEvaluation(every=every, examples=examples)
    metric = {"forgetting_metric": All(xi=1e-6)}
    return make_simulation(local_evaluation=chosen, **metric | options)


def test_standard_error_equals_hand_calculation():
    """Two of four examples are predicted correctly, and two are drawn. Of the six draws, one has
    none of the correct ones, four have one and one has two, so the variance of the accuracy is (1 /
    6) 2 (1 / 2)^2 = 1 / 12. The formula gives sqrt(1/4 / 2 * 2/3). With several classes, the
    largest value counts."""
    means = [np.mean(pair) for pair in combinations([0, 0, 1, 1], 2)]
    assert standard_error_bound(np.array([2]), np.array([4])) == pytest.approx(
        np.std(means), abs=1e-15
    )
    # 100 of 1,000: sqrt(0.25 / 100 * 900 / 999); 10 of 20: sqrt(0.025 * 10 / 19)
    part, whole = np.array([100, 10, 0]), np.array([1000, 20, 5])
    assert standard_error_bound(part[:1], whole[:1]) == pytest.approx(0.0474579, abs=1e-7)
    assert standard_error_bound(part, whole) == pytest.approx(0.1147079, abs=1e-7)
    assert standard_error_bound(whole, whole) == 0


def test_chosen_examples_are_balanced_and_fixed():
    first = make(examples=8, test_views=BOTH).runtime
    numbers = first.local_examples["plain"]
    assert torch.bincount(first.data.y_test[numbers]).tolist() == [2, 2, 2, 2]
    assert torch.equal(numbers, first.local_examples["augmented"])
    again = make(examples=8, seeds=Seeds(partition=1, sampling=1, training=1)).runtime
    assert torch.equal(numbers, again.local_examples["plain"])
    assert len(make(examples=4).runtime.local_examples["plain"]) == 4


def test_views_use_their_own_examples():
    runtime = make(examples=8, test_views=BOTH).runtime
    _, draws = runtime.local_test("augmented", 2)
    assert torch.equal(draws, runtime.test_draws("augmented", 2)[runtime.local_examples["plain"]])
    runtime = make(examples=6, scenario=TWO_TASKS).runtime
    (tested, _), numbers = runtime.local_test("plain", 2), runtime.local_examples["plain"]
    assert torch.equal(tested.data.test_tasks, runtime.data.test_tasks[numbers])
    held_out = Validation(fraction=0.25, per_client=False)
    options = {"validation": held_out, "sizes": (9, 8), "evaluate_on": "both"}
    runtime = make(examples=4, **options).runtime
    (tested, _), numbers = runtime.local_test("validation", 2), runtime.local_examples["validation"]
    expected = runtime.data.x_train[runtime.data.validation][numbers]
    assert torch.equal(tested.data.x_test, expected)


@every_engine
def test_engines_test_local_models_on_chosen_examples(engine):
    """Each model is tested separately, with the random numbers of the round."""
    simulation = make(examples=9, test_views=BOTH)
    state, runtime = play(simulation, 1), simulation.runtime
    numbers = runtime.local_examples["plain"]
    cohort = assemble(simulation, state, 2)
    shared = Shared(simulation.algorithm, runtime, state.server, 0.1)
    trained = engine.train(shared, cohort, True)
    for view in BOTH:
        x, y = runtime.load_test(numbers, runtime.test_draws(view, 2))
        for i in range(4):
            local = {name: value[i] for name, value in trained.messages["params"].items()}
            answers = runtime.net(local, x).logits.argmax(1)
            right = torch.bincount(y[answers == y], minlength=4)
            assert trained.class_correct[view][i].tolist() == right.tolist()


def columns(directory):
    table = pd.read_csv(directory / files.ROUNDS)
    return table[[name for name in table if "seconds" not in name and "per_second" not in name]]


def test_local_models_are_tested_only_in_every_second_round(tmp_path):
    """The values of these rounds equal those of a run that tests local models in every round."""
    whole = record(make(rounds=5), tmp_path / "whole")
    simulation = make(every=2, rounds=5)
    state = record(simulation, tmp_path / "some")
    assert whole.history.local_rounds == [1, 2, 3, 4, 5]
    assert state.history.local_rounds == [2, 4, 5]
    every, some = columns(tmp_path / "whole"), columns(tmp_path / "some")
    local = [name for name in every if every[name].iloc[3] != some[name].iloc[3]]
    assert "forgetting_degree" in local
    assert "forgetting" not in local
    assert some[local].iloc[[1, 3]].isna().all(axis=None)
    assert some.drop(columns=local).equals(every.drop(columns=local))
    assert some[local].iloc[[2, 4, 5]].equals(every[local].iloc[[2, 4, 5]])
    assert summary_of(simulation, state)["local_evaluation"] == {"every": 2}
    assert "local_evaluation" not in summary_of(make(rounds=5), whole)


def test_distributed_model_is_tested_if_previous_round_was_not(tmp_path):
    """Rounds 2, 4 and 5 are evaluated, so the models after rounds 1, 3 and 4 are needed."""
    whole = record(make(rounds=5), tmp_path / "whole").history
    state = record(make(rounds=5, eval_interval=2), tmp_path / "some")
    history = state.history
    assert history.local_rounds == [2, 4, 5]
    for number in history.local_rounds:
        np.testing.assert_array_equal(history.distributed(number), whole.distributed(number))
    found, expected = (columns(tmp_path / name) for name in ("some", "whole"))
    for name in ("local_round_forgetting", "forgetting_degree", "in_local_accuracy"):
        assert found[name].iloc[[2, 4, 5]].equals(expected[name].iloc[[2, 4, 5]])
    picture = round_picture(history.upto(4))
    np.testing.assert_array_equal(picture[[0, -1]], whole.class_accuracy[3:5])


def test_choosing_all_examples_changes_nothing(tmp_path):
    metric = RoundDrop(local=True)
    whole = record(make(forgetting_metric=metric), tmp_path / "whole")
    simulation = make(examples=20, forgetting_metric=metric)
    state = record(simulation, tmp_path / "part")
    assert columns(tmp_path / "part").equals(columns(tmp_path / "whole"))
    assert summary_of(simulation, state)["local_evaluation"] == {
        "plain": {"examples": 20, "standard_error": 0.0}
    }
    np.testing.assert_array_equal(state.history.distributed(2), whole.history.distributed(2))


def test_distributed_model_is_tested_on_same_examples(tmp_path):
    simulation = make(examples=8, rounds=2)
    state = record(simulation, tmp_path)
    before = play(make(rounds=2), 1).server
    x, y = simulation.runtime.load_test(simulation.runtime.local_examples["plain"])
    answers = simulation.runtime.net(before["params"], x).logits.argmax(1)
    accuracy = [float((answers[y == c] == c).double().mean()) for c in range(4)]
    assert state.history.distributed(2).tolist() == accuracy
    assert accuracy != state.history.class_accuracy[1].tolist()
    assert np.unique(state.history.local_class_accuracy).tolist() == [0, 0.5, 1]
    drops = np.maximum(0, np.array(accuracy) - state.history.local_class_accuracy[1]).mean()
    row = columns(tmp_path).iloc[2]
    assert row["local_round_forgetting"] == pytest.approx(drops, abs=1e-15)
    found = summary_of(simulation, state)["local_evaluation"]["plain"]
    # two of five: sqrt(0.25 / 2 * 3 / 4)
    assert found == {"examples": 8, "standard_error": pytest.approx(0.3061862, abs=1e-7)}


def test_resume_keeps_local_evaluation(tmp_path):
    """A run that resumes after round 2 equals an uninterrupted run."""
    options = {"every": 2, "examples": 8, "eval_interval": 2, "test_views": BOTH}
    whole = record(make(rounds=4, **options), tmp_path / "whole")
    record(make(rounds=2, **options), tmp_path / "parts")
    resumed = record(make(rounds=4, **options), tmp_path / "parts", resume=True)
    for view in BOTH:
        saved, expected = (each.tested[view].history for each in (resumed, whole))
        assert saved.to_tree().keys() == expected.to_tree().keys()
        for key, value in expected.to_tree().items():
            assert torch.equal(saved.to_tree()[key], value), key
        assert len(saved.distributed_accuracy) == 2
    assert columns(tmp_path / "parts").equals(columns(tmp_path / "whole"))
    whole.history.save_local(tmp_path / "local.npz")
    with np.load(tmp_path / "local.npz") as arrays:
        assert arrays["distributed"].shape == (2, 4)
        assert (arrays["distributed"] == np.stack(whole.history.distributed_accuracy)).all()
    saved = checkpoint.load(tmp_path / "parts").state["history"]
    simulation = make(**options)
    check_history(saved, simulation.new_history("plain"), simulation)
    saved["distributed_accuracy"] = saved["distributed_accuracy"][:1]
    with pytest.raises(Mismatch, match=r"shape of history\.distributed_accuracy"):
        check_history(saved, simulation.new_history("plain"), simulation)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 3, "eval_interval": 2}, "every=3: must be a multiple of eval_interval=2"),
        ({"examples": 3}, r"examples=3: must be at least 4, so that each class has one"),
        (
            {"every": 2, "forgetting_metric": RoundDrop(local=False)},
            r"every=2: this option only has an effect with a forgetting_metric that evaluates"
            " local models",
        ),
    ],
)
def test_invalid_local_evaluation_is_rejected(options, words):
    with pytest.raises(ConfigError, match=rf"^local_evaluation\.{words}"):
        make(**options)
