"""The validation set: how it is drawn, what is evaluated on it, and that other results do not
change."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.text import Text

import toy_federation
from fedexp.analysis.targets import rounds_to
from fedexp.core.errors import ConfigError
from fedexp.core.rng import generator_for
from fedexp.core.storage import write_json
from fedexp.data.held_out import Validation
from fedexp.data.views import configured_views, evaluation_views
from fedexp.figures import list_figures
from fedexp.figures.load import load_run_data
from fedexp.metrics.forgetting_metric import ForgettingEvents, Metrics, RoundDrop
from fedexp.metrics.timing import Absence, ForgettingPhases
from fedexp.rundir import files
from fedexp.rundir.reader import RunDirectory
from fedexp.testing import record
from fedexp.training.summary import summary_of
from toy_federation import make_simulation

CENTRAL, OWN = (
    Validation(fraction=0.25, per_client=False),
    Validation(fraction=0.25, per_client=True),
)
SIZES = (1, 3, 7, 9, 8)  # 28 of the 30 examples that are left of 40
TWO_TASKS = replace(toy_federation.TWO_TASKS, rounds_per_task=1)


def make(validation=CENTRAL, **options):
    return make_simulation(**{"sizes": SIZES, "validation": validation} | options)


def recorded(directory, **options):
    """Run the small federation with its files."""
    simulation = make(**options)
    state = record(simulation, directory)
    simulation.stages[0].partition.save(
        directory / files.PARTITION, simulation.runtime.data.classes
    )
    summary = {
        "status": state.status,
        "algorithm": "fedavg",
        "dataset": "noise",
    } | summary_of(simulation, state)
    write_json(directory / files.SUMMARY, summary)
    return simulation, state, json.loads((directory / files.SUMMARY).read_text())


# --- who holds what


def test_central_validation_set_is_drawn_first():
    simulation = make(public=0.2, sizes=(1, 3, 7, 9))
    partition, numbers = simulation.stages[0].partition, simulation.runtime.data.validation.numpy()
    assert len(numbers) == 10  # a quarter of 40
    drawn = generator_for(0, "validation").choice(40, 10, replace=False)
    assert sorted(drawn) == numbers.tolist() == partition.validation.tolist()
    assert len(partition.public) == 6  # a fifth of the 30 that are left
    everything = np.concatenate([*partition.parts, partition.public, numbers])
    assert len(np.unique(everything)) == len(everything)
    assert partition.info["validation_counts"] == np.bincount(numbers % 4, minlength=4).tolist()


def test_each_client_holds_out_a_quarter():
    before = make_simulation(sizes=(1, 3, 7, 12, 10)).stages[0].partition
    simulation = make(OWN, sizes=(1, 3, 7, 12, 10))
    partition, numbers = (
        simulation.stages[0].partition,
        set(simulation.runtime.data.validation.tolist()),
    )
    assert partition.sizes.tolist() == [1, 3, 6, 9, 8]  # without floor(n / 4) = 0, 0, 1, 3, 2
    for rest, whole in zip(partition.parts, before.parts, strict=True):
        assert set(rest) <= set(whole)
        assert set(whole) - set(rest) <= numbers
    assert len(numbers) == 6
    counts = np.stack([np.bincount(part % 4, minlength=4) for part in partition.parts])
    np.testing.assert_array_equal(partition.counts, counts)


def test_validation_set_has_examples_of_each_task():
    simulation = make(
        Validation(fraction=0.5, per_client=False), scenario=TWO_TASKS, sizes=(2, 3, 5), rounds=1
    )
    data = simulation.runtime.data
    assert [len(stage.partition.validation) for stage in simulation.stages] == [10, 10]
    tasks = data.validation_tasks.tolist()
    labels = data.y_train[data.validation].tolist()
    assert all((label >= 2) == (task == 1) for label, task in zip(labels, tasks, strict=True))
    for stage in simulation.stages:
        assert not set(np.concatenate(stage.partition.parts)) & set(data.validation.tolist())
        held = set(stage.federation.shared.tolist()) & set(data.validation.tolist())
        assert not held  # no example of it is shared with the clients either


# --- what is evaluated


def test_validation_set_replaces_test_set_by_default():
    assert evaluation_views(["plain"], None, False) == ("plain",)
    assert evaluation_views(["plain", "augmented"], None, True) == ("validation",)
    assert evaluation_views(["plain", "augmented"], "both", True) == (
        "plain",
        "augmented",
        "validation",
    )
    assert evaluation_views(["plain"], "test", True) == ("plain",)
    assert configured_views({"validation": {"fraction": 0.1}}) == ("validation",)
    assert configured_views({"validation": "damaged"}) == ("plain",)


def test_validation_accuracy_decides_best_round_and_targets(tmp_path):
    _, _, summary = recorded(tmp_path / "run", evaluate_on="both", rounds=6, targets=[0.2])
    table = pd.read_csv(tmp_path / "run" / "rounds.csv").set_index("round")
    chosen = table["validation_accuracy"].loc[1:]
    best = int(chosen.idxmax())
    assert summary["best_round"] == best
    assert summary["validation_best_accuracy"] == chosen.max()
    assert summary["best_accuracy"] == table["test_accuracy"].loc[best]
    reached = chosen.index[chosen >= 0.2]
    assert summary["rounds_to_target"] == {"0.2": int(reached[0]) if len(reached) else None}
    assert "validation_rounds_to_target" not in summary
    assert rounds_to(RunDirectory(tmp_path / "run"), float(chosen.max())) == best


def test_run_without_test_set_is_read_and_drawn(tmp_path):
    recorded(tmp_path / "run", rounds=3, forgetting_metric=RoundDrop(local=True))
    (tmp_path / "run" / "config.yaml").write_text("validation: {fraction: 0.25}\nchoices: {}\n")
    (tmp_path / "run" / ".hydra").mkdir()
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("[]\n")
    run = RunDirectory(tmp_path / "run")
    assert run.finished
    assert run.views == ("validation",)
    assert run.curve.iloc[-1][run.accuracy_name] == run.summary["validation_accuracy"]
    assert run.class_accuracy("validation")["round"].max() == 3
    names = {name for name, draw in list_figures(load_run_data(tmp_path / "run")) if draw()}
    assert {"curves", "loss", "class_accuracy_validation", "local_round_validation"} <= names
    assert "class_accuracy" not in names


def texts(draw):
    return [" ".join(text.get_text().split()) for text in draw().findobj(Text)]


def test_figures_name_the_validation_set_only(tmp_path):
    """No figure of a run without test data mentions a test."""
    metrics = [RoundDrop(local=True), ForgettingEvents(), ForgettingPhases(), Absence()]
    own = {"validation": OWN, "evaluate": ["global", "own"], "rounds": 4}
    recorded(tmp_path / "run", forgetting_metric=Metrics(metrics), **own)
    half = Validation(fraction=0.5, per_client=False)
    stream = {"validation": half, "scenario": TWO_TASKS, "sizes": (2, 3, 5), "rounds": 1}
    recorded(tmp_path / "tasks", **stream)
    drawn = {
        name: texts(draw)
        for run in ("tasks", "run")
        for name, draw in list_figures(load_run_data(tmp_path / run))
    }
    some = ("class_accuracy", "tasks", "task_matrix", "local_round", "example_forgetting")
    assert {f"{name}_validation" for name in (*some, "phases", "absence", "own_tests")} <= {*drawn}
    assert not [(name, text) for name, each in drawn.items() for text in each if "test " in text]
    named = [name for name, each in drawn.items() if any("alidation" in text for text in each)]
    assert {*drawn} - {*named} == {"data_distribution"}


def test_forgetting_of_a_run_on_both_sets_is_that_on_the_test_set(tmp_path):
    recorded(tmp_path / "run", evaluate_on="both", rounds=3)
    drawn = dict(list_figures(load_run_data(tmp_path / "run")))
    assert "forgetting, test set" in texts(drawn["curves"])
    for name, data in (("class_accuracy", "test"), ("class_accuracy_validation", "validation")):
        assert f"{data} accuracy of the class" in texts(drawn[name])


def test_tasks_are_evaluated_on_their_validation_examples(tmp_path):
    half = Validation(fraction=0.5, per_client=False)
    simulation, state, summary = recorded(
        tmp_path / "run",
        validation=half,
        scenario=TWO_TASKS,
        sizes=(2, 3, 5),
        rounds=1,
        evaluate_on="both",
    )
    table = pd.read_csv(tmp_path / "run" / "tasks.csv")
    data = simulation.runtime.data.with_validation_as_test()
    logits = simulation.runtime.net(
        state.server["params"],
        data.inputs(data.x_test, torch.arange(20), None, None, torch.float64),
    ).logits
    right = (logits.argmax(-1) == data.y_test).double()
    last = table[table["round"] == 2].set_index("evaluated_task")["validation_accuracy"]
    for task in (0, 1):
        assert last[task + 1] == right[data.test_tasks == task].mean().item()
    assert 0 <= summary["validation_average_accuracy"] <= 1


# --- what is rejected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"validation": replace(CENTRAL, fraction=0.0), "evaluate_on": "both"},
            "evaluate_on=both: needs a validation set",
        ),
        (
            {"validation": replace(CENTRAL, fraction=0.01)},
            "selects none of the 40 training examples",
        ),
        (
            {"validation": replace(OWN, fraction=0.05)},
            "selects none of the 40 training examples",
        ),
    ],
)
def test_impossible_validation_set_is_rejected(options, words):
    with pytest.raises(ConfigError, match=words):
        make(**options)


# --- what stays
