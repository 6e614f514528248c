"""REPRODUCTION.md and the committed tables are what the committed runs and notes give.

`python tests/test_reproduction.py --write` makes the files of the runs of
docs/reproduction/runs.yaml anew, and all tables and REPRODUCTION.md from the files of the committed
runs.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest
import yaml

from fedexp.analysis.sweep import load_sweep
from fedexp.cli.commands import call
from fedexp.config.options import list_options
from fedexp.papers import reproduction
from fedexp.papers.aggregate import write_report, write_tables
from fedexp.papers.reproduction import FOLDER, all_files, origin
from fedexp.rundir import evidence
from fedexp.rundir.sweeps import SweepDirectory
from toy_federation import CONF

ROOT = Path(__file__).parents[1]
NOTES, MULTIRUN = ROOT / "docs" / "reproduction", ROOT / "multirun"
COMMITTED = yaml.safe_load((NOTES / "runs.yaml").read_text(encoding="utf-8"))


def run_directory(folder: Path, run: dict, reconstructed: bool = False) -> None:
    """A run directory with all that the tables read, from a committed rounds.csv; with classes that
    are made up unless it says that it is reconstructed."""
    (folder / ".hydra").mkdir(parents=True)
    rounds = pd.read_csv(NOTES / run["rounds"])
    rounds.to_csv(folder / "rounds.csv", index=False)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([*run["overrides"], "seed=0"]))
    last, given = rounds.iloc[-1], dict(text.split("=") for text in run["overrides"])
    dataset, _, partition = given["experiment"].removeprefix("fedntd/").partition("_")
    summary = {
        "status": "completed",
        "algorithm": given["algorithm"],
        "dataset": dataset,
        "partition": "sharding" if partition.startswith("s") else "lda",
        "seed": 0,
        "accuracy": last["test_accuracy"],
        "best_accuracy": rounds["test_accuracy"][1:].max(),
        "forgetting": last["forgetting"],
        "rounds": int(last["round"]),
        "commit": run["commit"],
        "hardware": run["hardware"],
    } | ({"reconstructed": True} if reconstructed else {})
    (folder / "summary.json").write_text(json.dumps(summary))
    choices = {name: summary[name] for name in ("algorithm", "dataset", "partition")}
    algorithm = yaml.safe_load((CONF / "algorithm" / f"{given['algorithm']}.yaml").read_text())
    config = {
        "algorithm": {"_target_": algorithm["_target_"]},
        "model": {"_target_": "fedexp.models.cnn.CNN"},
        "choices": choices,
        "seed": 0,
        "revisions": {},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if not reconstructed:
        classes = rounds[["round", "test_accuracy"]].dropna()
        classes = classes.rename(columns={"test_accuracy": "accuracy"}).assign(**{"class": 0})
        columns = ["round", "class", "accuracy"]
        classes[columns].to_csv(folder / "class_accuracy.csv", index=False)


def tables(sweep: str, folder: Path) -> list[Path]:
    for i, run in enumerate(COMMITTED[sweep]):
        run_directory(folder / f"run{i}", run)
    SweepDirectory(folder).mark(sweep)
    return write_tables(folder)


def with_files(folder: Path) -> Path:
    """Copy the files of all committed runs; return the directory `multirun`."""
    for path in MULTIRUN.glob(f"*/{evidence.FOLDER}"):
        shutil.copytree(path, folder / "multirun" / path.parent.name / evidence.FOLDER)
    return folder / "multirun"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sweep", sorted(path.parent.name for path in MULTIRUN.glob(f"*/{evidence.FOLDER}"))
)
def test_committed_tables_are_what_the_committed_runs_give(sweep, tmp_path):
    for path in write_report(with_files(tmp_path) / sweep, figures=False):
        assert path.read_text() == (MULTIRUN / sweep / path.name).read_text(), path.name


@pytest.mark.slow
def test_runs_of_before_there_were_files_have_theirs(tmp_path):
    for sweep, runs in COMMITTED.items():
        for run in runs:
            name = run["rounds"].removesuffix("_rounds.csv")
            run_directory(tmp_path / name, run, reconstructed=True)
            (tmp_path / "x").write_bytes(evidence.pack(tmp_path / name))
            kept = MULTIRUN / sweep / evidence.FOLDER / f"{name}{evidence.SUFFIX}"
            assert evidence.read(kept) == evidence.read(tmp_path / "x"), name


def test_the_committed_report_is_current(capsys):
    assert call("reproduction", ["--root", str(ROOT), "--check"]) == 0, capsys.readouterr().out


def test_what_a_table_rests_on():
    """Two values at the full protocol, one at another with two departures, one not run."""
    table = pd.DataFrame(
        {
            "protocol": ["full", "full", "reduced", ""],
            "reading": "",
            "changes": ["", "", "rounds=5; data: 9 classes, not 10", ""],
            "seeds": ["0", "0 1", "1", ""],
            "commits": ["a", "b", "a", ""],
            "hardware": ["X (cpu, fp32); Y (cpu, bf16)", "X (cpu, fp32)", "", ""],
        }
    )
    assert origin(table) == (
        "2 printed values at the full protocol; 1 at another, not judged (data: 9 classes, not 10;"
        " rounds=5); seeds 0, 1; commits a, b; on X (cpu, fp32), Y (cpu, bf16)."
    )


def test_only_sweeps_with_runs_have_a_section(tmp_path):
    """Of two sweeps of one table, the second reading stands in the rows of the first."""
    hardware = {"name": "X", "device": "cpu", "precision": "fp32"}
    run = {"rounds": "cifar10_s2_fedavg_rounds.csv", "commit": "abcdef0", "hardware": hardware}
    given = ["experiment=fedntd/cifar10_s2", "algorithm=fedntd"]
    for name, more in (
        ("fedntd_table1", []),
        ("fedntd_table1_tau3", ["algorithm.tau=3", "algorithm.tau_squared=false"]),
    ):
        run_directory(tmp_path / "multirun" / name / "run", run | {"overrides": given + more})
    files = all_files(tmp_path)
    curves = {FOLDER / "fedntd_table1.svg", FOLDER / "fedntd_table1_tau3.svg"}
    assert set(files) == {Path("REPRODUCTION.md"), *curves}
    text = files[Path("REPRODUCTION.md")].decode()
    assert text.count("\n### ") == 1
    assert "`sweep=fedntd_table1`: 2 printed values at the full protocol" in text
    assert "FedNTD (before the release)" in text
    assert "MOON" not in text
    sweeps = [load_sweep(name, [CONF]) for name in list_options("sweep", [CONF])]
    papers = sum(bool(sweep.paper) for sweep in sweeps)
    assert f"{papers - 2} of {papers} tables and figures have no run here." in text


def test_it_is_written_and_checked(tmp_path, capsys):
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    assert call("reproduction", ["--root", str(tmp_path), "--check"]) == 1
    assert call("reproduction", ["--root", str(tmp_path)]) == 0
    text = (tmp_path / "REPRODUCTION.md").read_text()
    assert "Too few runs of FedNTD's Table 1 are kept here to compare them." in text
    assert call("reproduction", ["--root", str(tmp_path), "--check"]) == 0
    capsys.readouterr()
    assert call("reproduction", ["--root", str(tmp_path / "docs")]) == 2
    assert "--root names a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("taken", ["REPRODUCTION.md", "docs/reproduction/curves"])
def test_a_page_that_cannot_be_written_is_one_message(taken, tmp_path, capsys, monkeypatch):
    """A directory stands where the page would be, and a file where the folder of its curves would
    be."""
    (tmp_path / "docs/reproduction").mkdir(parents=True)
    (tmp_path / taken).mkdir() if taken.endswith(".md") else (tmp_path / taken).touch()
    files = {
        Path("REPRODUCTION.md"): b"# Page\n",
        Path("docs/reproduction/curves/a.svg"): b"<svg/>\n",
    }
    monkeypatch.setattr(reproduction, "all_files", lambda root: files)
    assert call("reproduction", ["--root", str(tmp_path), "--check"]) == 1
    assert call("reproduction", ["--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("cannot be written") == 1


def write() -> None:
    for sweep, runs in COMMITTED.items():
        with tempfile.TemporaryDirectory() as folder:
            for run in runs:
                name = run["rounds"].removesuffix("_rounds.csv")
                run_directory(Path(folder, name), run, reconstructed=True)
            for path in evidence.keep_runs(Path(folder)):
                (MULTIRUN / sweep / evidence.FOLDER).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, MULTIRUN / sweep / evidence.FOLDER / path.name)
    for path in MULTIRUN.glob(f"*/{evidence.FOLDER}"):
        write_report(path.parent, figures=False)
    call("reproduction", ["--root", str(ROOT)])


if __name__ == "__main__" and "--write" in sys.argv:
    write()
