"""Test the figures of a run: which are written, and that they show the values of the files."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedexp.core.storage import read_table
from fedexp.data.partitioned import Partition, partition_hash
from fedexp.figures import draw, interim_pictures, make_figures, style
from fedexp.figures.draw_details import class_reduction, local_series
from fedexp.figures.load import find_reduced_classes, load_run_data, run_title
from fedexp.metrics.record import Record

ALL = {
    "class_accuracy",
    "class_accuracy_normalised",
    "curves",
    "loss",
    "data_distribution",
    "local_round",
}
CONFIG = """
algorithm: {_target_: fedexp.algorithms.fedntd.FedNTD, beta: 1.0}
dataset: {_target_: fedexp.data.datasets.Digits, name: digits}
partition: {_target_: fedexp.data.partition_lda.LDA, alpha: 0.1}
alpha: 0.1
num_clients: 4
seed: 0
targets: [0.2, 0.99]
choices: {}
"""


def write_partition(path, counts, names):
    parts = tuple(np.split(np.arange(counts.sum()), np.cumsum(counts.sum(1))[:-1]))
    Partition(parts, counts, partition_hash(parts), {}).save(path, names)


def make_run(
    folder, rounds=3, classes=10, clients=4, interval=1, accuracy=None, local=True, names=None
):
    """A run directory with random accuracies, or the given ones [evaluated rounds, C]; returns the
    accuracies."""
    folder.mkdir(exist_ok=True)
    rng, number = np.random.default_rng(0), np.arange(rounds + 1)
    evaluated = number[::interval]
    if accuracy is None:
        accuracy = rng.uniform(0, 1, (len(evaluated), classes))
    counts = rng.integers(0, 30, (clients, classes))
    names = names or [f"class {c}" for c in range(classes)]
    write_partition(folder / "partition.npz", counts, names)
    table = pd.DataFrame({"train_loss": 2 - number / rounds, "forgetting": 0.1}, number)
    table["test_accuracy"] = pd.Series(np.nanmean(accuracy, 1), evaluated)
    table["test_loss"] = 1.5 + 0 * table["test_accuracy"]
    table.loc[0, "train_loss"] = table.loc[:1, "forgetting"] = np.nan
    table.to_csv(folder / "rounds.csv", index_label="round")
    keys = pd.MultiIndex.from_product([evaluated, range(classes)], names=["round", "class"])
    pd.Series(accuracy.ravel(), keys, name="accuracy").to_csv(folder / "class_accuracy.csv")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "summary.json").write_text(json.dumps({"status": "completed"}))
    if local:
        names = ["round", "client", "class"]
        keys = pd.MultiIndex.from_product(
            [range(1, rounds + 1), [0, 2], range(classes)], names=names
        )
        local_accuracy = pd.DataFrame({"accuracy": rng.uniform(0, 1, len(keys))}, keys)
        local_accuracy.to_csv(folder / "local_class_accuracy.csv")
    return accuracy


def make_stream(folder, tasks=3, rounds_per_task=2, interval=1, clients=4):
    """A run over a stream of tasks; returns random accuracies [evaluated rounds, tasks] and counts
    [tasks, K, C]. Each client has an order of the tasks, so the means are not those of columns."""
    rounds = tasks * rounds_per_task
    make_run(folder, rounds=rounds, interval=interval, clients=clients, local=False)
    rng, number = np.random.default_rng(1), np.arange(0, rounds + 1, interval)
    accuracy = rng.uniform(0, 1, (len(number), tasks))
    table = pd.DataFrame(accuracy, number, range(1, tasks + 1)).rename_axis(
        columns="evaluated_task"
    )
    table.index = pd.MultiIndex.from_arrays([number, -(-number // rounds_per_task)])
    table = table.rename_axis(index=["round", "task"]).stack().rename("accuracy")
    table.to_csv(folder / "tasks.csv")
    by_round = read_table(folder / "rounds.csv").set_index("round")
    for name in ("average_accuracy", "new_task_accuracy"):
        by_round[name] = pd.Series(rng.uniform(0, 1, len(number) - 1), number[1:])
    by_round.to_csv(folder / "rounds.csv")
    counts = rng.integers(0, 30, (tasks, clients, 10))
    for task, count in enumerate(counts, 1):
        name = "partition.npz" if task == 1 else f"partition_task{task}.npz"
        write_partition(folder / name, count, [f"class {c}" for c in range(10)])
    return accuracy, counts


def map_array(figure):
    """Return the values of the first heat map of a figure."""
    axes = next(a for a in figure.axes if a.collections or a.images)
    return np.ma.filled((*axes.collections, *axes.images)[0].get_array(), np.nan)


@pytest.fixture
def unrendered(monkeypatch):
    """Write figures without rendering them, which takes most of the time."""
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda self, path, **options: path.write_bytes(b"picture"),
    )


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"rounds": 12, "classes": 100, "clients": 60, "interval": 5},
        pytest.param({"rounds": 1, "classes": 2, "clients": 1}, marks=pytest.mark.slow),
    ],
)
def test_all_figures_are_written(tmp_path, monkeypatch, shape):
    # the style that users get
    monkeypatch.setattr(style, "OURS", Path(style.__file__).with_name("fedexp.mplstyle"))
    make_run(tmp_path, **shape)
    paths = make_figures(tmp_path)
    assert {p.stem for p in paths} == ALL
    assert sorted(paths) == sorted((tmp_path / "figures").iterdir())  # without temporary files
    for path in paths:
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG"
            assert 800 <= image.width <= 2000
            assert 300 <= image.height <= 2000
            assert len(image.convert("L").getcolors()) > 20  # not blank


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        pytest.param(["local_class_accuracy.csv"], ALL - {"local_round"}, marks=pytest.mark.slow),
        pytest.param(["config.yaml", "summary.json"], ALL, marks=pytest.mark.slow),
        (["rounds.csv"], ALL - {"curves", "loss"}),
        (["class_accuracy.csv"], {"curves", "loss", "data_distribution"}),
        (["partition.npz"], {"curves", "loss"}),
        (["rounds.csv", "class_accuracy.csv", "partition.npz"], set()),
    ],
)
def test_figures_of_missing_files_are_omitted(tmp_path, unrendered, missing, left):
    make_run(tmp_path)
    for name in missing:
        (tmp_path / name).unlink()
    assert {p.stem for p in make_figures(tmp_path)} == left
    assert left or not (tmp_path / "figures").exists()


def test_heat_map_shows_the_csv(tmp_path):
    accuracy = make_run(tmp_path, rounds=6, classes=4, interval=3, local=False)
    accuracy[1, 2] = np.nan
    make_run(tmp_path, rounds=6, classes=4, interval=3, accuracy=accuracy, local=False)
    run = load_run_data(tmp_path)
    assert list(run.record.rounds) == [0, 3, 6]
    np.testing.assert_array_equal(map_array(draw.class_accuracy(run, run.record)), accuracy.T)


def test_normalised_columns_sum_to_one_except_a_zero_column(tmp_path):
    accuracy = np.array([[0.0, 0.0, 0.0], [0.2, 0.0, 0.6], [0.5, np.nan, 0.0], [0.3, 0.3, 0.3]])
    make_run(tmp_path, classes=3, accuracy=accuracy, local=False)
    run = load_run_data(tmp_path)
    shown = map_array(draw.class_accuracy(run, run.record, normalised=True))
    expected = [[0, 0.25, 1, 1 / 3], [0, 0, np.nan, 1 / 3], [0, 0.75, 0, 1 / 3]]
    np.testing.assert_allclose(shown, expected)
    np.testing.assert_allclose(np.nansum(shown, 0), [0, 1, 1, 1])


def test_local_round_shows_local_models_between_the_global_models(tmp_path):
    accuracy = make_run(tmp_path, rounds=3, classes=5)
    table = read_table(tmp_path / "local_class_accuracy.csv")
    saved = table["accuracy"].to_numpy().reshape(3, 2, 5)
    run = load_run_data(tmp_path)
    expected = np.vstack([accuracy[2], saved[2], accuracy[3]])
    np.testing.assert_array_equal(draw.round_picture(run.record), expected)
    figure = draw.local_round(run, run.record)
    np.testing.assert_array_equal(map_array(figure), expected)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["global, round 2", "client 0", "client 2", "global, round 3"]


def test_pictures_during_a_run_show_the_view_that_was_tested(tmp_path):
    make_run(tmp_path, local=False)
    history = Record(np.ones((4, 10), dtype=np.int64))
    history.add(2, np.linspace(0, 1, 10))
    found = interim_pictures(tmp_path, {"validation": history})
    assert set(found) == {"class_accuracy_validation", "class_accuracy_normalised_validation"}


@pytest.mark.parametrize(
    ("rounds", "edges"),
    [
        ([0], [-0.5, 0.5]),
        ([0, 1, 2], [-0.5, 0.5, 1.5, 2.5]),
        ([0, 10, 20, 25], [-5, 5, 15, 22.5, 27.5]),  # the last round is always evaluated
    ],
)
def test_cells_of_a_heat_map_surround_their_round(rounds, edges):
    np.testing.assert_array_equal(style.cell_edges(np.array(rounds)), edges)


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (4, 10), (3432, 10)])
def test_data_distribution_shows_examples_per_client_and_class(tmp_path, clients, classes):
    make_run(tmp_path, classes=classes, clients=clients, local=False)
    run = load_run_data(tmp_path)
    totals, cells = draw.data_distribution(run, run.counts).axes[:2]
    values, edges, _ = totals.patches[0].get_data()
    np.testing.assert_array_equal(values, run.counts.sum(1))
    np.testing.assert_array_equal(edges[[0, -1]], cells.images[0].get_extent()[:2])
    np.testing.assert_array_equal(np.ma.filled(cells.images[0].get_array(), 0), run.counts.T)


def test_curves_show_evaluated_rounds_the_best_round_and_targets(tmp_path):
    """The initial model is better, but not the best of the run (`best_accuracy`)."""
    accuracy = np.array([[0.6, 0.4], [0.5, 0.3], [0.2, 0.2]])
    make_run(tmp_path, rounds=4, classes=2, interval=2, accuracy=accuracy, local=False)
    above, below = draw.curves(load_run_data(tmp_path)).axes
    lines = {line.get_label(): line for line in above.lines}
    assert list(lines) == [
        "test accuracy",
        "best: 0.400, round 2",
        "target 0.2: round 2",
        "target 0.99: never",
    ]
    np.testing.assert_allclose(lines["test accuracy"].get_xydata(), [[0, 0.5], [2, 0.4], [4, 0.2]])
    assert [line.get_label() for line in below.lines] == [draw.WHAT_F_IS]
    np.testing.assert_allclose(below.lines[0].get_xydata(), [[2, 0.1], [3, 0.1], [4, 0.1]])


def test_diverged_run_is_drawn_up_to_the_last_finite_values(tmp_path, unrendered):
    make_run(tmp_path, local=False)
    rows = [
        "round,test_accuracy,test_loss,train_loss",
        "0,0.1,2.3,",
        "1,0.3,400,2",
        "2,nan,inf,nan",
    ]
    (tmp_path / "rounds.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"status": "diverged"}))
    run = load_run_data(tmp_path)
    np.testing.assert_array_equal(run.points("test_loss"), [[0, 1], [2.3, 400]])
    figure = draw.loss(run)
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].get_xlim()[1] > 2  # the axis still ends at the last round
    assert figure.get_suptitle().endswith("seed 0, diverged")
    assert {p.stem for p in make_figures(tmp_path)} == ALL - {"local_round"}


def test_loss_figure_does_not_call_the_objective_cross_entropy(tmp_path):
    make_run(tmp_path, local=False)
    (axes,) = draw.loss(load_run_data(tmp_path)).axes
    assert axes.get_ylabel() == "loss"
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["train loss (objective),\nmean over clients", "test loss"]


@pytest.mark.parametrize(
    "shape",
    [
        {"tasks": 2, "rounds_per_task": 1},
        {"tasks": 3, "rounds_per_task": 20, "interval": 5},
        {"tasks": 10, "rounds_per_task": 3},
    ],
)
def test_tasks_figure_shows_the_csv(tmp_path, shape):
    accuracy, _ = make_stream(tmp_path, **shape)
    run = load_run_data(tmp_path)
    figure = draw.tasks(run, run.tasks)
    above, below = figure.axes[:2]
    np.testing.assert_array_equal(map_array(figure), accuracy.T)
    assert above.collections[0].get_clim() == (0, 1)
    average, new = below.lines[:2]
    assert [average.get_label(), new.get_label()] == [
        "average accuracy on the learned tasks",
        "new-task accuracy",
    ]
    table = read_table(tmp_path / "rounds.csv").dropna(subset="average_accuracy")
    for drawn, name in ((average, "average_accuracy"), (new, "new_task_accuracy")):
        np.testing.assert_array_equal(drawn.get_xydata(), table[["round", name]])


def test_titles_describe_the_run():
    choices = {"algorithm": "mine", "dataset": "cifar10", "partition": "sharding"}
    config = {"choices": choices, "shards_per_client": 2, "num_clients": 100, "seed": 3}
    title = "mine on cifar10, sharding shards_per_client=2, 100 clients, seed 3"
    assert run_title(config, {"status": "completed"}) == title
    assert run_title(config, {"status": "failed"}) == f"{title}, failed"
    assert run_title({}, {"algorithm": "fedavg", "dataset": "mnist"}) == "fedavg on mnist"
    own = config | {"partition": {"shards_per_client": 3}}  # partition.shards_per_client=3
    assert "shards_per_client=3" in run_title(own, {"status": "completed"})
    config["algorithm"] = {"paradigm": "centralized"}
    title = "mine on cifar10, all data on one client, seed 3"
    assert run_title(config, {"status": "completed"}) == title


def test_class_reduction_figure_shows_the_forgetting_degree():
    """A client that takes part in rounds 1 and 3 of 3: the degree is (0.5 - 0.25) / 0.5, then a
    gain, clipped."""
    history = Record(np.array([[[4]], [[1]]]), starts=(1, 3))
    for number, accuracy in enumerate((0.5, 0.1, 0.0, 0.2)):
        history.add(number, np.array([accuracy]))
    for number, accuracy in ((1, 0.25), (3, 0.9)):
        history.add_local(number, np.array([0]), np.array([[accuracy]]))
    rounds, degrees, accuracies = local_series(history, 0)
    assert rounds.tolist() == [1, 3]
    np.testing.assert_allclose(degrees, [[0.25 / 0.500001], [-1.0]])
    assert accuracies.tolist() == [[0.25], [0.9]]
    assert [each.shape for each in local_series(history, 1)] == [(0,), (0, 1), (0, 1)]
    config = {"schedule": {"classes": [{"round": 3, "shares": {"0": 0.25}}], "clients": None}}
    assert find_reduced_classes(config, history) == ((0, 0),)
    assert find_reduced_classes({}, history) == ()
    run = SimpleNamespace(reduced=((0, 0),), classes=("cat",), title="a run")
    above, below = class_reduction(run, history).axes
    assert below.lines[0].get_ydata().tolist() == [4, 4, 1]
    assert [line.get_xdata()[0] for line in above.lines[1:]] == [2.5]
