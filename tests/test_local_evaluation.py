"""Local models tested in fewer rounds."""

import numpy as np
import pandas as pd
import pytest

from fedexp.config.settings import LocalEvaluation
from fedexp.core.errors import ConfigError
from fedexp.figures.draw import round_picture
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.rundir import checkpoint, files
from fedexp.testing import record
from fedexp.training.folder import read_state
from fedexp.training.summary import summary_of
from toy_federation import ALL, make_simulation


def make(every=None, **options):
    chosen = LocalEvaluation(every=every)
    metric = {"forgetting_metric": ALL}
    return make_simulation(local_evaluation=chosen, **metric | options)


def columns(directory):
    table = pd.read_csv(directory / files.ROUNDS)
    return table[[name for name in table if "seconds" not in name and "per_second" not in name]]


def test_local_models_are_tested_only_in_every_second_round(tmp_path):
    """The values of these rounds equal those of a run that tests local models in every round."""
    whole = record(make(rounds=5), tmp_path / "whole")
    simulation = make(every=2, rounds=5)
    state = record(simulation, tmp_path / "some")
    assert list(whole.record.local_rounds) == [1, 2, 3, 4, 5]
    assert list(state.record.local_rounds) == [2, 4, 5]
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
    whole = record(make(rounds=5), tmp_path / "whole").record
    simulation = make(rounds=5, eval_interval=2)
    state = record(simulation, tmp_path / "some")
    history = state.record
    assert list(history.local_rounds) == [2, 4, 5]
    for number in history.local_rounds:
        np.testing.assert_array_equal(history.distributed(number), whole.distributed(number))
    saved = checkpoint.load(tmp_path / "some").state
    loaded = read_state(tmp_path / "some", saved, simulation).record
    np.testing.assert_array_equal(loaded.distributed_accuracy, history.distributed_accuracy)
    found, expected = (columns(tmp_path / name) for name in ("some", "whole"))
    for name in ("local_round_forgetting", "forgetting_degree", "in_local_accuracy"):
        assert found[name].iloc[[2, 4, 5]].equals(expected[name].iloc[[2, 4, 5]])
    picture = round_picture(history.upto(4))
    np.testing.assert_array_equal(picture[[0, -1]], whole.class_accuracy[3:5])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 3, "eval_interval": 2}, "every=3: must be a multiple of eval_interval=2"),
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
