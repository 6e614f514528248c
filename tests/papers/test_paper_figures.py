"""Figures in the layouts of the papers: each is drawn, and shows the values of the files."""

import logging
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from fedexp.core.errors import ConfigError
from fedexp.metrics import forgetting
from fedexp.rundir.sweeps import own_jobs
from fedexp_papers import pictures
from fedexp_papers.figures import label_runs, make_pictures
from fedexp_papers.sweeps import all_paper_sweeps, load_paper_sweep
from test_sweep_figures import make_run

SWEEPS = [sweep.name for sweep in all_paper_sweeps() if sweep.pictures]
# the analyses of these figures write their tables within a run; a test below draws such tables
NEED_TABLES = ("fedntd_fig6", "fedntd_fig8", "fedntd_fig11", "fedntd_fig12")
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
    for path in folder.glob("*/rounds.csv"):
        table = pd.read_csv(path)
        columns = {f"{name}_accuracy": table["test_accuracy"] for name in ("new_task", "average")}
        table.assign(**columns).to_csv(path, index=False)
    for path in folder.glob("*/local_class_accuracy.csv"):
        pd.DataFrame({"accuracy": rng.uniform(0, 1, len(keys))}, keys).to_csv(path)
    return own_jobs(folder)


@pytest.mark.parametrize("name", SWEEPS)
def test_each_picture_of_each_sweep_is_drawn(name, tmp_path, caplog):
    sweep = load_paper_sweep(name)
    with caplog.at_level(logging.WARNING, "fedexp"):
        drawn = dict(make_pictures(sweep, runs_of(sweep, tmp_path)))
    if name in NEED_TABLES:
        curves = [each["name"] for each in sweep.pictures if each["kind"] == "curves"]
        assert list(drawn) == [f"{name}_{each}" for each in curves]
        assert re.search("no run has the table", caplog.text)
        return
    if name in NEED_MODELS:
        assert not drawn
        assert len(caplog.messages) >= len(sweep.pictures)
        for message in caplog.messages:
            assert re.match(rf"the figure {name}.* was not drawn: .* (kept|saved)", message)
        return
    assert len(drawn) >= len(sweep.pictures), caplog.text
    assert all(each.startswith(name) for each in drawn)
    assert all(figure().axes for figure in drawn.values())


def test_title_of_a_single_run_names_the_figure_and_the_method(tmp_path, monkeypatch):
    def results(runs, given, title):
        return iter([SimpleNamespace(draw=lambda: title)])

    monkeypatch.setattr("fedexp_papers.figures.make_results", results)
    sweep = load_paper_sweep("fedntd_fig18")
    (draw,) = dict(make_pictures(sweep, runs_of(sweep, tmp_path))).values()
    assert draw() == "FedNTD Fig. 18, IID, then s=2, FedAvg"


def settings_of(name, folder, **options):
    sweep = load_paper_sweep(name)
    return label_runs(sweep, runs_of(sweep, folder, **options)), sweep


def test_labels_and_order_are_those_of_the_sweep_file(tmp_path):
    settings, sweep = settings_of("fedntd_fig2c", tmp_path, seeds=(0, 1))
    backwards = label_runs(sweep, own_jobs(tmp_path)[::-1])
    assert [(s.name, [m.name for m in s.methods]) for s in backwards] == [
        (s.name, [m.name for m in s.methods]) for s in settings
    ]
    assert [each.name for each in settings] == ["IID", "alpha=0.5", "alpha=0.3", "alpha=0.1"]
    assert [[m.name for m in each.methods] for each in settings] == [["CIFAR-10", "CIFAR-100"]] * 4
    assert [[m.number for m in each.methods] for each in settings] == [[0, 1]] * 4
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
    sweep = load_paper_sweep("flashback_fig1")
    (setting,) = label_runs(sweep, own_jobs(tmp_path))
    assert (setting.name, [method.name for method in setting.methods]) == (
        "CIFAR10 (beta=0.1)",
        ["FedAvg", "Flashback"],
    )
    assert [name for name, _ in make_pictures(sweep, own_jobs(tmp_path))] == [
        "flashback_fig1_a",
        "flashback_fig1_b",
    ]


def test_consistency_is_the_cosine_of_consecutive_rounds(tmp_path):
    settings, sweep = settings_of("fedntd_fig2", tmp_path)
    axes = pictures.consistency(settings, sweep.title).axes[0]
    for line, setting in zip(axes.lines, settings, strict=True):
        matrix = setting.methods[0].files[0].record.matrix
        np.testing.assert_allclose(line.get_ydata(), forgetting.consistency(matrix))
        assert line.get_label() == setting.name
    with pytest.raises(ConfigError, match="no run has values of absent"):
        pictures.curves(settings, sweep.title, {"absent": "a column that no run has"})


def test_round_picture_shows_the_requested_round(tmp_path):
    settings, sweep = settings_of("flashback_fig2", tmp_path)
    first = settings[0].methods[0].files[0].record
    image = pictures.round_models(settings, sweep.title, round=2).axes[0].images[0].get_array()
    np.testing.assert_allclose(image[0], first.class_accuracy[1])
    np.testing.assert_allclose(image[1:-1], first.local_class_accuracy[1])
    np.testing.assert_allclose(image[-1], first.class_accuracy[2])
    past_the_end = (
        pictures.round_models(settings, sweep.title, round=100).axes[0].images[0].get_array()
    )
    np.testing.assert_allclose(past_the_end[-1], first.class_accuracy[3])


def test_classes_are_dominant_non_dominant_or_missing():
    """Of 100 examples in 5 classes, a class is dominant from 0.5 / 5 = 10 % on."""
    counts = np.array([80, 10, 9, 1, 0])
    assert pictures.classify_classes(counts) == [
        "dominant",
        "dominant",
        "non-dominant",
        "non-dominant",
        "missing",
    ]
    assert pictures.choose_non_dominant(counts) == 2  # with most examples
    # there is none: the rarest
    assert pictures.choose_non_dominant(np.array([50, 20, 30, 0, 0])) == 1
    method = SimpleNamespace(files=[SimpleNamespace(counts=np.array([counts, 0 * counts]))])
    with pytest.raises(ConfigError, match="does not contain examples of client 1"):
        pictures.require_counts(method, 1)


def test_forgetting_degree_of_a_client_equals_its_formula(tmp_path):
    """(before - local) / (before + 1e-6), at least -1, in each round."""
    settings, sweep = settings_of("fedka_fig2", tmp_path)
    method = settings[0].methods[0]
    history = method.files[0].record
    rounds, degree, local = pictures.select_local_series(method, 3)
    assert rounds.tolist() == [1, 2, 3]
    before = np.stack(history.class_accuracy[:3])
    mine = np.stack([each[3] for each in history.local_class_accuracy])
    np.testing.assert_array_equal(local, mine)
    np.testing.assert_allclose(
        degree, np.maximum((before - mine) / (before + 1e-6), -1), rtol=1e-12
    )
    axes = pictures.client_classes(settings, sweep.title, client=3).axes[0]
    np.testing.assert_allclose(axes.lines[2].get_ydata(), degree[:, 2])
    looks = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
    assert len(set(looks)) == len(looks)  # also of classes of the same type
    with pytest.raises(ConfigError, match="client 7"):
        pictures.client_classes(settings, sweep.title, client=7)


def test_round_forgetting_is_shown_as_distribution(tmp_path):
    """Rounds count from 2 on, for local models with all clients."""
    settings, sweep = settings_of("flashback_fig4", tmp_path)
    first, second = pictures.round_forgetting(settings[:1], sweep.title).axes[:2]
    history = settings[0].methods[0].files[0].record
    assert first.lines[0].get_drawstyle() == "steps-post"
    shown = first.lines[0].get_xydata().T
    drops = forgetting.round_drop(history.matrix)
    np.testing.assert_array_equal(shown, [np.sort(drops), [0.5, 1]])
    local = np.stack(history.local_class_accuracy[1:])  # from round 2 on
    before = np.stack(history.class_accuracy[1:3])[:, None]
    expected = np.unique(forgetting.local_round_drop(before, local))
    np.testing.assert_array_equal(second.lines[0].get_xdata(), expected)
    shutil.rmtree(tmp_path)
    for method in settings[0].methods:
        make_run(tmp_path, method.runs[0].overrides, rounds=1)
    first_round = label_runs(sweep, own_jobs(tmp_path))
    with pytest.raises(ConfigError, match="at least two evaluated rounds"):
        pictures.round_forgetting(first_round, sweep.title)


def test_measures_are_drawn_against_a_parameter(tmp_path):
    """As in FedNTD Fig. 15, without another parameter, tau."""
    given = ["experiment=fedntd/cifar10_s2", "algorithm.tau_squared=false", "algorithm=fedntd"]
    for seed in (0, 1):
        make_run(tmp_path, [given[0], "algorithm=fedavg"], seed, accuracy=0.3)
        make_run(tmp_path, [*given, "algorithm.tau=2"], seed)
        for beta, accuracy in ((3, 0.6), (0.3, 0.5), (1, 0.7)):
            values = {"accuracy": accuracy + 0.1 * seed, "forgetting": beta / 10}
            make_run(tmp_path, [*given, f"algorithm.beta={beta}"], seed, **values)
    settings = label_runs(load_paper_sweep("fedntd_fig15"), own_jobs(tmp_path))
    above, below = pictures.parameter(settings, "title", "algorithm.beta").axes
    assert [text.get_text() for text in above.get_xticklabels()] == ["0.3", "1", "3"]
    points, dotted = above.lines[0], above.lines[-1]
    assert points.get_xdata().tolist() == [0.3, 1, 3]
    assert points.get_ydata().tolist() == pytest.approx([0.55, 0.75, 0.65], rel=1e-12)
    assert (dotted.get_linestyle(), dotted.get_ydata().tolist()) == (":", [0.3, 0.3])
    assert below.lines[0].get_ydata().tolist() == pytest.approx([0.03, 0.1, 0.3])


def test_analysis_table_is_averaged_over_clients(tmp_path):
    """Clients 3 and 5 have 0.2 and 0.6 before training, and 0.8 and 1 after the second epoch of
    round 2. The divergences 1, 2 and 3 of the whole model rise with the distance."""
    settings, sweep = settings_of("fedntd_fig8", tmp_path)
    epochs = "round,client,epoch,a\n1,3,0,9\n2,3,0,0.2\n2,5,0,0.6\n2,3,1,0.8\n2,5,1,1\n"
    layers = "round,client,layer,l1,distribution_distance\n"
    layers += "1,3,total,1,0.1\n1,3,conv,99,\n1,5,total,2,0.2\n2,3,total,3,0.3\n"
    for run in own_jobs(tmp_path):
        (run.directory / "local_epochs.csv").write_text(epochs)
        (run.directory / "weight_divergence.csv").write_text(layers)

    def panel(**options):
        return pictures.analysed(settings, "title", **options).axes[0]

    def line(**options):
        return panel(**options).lines[0]

    shown = line(table="local_epochs", columns={"a": "A"}, x="epoch", last=["round"])
    assert shown.get_xydata().tolist() == [[0, 0.4], [1, 0.9]]
    shown = line(table="local_epochs", columns={"a": "A"}, last=["epoch"])
    assert shown.get_xydata().tolist() == [[1, 9], [2, 0.9]]
    points = {"table": "weight_divergence", "columns": {"l1": "L1"}, "x": "distribution_distance"}
    (cloud, _) = panel(**points).collections  # one of each method
    assert cloud.get_offsets().tolist() == [[0.1, 1], [0.2, 2], [0.3, 3]]
    first, also_first, second = cloud.get_facecolors()[:, 3]
    assert 0 < first == also_first < second < 1
    assert line(**points).get_label().endswith(": correlation 1.00")
    layers += "".join(f"{i},3,total,{i},0.{i}\n" for i in range(100, 200))
    for run in own_jobs(tmp_path):
        (run.directory / "weight_divergence.csv").write_text(layers)
    settings = label_runs(sweep, own_jobs(tmp_path))
    assert len(panel(**points).collections[0].get_offsets()) == 103
    assert line(**points).get_marker() == "o"
