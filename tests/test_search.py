"""Searches: objective, search space, and early stopping."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf, open_dict

from fedexp.algorithms.base import FedAvg
from fedexp.cli.search import open_study, options_of, space_of
from fedexp.config.settings import Stop
from fedexp.core.errors import ConfigError
from fedexp.data.views import VALIDATION
from fedexp.rundir.objective import check_objective, direction_of, objective_name, objective_value
from fedexp.training.callbacks import EarlyStop, end_of_patience, is_finished
from toy_federation import composed

OPTIONS = {"n_trials": 4, "n_jobs": None, "sampler": "tpe", "seed": 0}


# --- the objective


def test_default_objective_never_uses_test_data():
    assert objective_name({"validation": {"fraction": 0.1}}) == "validation_accuracy"
    assert objective_name({"validation": {"fraction": 0.1}, "evaluate_on": "test"}) is None
    assert objective_name({"validation": {"fraction": 0.0}}) is None
    assert objective_name({"objective": "accuracy"}) == "accuracy"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("validation_accuracy", "max"),
        ("best_accuracy", "max"),
        ("forgetting", "min"),
        ("seconds", "min"),
        ("train_samples_per_second", "max"),
        ("consistency", "max"),
        ("personal_accuracy_std", "min"),
        ("in_local_accuracy_std_augmented", "min"),
        ("validation_personal_accuracy_worst", "max"),
        ("forgetting_events", "min"),
        ("unforgettable_examples", "max"),
    ],
)
def test_direction_of_an_objective(name, expected):
    assert direction_of(name, None) == expected
    assert direction_of(name, "min") == "min"


def test_direction_is_known_before_the_module_of_the_metric_is_imported():
    code = (
        "from fedexp.rundir.objective import declared_direction as of;"
        " print(of('personal_accuracy_std'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "min\n"


def test_objective_of_an_own_metric_needs_a_direction():
    assert direction_of("my_accuracy", "max") == "max"
    with pytest.raises(ConfigError, match=r"objective=my_accuracy: .*objective_direction=max or"):
        direction_of("my_accuracy", None)


def test_objective_must_be_a_finite_number():
    summary = {"accuracy": 0.5, "rounds": 3, "forgetting": None, "status": "completed"}
    assert [
        objective_value(summary, name)
        for name in ("accuracy", "rounds", "forgetting", "status", "none")
    ] == [0.5, 3.0, None, None, None]


@pytest.mark.parametrize(
    ("name", "views", "words"),
    [
        ("validation_acuracy", ("validation",), r"nearest: 'validation_accuracy'"),
        ("accuracy", ("validation",), "needs evaluate_on=both"),
        (
            "validation_forgetting",
            ("plain",),
            r"needs a validation set \(validation\.fraction=0\.1\)",
        ),
    ],
)
def test_unknown_objective_is_rejected(name, views, words):
    with pytest.raises(ConfigError, match=words):
        check_objective(name, views, ["forgetting"])
    check_objective("validation_consistency", ("validation",), ("consistency",))


# --- the values


def test_hydra_sweeps_become_optuna_distributions():
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    given = [
        "a=interval(0.1,1.0)",
        "b=tag(log,interval(0.001,0.1))",
        "c=int(interval(1,5))",
        "d=range(2,9,3)",
        "e=x,y",
        "f=choice(0.5,0.9)",
        "rounds=3",
        "alpha=1e-3",
    ]
    space, fixed = space_of(given)
    assert fixed == ["rounds=3", "alpha=1e-3"]
    assert space == {
        "a": FloatDistribution(0.1, 1.0),
        "b": FloatDistribution(0.001, 0.1, log=True),
        "c": IntDistribution(1, 5),
        "d": CategoricalDistribution(["2", "5", "8"]),
        "e": CategoricalDistribution(["x", "y"]),
        "f": CategoricalDistribution(["0.5", "0.9"]),
    }


def test_invalid_interval_is_rejected():
    with pytest.raises(ConfigError, match=r"local\.lr=interval\(2\.0,1\.0\)"):
        space_of(["local.lr=interval(2.0,1.0)"])


@pytest.mark.parametrize(
    "wrong", [{"n_trials": 0}, {"sampler": "tep"}, {"n_jobs": 0}, {"seed": "x"}]
)
def test_options_out_of_range_are_rejected(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"hydra.sweeper.{name}="):
        options_of(OmegaConf.create({"hydra": {"sweeper": OPTIONS | wrong}}))


def hydra_node(directory, **options):
    return OmegaConf.create({"sweep": {"dir": str(directory)}, "sweeper": OPTIONS | options})


def opened(directory, *overrides, space=("local.lr",), objective="accuracy", **options):
    config = composed("tracker=none", *overrides)
    with open_dict(config):
        config.hydra = hydra_node(directory, **options)
    return open_study(config, objective, space if isinstance(space, dict) else dict.fromkeys(space))


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_seed_and_number_of_trials_decide_the_values(tmp_path, sampler):
    """A continued study must not draw the values of its first trials again."""
    space, _ = space_of(["local.lr=interval(0.1,1.0)"])

    def first(name, seed):
        study = opened(tmp_path / name, space=space, sampler=sampler, seed=seed)
        return study.ask(space).params["local.lr"]

    drawn = first("a", 0)
    assert first("b", 0) == drawn
    assert first("c", 1) != drawn
    assert first("a", 0) != drawn


# --- early stopping


def test_patience_counts_rounds_since_the_best_round():
    assert end_of_patience([(0, 0.9)], 1) is None
    assert end_of_patience([(0, 0.9), (1, 0.1)], 1) is None
    curve = [(0, 0.9), (2, 0.1), (4, 0.3), (6, 0.3), (8, 0.2), (10, 0.4)]
    assert [end_of_patience(curve, patience) for patience in (1, 2, 3)] == [6, 8, None]


def answers(stop, *accuracy, eval_interval=1):
    """Return the answer of EarlyStop after each of these evaluated rounds."""
    callback, curve, found = EarlyStop(stop, eval_interval), [(0, 0.0)], []
    callback.start(None)
    for number, value in enumerate(accuracy, 1):
        curve.append((number, value))
        records = {VALIDATION: SimpleNamespace(curve=curve)}
        found.append(callback.after_round(SimpleNamespace(round=number, records=records)))
    return found


def test_patience_ends_a_run_without_improvement():
    """With patience 2, the run continues one round after the best one and ends after two.

    An equal accuracy is not an improvement.
    """
    stop, ended = Stop(patience=2, metric=None, minutes=None), {"by": "patience", "patience": 2}
    assert answers(stop, 0.5, 0.4, 0.6) == [None] * 3
    assert answers(stop, 0.5, 0.4, 0.3) == answers(stop, 0.5, 0.4, 0.5) == [None, None, ended]


def test_time_limit_ends_a_run_before_a_round_that_exceeds_it(monkeypatch):
    """A minute from second 100 ends at second 160: after a round of 30 seconds, 30 are left."""
    clock, stop = iter([100.0, 129.0, 130.0]), Stop(patience=None, metric=None, minutes=1.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert answers(stop, 0.5, 0.5) == [None, None]
    clock = iter([100.0, 130.0])
    assert answers(stop, 0.5) == [{"by": "minutes", "minutes": 1.0}]


@pytest.mark.parametrize(("interval", "ends"), [(2, False), (3, True)])
def test_time_limit_leaves_time_for_a_round_with_a_test(interval, ends, monkeypatch):
    """After a round of 20 seconds, 40 are left: enough for round 2, but not for round 3, too."""
    clock, stop = iter([100.0, 120.0]), Stop(patience=None, metric=None, minutes=1.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    (answer,) = answers(stop, 0.5, eval_interval=interval)
    assert (answer is not None) == ends


def test_stopped_run_counts_as_finished_for_the_same_options():
    patient = stopped(by="patience", patience=3)
    timed = stopped(by="minutes", minutes=5.0)
    three = Stop(patience=3, metric=None, minutes=None)
    five = replace(three, patience=None, minutes=5.0)
    no_stop = replace(three, patience=None)
    assert is_finished(SimpleNamespace(status="completed"), no_stop, [], True)
    assert is_finished(patient, three, [], True)
    assert is_finished(patient, replace(three, patience=2), [], True)
    assert not is_finished(patient, replace(three, patience=4), [], True)  # trains on
    assert not is_finished(patient, no_stop, [])
    assert not is_finished(timed, five, [], True)  # resumed by name: it gets the minutes again
    assert is_finished(timed, five, [])
    assert not is_finished(timed, no_stop, [])


def stopped(callbacks=(), **why):
    """A run that has been stopped, with these options of the group `callback`."""
    config = {"callback": {name: {} for name in callbacks}}
    return SimpleNamespace(status="stopped", summary={"stopped": why}, config=config)


def test_only_the_limit_that_ended_a_run_is_compared():
    ended = stopped(["stopper"], by="callback", reason="enough")
    five = Stop(patience=None, metric=None, minutes=5.0)
    assert is_finished(ended, five, ["stopper"])
    assert not is_finished(ended, five, [])  # of a version whose identities had no callbacks
    assert not is_finished(ended, five, ["stopper"], True)
    assert is_finished(stopped(by="callback", reason="of a metric"), five, [])
    assert is_finished(stopped(by="patience", patience=3), replace(five, patience=3), ["stopper"])


def test_study_of_another_experiment_is_rejected(tmp_path):
    """The tracker and the hardware may differ.

    The number of rounds, the algorithm, the searched keys and the objective may not.
    """
    opened(tmp_path)
    opened(tmp_path, "hardware.threads=1", "figures=false")
    for overrides, more in (
        (["rounds=3"], {}),
        (["algorithm=fedntd"], {}),
        ([], {"space": ["local.momentum"]}),
        ([], {"objective": "forgetting"}),
    ):
        with pytest.raises(ConfigError, match=r"contains a study of .*, not of .*; choose another"):
            opened(tmp_path, *overrides, **more)


def test_study_is_not_continued_with_another_version_of_a_class(tmp_path, monkeypatch):
    """Its trials would have numbers of the old code."""
    opened(tmp_path)
    monkeypatch.setattr(FedAvg, "version", 2, raising=False)
    with pytest.raises(ConfigError, match=r"contains a study of .*, not of .*"):
        opened(tmp_path)


def test_study_is_not_continued_with_other_choices_or_another_scale(tmp_path):
    """Optuna would notice it after a trial has been trained. A range may change."""

    def space(rate, momentum):
        return space_of([f"local.lr={rate}", f"local.momentum={momentum}"])[0]

    first = space("tag(log,interval(0.01,0.1))", "0.0,0.5")
    opened(tmp_path, space=first).ask(first)
    opened(tmp_path, space=space("tag(log,interval(0.001,1.0))", "0.0,0.5"))
    for key, other in (
        ("local.lr", space("interval(0.01,0.1)", "0.0,0.5")),
        ("local.momentum", space("tag(log,interval(0.01,0.1))", "0.0,0.9")),
    ):
        with pytest.raises(ConfigError, match=rf"contains trials with {key} from .*, not .*choose"):
            opened(tmp_path, space=other)
