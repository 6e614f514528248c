"""The table of means: its layout, its marks, and the runs that count."""

import itertools
import shutil

import numpy as np
import pandas as pd
import pytest

from fedexp.analysis.frame import tidy
from fedexp.analysis.layout import all_markdown, markdown
from fedexp.analysis.means_table import Layout, make_table
from fedexp.analysis.naming import displayed, ordered
from fedexp.analysis.report import write_tables
from fedexp.analysis.significance import OVERALL, differences, find_best, holm, interval, tabulate
from fedexp.cli.main import main
from fedexp.core.errors import ConfigError
from fedexp.rundir.sweeps import own_jobs
from test_sweep_figures import make_run


def make(folder, results):
    """Write runs of several seeds. results: overrides -> (accuracies, None for a diverged run;
    forgetting)."""
    for overrides, (accuracies, forgetting) in results.items():
        for seed, accuracy in enumerate(accuracies):
            status = "completed" if accuracy is not None else "diverged"
            values = {"accuracy": accuracy or 0.1, "forgetting": forgetting, "status": status}
            make_run(folder, overrides.split(), seed, **values)


def body(folder, **layout):
    """Return the cells of each row of the table, including the header."""
    section = make_table(tidy(own_jobs(folder)), Layout(**layout))
    head, _, *rows = markdown(section.table, section.corner).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows)]


METHODS = {
    # mean 55, standard deviation 5 * sqrt(6 / 5) = 5.48 points
    "algorithm=fedavg": ((0.5, 0.6) * 3, 0.3),
    "algorithm=fedntd": ((0.70,) * 6, 0.2),
    "algorithm=fedprox algorithm.mu=0.1": ((0.4,) * 5 + (None,), 0.1),
    "algorithm=fedprox algorithm.mu=1.0": ((None,) * 6, 0.1),
}


def test_rows_are_methods_and_columns_are_metrics(tmp_path):
    make(tmp_path, METHODS)
    assert body(tmp_path) == [
        ["", "Accuracy (%)", "Forgetting"],
        ["FedNTD", "**70.00 ± 0.00**", "**0.200 ± 0.000**"],
        ["FedAvg", "55.00 ± 5.48", "0.300 ± 0.000"],
        ["FedProx mu=0.1", "40.00 ± 0.00 (n=5)†", "0.100 ± 0.000 (n=5)†"],
        ["FedProx mu=1.0", "diverged", "diverged"],
    ]
    text = all_markdown([make_table(tidy(own_jobs(tmp_path)), Layout())])
    assert text.endswith("\n\n`†` without the seeds that diverged.\n")
    head = (
        "Mean ± standard deviation over 6 seeds, or over the number n in a cell; bold: the best, "
    )
    assert text.startswith(head)


def test_text_of_other_people_is_neither_html_nor_a_formula(tmp_path):
    """The name of an algorithm may be such text."""
    name = "=HYPERLINK(1)|<script>alert(1)</script>"
    make_run(tmp_path, [f"algorithm={name}"], 0, algorithm=name)
    make_run(tmp_path, ["algorithm=fedavg"], 0, forgetting=-0.5)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    text, cells = (tmp_path / "table.md").read_text(), pd.read_csv(tmp_path / "table.csv")
    assert "<" not in text
    assert r"| =HYPERLINK(1)\|&lt;script>alert(1)&lt;/script> |" in text
    assert f"'{name}" in cells["method"].tolist()
    assert -0.5 in cells["forgetting"].tolist()


def test_columns_are_settings_named_by_differing_options(tmp_path):
    results = [
        (10, "fedavg", 0.8),
        (0.5, "fedavg", 0.6),
        (10, "fedntd", 0.7),
        (0.5, "fedntd", 0.65),
    ]
    for alpha, method, accuracy in results:
        overrides = f"dataset=digits alpha={alpha} algorithm={method} participation=0.2"
        make(tmp_path, {overrides: ((accuracy,) * 6, 0.1)})
    assert body(tmp_path, metrics=("accuracy", "accuracy")) == [
        ["Accuracy (%)", "alpha=0.5", "alpha=10"],  # by value
        # by the mean of a row, 70 and 67.5
        ["FedAvg", "60.00 ± 0.00", "**80.00 ± 0.00**"],
        ["FedNTD", "**65.00 ± 0.00**", "70.00 ± 0.00"],
    ]
    assert body(tmp_path, metrics=("accuracy",), transpose=True) == [
        ["Accuracy (%)", "FedAvg", "FedNTD"],
        # the best method of each setting still
        ["alpha=0.5", "60.00 ± 0.00", "**65.00 ± 0.00**"],
        ["alpha=10", "**80.00 ± 0.00**", "70.00 ± 0.00"],
    ]
    assert body(tmp_path)[0][1:3] == ["alpha=0.5: Accuracy (%)", "alpha=0.5: Forgetting"]


@pytest.mark.parametrize(
    "values",
    [
        ("model=cnn", "model=cnn_3fc"),
        ("model.kernel=3", "model.kernel=5"),
        ("cohorts.dropout=0", "cohorts.dropout=0.8"),
        ("partition.numpy_seed=1", "partition.numpy_seed=2"),
        ("dataset.train_splits=[test]", "dataset.train_splits=[train]"),
        ("min_size=1", "min_size=10"),
        ("sort_by_label=false", "sort_by_label=true"),
        ("augment=false", "augment=true"),
    ],
)
def test_methods_are_compared_with_the_same_data_model_and_clients(tmp_path, values):
    """FedProx on one model was compared with FedAvg on another one."""
    for given, method in itertools.product(values, ("fedavg", "fedprox")):
        make_run(tmp_path, [given, f"algorithm={method}"], accuracy=0.5)
    every = tidy(own_jobs(tmp_path))
    assert set(every["method"]) == {"fedavg", "fedprox"}
    found = differences(every, ["accuracy"], "fedavg")
    assert [setting.split()[-1] for setting in found["setting"]] == ["settings", *values]


def test_sort_flag_sorts_the_rows(tmp_path):
    make(tmp_path, METHODS)

    def first(sort):
        return [row[0] for row in body(tmp_path, sort=sort)][1:]

    assert (
        first("") == first("accuracy") == ["FedNTD", "FedAvg", "FedProx mu=0.1", "FedProx mu=1.0"]
    )
    # less is better
    assert first("forgetting") == ["FedProx mu=0.1", "FedNTD", "FedAvg", "FedProx mu=1.0"]
    assert first("name") == ["FedAvg", "FedNTD", "FedProx mu=0.1", "FedProx mu=1.0"]
    with pytest.raises(
        ConfigError, match=r"--sort acuracy: no run has this value \(nearest: 'accuracy'\)"
    ):
        first("acuracy")


def best_of(folder, results, **layout):
    """Return the methods whose accuracy is bold. results: method -> accuracies of the seeds."""
    for name, accuracies in results.items():
        make(folder, {f"algorithm={name}": (accuracies, 0.1)})
    rows = body(folder, metrics=("accuracy",), **layout)[1:]
    return [name for name, value in rows if "**" in value]


def test_bold_values_cannot_be_told_from_the_best(tmp_path):
    """b is lower than a by one point with every seed; the sign of c's difference is unclear."""
    results = {"a": (0.7, 0.8, 0.9) * 2, "b": (0.69, 0.79, 0.89) * 2, "c": (0.6, 0.9, 0.85) * 2}
    assert best_of(tmp_path, results) == ["a", "c"]


def test_equal_values_are_bold_in_spite_of_rounding(tmp_path):
    """The values of b are the next numbers below those of a, so their differences are no noise."""
    same = tuple(np.nextafter(value, 0) for value in (0.7, 0.8, 0.9) * 2)
    assert set(best_of(tmp_path, {"a": (0.7, 0.8, 0.9) * 2, "b": same})) == {"a", "b"}


def test_few_seeds_have_nothing_in_bold(tmp_path):
    """Five pairs cannot be significant; with them, everything would be bold, or by chance one."""
    five = {"a": (0.9,) * 5, "b": (0.1,) * 5}
    assert best_of(tmp_path / "five", five) == []
    about = make_table(tidy(own_jobs(tmp_path / "five")), Layout()).about
    assert about.endswith("over 5 seeds; nothing is in bold, which needs 6 seeds.")
    assert best_of(tmp_path / "one", {"a": (0.9,), "b": (0.1,)}) == []
    table = make_table(tidy(own_jobs(tmp_path / "one")), Layout())
    assert table.about == "One seed, so nothing is in bold."
    # a method with fewer seeds is not compared, however good, and one method has no other
    assert best_of(tmp_path / "some", {"a": (0.5,) * 6, "b": (0.6,) * 6, "c": (0.9,) * 5}) == ["b"]
    assert best_of(tmp_path / "alone", {"a": (0.5,) * 6, "c": (0.9,) * 5}) == []


def test_method_with_few_seeds_of_the_best_one_is_not_bold(tmp_path):
    """b has six seeds, but only three of them are seeds of a, too: +10, 0 and +10 points for a."""
    results = {"a": (range(6), (0.9,) * 6), "b": (range(3, 9), (0.8, 0.9, 0.8) * 2)}
    for method, (seeds, accuracies) in results.items():
        for seed, accuracy in zip(seeds, accuracies, strict=True):
            make_run(tmp_path, [f"algorithm={method}"], seed, accuracy=accuracy)
    assert find_best(tidy(own_jobs(tmp_path)), "accuracy") == ["a"]


def test_diverged_and_missed_seeds_are_not_the_best(tmp_path):
    """Their method would be compared over the seeds that went well."""
    results = {"a": (0.5,) * 7, "b": (0.6,) * 7, "c": (0.9,) * 6 + (None,)}
    assert best_of(tmp_path / "diverged", results) == ["b"]
    reached = {"fedavg": [5] * 7, "fedntd": [7] * 7, "fedprox": [1] * 6 + [None]}
    for method, rounds in reached.items():
        for seed, number in enumerate(rounds):
            targets = {"rounds_to_target": {"0.5": number}}
            make_run(tmp_path / "missed", [f"algorithm={method}"], seed, **targets)
    table = tidy(own_jobs(tmp_path / "missed"))
    assert find_best(table, "rounds_to_target_0.5") == ["fedavg"]
    two = table[table["method"] != "fedntd"]
    assert find_best(two, "rounds_to_target_0.5") == [], "no other method reached it"


def test_a_cell_over_fewer_seeds_says_so(tmp_path):
    """fedntd has no run with two of the seeds, and one run without forgetting."""
    make(tmp_path, {"algorithm=fedavg": ((0.5,) * 6, 0.3)})
    make(tmp_path, {"algorithm=fedntd": ((0.5,) * 3, 0.3)})
    make_run(tmp_path, ["algorithm=fedntd"], 3, accuracy=0.5, forgetting=None)
    assert body(tmp_path)[1:] == [
        ["FedAvg", "50.00 ± 0.00", "0.300 ± 0.000"],
        ["FedNTD", "50.00 ± 0.00 (n=4)", "0.300 ± 0.000 (n=3)"],
    ]
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    csv = pd.read_csv(tmp_path / "table.csv").set_index("method")
    assert csv.loc["fedntd", ["n", "forgetting_n"]].tolist() == [4, 3]
    assert "accuracy_n" not in csv


def test_report_is_written_if_all_runs_diverged(tmp_path):
    make(tmp_path, {f"algorithm={name}": ((None, None), 0.1) for name in ("fedavg", "fedntd")})
    assert len(write_tables(tmp_path, own_jobs(tmp_path), Layout())) == 3
    assert body(tmp_path)[1:] == [
        ["FedAvg", "diverged", "diverged"],
        ["FedNTD", "diverged", "diverged"],
    ]


def test_report_has_flags_for_the_table(tmp_path, capsys):
    make(tmp_path, METHODS)
    assert (
        main(
            [
                "report",
                str(tmp_path),
                "--no-figures",
                "--metrics",
                "best_accuracy",
                "--sort",
                "name",
            ]
        )
        == 0
    )
    assert "Best accuracy (%)" in (tmp_path / "table.md").read_text()
    assert main(["report", str(tmp_path), "--no-figures", "--metrics", "acuracy"]) == 2
    assert (
        "--metrics acuracy: no run has this value (nearest: 'accuracy')" in capsys.readouterr().err
    )
    assert main(["report", str(tmp_path), "--format", "jpg"]) == 2
    assert "figures.format=jpg: must be one of png, pdf, svg" in capsys.readouterr().err


def test_each_setting_has_the_measures_of_its_runs(tmp_path):
    """One setting is continual learning, the other is not."""
    tasks = {"average_accuracy": 0.6, "task_forgetting": 0.2}
    for name in ("fedavg", "fedntd"):
        make_run(tmp_path, ["experiment=a", f"algorithm={name}"], accuracy=0.5)
        make_run(tmp_path, ["experiment=b", f"algorithm={name}"], **tasks)
    assert list(make_table(tidy(own_jobs(tmp_path)), Layout()).table) == [
        ("a", "Accuracy (%)"),
        ("a", "Forgetting"),
        ("b", "Average accuracy (%)"),
        ("b", "Task forgetting"),
    ]


def test_table_shows_own_accuracy_if_the_runs_have_it(tmp_path):
    own = {"own_accuracy_weighted": 0.875, "own_accuracy": 0.9}
    make_run(tmp_path, ["algorithm=fedavg"], 0, accuracy=0.5)
    before = body(tmp_path)
    assert before[0] == ["", "Accuracy (%)", "Forgetting"]
    make_run(tmp_path, ["algorithm=ditto"], 0, accuracy=0.5, **own)
    assert body(tmp_path) == [
        ["", "Accuracy (%)", "Forgetting", "Own accuracy weighted (%)"],
        ["Ditto", "50.00", "0.100", "87.50"],
        ["FedAvg", *before[1][1:], "-"],
    ]


def test_numbers_in_names_are_sorted_by_value():
    assert ordered(["mu=10", "mu=9", "", "mu=0.5"]) == ["", "mu=0.5", "mu=9", "mu=10"]


def test_long_numbers_in_names_are_shortened_but_stay_different():
    """Long numbers, as from a search, have three digits, or as many as keep names different."""
    assert displayed(["fedavg", "moon mu=0.00125", "cfed_c", "mine"]) == [
        "FedAvg",
        "MOON mu=0.00125",
        "CFeD(C)",
        "mine",
    ]
    drawn = ["local.lr=0.001132477255572942", "local.lr=1.5273e-05", "local.lr=0.1"]
    assert displayed(drawn) == ["local.lr=0.00113", "local.lr=1.53e-05", "local.lr=0.1"]
    close = ["lr=0.09549316466201994", "lr=0.09552814783286914"]
    assert displayed(close) == ["lr=0.09549", "lr=0.09553"]


def test_rounds_to_a_target_are_over_the_seeds_that_reached_it(tmp_path):
    """5 and 9 have the mean 7 and the deviation sqrt(8) = 2.8. FedNTD is slower, but each of its
    seeds reached 0.5. The fraction of a run's best accuracy is only shown on request."""
    reached = {"fedavg": (5, 9, None), "fedntd": (8, 8, 8), "fedprox": (None, None, None)}
    reached["scaffold"] = (20, 21, 22)
    for method, rounds in reached.items():
        for seed, number in enumerate(rounds):
            targets = {"0.5": number, "0.9*best": 2}
            make_run(tmp_path, [f"algorithm={method}"], seed, rounds_to_target=targets)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    section = (tmp_path / "table.md").read_text().partition("## Rounds to target")[2]
    assert [line for line in section.splitlines() if line.startswith("| Fed")][:3] == [
        "| FedNTD | 8 ± 0 |",
        "| FedAvg | 7 ± 2.8 (2 of 3 seeds) |",
        "| FedProx | never (0 of 3 seeds) |",
    ]
    assert "in parentheses" not in section
    wide = make_table(tidy(own_jobs(tmp_path)), Layout(metrics=("rounds_to_target",))).table
    assert list(wide.columns.get_level_values(1)) == [
        "Rounds to target 0.5",
        "Rounds to target 0.9*best",
    ]
    csv = pd.read_csv(tmp_path / "table.csv").set_index("method")
    assert csv.loc["fedavg", "rounds_to_target_0.5"] == 7
    assert csv.loc["fedprox", "rounds_to_target_0.5_reached"] == 0


def test_seed_counts_once(tmp_path, caplog):
    """The third run has the method and the seed of the first, and the fourth another seed of the
    training."""
    every = ["algorithm=fedavg"]
    seeds = {"partition": 0, "sampling": 0, "training": 0}
    for seed, training, accuracy in ((0, 0, 0.4), (1, 0, 0.6), (0, 0, 0.9), (0, 5, 0.5)):
        own = seeds | {"partition": seed, "training": training}
        make_run(tmp_path, every, seed, accuracy=accuracy, seeds=own)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    table = pd.read_csv(tmp_path / "table.csv")
    assert table["n"].tolist() == [3]
    assert table["accuracy"].tolist() == pytest.approx([0.5])
    line = "Not in the tables: run02 has the settings and seeds of run00"
    assert line in (tmp_path / "table.md").read_text()
    assert line in caplog.text


def test_table_names_failed_jobs(tmp_path):
    make_run(tmp_path, ["algorithm=fedavg"])
    make_run(tmp_path, ["algorithm=fedntd"], status="failed", error="out of memory")
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    text = (tmp_path / "table.md").read_text()
    assert "Not in the tables: run01 failed: out of memory\n" in text


def write_pairs(folder, seeds, settings):
    """FedNTD exceeds FedAvg by 1, 2, ... points with the seeds, and FedProx by -1 or 1 point. In
    the second setting, FedNTD's differences are larger by 2 points."""
    for setting, seed in itertools.product(range(settings), range(seeds)):
        given, more = [f"alpha={setting}"], (1 + seed + 2 * setting) / 100
        make_run(folder, [*given, "algorithm=fedavg"], seed, accuracy=0.5)
        make_run(folder, [*given, "algorithm=fedntd"], seed, accuracy=0.5 + more)
        own = 0.49 + 0.02 * (seed % 2)
        make_run(folder, [*given, "algorithm=fedprox"], seed, accuracy=own, forgetting=0.1)


def test_differences_to_a_baseline_are_paired_by_seed(tmp_path):
    """FedNTD is 1 to 8 points better with eight seeds: mean 4.5, deviation sqrt(6), and with the
    quantile 2.3646 of Student's t the interval 4.5 ± 2.05. All signs are equal, which 2 of 256
    flips give; Holm doubles the smaller of two p. A diverged run is in no pair."""
    write_pairs(tmp_path, 8, 1)
    make_run(tmp_path, ["alpha=0", "algorithm=fedntd"], 9, accuracy=0.1, status="diverged")
    make_run(tmp_path, ["alpha=0", "algorithm=fedavg"], 9, accuracy=0.5)

    def difference(*flags):
        assert main(["report", str(tmp_path), "--no-figures", *flags]) == 0
        return (tmp_path / "table.md").read_text().partition("### Difference to ")[2]

    text = difference()
    assert text.startswith("FedAvg\n")
    assert "| FedNTD | +4.50 [2.45, 6.55], n=8, p=0.016 | 0.000 [0.000, 0.000], n=8, p=1 |" in text
    assert "| FedProx | 0.00 [-0.89, 0.89], n=8, p=1 |" in text
    first = pd.read_csv(tmp_path / "differences.csv").iloc[0]
    assert first[["n", "pairs", "p", "least_p"]].tolist() == [8, 8, 2 * 2 / 256, 2 * 2 / 256]
    assert "| FedAvg | -4.50 [-6.55, -2.45], n=8" in difference("--baseline", "fedntd")
    assert main(["report", str(tmp_path), "--no-figures", "--baseline", "fednt"]) == 2
    for run in own_jobs(tmp_path):
        if run.summary["seed"] > 2:
            shutil.rmtree(run.directory)
    assert "| FedNTD | +2.00 [-0.48, 4.48], n=3 |" in difference()


def test_a_seed_counts_once_over_several_settings(tmp_path):
    """The differences of two settings, 1 to 8 and 3 to 10 points, have the means 2 to 9 of eight
    seeds: the interval 5.5 ± 2.05, and p as from eight pairs. One run is missing then: the seed has
    the difference 10 of its other setting, so the mean is 45 / 8 points."""
    write_pairs(tmp_path, 8, 2)

    def rows():
        every = tidy(own_jobs(tmp_path))
        found = differences(every, ["accuracy"], "fedavg")
        sections = tabulate(found, "fedavg", every["setting"].unique())
        return found[found["method"] == "fedntd"], sections[0].table

    found, shown = rows()
    assert found["setting"].tolist() == [OVERALL, "digits lda alpha=0", "digits lda alpha=1"]
    assert found["n"].tolist() == [8] * 3
    assert found["pairs"].tolist() == [16, 8, 8]
    assert found["p"].tolist() == pytest.approx([2 * 2 / 256] * 3)
    assert shown.loc["FedNTD"].to_dict() == {
        (OVERALL, "Accuracy (%)"): "+5.50 [3.45, 7.55], n=8, p=0.016",
        ("alpha=0", "Accuracy (%)"): "+4.50 [2.45, 6.55], n=8, p=0.016",
        ("alpha=1", "Accuracy (%)"): "+6.50 [4.45, 8.55], n=8, p=0.016",
    }
    for run in own_jobs(tmp_path):
        if run.summary["seed"] == 7 and {"alpha=0", "algorithm=fedntd"} <= {*run.overrides}:
            shutil.rmtree(run.directory)
    found, shown = rows()
    assert found["difference"].tolist() == pytest.approx([0.45 / 8, 0.04, 0.065])
    assert shown.loc["FedNTD", OVERALL].iloc[0].endswith(", n=8 (15 of 16 pairs), p=0.016")


def test_setting_without_the_baseline_is_a_gap_of_all_settings(tmp_path):
    """FedNTD has eight pairs with alpha=0. Without FedAvg, it has none with alpha=1."""
    write_pairs(tmp_path, 8, 2)
    for run in own_jobs(tmp_path):
        if {"alpha=1", "algorithm=fedavg"} <= {*run.overrides}:
            shutil.rmtree(run.directory)
    every = tidy(own_jobs(tmp_path))
    found = differences(every, ["accuracy"], "fedavg")
    shown = tabulate(found, "fedavg", every["setting"].unique())[0].table.loc["FedNTD"]
    assert shown[OVERALL].iloc[0] == "+4.50 [2.45, 6.55], n=8 (8 of 16 pairs), p=0.016"
    assert [setting for setting, _ in shown.index] == [OVERALL, "alpha=0"]


def test_correlated_settings_do_not_make_chance_significant():
    """Two methods are equal. Their differences vary between the six seeds, and are nearly the same
    in two settings (correlation 0.9). If a pair of runs were a seed, 0.05 would be exceeded."""
    noise, tables = np.random.default_rng(0), 200
    of_seed, of_run = noise.normal(size=(6, 1, tables)), noise.normal(size=(6, 2, tables))
    gaps = 0.9**0.5 * of_seed + 0.1**0.5 * of_run
    metrics = [f"metric{number}" for number in range(tables)]
    rows = []
    for seed, setting in itertools.product(range(6), range(2)):
        of = {"setting": f"s{setting}", "seeds": str(seed), "diverged": False}
        rows.append(of | {"method": "a"} | dict.fromkeys(metrics, 0.0))
        rows.append(of | {"method": "b"} | dict(zip(metrics, gaps[seed, setting], strict=True)))
    found = differences(pd.DataFrame(rows), metrics, "a")
    found = found[found["setting"] == OVERALL]
    assert 0 < (found["p"] <= 0.05).mean() <= 0.05  # expected: 2 of 64 flips
    missed = (found["low"] > 0) | (found["high"] < 0)
    assert 0.02 < missed.mean() < 0.08  # standard error 0.015
    pairs = np.array([interval(gaps[..., number].ravel()) for number in range(tables)])
    assert ((pairs[:, 0] > 0) | (pairs[:, 1] < 0)).mean() > 0.1


def test_holm_multiplies_each_p_by_the_number_of_larger_ones():
    assert holm(np.array([0.03, 0.01, 0.02, 0.9])).tolist() == [0.06, 0.04, 0.06, 0.9]
    # 0.03 and 0.025 are less than the adjusted p of a smaller one; 3 x 0.4 exceeds 1
    assert holm(np.array([0.03, 0.02, 0.025])).tolist() == pytest.approx([0.06] * 3)
    assert holm(np.array([0.5, 0.4, 0.6])).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("direction", "best"), [("min", "FedNTD"), ("max", "FedAvg")])
def test_best_value_of_an_own_metric_is_marked(tmp_path, direction, best):
    """The report does not load the metric, so the run says whether less is better."""
    for name, value in (("fedavg", 0.3), ("fedntd", 0.2)):
        for seed in range(6):
            own = {"mine": value, "directions": {"mine": direction}}
            make_run(tmp_path, [f"algorithm={name}"], seed, **own)
    rows = body(tmp_path, metrics=("mine",), sort="mine")
    assert [row for row in rows if "**" in row[1]] == [rows[1]]
    assert rows[1][0] == best
