"""REPRODUCTION.md, its page of tables, and the committed tables of sweeps."""

import re
from pathlib import Path

import pandas as pd
import pytest

from fedexp.analysis.layout import csv
from fedexp.config.options import conf_directories, list_options
from fedexp_papers import evidence, readings
from fedexp_papers.command import main
from fedexp_papers.page import END, MARK, PAGE, PARTS, TABLES, describe_runs
from fedexp_papers.sweeps import all_paper_sweeps, load_paper_sweep
from quick_runs import make_run

ROOT = Path(__file__).parents[2]
MULTIRUN = ROOT / "multirun"


LONG = ("cfed_table1", "fedntd_table1")


@pytest.mark.parametrize(
    "sweep",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in LONG else [])
        for name in sorted(path.parent.name for path in MULTIRUN.glob(f"*/{evidence.TABLE}"))
    ],
)
def test_committed_tables_are_current(sweep):
    current = csv(readings.join_readings(load_paper_sweep(sweep), MULTIRUN / sweep))
    assert current == (MULTIRUN / sweep / "comparison.csv").read_text(encoding="utf-8")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / PAGE
    parts = "More.\n".join(f"{MARK.format(name=name)}old\n{END}" for name in PARTS)
    path.write_text(f"# Title\n\n{parts}\nMore.\n", encoding="utf-8")
    return path


def test_parts_between_the_marks_and_the_tables_are_written_and_checked(page, capsys):
    """The second reading of the table has rows in the section of the first. Only sweeps with runs
    have a section."""
    arguments = ["page", "--root", str(page.parent)]
    given = ["experiment=fedntd/cifar10_s2", "algorithm=fedntd"]
    weaker = ["algorithm.tau=3", "algorithm.tau_squared=false"]
    for name, more in (("fedntd_table1", []), ("fedntd_table1_tau3", weaker)):
        make_run(page.parent / "multirun" / name, given + more, [0.25, 0.5])
    assert main([*arguments, "--check"]) == 2
    assert "is out of date; run `make reproduction`" in capsys.readouterr().err
    assert main(arguments) == 0
    text, tables = page.read_text(), (page.parent / TABLES).read_text()
    assert text.startswith(f"# Title\n\n{MARK.format(name=PARTS[0])}\n| paper | published | ")
    assert text.endswith(f"{END}\nMore.\n")
    assert text.count("More.\n") == len(PARTS)
    assert "old" not in text
    assert "**2 of the 874 published entries are judged (0 %)**" in text
    assert tables.count("\n### ") == 1
    assert "`sweep=fedntd_table1`: 2 published values at the full protocol" in tables
    assert "FedNTD (before the release)" in tables
    heading = "| | CIFAR-10 s=2 |"  # named although no other column was run
    assert tables.count(heading) == 2
    assert "MOON" not in tables
    papers = len(all_paper_sweeps())
    assert f"{papers - 2} of {papers} sweeps have no run here." in tables
    assert (page.parent / TABLES).with_name("overview.svg").read_bytes().startswith(b"<?xml")
    assert main([*arguments, "--check"]) == 0
    (page.parent / TABLES).write_text(tables + "changed")
    assert main([*arguments, "--check"]) == 2
    assert f"{page.parent / TABLES} is out of date" in capsys.readouterr().err


def test_other_protocols_of_the_first_and_of_other_readings_are_named():
    """One value was run as published and one in 9 rounds, the other reading in 5 rounds."""
    rows = {"protocol": ["full", "reduced", "reduced"], "reading": ["", "", "released"]}
    rows |= {"changes": ["", "rounds=9", "rounds=5"], "seeds": "0", "commits": "a", "hardware": "A"}
    text = (
        "1 published value at the full protocol; 1 at another protocol (rounds=9); other readings"
    )
    assert describe_runs(pd.DataFrame(rows)).startswith(f"{text} at another protocol (rounds=5); ")


@pytest.mark.slow
def test_committed_page_is_current():
    assert main(["page", "--root", str(ROOT), "--check"]) == 0


def test_page_without_marks_and_damaged_table_give_one_message(page, capsys):
    page.write_text("# Title\n")
    assert main(["page", "--root", str(page.parent)]) == 2
    assert f"{page}: has no lines" in capsys.readouterr().err
    page.write_text("".join(MARK.format(name=name) + END for name in PARTS))
    assert main(["page", "--root", str(page.parent)]) == 2
    assert "multirun: has no run of a published table" in capsys.readouterr().err
    path = page.parent / "multirun" / "fedntd_table1" / evidence.TABLE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert main(["page", "--root", str(page.parent)]) == 2
    assert f"{path}: not a valid table of runs" in capsys.readouterr().err


def test_table_of_checks_names_existing_tests_and_each_algorithm():
    text = (ROOT / "docs/algorithms/checks.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    defined = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert named
    assert not [name for name in named if f"def {name}(" not in defined]
    rows = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")]
    assert not [name for name, _, _, tests, _ in rows if tests == "-"], "without a test"
    listed = {name for row in rows for name in row[0].split(", ")}
    assert set(list_options("algorithm", conf_directories())) <= listed
