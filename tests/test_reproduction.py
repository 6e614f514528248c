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
from fedexp.papers.both_views import MARKER, filled
from fedexp.papers.reproduction import VALUE, document, facts, read_table, whole
from fedexp.rundir import evidence
from fedexp.rundir.sweeps import SweepDirectory
from toy_federation import CONF

ROOT = Path(__file__).parents[1]
NOTES, MULTIRUN = ROOT / "docs" / "reproduction", ROOT / "multirun"
COMMITTED = yaml.safe_load((NOTES / "runs.yaml").read_text(encoding="utf-8"))


def run_directory(folder: Path, run: dict) -> None:
    """A run directory with all that the tables read, from a committed rounds.csv."""
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
    }
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
    # No table reads it, but a run that is over has one.
    classes = (
        rounds[["round", "test_accuracy"]].dropna().rename(columns={"test_accuracy": "accuracy"})
    )
    classes.assign(**{"class": 0})[["round", "class", "accuracy"]].to_csv(
        folder / "class_accuracy.csv", index=False
    )


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
            run_directory(tmp_path / name, run)
            (tmp_path / "x").write_bytes(evidence.pack(tmp_path / name))
            kept = MULTIRUN / sweep / evidence.FOLDER / f"{name}{evidence.SUFFIX}"
            assert evidence.read(kept) == evidence.read(tmp_path / "x"), name


def test_the_committed_report_is_current(capsys):
    assert call("reproduction", ["--root", str(ROOT), "--check"]) == 0, capsys.readouterr().out


def test_all_sweeps_and_notes_are_in_it():
    text = document(ROOT, {})
    for name in list_options("sweep", [CONF]):
        assert (f"| `{name}` |" in text) == bool(load_sweep(name, [CONF]).paper)
    for note in NOTES.glob("*.md"):
        body = note.read_text(encoding="utf-8").strip().partition("\n")[2].strip()
        # between them the names of sweeps, which stand for tables
        for part in MARKER.split(body)[::2]:
            assert part.strip() in text, note.name
    assert not MARKER.search(text)


def test_a_row_of_the_overview(tmp_path):
    """The committed cells (two values each) of Table 1's 196, one seed each; one reduced run beside
    them."""
    tables("fedntd_table1", tmp_path)
    run_directory(
        tmp_path / "short",
        {
            "rounds": "mnist_s2_fedavg_rounds.csv",
            "overrides": ["experiment=fedntd/cifar10_s5", "algorithm=moon", "rounds=5"],
            "commit": "abcdef0123",
            "hardware": {"name": "H200", "device": "cuda", "precision": "fp32"},
        },
    )
    write_tables(tmp_path)
    sweep = load_sweep("fedntd_table1", [CONF])
    table = read_table(tmp_path / "table.csv")
    values, full, reduced, seeds, verdicts, commits, hardware = facts(sweep, table)
    runs = COMMITTED["fedntd_table1"]
    old = sum("algorithm=fedcurv" in run["overrides"] for run in runs)  # made before a correction
    machines = [run["hardware"] for run in runs] + [
        {"name": "H200", "device": "cuda", "precision": "fp32"}
    ]
    assert (values, full, seeds) == ("196", str(2 * (len(runs) - old)), "1 a value (seed 0)")
    assert reduced.startswith(f"{2 * old + 2}: `older code: FedCurv (")
    assert reduced.endswith("; `rounds=5`")
    assert sum(int(part.split()[0]) for part in verdicts.split(", ")) == 2 * (len(runs) - old)
    assert commits == ", ".join(sorted({run["commit"] for run in runs} | {"abcdef0"}))
    assert hardware == ", ".join(
        sorted({f"{m['name']} ({m['device']}, {m['precision']})" for m in machines})
    )
    assert facts(sweep, None)[:2] == ["196", "not run"]


def test_a_value_that_is_read_in_two_ways_counts_once():
    """Of A both readings were run, of B the second alone, of C the first in full, of D the second
    in full; the order of the column is that of the first reading."""

    def table(protocols, order):
        rows = pd.DataFrame(
            {"method": list("ABCD"), "protocol": protocols, "verdict": "within", "order": order}
        )
        rows["verdict"] = rows["verdict"].where(
            rows["protocol"] == "full", "not judged: reduced protocol"
        )
        rows = rows.assign(order_by="last", **dict.fromkeys(set(VALUE) - {"method"}, "x"))
        return rows

    first = table(["reduced", "", "full", "reduced"], "no swap beyond noise")
    tables = {
        "other": table(["reduced", "reduced", "reduced", "full"], "swapped: A above B"),
        "first": first,
    }
    text = whole(tables, {"other"})
    assert (
        "2 printed values are measured at the full protocol: 2 within. 2 are measured with other"
        " data" in text
    )
    assert text.endswith("In 1 of 1 columns with enough methods, no two are swapped beyond noise.")
    assert "2 printed values are measured at the full protocol: 2 within." in whole(tables)
    assert whole(tables).endswith(
        "In 1 of 2 columns with enough methods, no two are swapped beyond noise."
    )
    assert whole({}) == "**Where it stands.** 0 printed values are measured at the full protocol."


def test_a_note_has_the_runs_in_both_views():
    """By hand, of a table without other runs: FedAvg judged in both views with accuracy 71.234 (+-
    0.5 over seeds) and F 0.256; FedProx tested in the plain view alone, FedNova reduced, the others
    not run."""
    table = read_table(MULTIRUN / "fedntd_table1" / "table.csv")
    setting = (table["dataset"] == "CIFAR-10") & (table["partition_param"] == "s=2")
    clear = {"n": 0, "verdict": "not run", "protocol": "", "plain_last": float("nan")}
    table = table.assign(**clear)
    run = {"n": 2, "protocol": "full", "hardware": "EPYC (cpu, fp32); Xeon (cpu, bf16)"}
    for method, metric, values in [
        (
            "FedAvg",
            "accuracy",
            {
                "mean": 71.234,
                "std": 0.5,
                "plain_last": 80.0,
                "plain_last10": 79.5,
                "printed": 70.0,
                "verdict": "within",
            },
        ),
        (
            "FedAvg",
            "forgetting",
            {
                "mean": 0.256,
                "std": float("nan"),
                "plain_last": 0.1,
                "plain_last10": 0.125,
                "printed": 0.2,
                "verdict": "outside",
            },
        ),
        ("FedProx", "accuracy", {"plain_last": 60.0, "verdict": "not judged: no augmented view"}),
        ("FedNova", "accuracy", {"plain_last": 60.0, "verdict": "within", "protocol": "reduced"}),
    ]:
        rows = (
            setting
            & (table["method"] == method)
            & (table["metric"] == metric)
            & (table["reading"] == "")
        )
        for name, value in {**run, **values}.items():
            table.loc[rows, name] = value
    lines = filled(
        "Before.\n\n::: both_views fedntd_table1\n\nAfter.", {"fedntd_table1": table}
    ).splitlines()
    assert lines[:2] + lines[-2:] == ["Before.", "", "", "After."]
    assert lines[4:-2] == [
        "| CIFAR-10 s=2, FedAvg | bf16, fp32 | 71.23 ± 0.50*, F 0.26! | 80.00, F 0.10 | 79.50, F"
        " 0.12 | 70.00, F 0.20 |"
    ]
    assert filled("::: both_views other", {}) == "No run has both views yet."


def test_it_is_written_and_checked(tmp_path, capsys):
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    assert call("reproduction", ["--root", str(tmp_path), "--check"]) == 1
    (tmp_path / "docs" / "reproduction" / "fedntd_table8.md").write_text(
        "## My heading\n\nWhat I saw.\n"
    )
    (tmp_path / "docs" / "reproduction" / "more.md").write_text("## More\n")
    assert call("reproduction", ["--root", str(tmp_path)]) == 0
    text = (tmp_path / "REPRODUCTION.md").read_text()
    assert "| `fedntd_table8` | 50 | not run |" in text
    assert (
        text.index("## My heading")
        < text.index("`sweep=fedntd_table8`: not run.")
        < text.index("What I saw.")
    )
    assert text.rstrip().endswith("## More")
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
        Path("REPRODUCTION.md"): "# Page\n",
        Path("docs/reproduction/curves/a.svg"): "<svg/>\n",
    }
    monkeypatch.setattr(reproduction, "all_files", lambda root: files)
    assert call("reproduction", ["--root", str(tmp_path), "--check"]) == 1
    assert call("reproduction", ["--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("cannot be written") == 1


def write() -> None:
    for sweep, runs in COMMITTED.items():
        with tempfile.TemporaryDirectory() as folder:
            for run in runs:
                run_directory(Path(folder, run["rounds"].removesuffix("_rounds.csv")), run)
            for path in evidence.keep_runs(Path(folder)):
                (MULTIRUN / sweep / evidence.FOLDER).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, MULTIRUN / sweep / evidence.FOLDER / path.name)
    for path in MULTIRUN.glob(f"*/{evidence.FOLDER}"):
        write_report(path.parent, figures=False)
    call("reproduction", ["--root", str(ROOT)])


if __name__ == "__main__" and "--write" in sys.argv:
    write()
