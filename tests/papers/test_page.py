"""The tables of REPRODUCTION.md, its curves, and the committed tables of sweeps."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedexp.analysis.layout import csv
from fedexp_papers import checks, evidence, readings
from fedexp_papers.command import main
from fedexp_papers.curves import draw_learning_curves, list_curves
from fedexp_papers.page import CURVES, END, PAGE, START
from fedexp_papers.runs import read_runs
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
    current = csv(readings.compare_sweep(load_paper_sweep(sweep), MULTIRUN / sweep))
    assert current == (MULTIRUN / sweep / "comparison.csv").read_text(encoding="utf-8")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / PAGE
    path.write_text(f"# Title\n\n{START}old\n{END}\nMore.\n", encoding="utf-8")
    return path


def test_tables_are_written_between_the_marks_and_checked(page, capsys):
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
    text = page.read_text()
    assert text.startswith(f"# Title\n\n{START}\n### FedNTD Table 1: ")
    assert text.endswith(f"{END}\nMore.\n")
    assert text.count("\n### ") == 1
    assert "`sweep=fedntd_table1`: 2 published values at the full protocol" in text
    assert "FedNTD (before the release)" in text
    heading = "| | CIFAR-10 s=2 |"  # named although no other column was run
    assert text.count(heading) == 2
    assert "MOON" not in text
    for name in ("fedntd_table1", "fedntd_table1_tau3"):
        curves = (CURVES / f"{name}.svg").as_posix()
        assert f"[{name}]({curves})" in text
        assert "fedntd" in (page.parent / curves).read_text()
    papers = len(all_paper_sweeps())
    assert f"{papers - 2} of {papers} tables and figures have no run here." in text
    assert main([*arguments, "--check"]) == 0


@pytest.mark.slow
def test_committed_page_is_current():
    assert main(["page", "--root", str(ROOT), "--check"]) == 0


def test_page_without_marks_and_damaged_table_give_one_message(page, capsys):
    page.write_text("# Title\n")
    assert main(["page", "--root", str(page.parent)]) == 2
    assert f"{page}: has no lines" in capsys.readouterr().err
    page.write_text(START + END)
    path = page.parent / "multirun" / "fedntd_table1" / evidence.TABLE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert main(["page", "--root", str(page.parent)]) == 2
    assert f"{path}: not a valid table of runs" in capsys.readouterr().err


S2 = "experiment=fedntd/cifar10_s2"


def test_figure_shows_the_mean_curve_of_each_method_and_setting(tmp_path):
    """FedAvg 0.2, 0.4 and 0.4, 0.8: means 0.3, 0.6. The failed run of FedProx is left out."""
    for seed, curve in enumerate(([0.2, 0.4], [0.4, 0.8])):
        make_run(tmp_path, [S2, "algorithm=fedavg"], curve, seed=seed)
    make_run(tmp_path, [S2, "algorithm=fedntd"], [0.5, 0.5], seed=0)
    make_run(tmp_path, ["experiment=fedntd/cifar10_s3", "algorithm=fedntd"], [0.1, 0.2], seed=0)
    make_run(tmp_path, [S2, "algorithm=fedprox"], [0.5, 0.5], status="failed")
    known = list_curves(read_runs([tmp_path]))
    axes = draw_learning_curves(load_paper_sweep("fedntd_table1"), known).axes
    assert [each.get_ylabel() for each in axes[::3]] == ["fedntd/cifar10_s2", "fedntd/cifar10_s3"]
    assert [each.get_title() for each in axes[:3]] == [
        "accuracy, plain test",
        "accuracy, augmented test",
        "forgetting, augmented test",
    ]
    lines = {line.get_label(): line for line in axes[0].lines}
    assert {"fedavg, 2 seeds", "fedntd"} <= set(lines)
    assert not any(label.startswith("fedprox") for label in lines)
    fedavg = lines["fedavg, 2 seeds"]
    assert np.asarray(fedavg.get_xdata()).tolist() == [1, 2]
    assert np.asarray(fedavg.get_ydata()).tolist() == pytest.approx([0.3, 0.6])
    assert lines["fedntd"].get_color() == axes[3].lines[0].get_color()


def test_page_of_checks_is_current():
    page = (ROOT / checks.PAGE).read_text(encoding="utf-8")
    assert page == checks.checks_page(ROOT), "run `make reproduction`"
    rows = {row.split(" | ")[0].strip("| "): row for row in page.splitlines() if "|" in row}
    assert "`test_moon_loss_equals_formula`" in rows["moon"]
    assert "test_two_rounds_equal_a_plain_loop" in rows["scaffold"]  # by a constant of the file
    assert "SaraBabakN/MFCL-NeurIPS23 at 40d1681" in rows["mfcl"]
    assert not [name for name, row in rows.items() if row.split(" | ")[3] == "-"], "without a test"


def test_values_are_counted_once_for_each_printed_value():
    """FedCurv has runs only in FedNTD's Table 1: four values, all within the tolerance."""
    table = pd.read_csv(MULTIRUN / "fedntd_table1/comparison.csv", na_filter=False)
    mine = table[(table["method"] == "FedCurv") & (table["verdict"] != "not run")]
    assert mine["verdict"].value_counts()["within"] == 4
    assert checks.count_judged(ROOT)["fedcurv"] == (4, 4)


@pytest.mark.parametrize(
    ("header", "equations", "code"),
    [
        (
            "See section 4.2, Eq.\n(3)-(4) and (Algorithm 1).",
            "section 4.2, Eq. (3)-(4), Algorithm 1",
            "-",
        ),
        ("As\n    L = x\nin the authors' code.", "header", "header"),
        ("Their code (me/repo, commit 0123abc) adds 1/2.", "-", "me/repo at 0123abc"),
        ("No code by the authors was found; a/b has one.", "-", "none found"),
    ],
)
def test_equations_and_code_are_read_from_the_header(header, equations, code):
    assert checks.describe_equations(header) == equations
    assert checks.describe_code(header) == code
