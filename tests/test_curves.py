"""Learning curves: means over seeds, methods and settings."""

import numpy as np
import pytest
from reproduction.curves import draw_learning_curves, render_svg

from fedexp.analysis.sweep import load_sweep
from fedexp.papers.runs import read_runs
from test_compare import make_run
from toy_federation import CONF

S2 = "experiment=fedntd/cifar10_s2"


def drawn(folder):
    return draw_learning_curves(load_sweep("fedntd_table1", [CONF]), read_runs([folder]))


def test_figure_shows_the_mean_curve_of_each_method_and_setting(tmp_path):
    """FedAvg 0.2, 0.4 and 0.4, 0.8: means 0.3, 0.6."""
    for seed, curve in enumerate(([0.2, 0.4], [0.4, 0.8])):
        make_run(tmp_path, [S2, "algorithm=fedavg"], curve, seed=seed)
    make_run(tmp_path, [S2, "algorithm=fedntd"], [0.5, 0.5], seed=0)
    make_run(tmp_path, ["experiment=fedntd/cifar10_s3", "algorithm=fedntd"], [0.1, 0.2], seed=0)
    make_run(tmp_path, [S2, "algorithm=fedprox"], [0.5, 0.5], status="failed")
    axes = drawn(tmp_path).axes
    assert len(axes) == 2 * 3
    assert [each.get_ylabel() for each in axes[::3]] == ["fedntd/cifar10_s2", "fedntd/cifar10_s3"]
    assert [each.get_title() for each in axes[:3]] == [
        "accuracy, plain test",
        "accuracy, augmented test",
        "forgetting, augmented test",
    ]
    lines = {line.get_label(): line for line in axes[0].lines}
    assert {"fedavg, 2 seeds", "fedntd"} <= set(lines)
    assert not any(label.startswith("fedprox") for label in lines)
    fedavg = lines["fedavg, 2 seeds"]
    assert np.asarray(fedavg.get_xdata()).tolist() == [1, 2]
    assert np.asarray(fedavg.get_ydata()).tolist() == pytest.approx([0.3, 0.6])
    own = {line.get_color() for each in (axes[0], axes[3]) for line in each.lines}
    assert lines["fedntd"].get_color() == axes[3].lines[0].get_color(), "one colour everywhere"
    assert len(own) == 2


def test_equal_runs_give_equal_bytes(tmp_path):
    make_run(tmp_path, [S2, "algorithm=fedavg"], [0.2, 0.4], seed=0)
    assert render_svg(drawn(tmp_path)) == render_svg(drawn(tmp_path))


def test_nothing_is_drawn_without_rounds(tmp_path):
    assert drawn(tmp_path) is None
