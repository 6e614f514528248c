"""`fedexp reproduction`: measured values, hours spent and hours left."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fedexp.analysis.sweep import load_sweep
from fedexp.cli.commands import call
from fedexp.config.options import list_options
from fedexp.papers import status
from fedexp.papers.aggregate import write_tables
from fedexp.rundir import evidence
from fedexp.rundir.sweeps import write_sweep_name
from test_evidence import remove_runs
from test_reproduction import run_directory
from toy_federation import CONF


@pytest.fixture(autouse=True)
def few_sweeps(request, monkeypatch):
    """List only two sweeps, except in the slow test: all of them compose 40 configurations."""
    compare = status.compare_everything

    def compare_few(root: Path) -> Any:
        sweeps, runs, tables = compare(root)
        return {name: sweeps[name] for name in ("fedntd_table1", "fedntd_table8")}, runs, tables

    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(status, "compare_everything", compare_few)


@pytest.mark.slow
def test_every_sweep_of_a_paper_has_a_row(tmp_path, capsys):
    assert call("reproduction", ["--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for sweep in list_options("sweep", [CONF]):
        if load_sweep(sweep, [CONF]).paper:
            assert row_of(out, sweep)["spent"] == "-"


def row_of(out: str, sweep: str) -> dict[str, str]:
    """Return the cells of a sweep by column name."""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in out.splitlines()
        if line.startswith("|")
    ]
    return dict(
        zip(lines[0][1:], next(line[1:] for line in lines if line[0] == f"`{sweep}`"), strict=True)
    )


def add_run(sweep: Path, name: str, algorithm: str, hours: float | None, **hardware: Any) -> None:
    """Add a run on CIFAR-10 s=2: 200 rounds x R=0.1 x E=5 = 100 passes over the training data."""
    run_directory(
        sweep / name,
        overrides=["experiment=fedntd/cifar10_s2", f"algorithm={algorithm}"],
        hardware={"name": "X", "device": "cpu", "precision": "fp32", "threads": 1} | hardware,
        seconds=hours and 3600 * hours,
    )
    choices = {"dataset": "cifar10", "scenario": "none", "model": "cnn", "algorithm": algorithm}
    config = {"choices": choices, "rounds": 200, "participation": 0.1, "local": {"epochs": 5}}
    (sweep / name / "config.yaml").write_text(yaml.safe_dump(config))


def test_hours_spent_and_left_equal_hand_calculation(tmp_path, capsys):
    """FedAvg on two threads in 2 hours: 4 core hours; FedNTD on a GPU in 1 hour. Table 1 has 98
    jobs, 8 settings x 7 methods of them on CIFAR-10. All are left, since neither run tested the
    augmented view. FedNTD's teacher makes a third more passes than FedAvg, MOON's two models two
    thirds more: 8 x (5 x 4 + 16/3 + 20/3) = 256 core hours, or 8 x (5 x 3/4 + 1 + 5/4) = 48 GPU
    hours."""
    sweep = tmp_path / "multirun" / "fedntd_table1"
    add_run(sweep, "a", "fedavg", 2, threads=2, workers=1)
    add_run(sweep, "b", "fedntd", 1, device="cuda:0", precision="tf32", threads=8)
    write_sweep_name(sweep, "fedntd_table1")
    write_tables(sweep)
    evidence.keep_runs(sweep)
    remove_runs(sweep)
    assert call("reproduction", ["--root", str(tmp_path)]) == 0
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
        == "98 of 98 jobs: 256.0 core h for 56 of them or 48.0 GPU h for 56 of them"
    )
    other = row_of(out, "fedntd_table8")
    assert (other["printed"], other["measured, by seeds"], other["spent"]) == ("50", "", "-")
    assert not (tmp_path / "REPRODUCTION.md").exists()


def in_both_views(sweep: Path, name: str) -> None:
    """Add an augmented test to a run, with 0.8 of the plain accuracies."""
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


def test_hours_left_are_estimated_from_kept_runs(tmp_path, capsys):
    """FedAvg in both views took 3 hours on one core. The other 55 jobs on CIFAR-10 are estimated
    from it: 8 x (5 x 3 + 4 + 5) - 3 hours."""
    sweep = tmp_path / "multirun" / "fedntd_table1"
    add_run(sweep, "a", "fedavg", 3)
    in_both_views(sweep, "a")
    evidence.keep_runs(sweep)
    remove_runs(sweep)
    assert call("reproduction", ["--root", str(tmp_path)]) == 0
    found = row_of(capsys.readouterr().out, "fedntd_table1")
    assert found["spent"] == "3.0 core h"
    assert found["left (first seeds)"] == "97 of 98 jobs: 189.0 core h for 55 of them"


def test_damaged_file_gives_one_message(tmp_path, capsys):
    path = tmp_path / "multirun" / "fedntd_table1" / "runs" / "x.json.xz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert call("reproduction", ["--root", str(tmp_path)]) == 2
    assert "x.json.xz: not a valid run file" in capsys.readouterr().err


def test_runs_without_times_are_counted(tmp_path, capsys):
    """Two runs of 2 hours on one core each, and one run without seconds."""
    sweep = tmp_path / "multirun" / "fedntd_table1"
    for name, algorithm, hours in (("a", "fedavg", 2), ("b", "fedntd", 2), ("c", "moon", None)):
        add_run(sweep, name, algorithm, hours)
    assert call("reproduction", ["--root", str(tmp_path)]) == 0
    assert (
        row_of(capsys.readouterr().out, "fedntd_table1")["spent"]
        == "4.0 core h (1 run without times)"
    )


@pytest.mark.parametrize(
    ("hardware", "hours"),
    [
        ({"device": "cuda:0", "threads": 8}, {"gpu": 2.0}),
        ({"device": "cuda:0", "threads": 8, "workers": 3}, {"gpu": 6.0}),
        ({"device": "cpu", "threads": 2, "workers": 3}, {"cpu": 12.0}),
    ],
)
def test_hours_of_a_run_count_cores_or_gpus(hardware, hours):
    """Two hours on one GPU with eight threads, on three GPUs with a worker each, and of three
    workers with two cores each."""
    found = status.compute_hours({"hardware": hardware, "seconds": 7200})
    assert {unit: value for unit, value in found.items() if value == value} == hours


SETTING = "experiment=fedntd/cifar10_s2"
FACTS = {"overrides": [SETTING, "algorithm=fedavg"], "summary": {"rounds": 200}}
FACTS |= {"config": {}, "cpu": 10.0, "gpu": float("nan")}


def jobs_of(sweep: str) -> pd.DataFrame:
    """Return the jobs of a sweep that has no runs."""
    none = pd.DataFrame(columns=list(FACTS))
    return status.list_jobs(load_sweep(sweep, [CONF]), None, none)


def job_of(jobs: pd.DataFrame, *wanted: str) -> pd.Series:
    (job,) = [job for _, job in jobs.iterrows() if job["overrides"].issuperset(wanted)]
    return job


def test_hours_of_a_job_follow_from_passes_over_the_data():
    """FedAvg on CIFAR-10 s=2 makes 200 rounds x R=0.1 x E=5 = 100 passes in 10 hours. With R=1.0
    (Table 10) it takes ten times as long, FedProx with E=10 (Table 8) twice. FedReg makes 3 x 5
    gradient passes in training, 19 and a third before it: in 500 rounds (Flashback) 500 x 0.1 x 34
    1/3 = 1716 2/3 passes. ResNet-10 has not been measured."""
    choices = {"dataset": "cifar10", "scenario": "none", "model": "cnn", "algorithm": "fedavg"}
    config = {"choices": choices, "rounds": 200, "participation": 0.1, "local": {"epochs": 5}}
    runs = pd.DataFrame([FACTS | {"config": config}])

    def hours(sweep: str, *wanted: str) -> float:
        return job_of(status.estimate_hours(jobs_of(sweep), runs), *wanted)["cpu"]

    assert hours("fedntd_table1", SETTING, "algorithm=fedavg") == pytest.approx(10)
    wide = hours("fedntd_table10", SETTING, "algorithm=fedavg", "participation=1.0")
    assert wide == pytest.approx(100)
    long = hours("fedntd_table8", SETTING, "algorithm=fedprox", "local.epochs=10")
    assert long == pytest.approx(20)
    fedreg = hours("flashback_table1", "experiment=flashback/cifar10_lda0.5", "algorithm=fedreg")
    assert fedreg == pytest.approx(1716.67 / 10, rel=1e-4)
    assert status.estimate_hours(jobs_of("fedntd_resnet10"), runs)["cpu"].isna().all()


def test_centralised_job_passes_over_all_data():
    """CFeD Table 1: rounds x epochs, 1 x 20."""
    job = job_of(jobs_of("cfed_table1"), "experiment=cfed/text_domain", "algorithm=ewc")
    assert job["passes"] == 20
