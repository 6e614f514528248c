"""Test the figures of sweeps: how runs are grouped, and which values are shown."""

import json
import os
import re

import numpy as np
import pandas as pd
import yaml

from fedexp.analysis import draw_sweep, sweep_figures
from fedexp.analysis.means_table import Layout
from fedexp.analysis.page import mark_of, to_html, write_page
from fedexp.analysis.report import write_report, write_tables
from fedexp.analysis.sweep import find_sweep
from fedexp.cli.main import main
from fedexp.config.options import conf_directories
from fedexp.rundir.sweeps import own_jobs
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
    """Write a run directory with random class accuracies; return them, [rounds + 1, C]."""
    directory = folder / f"run{len(list(folder.glob('run*'))):02d}"
    (directory / ".hydra").mkdir(parents=True)
    rng = np.random.default_rng([seed, len(str(overrides))])
    accuracy = rng.uniform(0, 1, (rounds + 1, classes))
    make_files(directory, rounds=rounds, classes=classes, accuracy=accuracy, local=local)
    (directory / ".hydra" / "overrides.yaml").write_text(
        yaml.safe_dump([*overrides, f"seed={seed}"])
    )
    chosen = [text.partition("=")[2] for text in overrides if text.startswith("algorithm=")]
    content = {"status": status, "algorithm": (chosen or ["fedavg"])[0], "dataset": "digits"}
    content |= {"partition": "lda", "seed": seed, "rounds": rounds, "best_accuracy": 0.9}
    content |= {"accuracy": accuracy[-1].mean(), "forgetting": 0.1} | summary
    (directory / "summary.json").write_text(json.dumps(content))
    return accuracy


def settings(folder):
    return {each.name: each for each in sweep_figures.settings(own_jobs(folder))}


def methods(setting):
    return {method.name: len(method.runs) for method in setting.methods}


def test_figures_of_settings_with_other_letters_have_names_of_their_own(tmp_path):
    for path in ("a/b", "a_b"):
        for method in ("fedavg", "fedntd"):
            make_run(tmp_path, [f"partition.path={path}", f"algorithm={method}"])
    names = [name for name, _ in draw_sweep.sweep_pictures(own_jobs(tmp_path))]
    assert len(names) == len(set(names)) == 6
    start = "digits_lda_partition.path=a_b"
    assert {f"{start}_curves", f"{start}_curves_2"} <= {*names}


def test_runs_are_grouped_by_setting_and_method(tmp_path):
    """Overrides of all runs are in the title only. rounds=5 is a separate setting."""
    for experiment in ("fedntd/cifar10_s2", "fedntd/mnist_s2"):
        given = [f"experiment={experiment}", "participation=0.2"]
        for seed in (1, 0):
            make_run(tmp_path, [*given, "data_dir=x", "algorithm=fedavg"], seed)
            make_run(tmp_path, [*given, "algorithm=fedntd"], seed)
            make_run(tmp_path, [*given, "algorithm=fednova", "algorithm.variant=ccvr"], seed)
    make_run(tmp_path, [*given, "algorithm=fedavg", "rounds=5"])
    found = settings(tmp_path)
    assert list(found) == ["fedntd/cifar10_s2", "fedntd/mnist_s2", "fedntd/mnist_s2 rounds=5"]
    assert methods(found["fedntd/mnist_s2"]) == {
        "FedAvg": 2,
        "FedNova variant=ccvr": 2,
        "FedNTD": 2,
    }
    assert methods(found["fedntd/mnist_s2 rounds=5"]) == {"FedAvg": 1}
    assert [run.summary["seed"] for run in found["fedntd/mnist_s2"].methods[0].runs] == [0, 1]
    assert found["fedntd/mnist_s2"].title == "fedntd/mnist_s2, participation=0.2"


def test_options_of_a_single_algorithm_are_methods(tmp_path):
    for lr in (0.1, 0.01):
        make_run(tmp_path, [f"local.lr={lr}"])
    assert methods(settings(tmp_path)["digits lda"]) == {
        "FedAvg local.lr=0.01": 1,
        "FedAvg local.lr=0.1": 1,
    }


def test_option_with_one_value_for_each_method_belongs_to_the_method(tmp_path):
    """Methods with tuned learning rates are compared in one figure, as in the table."""
    for method, lr in (("fedavg", 0.1), ("fedprox", 0.01)):
        make_run(tmp_path, [f"algorithm={method}", f"local.lr={lr}"])
    shown = {"FedAvg local.lr=0.1": 1, "FedProx local.lr=0.01": 1}
    assert methods(settings(tmp_path)["digits lda"]) == shown
    make_run(tmp_path, ["algorithm=fedprox", "local.lr=0.1"])
    assert list(settings(tmp_path)) == ["digits lda local.lr=0.1", "digits lda local.lr=0.01"]


def test_curves_show_mean_and_standard_deviation(tmp_path):
    """Only rounds of all seeds are shown: the second seed diverged after round 2."""
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
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text() == "FedNTD (1 of 2 diverged)"
    assert legend.get_title().get_text() == "mean ± standard\ndeviation, n=2"


def test_legend_gives_the_number_of_seeds(tmp_path):
    make_run(tmp_path, ["algorithm=fedavg"])
    make_run(tmp_path, ["algorithm=fedntd"])

    def shown():
        (setting,) = settings(tmp_path).values()
        (legend,) = draw_sweep.curves(setting).legends
        texts = [text.get_text() for text in legend.get_texts()]
        return legend.get_title().get_text(), texts

    assert shown() == ("", ["FedAvg", "FedNTD"])
    make_run(tmp_path, ["algorithm=fedntd"], 1)
    assert shown() == ("mean ± standard\ndeviation", ["FedAvg, n=1", "FedNTD, n=2"])


def test_method_has_the_same_colour_in_the_pictures_of_all_sweeps(tmp_path):
    """The second sweep has more methods, two variants of FedNTD, and one that is no option."""

    def looks(folder, *methods):
        for method in methods:
            make_run(tmp_path / folder, [f"algorithm={method}"])
        (setting,) = settings(tmp_path / folder).values()
        return {method.name: str(draw_sweep.look(method.number)) for method in setting.methods}

    small = looks("small", "fedavg", "fedntd", "lwf")
    large = looks("large", "cfed", "ditto", "fedavg", "fedntd", "mine", "moon", "lwf")
    assert small.items() <= large.items()
    assert len(set(large.values())) == 7
    for beta in (0.3, 3):
        make_run(tmp_path / "large", ["algorithm=fedntd", f"algorithm.beta={beta}"])
    variants = looks("large", "l2p")
    assert large.items() - variants.items() <= {("mine", large["mine"])}
    assert len(set(variants.values())) == 10


def make_stream(folder, overrides, average, forgetting):
    """Write a run of two tasks of two rounds each, whose accuracy and F rank methods inversely."""
    make_run(
        folder,
        [*overrides, "scenario=class_incremental"],
        rounds=4,
        average_accuracy=average[-1],
        task_forgetting=forgetting,
        accuracy=1 - average[-1],
        forgetting=1 - forgetting,
    )
    directory = sorted(folder.glob("run*"))[-1]
    table = pd.read_csv(directory / "rounds.csv")
    table["task"] = [0, 1, 1, 2, 2]
    table["average_accuracy"] = [np.nan, *average]
    table["task_forgetting"] = [np.nan, np.nan, np.nan, forgetting, forgetting]
    table.to_csv(directory / "rounds.csv", index=False)
    rows = [
        {"round": r, "task": (r + 1) // 2, "evaluated_task": t, "accuracy": 0.5}
        for r in range(5)
        for t in (1, 2)
    ]
    pd.DataFrame(rows).to_csv(directory / "tasks.csv", index=False)


def test_continual_learning_has_the_same_measures_in_figure_and_table(tmp_path):
    make_stream(tmp_path, ["algorithm=cfed"], [0.1, 0.2, 0.3, 0.6], 0.25)
    make_stream(tmp_path, ["algorithm=fedavg"], [0.1, 0.2, 0.3, 0.4], 0.5)
    (setting,) = settings(tmp_path).values()
    above, below = draw_sweep.curves(setting).axes
    assert above.lines[0].get_ydata().tolist() == [0.1, 0.2, 0.3, 0.6]
    assert below.lines[0].get_ydata().tolist() == [0.25, 0.25]
    assert [line.get_xdata()[0] for line in above.lines if line.get_linestyle() == ":"] == [2.5]
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    first, second = (tmp_path / "table.md").read_text().splitlines()[4:8:3]
    assert first == "| | Average accuracy (%) | Task forgetting |"
    assert second == "| FedAvg | 40.00 | 0.500 |"


def make_search(folder):
    """Write three trials without a test on the test set."""
    for lr, value in ((0.0953, 0.7), (0.001132477255572942, 0.5), (0.01, 0.6)):
        values = {"validation_accuracy": value, "validation_forgetting": 1 - value}
        make_run(folder, ["validation.fraction=0.1", f"local.lr={lr}"], **values)
    for directory in folder.glob("run*"):
        path = directory / "summary.json"
        summary = json.loads(path.read_text())
        for name in ("accuracy", "best_accuracy", "forgetting"):
            del summary[name]
        path.write_text(json.dumps(summary | {"validation_best_accuracy": 0.9}))
        for name in ("class_accuracy.csv", "rounds.csv"):
            text = (directory / name).read_text().replace("test_", "validation_")
            (directory / name).write_text(text)
        (directory / "class_accuracy.csv").rename(directory / "class_accuracy_validation.csv")
        config = {"choices": {}, "rounds": 3, "validation": {"fraction": 0.1}}
        (directory / "config.yaml").write_text(yaml.safe_dump(config))


def test_tables_of_a_search_show_validation_measures(tmp_path):
    make_search(tmp_path)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[2] == "One seed, so nothing is in bold."
    assert lines[6:9] == [
        "| local.lr=0.0953 | 70.00 | 0.300 |",
        "| local.lr=0.01 | 60.00 | 0.400 |",
        "| local.lr=0.00113 | 50.00 | 0.500 |",
    ]


def test_curves_of_the_validation_set_are_not_among_those_of_the_test_set(tmp_path):
    """They were drawn as test accuracy, too."""
    make_search(tmp_path)
    make_run(tmp_path, ["local.lr=1"])
    (setting,) = settings(tmp_path).values()
    figure = draw_sweep.curves(setting)
    lines = {axes.get_ylabel(): [line.get_label() for line in axes.lines] for axes in figure.axes}
    assert lines["test accuracy"] == ["FedAvg local.lr=1"]
    assert len(lines["validation accuracy"]) == 3
    assert len(figure.legends[0].get_texts()) == 4


def test_report_writes_tables_and_figures(tmp_path):
    for name in ("fedavg", "fedntd"):
        make_run(tmp_path, ["experiment=fedntd/cifar10_s2", f"algorithm={name}"])
    paths = write_report(tmp_path, figures=True)
    kinds = ("curves", "class_accuracy", "class_accuracy_normalised")
    drawn = paths[3:]
    assert [path.name for path in drawn] == [f"fedntd_cifar10_s2_{kind}.png" for kind in kinds]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    page = write_page(tmp_path, paths).read_text()
    shown = sorted(path.relative_to(tmp_path).as_posix() for path in drawn)
    assert re.findall('src="(.+?)"', page) == shown
    assert len(list((tmp_path / "figures").iterdir())) == 3  # without temporary files
    # the formatted tables, the figures, and links to the csv files
    text = "<p>One seed, so nothing is in bold.</p>"
    places = [text, "<td>FedNTD</td>", "<h2>Rounds to target</h2>", "src=", 'href="table.csv"']
    assert [page.index(each) for each in places] == sorted(map(page.index, places))
    assert "<th>Accuracy (%)</th>" in page
    paths = write_report(tmp_path, figures=False)
    assert len(paths) == 3
    # no pictures of earlier reports
    assert "src=" not in write_page(tmp_path, paths).read_text()


def test_failed_figure_does_not_affect_tables(tmp_path, caplog, monkeypatch):
    make_run(tmp_path, ["algorithm=fedavg"])
    (tmp_path / "run00" / "partition.npz").write_text("no archive")
    monkeypatch.setattr("fedexp.analysis.report.log.propagate", True)
    assert len(write_report(tmp_path, figures=True)) == 3
    assert "the figures could not be drawn" in caplog.text
    assert main(["report", str(tmp_path)]) == 1
    assert main(["report", str(tmp_path), "--no-figures"]) == 0


def test_page_has_no_comparison_without_the_results_of_a_run(tmp_path, caplog):
    """The times of files, which are arbitrary in a copy, do not matter."""
    make_run(tmp_path, ["algorithm=fedavg"])
    (tmp_path / "comparison.md").write_text(f"compared\n{mark_of(tmp_path)}")

    def page():
        return write_page(tmp_path, write_report(tmp_path, figures=False)).read_text()

    os.utime(tmp_path / "comparison.md", (1, 1))
    assert "<p>compared</p>\n" in page()
    assert "summary.json" not in page()
    make_run(tmp_path, ["algorithm=fedntd"])
    os.utime(tmp_path / "comparison.md")
    assert "compared" not in page()
    assert "comparison.md: lacks the results of a run" in caplog.text


def test_page_shows_text_of_the_runs_as_text(tmp_path):
    make_run(tmp_path, ["algorithm=fedavg", "model.name=<script>"], accuracy=0.25)
    make_run(tmp_path, ["algorithm=fedavg", "model.name=b"], accuracy=0.5)
    page = write_page(tmp_path, write_report(tmp_path, figures=False)).read_text()
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "<td>25.00</td>" in page
    assert "<td>50.00</td>" in page


def test_page_has_the_marks_of_markdown():
    text = "# a\n\n`x=<1>` and **2**\n\n| | b\\|c |\n| --- | --- |\n| &lt;i> | **3 ± 1** |\n"
    rows = "<tr><th></th><th>b|c</th></tr>\n<tr><td>&lt;i&gt;</td><td><b>3 ± 1</b></td></tr>"
    assert to_html(text).replace("</tr><tr>", "</tr>\n<tr>") == (
        "<h1>a</h1>\n<p><code>x=&lt;1&gt;</code> and <b>2</b></p>\n"
        f"<div><table>{rows}</table></div>"
    )


def test_report_has_the_title_of_its_sweep(tmp_path):
    make_run(tmp_path / "fedntd_table1", ["experiment=fedntd/cifar10_s2", "algorithm=fedavg"])
    sweep = find_sweep(tmp_path / "fedntd_table1", conf_directories())
    paths = write_report(tmp_path / "fedntd_table1", figures=False)
    lines = (tmp_path / "fedntd_table1/table.md").read_text().splitlines()
    assert lines[:3] == ["# fedntd_table1", "", sweep.title]
    assert f"<p>{sweep.title}</p>" in write_page(tmp_path / "fedntd_table1", paths).read_text()
