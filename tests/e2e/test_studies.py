"""Small Optuna studies on digits: values, report, resume, and rejected input."""

import pandas as pd
import pytest
import yaml
from helpers import SMALL, summary_of

from fedexp.core.storage import read_csv

pytest.importorskip("optuna")

SEARCH = ("--multirun", "hydra/sweeper=optuna", *SMALL, "rounds=2", "hydra.sweep.dir=study")
VALIDATED = (*SEARCH, "validation.fraction=0.2", "local.lr=tag(log,interval(0.0001,0.1))")


def test_study_finds_the_best_trial_and_continues(fedexp, tmp_path):
    search = (*VALIDATED, "local.momentum=0.0,0.9")
    fedexp.done(*search, "hydra.sweeper.n_trials=1")
    first = read_csv(tmp_path / "study/trials.csv")
    answer = fedexp.done(*search, "hydra.sweeper.n_trials=2")
    trials = read_csv(tmp_path / "study/trials.csv")
    pd.testing.assert_frame_equal(trials.iloc[:1], first)
    assert trials["local.lr"].nunique() == 2
    assert trials["state"].tolist() == ["complete"] * 2
    assert trials["rounds"].tolist() == [2, 2]
    for trial in trials.to_dict("records"):
        run = tmp_path / "study" / trial["run"]
        config, summary = (
            yaml.safe_load((run / "config.yaml").read_text()),
            summary_of(run),
        )
        assert summary["validation_accuracy"] == trial["validation_accuracy"]
        assert config["local"]["lr"] == trial["local.lr"]
        assert config["local"]["momentum"] == trial["local.momentum"]
        assert "accuracy" not in summary  # test data are not used
    best = trials.loc[trials["validation_accuracy"].idxmax()]
    said = (
        f"2 trials, 0 diverged, 0 failed; the best, trial {best['trial']}, has validation_accuracy="
    )
    assert said in answer.out
    table = read_csv(tmp_path / "study/table.csv")  # the usual report
    assert sorted(table["validation_accuracy"]) == sorted(trials["validation_accuracy"])
    over = fedexp(*search, "hydra.sweeper.n_trials=2")
    assert "all 2 trials are done" in over.out


@pytest.mark.slow
def test_interrupted_trial_resumes(fedexp, tmp_path, monkeypatch):
    from fedexp.training import rounds

    played, play = [], rounds.play_round

    def interrupt(experiment, state, *others):
        played.append(state.round + 1)
        if played == [1, 2]:
            raise KeyboardInterrupt
        return play(experiment, state, *others)

    monkeypatch.setattr(rounds, "play_round", interrupt)
    assert fedexp(*VALIDATED, "hydra.sweeper.n_trials=1").code == 130
    fedexp.done(*VALIDATED, "hydra.sweeper.n_trials=1")
    assert played == [1, 2, 2]  # the second round again, not the first
    trials = read_csv(tmp_path / "study/trials.csv")
    assert trials["state"].tolist() == ["complete"]
    assert len(list((tmp_path / "study").glob("*/config.yaml"))) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            (*SEARCH, "local.lr=interval(0.01,0.1)"),
            "a search needs an objective: set validation.fraction=0.1",
        ),
        ((*SEARCH, "validation.fraction=0.2"), "no values to search for"),
        ((*VALIDATED, "objective=accuracy,forgetting"), "a search has one objective"),
        ((*VALIDATED, "objective=[accuracy,forgetting]"), "a search has one objective"),
        (
            (*VALIDATED, "hydra.sweeper.pruner=none"),
            "hydra.sweeper.pruner: no longer exists; use stop.patience",
        ),
        ((*SEARCH[:1], "hydra/sweeper=optnua", *SEARCH[2:]), "no such option (nearest: 'optuna')"),
    ],
)
def test_invalid_search_is_rejected_and_writes_nothing(fedexp, tmp_path, options, words):
    answer = fedexp.rejected(*options)
    assert words in answer.err
    assert "Traceback" not in answer.err
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_parallel_trials_share_a_study(fedexp, tmp_path, fresh_processes):
    fedexp.done(
        *VALIDATED, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_trials=4"
    )
    trials = read_csv(tmp_path / "study/trials.csv")
    assert trials["trial"].tolist() == [0, 1, 2, 3]
    assert set(trials["state"]) == {"complete"}
    assert trials["run"].nunique() == 4
