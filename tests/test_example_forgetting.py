"""Forgetting of single test examples (`forgetting_metric=events`)."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits

import fedexp
from fedexp.cli.main import main
from fedexp.core.errors import ConfigError
from fedexp.core.storage import read_csv
from fedexp.data.image_files import stratified_split
from fedexp.engine.base import Tested
from fedexp.figures import list_figures
from fedexp.figures.load import load_run_data
from fedexp.metrics import examples
from fedexp.metrics.forgetting_metric import ForgettingEvents
from fedexp.metrics.record import Record
from fedexp.rundir import files
from fedexp.rundir.reader import RunDirectory
from quick_runs import SMALL
from toy_federation import make_simulation

# rounds t = 1..4 (rows) and test examples (columns)
RIGHT = np.array(
    [
        [1, 0, 0, 1, 1],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 1],
        [1, 0, 1, 0, 1],
    ],
    dtype=bool,
)
EVENTS = [*SMALL, "forgetting_metric=events", "hardware.precision=fp64"]


def test_events_equal_hand_calculation():
    # Example 3 goes right, wrong, right, wrong: two events. Example 4 is wrong only in round 2.
    assert examples.forgetting_events(RIGHT).tolist() == [0, 0, 0, 2, 1]
    # Example 1 is never learned. Example 2 is learned in round 2 and stays right.
    assert examples.unforgettable(RIGHT).tolist() == [True, False, True, False, False]
    # Round 2 loses examples 3 and 4 and gains 2; round 3 gains 3 and 4; round 4 loses 3.
    assert examples.forgotten_share(RIGHT).tolist() == [0.4, 0.0, 0.2]
    assert examples.learned_share(RIGHT).tolist() == [0.2, 0.4, 0.0]


def recorded(right, labels):
    """A history with these predictions after round 0, in which all predictions are wrong."""
    history = Record(np.ones((2, 3), np.int64), labels=np.array(labels))
    for number, row in enumerate([np.zeros(len(labels), bool), *right]):
        history.add(number, np.full(3, row.mean()), row)
    return history


def test_columns_and_summary_equal_hand_calculation():
    history, metric = recorded(RIGHT, [0, 1, 2, 0, 1]), ForgettingEvents()
    assert metric.round_values(history) == {"forgotten_examples": 0.2, "learned_examples": 0.0}
    assert metric.summary(history) == pytest.approx(
        {
            "forgotten_examples": 0.6 / 3,
            "learned_examples": 0.6 / 3,
            "forgetting_events": 3 / 5,
            "unforgettable_examples": 2 / 5,
        },
        abs=1e-15,
    )
    before = metric.round_values(history.upto(2))
    assert before == {"forgotten_examples": 0.4, "learned_examples": 0.2}


def test_shares_are_undefined_before_the_second_round():
    for rounds in (0, 1):
        history = recorded(RIGHT[:rounds], [0, 1, 2, 0, 1])
        for values in (ForgettingEvents().round_values, ForgettingEvents().summary):
            assert all(np.isnan(value) for value in values(history).values())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    options = ["rounds=4", "keep_models=1", "algorithm=fedntd", "local.lr=0.5"]
    return fedexp.run([*EVENTS, *options], directory=tmp_path_factory.mktemp("runs") / "run")


def test_predictions_equal_those_of_the_kept_models(run):
    """The digits' test images are made without fedexp, and each kept model predicts them."""
    digits = load_digits()
    _, test = stratified_split(digits.target, 0.2, 0)
    images = torch.from_numpy((digits.images[test] / 16 - 0.3054) / 0.3761)[:, None]
    labels, right = digits.target[test], []
    for number in (1, 2, 3, 4):
        with torch.no_grad():
            right.append(run.model(number)(images).argmax(1).numpy() == labels)
    history = RunDirectory(run.directory).record()
    np.testing.assert_array_equal(history.correct(), np.array(right))
    np.testing.assert_array_equal(history.labels, labels)
    events = examples.forgetting_events(np.array(right))
    assert events.any(), "some examples are forgotten, so that the test can fail"
    table = run.examples
    assert table["label"].tolist() == labels.tolist()
    assert table["forgotten"].tolist() == events.tolist()
    assert table["correct"].tolist() == right[-1].tolist()
    first = [next((t + 1 for t in range(4) if right[t][i]), np.nan) for i in range(len(labels))]
    np.testing.assert_array_equal(table["learned"], first)


@pytest.mark.parametrize("as_floats", [False, True])
def test_tables_that_were_sorted_otherwise_are_read_in_their_order(as_floats, run, tmp_path):
    """Sorted by another column or shuffled, and saved by pandas, perhaps with floats. Without
    checksums, as in runs of earlier versions."""
    copy = Path(shutil.copytree(run.directory, tmp_path / "run"))
    (copy / files.CHECKSUMS).unlink()
    names = {path.name for path in copy.glob("*.csv")} - {files.CLASSES}
    assert names == {"rounds.csv", "clients.csv", "class_accuracy.csv", "example_correct.csv"}
    for name in names:
        rows = read_csv(copy / name)
        rows = rows.astype(float) if as_floats else rows
        rows.sample(frac=1, random_state=0).to_csv(copy / name, index=False)
    found = fedexp.load_run(copy)
    for name in ("rounds", "clients", "class_accuracy", "examples"):
        pd.testing.assert_frame_equal(getattr(found, name), getattr(run, name), check_dtype=False)
    assert RunDirectory(copy).record().cohorts == RunDirectory(run.directory).record().cohorts
    assert main(["compare", str(copy), str(run.directory)]) == 0


def test_figure_is_drawn(run):
    assert dict(list_figures(load_run_data(run.directory)))["example_forgetting"]().axes


def test_parts_of_the_test_set_are_joined_in_order(monkeypatch):
    monkeypatch.setattr("fedexp.engine.base.EVALUATION_BATCH", 2)
    simulation = make_simulation()
    runtime, params = simulation.runtime, simulation.initial
    whole = runtime.evaluate(params)
    assert whole.right.any()
    assert whole.right.sum() == whole.class_correct.sum()
    last = runtime.evaluation_batches
    parts = [runtime.evaluate(params, batches=part) for part in (range(1), range(1, last))]
    assert torch.equal(Tested.joined(parts).right, whole.right)


def test_run_without_the_metric_has_no_examples(run, tmp_path):
    copy = Path(shutil.copytree(run.directory, tmp_path / "run"))
    (copy / "example_correct.csv").unlink()
    with pytest.raises(ConfigError, match=r"example_correct\.csv: is missing"):
        fedexp.load_run(copy).examples  # noqa: B018


def test_algorithm_without_a_global_model_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="events: this metric needs a global model, but Local"):
        fedexp.run([*EVENTS, "algorithm=local_only"], directory=tmp_path / "run")
