"""Tables of sweeps from run directories that the tests write."""

import json

import pandas as pd
import pytest
import yaml

from fedexp.analysis import layout
from fedexp.analysis.aggregate import rounds_to_targets
from fedexp.analysis.layout import sections
from fedexp.analysis.sweep import load_sweep
from fedexp.cli.commands import call
from fedexp.papers import cells as papers
from fedexp.papers.aggregate import write_tables
from fedexp.papers.runs import read_runs
from fedexp.rundir.sweeps import find_jobs, write_sweep_name
from toy_federation import CONF, CONFS

TABLE8 = ["experiment=fedntd/cifar10_s2", "local.epochs=5"]
RUN8 = [*TABLE8, "algorithm=fedavg"]


def make_run(
    folder, overrides, curve, status="completed", forgetting=0.5, views=True, config=None, **summary
):
    """Make a run directory with the files that tables read.

    views: also test augmented images, with the same results. config: further values of the
    configuration; by default those that FedKA's sweeps require.
    """
    config = {"test_per_client": 0.25} if config is None else config
    directory = folder / f"run{len(list(folder.glob('run*')))}"
    (directory / ".hydra").mkdir(parents=True)
    (directory / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    rounds = {"round": range(len(curve) + 1), "test_accuracy": [0.1, *curve]}
    rounds["forgetting"] = (
        [None] * (len(curve) > 1) + [None] + [forgetting] * max(len(curve) - 1, 1)
    )
    if views:
        rounds |= {f"{name}_augmented": rounds[name] for name in ("test_accuracy", "forgetting")}
    pd.DataFrame(rounds).to_csv(directory / "rounds.csv", index=False)
    for name in ["class_accuracy.csv", *["class_accuracy_augmented.csv"] * views]:
        classes = {"round": rounds["round"], "class": 0, "accuracy": rounds["test_accuracy"]}
        pd.DataFrame(classes).to_csv(directory / name, index=False)
    data = {"train": 50_000, "test": 10_000, "classes": 10, "clients": 100}
    config = {"choices": {}, "rounds": len(curve), "expected": data} | config
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    if "tasks" in summary:
        (directory / "tasks.csv").write_text("round,task,evaluated_task,accuracy\n1,1,1,0.5\n")
    algorithm = next(
        (o.partition("=")[2] for o in overrides if o.startswith("algorithm=")), "fedavg"
    )
    content = {
        "status": status,
        "algorithm": algorithm,
        "dataset": "cifar10",
        "partition": "p",
        "rounds": len(curve),
    }
    content |= {
        "accuracy": curve[-1],
        "best_accuracy": max(curve),
        "forgetting": forgetting,
    } | summary
    (directory / "summary.json").write_text(json.dumps(content))


def cells(folder, name):
    return papers.cells(load_sweep(name, CONFS), read_runs([folder]))


def one(table, **wanted):
    for key, value in wanted.items():
        table = table[table[key] == value]
    assert len(table) == 1
    return table.iloc[0]


def table8(folder, method="FedAvg", metric="accuracy"):
    """The row of FedNTD Table 8, E=5."""
    return one(cells(folder, "fedntd_table8"), setting="E=5", method=method, metric=metric)


def test_cell_has_mean_and_standard_deviation_over_seeds(tmp_path):
    """FedNTD Table 8, E=5: FedAvg has 40.14 (0.59). Ours: 39 and 43, mean 41, deviation sqrt(8) =
    2.83."""
    for seed, accuracy in ((0, 0.39), (1, 0.43)):
        make_run(tmp_path, [*RUN8, f"seed={seed}"], [accuracy], forgetting=0.66)
    table = cells(tmp_path, "fedntd_table8")
    row = one(table, setting="E=5", method="FedAvg", metric="accuracy")
    assert (row["n"], row["printed"], row["protocol"], row["verdict"]) == (
        2,
        40.14,
        "full",
        "within",
    )
    assert (row["mean"], row["std"], row["difference"]) == pytest.approx((41.0, 8**0.5, 0.86))
    lost = one(table, setting="E=5", method="FedAvg", metric="forgetting")
    assert (lost["mean"], lost["verdict"]) == (pytest.approx(0.66), "outside")  # 0.07 away
    assert (table["verdict"] == "not run").sum() == len(table) - 2 == 48


def test_tolerance_is_at_least_two_published_standard_deviations(tmp_path):
    """FedNTD Table 1, CIFAR-10 s=2, FedAvg: 40.14, with 1.15 from Table 7, so 2.30."""
    make_run(tmp_path, ["experiment=fedntd/cifar10_s2", "algorithm=fedavg"], [0.4243])
    row = one(
        cells(tmp_path, "fedntd_table1"),
        dataset="CIFAR-10",
        partition_param="s=2",
        method="FedAvg",
        metric="accuracy",
    )
    assert (row["verdict"], row["printed_std"]) == ("within", 1.15)


def test_reduced_runs_are_not_judged_and_not_averaged_with_others(tmp_path):
    """The two runs of 5 rounds are shown, the run of 9 rounds is not. A full run replaces them."""
    given = ((["rounds=9"], 0.9), (["rounds=5"], 0.2), (["rounds=5", "seed=1"], 0.3))
    for overrides, accuracy in given:
        make_run(tmp_path, [*RUN8, *overrides], [accuracy])
    row = table8(tmp_path)
    assert (row["protocol"], row["verdict"]) == ("reduced", "not judged: reduced protocol")
    assert (row["n"], row["mean"], row["changes"], row["not_shown"]) == (2, 25, "rounds=5", 1)
    make_run(tmp_path, RUN8, [0.4])
    row = table8(tmp_path)
    assert (row["protocol"], row["n"], row["mean"]) == ("full", 1, 40)
    assert (row["changes"], row["not_shown"]) == ("", 3)


def test_cell_counts_unfinished_runs_and_names_their_origin(tmp_path):
    """One seed is completed, one diverged, one failed, and one is unfinished."""
    more = {"commit": "0123456789", "hardware": {"name": "A", "device": "cpu", "precision": "fp32"}}
    make_run(tmp_path, RUN8, [0.4], seed=0, **more)
    make_run(
        tmp_path,
        RUN8,
        [0.1],
        "diverged",
        seed=1,
        **more | {"commit": "abcdefabc+"},
    )
    make_run(tmp_path, RUN8, [0.1], "failed", seed=2)
    make_run(tmp_path, RUN8, [0.1])
    (tmp_path / "run3" / "summary.json").unlink()
    row = table8(tmp_path)
    assert row["status"] == "1 completed, 1 diverged, 1 failed, 1 unfinished"
    assert (row["n"], row["diverged"], row["mean"], row["tolerance"]) == (2, 1, 40, 2.0)
    assert (row["seeds"], row["commits"], row["hardware"]) == (
        "0 1",
        "0123456 abcdefa",
        "A (cpu, fp32)",
    )
    other = one(cells(tmp_path, "fedntd_table8"), setting="E=1", method="FedAvg", metric="accuracy")
    assert (other["status"], other["verdict"]) == ("not run", "not run")


def test_suspect_value_is_not_judged_and_diverged_run_is_outside(tmp_path):
    """FedNova and SCAFFOLD of Table 10 at R=0.3 are a copying error in the paper."""
    given = ["experiment=fedntd/cifar10_s2", "participation=0.3", "algorithm=scaffold"]
    make_run(tmp_path / "a", given, [0.5])
    table = cells(tmp_path / "a", "fedntd_table10")
    row = one(table, setting="R=0.3", method="SCAFFOLD", metric="accuracy")
    assert row["verdict"] == "not judged: suspect print"
    make_run(tmp_path / "b", RUN8, [0.4], status="diverged")
    assert table8(tmp_path / "b")["verdict"] == "outside"


def test_rounds_to_target_use_the_published_accuracy(tmp_path):
    """Flashback Table 1, CIFAR10 beta=0.1: A = 0.5, so the targets are 0.375, 0.45 and 0.5."""
    make_run(
        tmp_path,
        ["experiment=flashback/cifar10_lda0.1", "algorithm=fedavg"],
        [0.2, 0.4, 0.44, 0.46, 0.49],
    )
    table = cells(tmp_path, "flashback_table1")
    table = table[
        (table["dataset"] == "CIFAR10")
        & (table["partition_param"] == "beta=0.1")
        & (table["method"] == "FedAvg")
    ]
    ours = dict(zip(table["metric"], table["mean"], strict=True))
    assert ours["rounds_to_0.75A"] == 2
    assert ours["rounds_to_0.9A"] == 4
    assert ours["rounds_to_A"] == float("inf")  # never
    verdicts = dict(zip(table["metric"], table["verdict"], strict=True))
    assert verdicts["rounds_to_A"] == "outside"  # printed: 445


def test_target_that_the_paper_never_reaches_is_compared(tmp_path):
    """Flashback Table 1, CIFAR10 beta=0.1, FedDF: 105 rounds to 0.375, and 0.45 is never reached.
    If only one of two seeds reaches a target, there is no mean."""
    feddf = ["experiment=flashback/cifar10_lda0.1", "algorithm=feddf"]
    here = {"dataset": "CIFAR10", "partition_param": "beta=0.1", "method": "FedDF"}
    make_run(tmp_path, [*feddf, "seed=0"], [0.3] * 100 + [0.4] * 10)
    table = cells(tmp_path, "flashback_table1")
    assert one(table, **here, metric="rounds_to_0.75A")[["mean", "verdict"]].tolist() == [
        101,
        "within",
    ]
    assert one(table, **here, metric="rounds_to_0.9A")["verdict"] == "not reached as printed"
    make_run(tmp_path, [*feddf, "seed=1"], [0.46])
    row = one(cells(tmp_path, "flashback_table1"), **here, metric="rounds_to_0.9A")
    assert row["verdict"] == "not judged: reached by 1 of 2"
    assert row["mean"] == float("inf")  # the mean of the other seed would flatter


def test_alignment_is_compared_for_each_layer_and_pair(tmp_path):
    """FedNTD Table 2, IID, FedAvg: 0.679 and 0.850 for 512 neurons, 0.771 and 0.898 for 128
    neurons."""
    setting = [
        "experiment=fedntd/cifar10_iid",
        "model=cnn_3fc",
        "forgetting_metric=alignment",
        "algorithm=fedavg",
    ]
    layers = [{"local": 0.7, "aggregated": 0.85}, {"local": 0.6, "aggregated": 0.9}]
    make_run(tmp_path, setting, [0.5], alignment=layers)
    table = cells(tmp_path, "fedntd_table2")
    table = table[(table["partition"] == "IID") & (table["method"] == "FedAvg")]
    assert table["mean"].tolist() == [0.7, 0.85, 0.6, 0.9]
    assert table["verdict"].tolist() == ["within", "within", "outside", "within"]


def test_columns_are_named_by_what_differs_between_them():
    """Columns are named by what differs between them. A long table is split by partition."""

    def columns(name):
        return {part.title: list(part.table.columns) for part in sections(cells(CONF, name))}

    assert columns("fedntd_table8") == {"": ["E=1", "E=3", "E=5", "E=10", "E=20"]}
    assert columns("cfed_table1")[""] == [
        "Domain-T1",
        "Domain-T2",
        "Class-T1",
        "Class-T2",
        "Class-I1",
        "Class-I2",
    ]
    assert columns("fedntd_table13")[""][3:] == [
        "alpha=0.05 K=64",
        "alpha=0.1 K=64",
        "alpha=0.5 K=64",
    ]
    assert {title: len(names) for title, names in columns("fedntd_table1").items()} == {
        "sharding": 7,
        "LDA": 7,
    }
    assert columns("flashback_table1")["natural"][0] == "FEMNIST N=500 x=0.75"


def test_suspect_and_reduced_cells_are_marked(tmp_path):
    make_run(
        tmp_path, ["experiment=fedntd/cifar10_s2", "participation=0.3", "algorithm=scaffold"], [0.5]
    )
    make_run(
        tmp_path,
        ["experiment=fedntd/cifar10_s2", "participation=0.1", "algorithm=fedavg", "rounds=1"],
        [0.2],
    )
    write_sweep_name(tmp_path, "fedntd_table10")
    write_tables(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "50.00? (0.50?) [55.59 (0.31)]" in text
    assert "20.00~ (0.50~) [40.14 (0.59)]" in text
    assert "Other protocols (`~`): `rounds=1`." in text
    assert "50.00? (0.50?)" in (tmp_path / "table.tex").read_text()


def test_diverged_fedavg_run_does_not_lower_the_target(tmp_path):
    """The FedAvg run that did not diverge ends at 0.5 after 4 rounds. FedKA reaches 0.5 after 2
    rounds."""
    make_run(
        tmp_path,
        ["experiment=fedka/cifar10", "algorithm=fedavg", "seed=0"],
        [0.2, 0.3, 0.4, 0.5],
        seed=0,
    )
    failed = ["experiment=fedka/cifar10", "algorithm=fedavg", "seed=1"]
    make_run(tmp_path, failed, [0.1, 0.1], status="diverged", seed=1)
    make_run(tmp_path, ["experiment=fedka/cifar10", "algorithm=fedka"], [0.4, 0.55, 0.6, 0.6])
    table = cells(tmp_path, "fedka_table2")
    rows = {
        m: one(table, dataset="CIFAR-10", method="FedKA", metric=m)["mean"]
        for m in ("rounds_to_A", "speedup")
    }
    assert rows == {"rounds_to_A": 2, "speedup": 2}


def test_speedup_of_a_method_that_never_reaches_fedavg(tmp_path):
    """FedKA Table 2, CIFAR-10: FedNTD never reaches FedAvg's accuracy; FedKA does in 43 rounds."""
    for method, accuracies in (("fedavg", [0.2, 0.5]), ("fedntd", [0.4]), ("fedka", [0.3])):
        given = ["experiment=fedka/cifar10", f"algorithm={method}"]
        make_run(tmp_path, given, accuracies)
    table = cells(tmp_path, "fedka_table2")
    for method, verdict in (("FedNTD", "not reached as printed"), ("FedKA", "outside")):
        for metric, value in (("rounds_to_A", float("inf")), ("speedup", 0)):
            row = one(table, dataset="CIFAR-10", method=method, metric=metric)
            assert (row["mean"], row["verdict"]) == (value, verdict)
            assert layout.format_values(row)[0] == "never"


def test_table_of_a_named_sweep_shows_ours_beside_published_values(tmp_path, capsys):
    folder = tmp_path / "anything"
    write_sweep_name(folder, "fedntd_table8")
    make_run(folder, RUN8, [0.3, 0.41], forgetting=0.6)
    assert call("report", [str(folder), "--no-figures"]) == 0
    text = (folder / "table.md").read_text()
    assert text in capsys.readouterr().out
    assert "50 published values: 48 not run, 2 within." in text
    ruled, plain, _ = [line for line in text.splitlines() if line.startswith("| FedAvg |")]
    # 0.6 x 30 + 0.4 x 41; two errors of it are 7.78 points
    assert "| 34.40* (0.60*) [40.14 (0.59)] |" in ruled
    assert "| [34.49 (0.64)] |" in ruled  # not run
    # the last round; the mean of the last ten, here two
    assert plain == "| FedAvg | 41.00, 35.50 (0.60, 0.60) |"
    assert "Rule: inferred protocol: ema(0.6), augmented test." in text
    tidy = pd.read_csv(folder / "table.csv")
    assert len(tidy) == 50
    assert r"\begin{tabular}" in (folder / "table.tex").read_text()


def test_table_without_published_values_shows_means_and_rounds_to_target(tmp_path):
    """Means over seeds, and rounds to parts of A = 0.95 x 0.8 = 0.76: 0.57, 0.684, 0.76."""
    make_run(tmp_path, ["algorithm=fedavg", "seed=0"], [0.5, 0.6, 0.7, 0.78])
    make_run(tmp_path, ["algorithm=fedavg", "seed=1"], [0.5, 0.58, 0.6, 0.76])
    make_run(tmp_path, ["algorithm=fedntd", "seed=0"], [0.6, 0.75, 0.8, 0.8])
    make_run(tmp_path, ["algorithm=fedntd", "seed=1"], [0.6, 0.6, 0.7, 0.7])
    make_run(tmp_path, ["algorithm=fedntd", "seed=2", "rounds=9"], [0.1], status="failed")
    names = {path.name for path in write_tables(tmp_path)}
    assert names == {"table.csv", "table.md", "table.tex", "rounds_to_target.csv"}
    table = pd.read_csv(tmp_path / "table.csv").set_index("method")
    assert table["n"].tolist() == [2, 2]
    assert table.loc["fedavg", "accuracy"] == pytest.approx(0.77)
    assert table.loc["fedavg", "accuracy_std"] == pytest.approx(0.01 * 2**0.5)
    targets = rounds_to_targets(find_jobs(tmp_path)).set_index("method")
    fedavg, fedntd = (targets.loc[name] for name in ("fedavg", "fedntd"))
    assert fedavg["A"] == pytest.approx(0.76)
    assert fedavg[["rounds_to_0.75A", "rounds_to_0.9A", "rounds_to_1A"]].tolist() == [2, 3.5, 4]
    assert fedntd[["rounds_to_0.75A", "rounds_to_0.9A"]].tolist() == [1, 2.5]
    assert fedntd["rounds_to_1A"] != fedntd["rounds_to_1A"]
    assert fedntd["speedup_0.75A"] == 2
    assert fedntd["speedup_0.9A"] == pytest.approx(1.4)


def test_report_without_a_finished_run_fails(tmp_path, capsys):
    assert call("report", [str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err


@pytest.mark.slow
def test_run_repeated_with_more_test_views_counts_once(tmp_path):
    """A is 0.95 of the best accuracy of the later run, 0.7; the earlier run has 0.9."""
    for views, accuracy in ((False, 0.9), (True, 0.7)):
        make_run(
            tmp_path,
            ["experiment=fedntd/cifar10_s2", "algorithm=fedavg"],
            [accuracy],
            views=views,
            seed=0,
        )
    write_sweep_name(tmp_path, "fedntd_table1")
    write_tables(tmp_path)
    targets = pd.read_csv(tmp_path / "rounds_to_target.csv")
    assert targets["A"].tolist() == pytest.approx([0.95 * 0.7])


TABLE1 = ["experiment=fedntd/cifar10_s2"]


def hardware(precision):
    return {"name": "A", "device": "cpu", "precision": precision}


def test_diverged_seed_is_counted_and_marked(tmp_path):
    """One of three seeds diverged in round 1 and has no F. Accuracy and F have the same n."""
    for seed in (0, 1):
        make_run(tmp_path, [*TABLE8, "algorithm=fedprox", f"seed={seed}"], [0.4, 0.4], seed=seed)
    make_run(
        tmp_path,
        [*TABLE8, "algorithm=fedprox", "seed=2"],
        [0.1],
        status="diverged",
        forgetting=None,
        seed=2,
    )
    table = cells(tmp_path, "fedntd_table8")
    for metric in ("accuracy", "forgetting"):
        row = one(table, setting="E=5", method="FedProx", metric=metric)
        assert (row["n"], row["diverged"], row["not_shown"]) == (3, 1, 0)
        assert "†" in layout.format_cell([row])


def test_two_precisions_of_one_seed_count_once(tmp_path):
    """Seed 0 is run in fp32 and bf16, seed 1 in bf16. The two bf16 runs count and have a standard
    deviation; seed 0 alone has none."""
    given = RUN8
    make_run(tmp_path / "a", given, [0.50], seed=0, hardware=hardware("fp32"))
    make_run(
        tmp_path / "a",
        [*given, "hardware.precision=bf16"],
        [0.40],
        seed=0,
        hardware=hardware("bf16"),
    )
    row = table8(tmp_path / "a")
    assert (row["n"], row["seeds"], row["not_shown"], row["mean"]) == (1, "0", 1, 50)
    assert row["std"] is None or row["std"] != row["std"]
    make_run(
        tmp_path / "a",
        [*given, "seed=1", "hardware.precision=bf16"],
        [0.44],
        seed=1,
        hardware=hardware("bf16"),
    )
    row = table8(tmp_path / "a")
    assert (row["n"], row["seeds"], row["not_shown"], row["mean"]) == (
        2,
        "0 1",
        1,
        pytest.approx(42),
    )


def test_diverged_method_does_not_change_the_view_of_its_column(tmp_path):
    """FedNTD Table 1, CIFAR-10 s=2: four methods have the augmented view and SCAFFOLD diverged. rho
    compares the four under the rule."""
    for number, method in enumerate(("fedavg", "fedprox", "moon", "fedntd")):
        make_run(tmp_path, [*TABLE1, f"algorithm={method}"], [0.4 + 0.03 * number] * 2)
    make_run(tmp_path, [*TABLE1, "algorithm=scaffold"], [0.1], status="diverged", forgetting=None)
    row = one(
        cells(tmp_path, "fedntd_table1"),
        dataset="CIFAR-10",
        partition_param="s=2",
        method="FedAvg",
        metric="accuracy",
    )
    assert row["order_by"] == "inferred protocol: ema(0.6), augmented test"


@pytest.mark.parametrize(
    ("status", "accuracy", "verdict", "of_forgetting"),
    [
        ("diverged", 0.1, "failed as printed", "failed as printed"),
        ("completed", 0.1, "failed as printed", "not judged: no printed number"),
        ("completed", 0.3, "outside", "not judged: no printed number"),
    ],
)
def test_published_failure_agrees_only_with_a_failed_run(
    tmp_path, status, accuracy, verdict, of_forgetting
):
    """FedNTD Table 11 has "10.00 (Failure)" and no F for SCAFFOLD at R=1.0. A run that ends at
    chance has failed too."""
    given = ["experiment=fedntd/cifar10_lda0.1", "participation=1.0", "algorithm=scaffold"]
    make_run(tmp_path, given, [accuracy, accuracy], status=status)
    table = cells(tmp_path, "fedntd_table11")
    rows = [
        one(table, setting="R=1.0", method="SCAFFOLD", metric=name)
        for name in ("accuracy", "forgetting")
    ]
    assert [row["verdict"] for row in rows] == [verdict, of_forgetting]
    assert rows[0]["diverged"] == (status == "diverged")


def test_dash_is_not_a_published_value():
    """CFeD Table 1 has 84 cells, 6 of them with a dash, since DMC learns only new classes."""
    assert len(papers.published_cells(load_sweep("cfed_table1", CONFS))) == 78


def test_all_runs_of_a_setting_have_one_target(tmp_path):
    """The order of options and the precision do not make another setting: A is 0.95 x 0.6 for all
    three runs. A speed-up is against FedAvg in the same precision."""
    make_run(
        tmp_path,
        ["algorithm=fedavg", "rounds=3", "local.lr=0.1"],
        [0.5, 0.5, 0.6],
        hardware=hardware("fp32"),
    )
    given = ["local.lr=0.1", "hardware.precision=bf16", "rounds=3"]
    make_run(tmp_path, ["algorithm=fedavg", *given], [0.1, 0.5, 0.5], hardware=hardware("bf16"))
    make_run(tmp_path, ["algorithm=fedntd", *given], [0.5, 0.5, 0.5], hardware=hardware("bf16"))
    write_tables(tmp_path)
    table = pd.read_csv(tmp_path / "rounds_to_target.csv")
    assert table["A"].tolist() == pytest.approx([0.57] * 3)
    names = ["fedavg", "fedntd hardware.precision=bf16", "fedavg hardware.precision=bf16"]
    assert sorted(table["method"]) == sorted(names)
    rounds = table.set_index("method").loc[names]
    assert rounds["rounds_to_0.75A"].tolist() == [1, 1, 2]
    assert rounds["speedup_0.75A"].tolist() == [1, 2, 1]


def test_speed_up_is_relative_to_the_fastest_fedavg(tmp_path):
    """FedAvg with two learning rates needs 3 and 2 rounds to 0.75 A."""
    make_run(tmp_path, ["algorithm=fedavg", "local.lr=0.1"], [0.1, 0.1, 0.5, 0.5])
    make_run(tmp_path, ["algorithm=fedavg", "local.lr=0.2"], [0.1, 0.5, 0.5, 0.5])
    make_run(tmp_path, ["algorithm=fedntd", "local.lr=0.2"], [0.5, 0.5, 0.5, 0.5])
    targets = rounds_to_targets(find_jobs(tmp_path)).set_index("method")
    assert targets["rounds_to_0.75A"].tolist() == [1, 2, 3], "the fastest first"
    assert targets["speedup_0.75A"].tolist() == [2, 1, 2 / 3]


def test_diverged_run_reaches_no_target(tmp_path):
    """Its best accuracy does not count for A, and its group has no rounds. If all runs of a setting
    diverged, there is no A."""
    for seed, status in (("seed=0", "diverged"), ("seed=1", "completed")):
        make_run(
            tmp_path,
            ["algorithm=fedavg", seed],
            [0.4, 0.5 if status == "completed" else 0.9],
            status=status,
        )
    make_run(tmp_path, ["algorithm=fedntd", "seed=0"], [0.4, 0.8])
    make_run(tmp_path, ["algorithm=fedavg", "alpha=1e6"], [0.1, 0.1], status="diverged")
    write_tables(tmp_path)
    table = pd.read_csv(tmp_path / "rounds_to_target.csv").set_index(["setting", "method"])
    assert table.loc[("cifar10 p", "fedntd"), ["A", "rounds_to_1A"]].tolist() == pytest.approx(
        [0.95 * 0.8, 2]
    )
    rounds = [f"rounds_to_{factor}A" for factor in ("0.75", "0.9", "1")]
    assert table.loc[("cifar10 p", "fedavg"), rounds].isna().all()
    assert table.loc[("cifar10 p alpha=1e6", "fedavg"), ["A", *rounds]].isna().all()
