"""The pages and tables of kept runs. test_statistics.py checks the committed page."""

from pathlib import Path

import pandas as pd
import pytest
from reproduction.__main__ import main
from reproduction.page import CURVES, PAGE, describe_origin, make_files

from fedexp.analysis import layout
from fedexp.analysis.sweep import load_sweep
from fedexp.config.options import list_options
from fedexp.papers import evidence, readings
from test_compare import make_run
from toy_federation import CONF

ROOT = Path(__file__).parents[1]
MULTIRUN = ROOT / "multirun"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sweep", sorted(path.parent.name for path in MULTIRUN.glob(f"*/{evidence.TABLE}"))
)
def test_committed_tables_are_current(sweep):
    current = layout.csv(readings.compare_sweep(load_sweep(sweep, [CONF]), MULTIRUN / sweep))
    assert current == (MULTIRUN / sweep / "table.csv").read_text(encoding="utf-8")


def test_origin_of_a_table_names_seeds_commits_and_hardware():
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
        make_run(tmp_path / "multirun" / name, given + more, [0.25, 0.5])
    files = make_files(tmp_path)
    curves = {CURVES / "fedntd_table1.svg", CURVES / "fedntd_table1_tau3.svg"}
    assert set(files) == {PAGE, *curves}
    text = files[PAGE].decode()
    assert text.count("\n### ") == 1
    assert "`sweep=fedntd_table1`: 2 published values at the full protocol" in text
    assert "FedNTD (before the release)" in text
    heading = "| | CIFAR-10 s=2 |"  # named although no other column was run
    assert text.count(heading) == 2
    assert "MOON" not in text
    sweeps = [load_sweep(name, [CONF]) for name in list_options("sweep", [CONF])]
    papers = sum(bool(sweep.paper) for sweep in sweeps)
    assert f"{papers - 2} of {papers} tables and figures have no run here." in text


def test_page_is_written_and_checked(tmp_path, capsys):
    arguments = ["--root", str(tmp_path)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    text = (tmp_path / PAGE).read_text()
    assert "Too few runs of FedNTD's Table 1 are kept here to compare them." in text
    assert main([*arguments, "--check"]) == 0
    (tmp_path / PAGE).write_text(text.replace("Too few", "No"))
    assert main([*arguments, "--check"]) == 1
    assert capsys.readouterr().out.count("REPRODUCTION.md is out of date") == 2


def test_curve_of_removed_runs_is_deleted(tmp_path, capsys):
    arguments = ["--root", str(tmp_path)]
    assert main(arguments) == 0
    old = tmp_path / CURVES / "old.svg"
    old.parent.mkdir(parents=True)
    old.touch()
    assert main([*arguments, "--check"]) == 1
    assert "old.svg is out of date" in capsys.readouterr().out
    assert main(arguments) == 0
    assert not old.exists()


def test_damaged_file_of_a_run_gives_one_message(tmp_path, capsys):
    path = tmp_path / "multirun" / "fedntd_table1" / evidence.TABLE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert main(["--root", str(tmp_path)]) == 2
    assert f"{path}: not a valid table of runs" in capsys.readouterr().err
