"""Figures in the layouts of the papers: each is drawn, and shows the values of the files."""

import logging
import re

import numpy as np
import pandas as pd
import pytest

from fedexp.analysis.sweep import load_sweep
from fedexp.config.options import list_options
from fedexp.core.errors import ConfigError
from fedexp.figures.load import load_run_data
from fedexp.metrics import forgetting
from fedexp.papers import draw_paper
from fedexp.papers.paper_figures import draw_picture, label_runs, make_pictures
from fedexp.rundir.sweeps import find_jobs
from test_sweep_figures import make_run
from toy_federation import CONFS

SWEEPS = [name for name in list_options("sweep", CONFS) if load_sweep(name, CONFS).pictures]
# the runs here keep none
NEED_MODELS = ("fedntd_fig14", "fedntd_fig17", "fedntd_fig18", "fedntd_fig19")


def runs_of(sweep, folder, seeds=(0,)):
    """Make a directory for each run of a sweep, with three rounds, five classes and four clients in
    each round."""
    for block in sweep.blocks:
        for combination in block.combinations():
            for seed in seeds:
                overrides = [*block.fixed, *(f"{key}={value}" for key, value in combination)]
                make_run(folder, overrides, seed, local=True, classes=5)
    rng = np.random.default_rng(3)
    keys = pd.MultiIndex.from_product(
        [range(1, 4), range(4), range(5)], names=["round", "client", "class"]
    )
    for path in folder.glob("*/local_class_accuracy.csv"):
        pd.DataFrame({"accuracy": rng.uniform(0, 1, len(keys))}, keys).to_csv(path)
    return find_jobs(folder)


@pytest.mark.parametrize("name", SWEEPS)
def test_each_picture_of_each_sweep_is_drawn(name, tmp_path, caplog):
    sweep = load_sweep(name, CONFS)
    with caplog.at_level(logging.WARNING, "fedexp"):
        drawn = dict(make_pictures(sweep, runs_of(sweep, tmp_path)))
    if name in NEED_MODELS:
        assert not drawn
        assert len(caplog.messages) >= len(sweep.pictures)
        for message in caplog.messages:
            assert re.match(rf"the figure {name}.* was not drawn: .* (kept|saved)", message)
        return
    assert len(drawn) == len(sweep.pictures), caplog.text
    assert all(each.startswith(name) for each in drawn)
    assert all(figure().axes for figure in drawn.values())


def settings_of(name, folder, **options):
    sweep = load_sweep(name, CONFS)
    return label_runs(sweep, runs_of(sweep, folder, **options)), sweep


def test_labels_and_order_are_those_of_the_sweep_file(tmp_path):
    settings, sweep = settings_of("fedntd_fig2c", tmp_path, seeds=(0, 1))
    backwards = label_runs(sweep, find_jobs(tmp_path)[::-1])
    assert [(s.name, [m.name for m in s.methods]) for s in backwards] == [
        (s.name, [m.name for m in s.methods]) for s in settings
    ]
    assert [each.name for each in settings] == ["IID", "alpha=0.5", "alpha=0.3", "alpha=0.1"]
    assert [[m.name for m in each.methods] for each in settings] == [["CIFAR-10", "CIFAR-100"]] * 4
    assert all(len(method.runs) == 2 for each in settings for method in each.methods)


def test_changed_fixed_override_keeps_the_labels(tmp_path):
    """Fewer rounds than in the sweep's file: Hydra notes only the last value of a key."""
    for seed in (0, 1):
        for algorithm in ("fedavg", "flashback"):
            run = [
                "experiment=flashback/cifar10_lda0.1",
                f"algorithm={algorithm}",
                "rounds=3",
                f"seed={seed}",
            ]
            make_run(tmp_path, run, seed, classes=5)
    sweep = load_sweep("flashback_fig1", CONFS)
    (setting,) = label_runs(sweep, find_jobs(tmp_path))
    assert (setting.name, [method.name for method in setting.methods]) == (
        "CIFAR10 (beta=0.1)",
        ["FedAvg", "Flashback"],
    )
    assert [name for name, _ in make_pictures(sweep, find_jobs(tmp_path))] == [
        "flashback_fig1_a",
        "flashback_fig1_b",
    ]


def test_added_override_makes_separate_methods(tmp_path):
    """A second learning rate on the command line is not another seed. `only` still selects the
    methods."""
    for seed in (0, 1):
        for algorithm in ("fedavg", "flashback"):
            for lr in ("0.1", "0.01"):
                run = [
                    "experiment=flashback/cifar10_lda0.1",
                    f"algorithm={algorithm}",
                    f"seed={seed}",
                ]
                make_run(tmp_path, [*run, "rounds=50", f"local.lr={lr}"], seed, classes=5)
    sweep = load_sweep("flashback_fig1", CONFS)
    (setting,) = label_runs(sweep, find_jobs(tmp_path))
    assert sorted(method.name for method in setting.methods[:2]) == [
        "FedAvg, local.lr=0.01",
        "FedAvg, local.lr=0.1",
    ]
    assert [len(method.runs) for method in setting.methods] == [2] * 4
    figure = draw_picture({"kind": "curves", "only": ["FedAvg"]}, [setting], "title")
    assert len(figure.axes[0].lines) == 2


def test_class_curves_have_the_colours_of_the_legend(tmp_path):
    """The colours do not depend on the number of rounds."""
    sweep = load_sweep("fedka_fig1", CONFS)
    make_run(tmp_path, ["experiment=fedka/cifar10", "algorithm=fedavg"], rounds=25, classes=5)
    figure = draw_paper.class_curves(label_runs(sweep, find_jobs(tmp_path)), sweep.title)
    history = load_run_data(next(tmp_path.glob("run*"))).record
    for c, (line, key) in enumerate(
        zip(figure.axes[0].lines, figure.legends[0].get_lines(), strict=False)
    ):
        if c < 5:
            np.testing.assert_allclose(line.get_ydata(), history.matrix[:, c])
            assert line.get_color() == key.get_color() == f"C{c}"


def test_consistency_is_the_cosine_of_consecutive_rounds(tmp_path):
    settings, sweep = settings_of("fedntd_fig2", tmp_path)
    axes = draw_paper.consistency(settings, sweep.title).axes[0]
    for line, setting in zip(axes.lines, settings, strict=True):
        matrix = setting.methods[0].files[0].record.matrix
        np.testing.assert_allclose(line.get_ydata(), forgetting.consistency(matrix))
        assert line.get_label() == setting.name


def test_bars_are_means_over_seeds(tmp_path):
    """The forgetting is 0.1 in each file."""
    settings, sweep = settings_of("fedntd_fig2c", tmp_path)
    axes = draw_paper.levels(settings, sweep.title).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.1] * 8)
    assert [text.get_text() for text in axes.get_xticklabels()] == [
        "IID",
        "alpha=0.5",
        "alpha=0.3",
        "alpha=0.1",
    ]


def test_round_picture_shows_the_requested_round(tmp_path):
    settings, sweep = settings_of("flashback_fig2", tmp_path)
    first = settings[0].methods[0].files[0].record
    image = draw_paper.round_models(settings, sweep.title, round=2).axes[0].images[0].get_array()
    np.testing.assert_allclose(image[0], first.class_accuracy[1])
    np.testing.assert_allclose(image[1:-1], first.local_class_accuracy[1])
    np.testing.assert_allclose(image[-1], first.class_accuracy[2])
    past_the_end = (
        draw_paper.round_models(settings, sweep.title, round=100).axes[0].images[0].get_array()
    )
    np.testing.assert_allclose(past_the_end[-1], first.class_accuracy[3])


def test_classes_are_dominant_non_dominant_or_missing():
    """Of 100 examples in 5 classes, a class is dominant from 0.5 / 5 = 10 % on."""
    counts = np.array([80, 10, 9, 1, 0])
    assert draw_paper.classify_classes(counts) == [
        "dominant",
        "dominant",
        "non-dominant",
        "non-dominant",
        "missing",
    ]
    assert draw_paper.choose_non_dominant(counts) == 2  # with most examples
    # there is none: the rarest
    assert draw_paper.choose_non_dominant(np.array([50, 20, 30, 0, 0])) == 1


def test_forgetting_degree_of_a_client_equals_its_formula(tmp_path):
    """(before - local) / (before + 1e-6), at least -1, in each round."""
    settings, sweep = settings_of("fedka_fig2", tmp_path)
    method = settings[0].methods[0]
    history = method.files[0].record
    rounds, degree, local = draw_paper.select_local_series(method, 3)
    assert rounds.tolist() == [1, 2, 3]
    before = np.stack(history.class_accuracy[:3])
    mine = np.stack([each[3] for each in history.local_class_accuracy])
    np.testing.assert_array_equal(local, mine)
    np.testing.assert_allclose(
        degree, np.maximum((before - mine) / (before + 1e-6), -1), rtol=1e-12
    )
    axes = draw_paper.client_classes(settings, sweep.title, client=3).axes[0]
    np.testing.assert_allclose(axes.lines[2].get_ydata(), degree[:, 2])
    with pytest.raises(ConfigError, match="client 7"):
        draw_paper.client_classes(settings, sweep.title, client=7)


def test_missing_runs_are_reported(tmp_path):
    sweep = load_sweep("flashback_fig1", CONFS)
    settings = label_runs(sweep, runs_of(sweep, tmp_path))
    with pytest.raises(ConfigError, match="no finished run of FedXYZ"):
        draw_picture({"kind": "class_maps", "only": ["FedXYZ"]}, settings, "title")
