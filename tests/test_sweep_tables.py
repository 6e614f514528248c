"""The tables of a sweep: means over seeds, rounds to targets, and the values a search chose."""

import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest

from fedexp.analysis.frame import tidy
from fedexp.analysis.means_table import Layout
from fedexp.analysis.report import write_tables
from fedexp.analysis.targets import rounds_to_targets
from fedexp.cli.main import main
from fedexp.rundir import jobs
from fedexp.rundir.sweeps import own_jobs, write_sweep_name
from quick_runs import make_run


def hardware(precision):
    return {"name": "A", "device": "cpu", "precision": precision}


def test_tables_show_means_and_rounds_to_target(tmp_path):
    """Means over seeds, and rounds to parts of A = 0.95 x 0.8 = 0.76: 0.57, 0.684, 0.76."""
    make_run(tmp_path, ["algorithm=fedavg", "seed=0"], [0.5, 0.6, 0.7, 0.78])
    make_run(tmp_path, ["algorithm=fedavg", "seed=1"], [0.5, 0.58, 0.6, 0.76])
    make_run(tmp_path, ["algorithm=fedntd", "seed=0"], [0.6, 0.75, 0.8, 0.8])
    make_run(tmp_path, ["algorithm=fedntd", "seed=1"], [0.6, 0.6, 0.7, 0.7])
    make_run(tmp_path, ["algorithm=fedntd", "seed=2", "rounds=9"], [0.1], status="failed")
    names = {path.name for path in write_tables(tmp_path, own_jobs(tmp_path), Layout())}
    assert names == {"table.csv", "table.md", "rounds_to_target.csv"}
    table = pd.read_csv(tmp_path / "table.csv").set_index("method")
    assert table["n"].tolist() == [2, 2]
    assert table.loc["fedavg", "accuracy"] == pytest.approx(0.77)
    assert table.loc["fedavg", "accuracy_std"] == pytest.approx(0.01 * 2**0.5)
    targets = rounds_to_targets(tidy(own_jobs(tmp_path))).set_index("method")
    fedavg, fedntd = (targets.loc[name] for name in ("fedavg", "fedntd"))
    assert fedavg["A"] == pytest.approx(0.76)
    assert fedavg[["rounds_to_0.75A", "rounds_to_0.9A", "rounds_to_1A"]].tolist() == [2, 3.5, 4]
    assert fedntd[["rounds_to_0.75A", "rounds_to_0.9A"]].tolist() == [1, 2.5]
    assert fedntd[["rounds_to_1A", "rounds_to_1A_reached", "n"]].tolist() == [3, 1, 2]
    assert np.isnan(fedntd["speedup_1A"]), "one seed did not reach A"
    text = (tmp_path / "table.md").read_text().partition("## Rounds to target")[2]
    assert "| FedAvg | 0.76 | 2 ± 0 | 3.5 ± 0.7 | 4 ± 0 | 1 | 1 | 1 |" in text
    assert "| FedNTD | 0.76 | 1 ± 0 | 2.5 ± 0.7 | 3 (1 of 2 seeds) | 2 | 1.4 | - |" in text
    assert fedntd["speedup_0.75A"] == 2
    assert fedntd["speedup_0.9A"] == pytest.approx(1.4)


def test_run_counts_if_its_configuration_is_that_of_a_run_that_it_replaced(tmp_path):
    """The former run was extended to the rounds that a file of options had later."""
    for accuracy in (0.4, 0.6):
        make_run(tmp_path, ["seed=0"], [0.1, accuracy], identity="1f", seed=0)
    for name in ("run0", "run1"):
        jobs.record(tmp_path, [(["seed=0"], name)])
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    assert pd.read_csv(tmp_path / "table.csv")["accuracy"].tolist() == [0.6]
    text = (tmp_path / "table.md").read_text()
    assert "Not in the tables: run0: a later command" in text
    assert "run1" not in text


@pytest.mark.parametrize("identities", [("1f", "1f"), ("1f", "2e")])
def test_longest_of_equal_runs_counts(identities, tmp_path):
    """stop.minutes ended the first one, which tests further images if the identities differ."""
    statuses, views = ("stopped", "completed"), identities[0] != identities[1]
    for i, (identity, status) in enumerate(zip(identities, statuses, strict=True)):
        about = {"status": status, "identity": identity, "seed": 0}
        curve = [0.1, 0.4, 0.6][: 2 + i]
        make_run(tmp_path, ["algorithm=fedavg"], curve, views=views and not i, **about)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    assert pd.read_csv(tmp_path / "table.csv")["accuracy"].tolist() == [0.6]
    assert "Not in the tables: run0 has the " in (tmp_path / "table.md").read_text()


def test_runs_that_are_evaluated_on_other_sets_are_not_averaged(tmp_path):
    """`evaluate_on` decides what `best_accuracy` and the rounds to targets mean."""
    for seed, on in enumerate(["both", "test", None]):
        options = ["validation.fraction=0.1", *([f"evaluate_on={on}"] if on else [])]
        make_run(tmp_path, [*options, f"seed={seed}"], [0.5, 0.6], seed=seed)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    table = pd.read_csv(tmp_path / "table.csv")
    methods = [f"fedavg{text}" for text in ("", " evaluate_on=both", " evaluate_on=test")]
    assert sorted(table["method"]) == methods
    assert table["n"].tolist() == [1, 1, 1]


def test_report_names_runs_of_a_setting_with_other_data_or_metrics(tmp_path, caplog):
    """They are averaged, since their options are equal, but not without a word."""
    usual, changed = {"arrays": "aa 1"}, {"arrays": "bb 1"}
    for seed, sums in enumerate([usual, usual, changed]):
        make_run(tmp_path, [f"seed={seed}"], [0.5], seed=seed, checksums=sums)
    xi = "forgetting_metric.degree.xi"
    make_run(tmp_path, ["seed=3", f"{xi}=0.1"], [0.5], seed=3, checksums={"arrays": "aa 2"})
    make_run(tmp_path, ["seed=4", f"{xi}=0.2"], [0.5], seed=4)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    lines = [
        "Not comparable in cifar10 p: data (arrays) is aa, but bb in run2",
        f"Not comparable in cifar10 p: {xi} is 0.1, but 0.2 in run4",
    ]
    text = (tmp_path / "table.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("Not comp")] == lines
    assert [f"{tmp_path}: {line}" for line in lines] == caplog.messages
    assert pd.read_csv(tmp_path / "table.csv")["n"].tolist() == [5]


def test_seeds_of_one_purpose_are_shown(tmp_path):
    for seed in (0, 1):
        seeds = {"partition": 0, "sampling": 0, "training": seed}
        make_run(tmp_path, [f"seeds.training={seed}"], [0.5], seed=0, seeds=seeds)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    (shown,) = pd.read_csv(tmp_path / "table.csv", dtype=str)["seeds"]
    assert shown == "0 partition=0,sampling=0,training=1"


def test_report_without_a_finished_run_fails(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err


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
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
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
    targets = rounds_to_targets(tidy(own_jobs(tmp_path))).set_index("method")
    assert targets["rounds_to_0.75A"].tolist() == [1, 2, 3], "the fastest first"
    assert targets["speedup_0.75A"].tolist() == [2, 1, 2 / 3]


def test_server_optimizer_is_not_fedavg(tmp_path):
    """FedAvg needs 4 rounds to A; FedAvgM and FedAdam, set by a preset, need 2."""
    slow, fast = [0.1, 0.1, 0.1, 0.5], [0.1, 0.5, 0.5, 0.5]
    make_run(tmp_path, ["algorithm=fedavg"], slow, config={"server": {"optimizer": None}})
    for name, given in (("sgd", ["server.optimizer=sgd"]), ("adam", ["local.lr=0.2"])):
        config = {"server": {"optimizer": name}}
        make_run(tmp_path, ["algorithm=fedavg", *given], fast, config=config)
    targets = rounds_to_targets(tidy(own_jobs(tmp_path)))
    assert sorted(targets["rounds_to_1A"]) == [2, 2, 4]
    assert targets.set_index("rounds_to_1A")["speedup_1A"].to_dict() == {2: 2, 4: 1}


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
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    table = pd.read_csv(tmp_path / "rounds_to_target.csv").set_index(["setting", "method"])
    assert table.loc[("cifar10 p", "fedntd"), ["A", "rounds_to_1A"]].tolist() == pytest.approx(
        [0.95 * 0.8, 2]
    )
    rounds = [f"rounds_to_{factor}A" for factor in ("0.75", "0.9", "1")]
    assert table.loc[("cifar10 p", "fedavg"), rounds].isna().all()
    assert table.loc[("cifar10 p alpha=1e6", "fedavg"), ["A", *rounds]].isna().all()


def test_report_names_the_best_value_of_each_method(tmp_path):
    """FedKA has 50 and 60 % (mean 55) with beta 0.1, and 57 % with 0.01.

    With 0.5, it diverged at a higher accuracy. FedProx has one value.
    """
    for i, (beta, accuracy) in enumerate(
        [("0.1", 0.5), ("0.1", 0.6), ("0.01", 0.57), ("0.5", 0.9)]
    ):
        status = "diverged" if beta == "0.5" else "completed"
        overrides = [f"algorithm.beta={beta}", "algorithm=fedka", f"seed={i}"]
        make_run(tmp_path, overrides, [accuracy], status=status)
    make_run(tmp_path, ["algorithm.mu=1", "algorithm=fedprox"], [0.4])
    write_sweep_name(tmp_path, "fedka_search")
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    text = (tmp_path / "table.md").read_text()
    assert "### Chosen values (highest accuracy in the last round, averaged over seeds)" in text
    # neither FedAvg nor seeds without a setting, so nothing explains them
    assert re.findall("Speed-ups|of 15 pairs", text) == []
    assert "| FedKA | beta=0.01 | 57.00 |" in text
    assert "| FedProx | mu=1 | 40.00 |" in text


def test_latex_has_the_tables_and_stays_up_to_date(tmp_path):
    """Marks are commands, and names are escaped. A later report writes table.tex again."""
    for seed in range(6):
        for alpha, accuracy in ((0.1, 0.4), (1, 0.8)):
            given = [f"alpha={alpha}", f"seed={seed}"]
            make_run(tmp_path, ["algorithm=fedavg", *given], [0.1, accuracy], seed=seed)
            status = "diverged" if (seed, alpha) == (5, 1) else "completed"
            own = ["algorithm=my_{50%}", *given]
            make_run(tmp_path, own, [0.1, accuracy - 0.1], status=status, seed=seed)
    assert main(["report", str(tmp_path), "--no-figures", "--metrics", "accuracy"]) == 0
    assert not (tmp_path / "table.tex").exists()
    assert main(["report", str(tmp_path), "--no-figures", "--metrics", "accuracy", "--latex"]) == 0
    text = (tmp_path / "table.tex").read_text()
    first = text.partition("\\end{table}")[0].splitlines()
    assert [line for line in first if "&" in line] == [
        r"Accuracy (\%) & alpha=0.1 & alpha=1 \\",
        r"FedAvg & \textbf{40.00 $\pm$ 0.00} & 80.00 $\pm$ 0.00 \\",
        r"my\_\{50\%\} & 30.00 $\pm$ 0.00 & 70.00 $\pm$ 0.00 (n=5)$^\dagger$ \\",
    ]
    assert r"\caption{Difference to FedAvg}" in text
    assert r"my\_\{50\%\} & $-$10.00 [$-$10.00, $-$10.00], n=6 (11 of 12 pairs), p=0.031" in text
    assert "alpha=1 FedAvg & 0.76 & 2 $\\pm$ 0 & 2 $\\pm$ 0" in text
    flags = ("--baseline", "my_{50%}", "--no-figures", "--latex")
    assert main(["report", str(tmp_path), *flags]) == 0
    assert r"\caption{Difference to my\_\{50\%\}}" in (tmp_path / "table.tex").read_text()
    make_run(tmp_path, ["algorithm=fedavg", "alpha=0.1", "seed=7"], [0.1, 0.4], seed=7)
    assert main(["report", str(tmp_path), "--no-figures"]) == 0
    assert "(n=6)" in (tmp_path / "table.tex").read_text()


def test_latex_has_a_row_of_settings_only_if_there_are_several(tmp_path):
    """With several measures, each setting has a rule above its columns."""
    for alpha in ("0.1", "1"):
        for algorithm in ("fedavg", "fedntd"):
            given = [f"algorithm={algorithm}", f"alpha={alpha}", "seed=0"]
            make_run(tmp_path / alpha, given, [0.1, 0.4])
            make_run(tmp_path / "both", given, [0.1, 0.4])
    heads = {}
    for name in ("1", "both"):
        assert main(["report", str(tmp_path / name), "--no-figures", "--latex"]) == 0
        text = (tmp_path / name / "table.tex").read_text()
        heads[name] = re.search(r"\\toprule\n(.*?)\\midrule", text, re.DOTALL)[1].splitlines()
        assert text.count("\\begin{table}") == text.count("\\begin{tabular}") == 2
    assert heads["1"] == [r" & Accuracy (\%) & Forgetting \\"]
    assert heads["both"] == [
        r" & \multicolumn{2}{c}{alpha=0.1} & \multicolumn{2}{c}{alpha=1} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}",
        r" & Accuracy (\%) & Forgetting & Accuracy (\%) & Forgetting \\",
    ]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_tables_and_appendix_compile(tmp_path):
    """No line is more than 5 pt too wide, although the tables are wider than the text."""
    for seed in range(3):
        for alpha in ("0.1", "0.5", "1"):
            for name in ("fedavg", "my_{50%}", "fedprox"):
                given = [f"algorithm={name}", f"alpha={alpha}", f"seed={seed}"]
                make_run(tmp_path, given, [0.1, 0.4], seed=seed)
    assert main(["report", str(tmp_path), "--no-figures", "--latex", "--appendix"]) == 0
    packages = r"\usepackage{array,booktabs,graphicx,longtable}"
    page = rf"\documentclass{{article}}{packages}\begin{{document}}\input{{table}}"
    (tmp_path / "page.tex").write_text(rf"{page}\clearpage\input{{appendix}}\end{{document}}")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    assert [
        each for each in re.findall(r"([\d.]+)pt too wide", done.stdout) if float(each) > 5
    ] == []


def test_accuracies_after_each_task_are_averaged_over_seeds(tmp_path):
    """50, 60 and 70 % have the mean 60 and the deviation 10. A run that ended after a task counts
    where it has values, and a diverged one does not."""
    for seed, accuracy in enumerate((0.5, 0.6, 0.7, 0.1)):
        ends = [{"task": 1, "accuracies": [accuracy, 0.0]}, {"task": 2, "accuracies": [0.4, 0.6]}]
        status = "diverged" if seed == 3 else "completed"
        for name, kept in (("fedavg", ends), ("fedntd", ends[: 1 + (seed > 0)])):
            values = {"tasks": kept, "average_accuracy": 0.5, "status": status}
            make_run(tmp_path, [f"algorithm={name}", f"seed={seed}"], [0.1], **values)
    write_tables(tmp_path, own_jobs(tmp_path), Layout())
    table = pd.read_csv(tmp_path / "task_means.csv").set_index("method")
    first = table.loc["fedavg"].iloc[0]
    assert first[["after_task", "evaluated_task", "n"]].tolist() == [1, 1, 3]
    assert first[["accuracy", "accuracy_std"]].tolist() == pytest.approx([0.6, 0.1])
    assert table.loc["fedntd", "n"].tolist() == [3, 3, 2, 2]
    text = (tmp_path / "table.md").read_text()
    part = text.partition("### Test accuracy after each task (%): FedNTD\n")[2].splitlines()
    assert part[1] == "Mean ± standard deviation over 3 seeds, or over the number n in a cell."
    assert part[3:7] == [
        "| after | task 1 | task 2 |",
        "| --- | --- | --- |",
        "| 1 | 60.00 ± 10.00 | 0.00 ± 0.00 |",
        "| 2 | 40.00 ± 0.00 (n=2) | 60.00 ± 0.00 (n=2) |",
    ]
