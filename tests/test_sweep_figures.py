"""Pictures of sweeps: which are drawn, how runs are grouped, and that they show exactly what the
files say."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml

from fedexp.analysis import draw_sweep, sweep_figures
from fedexp.analysis.aggregate import write_report
from fedexp.analysis.compare import load_runs
from fedexp.metrics.forgetting import local_round_drop, round_drop
from test_figures import make_run as make_files


def make_run(
    folder,
    overrides,
    seed=0,
    status="completed",
    rounds=3,
    local=False,
    classes=3,
    column=None,
    **summary,
):
    """A run directory with random class accuracies; returns them [rounds + 1, C]."""
    directory = folder / f"run{len(list(folder.glob('run*'))):02d}"
    (directory / ".hydra").mkdir(parents=True)
    rng = np.random.default_rng([seed, len(str(overrides))])
    accuracy = rng.uniform(0, 1, (rounds + 1, classes))
    make_files(directory, rounds=rounds, classes=classes, accuracy=accuracy, local=local)
    (directory / ".hydra" / "overrides.yaml").write_text(
        yaml.safe_dump([*overrides, f"seed={seed}"])
    )
    algorithm = next(
        (o.partition("=")[2] for o in overrides if o.startswith("algorithm=")), "fedavg"
    )
    content = {
        "status": status,
        "algorithm": algorithm,
        "dataset": "digits",
        "partition": "lda",
        "seed": seed,
    }
    content |= {
        "rounds": rounds,
        "accuracy": accuracy[-1].mean(),
        "best_accuracy": 0.9,
        "forgetting": 0.1,
    } | summary
    (directory / "summary.json").write_text(json.dumps(content))
    return accuracy


def settings(folder):
    return {each.name: each for each in sweep_figures.settings(load_runs(folder))}


def methods(setting):
    return {method.name: len(method.runs) for method in setting.methods}


def test_methods_stand_side_by_side_in_each_setting(tmp_path):
    """Seeds are together; what all runs share is said once; rounds=5 is a setting of its own, never
    mixed in."""
    for experiment in ("fedntd/cifar10_s2", "fedntd/mnist_s2"):
        for method in (
            ["algorithm=fedavg"],
            ["algorithm=fedntd"],
            ["algorithm=fednova", "algorithm.variant=ccvr"],
        ):
            for seed in (1, 0):
                make_run(
                    tmp_path,
                    [f"experiment={experiment}", *method, "data_dir=x", "participation=0.2"],
                    seed,
                )
    make_run(
        tmp_path,
        ["experiment=fedntd/mnist_s2", "algorithm=fedavg", "participation=0.2", "rounds=5"],
    )
    found = settings(tmp_path)
    assert list(found) == ["fedntd/cifar10_s2", "fedntd/mnist_s2", "fedntd/mnist_s2 rounds=5"]
    assert methods(found["fedntd/mnist_s2"]) == {
        "fedavg": 2,
        "fedntd": 2,
        "fednova variant=ccvr": 2,
    }
    assert methods(found["fedntd/mnist_s2 rounds=5"]) == {"fedavg": 1}
    assert [run.summary["seed"] for run in found["fedntd/mnist_s2"].methods[0].runs] == [0, 1]
    assert found["fedntd/mnist_s2"].title == "fedntd/mnist_s2, participation=0.2"


def test_one_algorithm_s_options_are_its_methods(tmp_path):
    for lr in (0.1, 0.01):
        make_run(tmp_path, [f"local.lr={lr}"])
    assert methods(settings(tmp_path)["digits lda"]) == {
        "fedavg local.lr=0.1": 1,
        "fedavg local.lr=0.01": 1,
    }


def test_curves_are_mean_and_standard_deviation(tmp_path):
    """Of the rounds that all seeds have: the second seed has diverged after round 2."""
    first = make_run(tmp_path, ["algorithm=fedntd"], 0).mean(1)
    second = make_run(tmp_path, ["algorithm=fedntd"], 1, "diverged", rounds=2).mean(1)
    (setting,) = settings(tmp_path).values()
    figure = draw_sweep.curves(setting)
    axes = figure.axes[0]
    both = np.stack([first[:3], second])
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), [0, 1, 2])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), both.mean(0), rtol=1e-12)
    band = axes.collections[0].get_paths()[0].vertices
    spread = abs(both[0] - both[1]) / 2**0.5  # the standard deviation of two
    for r in range(3):
        edges = band[band[:, 0] == r, 1]
        np.testing.assert_allclose(
            [edges.min(), edges.max()], both.mean(0)[r] + [-spread[r], spread[r]], rtol=1e-9
        )
    assert figure.legends[0].get_texts()[0].get_text() == "fedntd (1 of 2 diverged), n=2"


@pytest.mark.slow
def test_heat_maps_have_the_lowest_seed_of_every_method_and_one_scale(tmp_path):
    runs = {
        name: [make_run(tmp_path, [f"algorithm={name}"], seed) for seed in (0, 1)]
        for name in ("fedavg", "fedntd", "fedprox", "moon", "scaffold")
    }
    (setting,) = settings(tmp_path).values()
    figure = draw_sweep.class_accuracy(setting, normalised=False)
    maps = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in maps] == [f"{name}, seed 0" for name in runs]
    for axes, accuracies in zip(maps, runs.values(), strict=True):
        image = axes.collections[0]
        np.testing.assert_array_equal(image.get_array(), accuracies[0].T)
        assert image.get_clim() == (0, 1)
        assert axes.get_ylim() == (2.5, -0.5)  # class 0 on top
    shares = draw_sweep.class_accuracy(setting, normalised=True).axes[0].collections[0].get_array()
    np.testing.assert_allclose(shares.sum(0), 1, rtol=1e-12)


def test_distributions_of_round_forgetting(tmp_path):
    """Global over rounds 2, 3, ... and, where local models were evaluated, over the same rounds and
    clients."""
    x, share = draw_sweep.distribution(np.array([0.3, 0.1, np.nan, 0.2, 0.1]))
    assert x.tolist() == [0.1, 0.1, 0.1, 0.2, 0.3]
    assert share.tolist() == [0, 0.25, 0.5, 0.75, 1]
    accuracy = make_run(tmp_path, ["algorithm=fedavg"], local=True)
    make_run(tmp_path, ["algorithm=fedntd"])
    (setting,) = settings(tmp_path).values()
    whole, local = draw_sweep.round_forgetting(setting).axes
    np.testing.assert_array_equal(whole.lines[0].get_xdata()[1:], np.sort(round_drop(accuracy)))
    assert (len(whole.lines), len(local.lines)) == (2, 1)
    saved = np.load(tmp_path / "run00" / "local_class_accuracy.npz")["accuracy"]  # [T, S, C]
    expected = np.sort(local_round_drop(accuracy[1:-1, None], saved[1:]).ravel())  # from round 2 on
    np.testing.assert_array_equal(local.lines[0].get_xdata()[1:], expected)


def test_accuracy_and_forgetting_against_a_parameter(tmp_path):
    """FedNTD Fig. 15: beta in seeds 0 and 1, tau apart from it, FedAvg dotted."""
    for seed in (0, 1):
        make_run(tmp_path, ["experiment=a", "algorithm=fedavg"], seed, accuracy=0.3)
        for beta, accuracy in ((3, 0.6), (0.3, 0.5), (1, 0.7)):
            make_run(
                tmp_path,
                ["experiment=a", "algorithm=fedntd", f"algorithm.beta={beta}"],
                seed,
                accuracy=accuracy + 0.1 * seed,
                forgetting=beta / 10,
            )
        for tau in (1, 2):
            make_run(tmp_path, ["experiment=a", "algorithm=fedntd", f"algorithm.tau={tau}"], seed)
    beta, tau = sorted(
        sweep_figures.parameter_sweeps(load_runs(tmp_path)), key=lambda each: each.key
    )
    assert (beta.key, tau.key) == ("algorithm.beta", "algorithm.tau")
    (line,) = beta.lines
    assert line.name == "fedntd"
    assert {x: len(runs) for x, runs in line.points.items()} == {0.3: 2, 1: 2, 3: 2}
    assert [method.name for method in beta.baselines] == ["fedavg"]
    above, below = draw_sweep.parameter(beta).axes
    points, dotted = above.lines[0], above.lines[-1]
    assert points.get_xdata().tolist() == [0.3, 1, 3]
    np.testing.assert_allclose(points.get_ydata(), [0.55, 0.75, 0.65], rtol=1e-12)
    assert (dotted.get_linestyle(), dotted.get_ydata()[0]) == (":", 0.3)
    np.testing.assert_allclose(below.lines[0].get_ydata(), [0.03, 0.1, 0.3])
    assert above.get_xscale() == "log"


def test_a_stream_of_tasks_has_the_curves_of_its_own_measures(tmp_path):
    make_run(tmp_path, ["algorithm=cfed"])
    directory = tmp_path / "run00"
    table = pd.read_csv(directory / "rounds.csv")
    table["average_accuracy"], table["new_task_accuracy"] = (
        [np.nan, 0.1, 0.2, 0.3],
        [np.nan, 0.4, 0.5, 0.6],
    )
    table.to_csv(directory / "rounds.csv", index=False)
    rows = [{"round": r, "task": min(r, 1), "evaluated_task": 1, "accuracy": 0.5} for r in range(4)]
    pd.DataFrame(rows).to_csv(directory / "tasks.csv", index=False)
    (setting,) = settings(tmp_path).values()
    above, below = draw_sweep.curves(setting).axes
    assert above.lines[0].get_ydata().tolist() == [0.1, 0.2, 0.3]
    assert below.lines[0].get_ydata().tolist() == [0.4, 0.5, 0.6]


def test_the_report_has_tables_and_pictures(tmp_path):
    for name in ("fedavg", "fedntd"):
        make_run(tmp_path, ["experiment=fedntd/cifar10_s2", f"algorithm={name}"])
    paths = write_report(tmp_path, figures=True)
    kinds = ("curves", "class_accuracy", "class_accuracy_normalised", "round_forgetting")
    assert [path.name for path in paths[4:]] == [f"fedntd_cifar10_s2_{kind}.png" for kind in kinds]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[4:])
    assert len(list((tmp_path / "figures").iterdir())) == 4  # nothing half-written
    assert len(write_report(tmp_path, figures=False)) == 4


def test_a_picture_that_fails_costs_no_table(tmp_path, caplog, monkeypatch):
    make_run(tmp_path, ["algorithm=fedavg"])
    (tmp_path / "run00" / "partition.npz").write_text("no archive")
    monkeypatch.setattr("fedexp.analysis.aggregate.log.propagate", True)
    assert len(write_report(tmp_path, figures=True)) == 4
    assert "the figures could not be drawn" in caplog.text
