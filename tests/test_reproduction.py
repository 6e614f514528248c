"""REPRODUCTION.md and the committed tables are what the committed runs give."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fedexp.analysis.sweep import load_sweep
from fedexp.cli.commands import call
from fedexp.config.options import list_options
from fedexp.papers import reproduction
from fedexp.papers.aggregate import write_report
from fedexp.papers.reproduction import FOLDER, all_files, describe_origin
from fedexp.rundir import evidence
from toy_federation import CONF

ROOT = Path(__file__).parents[1]
MULTIRUN = ROOT / "multirun"
EARLY = {  # early runs without class accuracies
    path.name.removesuffix(evidence.SUFFIX): path
    for path in sorted((MULTIRUN / "fedntd_table1" / evidence.FOLDER).glob("*"))
    if "_seed" not in path.name
}


def run_directory(folder: Path, name: str = "cifar10_s2_fedavg", **changes: Any) -> None:
    """Make a run directory of an early run of Table 1.

    changes: `overrides`, and keys of summary.json.
    """
    evidence.unpack(EARLY[name], folder)
    if "overrides" in changes:
        text = yaml.safe_dump([*changes.pop("overrides"), "seed=0"])
        (folder / ".hydra" / "overrides.yaml").write_text(text)
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sweep", sorted(path.parent.name for path in MULTIRUN.glob(f"*/{evidence.FOLDER}"))
)
def test_committed_tables_are_current(sweep, tmp_path):
    for path in MULTIRUN.glob(f"*/{evidence.FOLDER}"):
        shutil.copytree(path, tmp_path / "multirun" / path.parent.name / evidence.FOLDER)
    for path in write_report(tmp_path / "multirun" / sweep, figures=False):
        assert path.read_text() == (MULTIRUN / sweep / path.name).read_text(), path.name


def test_committed_page_is_current(capsys):
    assert call("reproduction", ["--root", str(ROOT), "--check"]) == 0, capsys.readouterr().out


def test_origin_of_a_table():
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
    assert describe_origin(table) == (
        "2 published values at the full protocol; 1 at another protocol, not judged (data: 9"
        " classes, not 10; rounds=5); seeds 0, 1; commits a, b; on X (cpu, fp32), Y (cpu, bf16)."
    )


def test_only_sweeps_with_runs_have_a_section(tmp_path):
    """The second reading of the table has rows in the section of the first."""
    given = ["experiment=fedntd/cifar10_s2", "algorithm=fedntd"]
    weaker = ["algorithm.tau=3", "algorithm.tau_squared=false"]
    for name, more in (("fedntd_table1", []), ("fedntd_table1_tau3", weaker)):
        run_directory(tmp_path / "multirun" / name / "run", overrides=given + more)
    files = all_files(tmp_path)
    curves = {FOLDER / "fedntd_table1.svg", FOLDER / "fedntd_table1_tau3.svg"}
    assert set(files) == {Path("REPRODUCTION.md"), *curves}
    text = files[Path("REPRODUCTION.md")].decode()
    assert text.count("\n### ") == 1
    assert "`sweep=fedntd_table1`: 2 published values at the full protocol" in text
    assert "FedNTD (before the release)" in text
    assert "MOON" not in text
    sweeps = [load_sweep(name, [CONF]) for name in list_options("sweep", [CONF])]
    papers = sum(bool(sweep.paper) for sweep in sweeps)
    assert f"{papers - 2} of {papers} tables and figures have no run here." in text


def test_page_is_written_and_checked(tmp_path, capsys):
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    assert call("reproduction", ["--root", str(tmp_path), "--check"]) == 1
    assert call("reproduction", ["--root", str(tmp_path)]) == 0
    text = (tmp_path / "REPRODUCTION.md").read_text()
    assert "Too few runs of FedNTD's Table 1 are kept here to compare them." in text
    assert call("reproduction", ["--root", str(tmp_path), "--check"]) == 0
    capsys.readouterr()
    assert call("reproduction", ["--root", str(tmp_path / "docs")]) == 2
    assert "must be a checkout with docs/reproduction" in capsys.readouterr().err


@pytest.mark.parametrize("taken", ["REPRODUCTION.md", "docs/reproduction/curves"])
def test_unwritable_page_gives_one_message(taken, tmp_path, capsys, monkeypatch):
    """A directory has the name of the page, or a file the name of the folder of its curves."""
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
