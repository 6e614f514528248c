"""`fedexp reproduction --status`: what is measured, what it has cost, and what is
left."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from fedexp.analysis.sweep import load_sweep
from fedexp.cli.commands import call
from fedexp.papers import reproduction, status
from fedexp.papers.aggregate import write_tables
from fedexp.rundir import evidence
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import SweepDirectory
from test_evidence import remove_runs
from test_reproduction import ROOT, run_directory
from toy_federation import CONF


def row_of(out: str, sweep: str) -> dict[str, str]:
    """The cells of a sweep by the heads of their columns."""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in out.splitlines()
        if line.startswith("|")
    ]
    return dict(
        zip(lines[0][1:], next(line[1:] for line in lines if line[0] == f"`{sweep}`"), strict=True)
    )


def add_run(sweep: Path, name: str, algorithm: str, seconds: float, hardware: dict) -> None:
    run = {
        "rounds": "cifar10_s2_fedavg_rounds.csv",
        "overrides": ["experiment=fedntd/cifar10_s2", f"algorithm={algorithm}"],
        "commit": "abcdef0",
        "hardware": hardware,
    }
    run_directory(sweep / name, run)
    path = sweep / name / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": seconds}))


def test_what_is_measured_spent_and_left(tmp_path, capsys, monkeypatch):
    """FedAvg on two threads in 2 hours: 4 core hours; FedNTD on a GPU in 1 hour. Table 1 has 98
    jobs, 8 settings x 7 methods of them on CIFAR-10. All are left, since neither run was tested in
    the augmented view: 56 times 4 core hours or 1 GPU hour, from other methods for most of them."""
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
    (tmp_path / "data" / "MNIST").mkdir()
    monkeypatch.delenv("FEDEXP_DATA", raising=False)
    sweep = tmp_path / "multirun" / "fedntd_table1"
    cpu = {"name": "CPU", "device": "cpu", "precision": "fp32", "threads": 2, "workers": 1}
    add_run(sweep, "a", "fedavg", 7200, cpu)
    add_run(
        sweep,
        "b",
        "fedntd",
        3600,
        {"name": "H100", "device": "cuda:0", "precision": "tf32", "threads": 8},
    )
    SweepDirectory(sweep).mark("fedntd_table1")
    write_tables(sweep)
    evidence.keep_runs(sweep)
    remove_runs(sweep)
    assert call("reproduction", ["--root", str(tmp_path), "--status"]) == 0
    out = capsys.readouterr().out
    found = row_of(out, "fedntd_table1")
    assert found["printed"] == "196"
    assert found["measured, by seeds"] == "4 with 1 seed"
    # without the augmented view nothing is judged
    assert (found["within"], found["outside"]) == ("0", "0")
    assert found["order reproduced"] == "-"  # two methods in the column
    assert found["spent"] == "4.0 core h, 1.0 GPU h"
    assert (
        found["left (first seeds)"]
        == "98 of 98 jobs: ~224.0 core h for 56 of them or ~56.0 GPU h for 56 of them"
    )
    assert found["missing"] == "data: cifar100, cinic10"
    other = row_of(out, "fedntd_table8")
    assert (other["printed"], other["measured, by seeds"], other["spent"]) == ("50", "", "-")
    assert not (tmp_path / "REPRODUCTION.md").exists()


def in_both_views(sweep: Path, name: str) -> None:
    """Make a run one that was tested in the augmented view too, where its accuracies are 0.8 of the
    plain ones."""
    rounds = pd.read_csv(sweep / name / "rounds.csv")
    rounds["test_accuracy_augmented"], rounds["forgetting_augmented"] = (
        0.8 * rounds["test_accuracy"],
        rounds["forgetting"],
    )
    rounds.to_csv(sweep / name / "rounds.csv", index=False)
    path = sweep / name / "config.yaml"
    path.write_text(
        yaml.safe_dump(yaml.safe_load(path.read_text()) | {"test_views": ["plain", "augmented"]})
    )
    classes = sweep / name / "class_accuracy.csv"
    shutil.copy(classes, classes.with_name("class_accuracy_augmented.csv"))


def test_what_is_left_costs_what_committed_rounds_took(tmp_path, capsys, monkeypatch):
    """FedAvg in both views, 3 hours on one core: of the 56 jobs on CIFAR-10 it is the one that is
    not left, and the others are estimated from it, though its directory is gone. Data sets may lie
    in several directories."""
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    for name in ("a/CIFAR10", "a/cifar-100-python", "b/MNIST", "b/cinic-10"):
        (tmp_path / name).mkdir(parents=True)
    sweep = tmp_path / "multirun" / "fedntd_table1"
    add_run(
        sweep,
        "a",
        "fedavg",
        3 * 3600,
        {"name": "CPU", "device": "cpu", "precision": "fp32", "threads": 1},
    )
    in_both_views(sweep, "a")
    evidence.keep_runs(sweep)
    remove_runs(sweep)
    assert call("report", [str(sweep), "--no-figures"]) == 0
    capsys.readouterr()
    assert (
        call(
            "reproduction", ["--root", str(tmp_path), "--status", "--data-dir", str(tmp_path / "a")]
        )
        == 0
    )
    found = row_of(capsys.readouterr().out, "fedntd_table1")
    assert (found["spent"], found["missing"]) == ("3.0 core h", "data: cinic10, mnist")
    assert found["left (first seeds)"] == "97 of 98 jobs: ~165.0 core h for 55 of them"
    folders = [text for name in "ab" for text in ("--data-dir", str(tmp_path / name))]
    assert call("reproduction", ["--root", str(tmp_path), "--status", *folders]) == 0
    assert row_of(capsys.readouterr().out, "fedntd_table1")["missing"] == ""


@pytest.mark.slow
def test_values_of_a_committed_table_are_not_left(tmp_path, capsys):
    """Without the files of its runs: measured, at an unknown cost."""
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    sweep = tmp_path / "multirun" / "fedntd_table1"
    add_run(sweep, "a", "fedavg", 0, {"name": "CPU", "device": "cpu", "precision": "fp32"})
    in_both_views(sweep, "a")
    SweepDirectory(sweep).mark("fedntd_table1")
    write_tables(sweep)
    remove_runs(sweep)
    assert call("reproduction", ["--root", str(tmp_path), "--status"]) == 0
    found = row_of(capsys.readouterr().out, "fedntd_table1")
    assert found["left (first seeds)"] == "97 of 98 jobs: not measured"
    assert found["spent"] == "-"


def test_a_value_that_is_read_in_two_ways_is_measured_once():
    """The same printed value outside in the first reading and within in the second, which has a row
    of its own."""
    table = reproduction.read_table(ROOT / "multirun" / "fedntd_table1" / "table.csv").assign(
        n=0, protocol=""
    )
    cell = (
        (table["dataset"] == "CIFAR-10")
        & (table["partition_param"] == "s=3")
        & (table["metric"] == "accuracy")
    )
    mine = cell & table["method"].str.startswith("FedNTD")
    assert mine.sum() == 2
    sweep = load_sweep("fedntd_table1", [CONF])

    def found(protocols, verdicts):
        table.loc[mine, "n"], table.loc[mine, "protocol"], table.loc[mine, "verdict"] = (
            1,
            protocols,
            verdicts,
        )
        return status.row(status.Standing(sweep, table, {}, status.Hours()), status.Costs(), [])[:5]

    assert found(["full", "full"], ["outside", "within"]) == ["196", "1 with 1 seed", "0", "1", "1"]
    assert found(["full", "full"], ["outside", "outside"]) == [
        "196",
        "1 with 1 seed",
        "0",
        "1",
        "0",
    ]
    assert found(["full", "full"], ["within", "within"]) == ["196", "1 with 1 seed", "1", "0", "0"]
    assert found(["full", "reduced"], ["outside", "within"]) == [
        "196",
        "1 with 1 seed",
        "0",
        "1",
        "0",
    ]


def test_a_damaged_file_is_one_message(tmp_path, capsys):
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    path = tmp_path / "multirun" / "fedntd_table1" / "runs" / "x.json.xz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert call("reproduction", ["--root", str(tmp_path), "--status"]) == 2
    assert "x.json.xz: not the file of a run" in capsys.readouterr().err


def test_runs_of_an_early_version_have_no_times(tmp_path, capsys):
    """Two runs of 2 hours on one core each, and one whose seconds nobody noted."""
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    sweep = tmp_path / "multirun" / "fedntd_table1"
    for name, algorithm, seconds in (
        ("a", "fedavg", 7200),
        ("b", "fedntd", 7200),
        ("c", "moon", None),
    ):
        add_run(
            sweep,
            name,
            algorithm,
            seconds,
            {"name": "CPU", "device": "cpu", "precision": "fp32", "threads": 1},
        )
    assert call("reproduction", ["--root", str(tmp_path), "--status"]) == 0
    assert (
        row_of(capsys.readouterr().out, "fedntd_table1")["spent"]
        == "4.0 core h (1 run without times)"
    )


@pytest.mark.parametrize(
    ("hardware", "hours"),
    [
        ({"device": "cuda:0", "threads": 8}, status.Hours(gpu=2.0)),
        ({"device": "cuda:0", "threads": 8, "workers": 3}, status.Hours(gpu=6.0)),
        ({"device": "cpu", "threads": 2, "workers": 3}, status.Hours(cpu=12.0)),
    ],
)
def test_hours_of_a_run_count_its_cores_or_gpus(tmp_path, hardware, hours):
    """Two hours of a GPU with eight threads beside it, of three workers with a GPU each, of three
    with two cores each."""
    add_run(tmp_path, "a", "fedavg", 7200, {"name": "X", "precision": "fp32"} | hardware)
    assert status.hours_of(RunDirectory(tmp_path / "a")) == hours


def job_of(sweep: str, *wanted: str) -> status.Job:
    jobs = [
        job
        for _, job in status.jobs_of(load_sweep(sweep, [CONF]))
        if job.overrides.issuperset(wanted)
    ]
    assert len(jobs) == 1
    return jobs[0]


def test_what_a_job_costs_follows_from_its_passes_over_the_data():
    """FedAvg on CIFAR-10 s=2, 200 rounds x R=0.1 x E=5 = 100 passes, in 10 hours: with R=1.0 (Table
    10) it takes ten times as long, FedProx with E=10 (Table 8) twice, about; a ResNet-10 has not
    been measured."""
    setting = "experiment=fedntd/cifar10_s2"
    measured = job_of("fedntd_table1", setting, "algorithm=fedavg")
    assert measured.work.passes == 100
    costs = status.Costs(known={key: [status.Hours(cpu=0.1)] for key in status.keys(measured)})
    assert costs.estimate(measured, "cpu") == (pytest.approx(10), True)
    wide = job_of("fedntd_table10", setting, "algorithm=fedavg", "participation=1.0")
    assert costs.estimate(wide, "cpu") == (pytest.approx(100), False)
    long = job_of("fedntd_table8", setting, "algorithm=fedprox", "local.epochs=10")
    assert costs.estimate(long, "cpu") == (pytest.approx(20), False)
    other = next(job for _, job in status.jobs_of(load_sweep("fedntd_resnet10", [CONF])))
    assert costs.estimate(other, "cpu") == (None, False)


def test_which_data_sets_a_job_needs():
    """CFeD Table 1: three sets of texts in domains; a surrogate set for those methods that distil
    on it alone; with all data in one place the passes are rounds x epochs, 1 x 20."""
    domains = job_of("cfed_table1", "experiment=cfed/text_domain", "algorithm=fedavg")
    assert domains.work.data == ("thucnews", "sina2019", "sogoucs")
    assert job_of("cfed_table1", "experiment=cfed/image_class", "algorithm=fedavg").work.data == (
        "cifar10",
    )
    assert job_of("cfed_table1", "experiment=cfed/image_class", "algorithm=cfed").work.data == (
        "cifar10",
        "caltech256",
    )
    assert job_of("cfed_table1", "experiment=cfed/text_domain", "algorithm=ewc").work.passes == 20
