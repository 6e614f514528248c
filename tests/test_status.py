"""`python -m fedexp.reproduction --status`: what is measured, what it has cost, and what is left."""

import json
from pathlib import Path

from fedexp.analysis import reproduction
from fedexp.analysis.aggregate import mark, write_tables
from fedexp.rundir import evidence
from test_evidence import remove_runs
from test_reproduction import run_directory


def row_of(out: str, sweep: str) -> dict[str, str]:
    """The cells of a sweep by the heads of their columns."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    return dict(zip(lines[0][1:], next(line[1:] for line in lines if line[0] == f"`{sweep}`"), strict=True))


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
    """FedAvg on two threads in 2 hours: 4 core hours; FedNTD on a GPU in 1 hour. Table 1 has 98 jobs, 8 settings x 7
    methods of them on CIFAR-10, where 54 are left: 216 core hours or 54 GPU hours, from other methods for all but
    their own."""
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
    (tmp_path / "data" / "MNIST").mkdir()
    monkeypatch.delenv("FEDEXP_DATA", raising=False)
    sweep = tmp_path / "multirun" / "fedntd_table1"
    cpu = {"name": "CPU", "device": "cpu", "precision": "fp32", "threads": 2, "workers": 1}
    add_run(sweep, "a", "fedavg", 7200, cpu)
    add_run(sweep, "b", "fedntd", 3600, {"name": "H100", "device": "cuda:0", "precision": "tf32", "threads": 8})
    mark(sweep, "fedntd_table1")
    write_tables(sweep)
    evidence.keep_runs(sweep)
    remove_runs(sweep)
    assert reproduction.main(["--root", str(tmp_path), "--status"]) == 0
    out = capsys.readouterr().out
    found = row_of(out, "fedntd_table1")
    assert found["printed"] == "196"
    assert found["measured, by seeds"] == "4 with 1 seed"
    assert (found["within"], found["outside"]) == ("0", "0")  # without the augmented view nothing is judged
    assert found["order reproduced"] == "-"  # two methods in the column
    assert found["spent"] == "4.0 core h, 1.0 GPU h"
    assert found["left (first seeds)"] == "96 of 98 jobs: ~216.0 core h for 54 of them or ~54.0 GPU h for 54 of them"
    assert found["missing"] == "data: cifar100, cinic10"
    other = row_of(out, "fedntd_table8")
    assert (other["printed"], other["measured, by seeds"], other["spent"]) == ("50", "", "-")
    assert not (tmp_path / "REPRODUCTION.md").exists()


def test_values_of_a_committed_table_are_not_left(tmp_path, capsys):
    """Without the files of its runs: measured, at an unknown cost."""
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    sweep = tmp_path / "multirun" / "fedntd_table1"
    add_run(sweep, "a", "fedavg", 0, {"name": "CPU", "device": "cpu", "precision": "fp32"})
    mark(sweep, "fedntd_table1")
    write_tables(sweep)
    remove_runs(sweep)
    assert reproduction.main(["--root", str(tmp_path), "--status"]) == 0
    found = row_of(capsys.readouterr().out, "fedntd_table1")
    assert found["left (first seeds)"] == "97 of 98 jobs: not measured"
    assert found["spent"] == "-"


def test_a_damaged_file_is_one_message(tmp_path, capsys):
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    path = tmp_path / "multirun" / "fedntd_table1" / "runs" / "x.json.xz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert reproduction.main(["--root", str(tmp_path), "--status"]) == 2
    assert "x.json.xz: not the file of a run" in capsys.readouterr().err
