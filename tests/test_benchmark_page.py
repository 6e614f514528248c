"""Check the committed runs of the benchmark."""

from pathlib import Path

import pytest

from fedexp.analysis.benchmark import select_runs
from fedexp.analysis.sweep import load_sweep
from fedexp.rundir.evidence import all_jobs
from toy_federation import CONF

ROOT = Path(__file__).parents[1]
NAME = "forgetting_benchmark_digits"


def test_every_method_is_better_than_chance():
    """Guesses among ten classes are right on 0.1 of at least 360 test images, with a standard
    deviation of sqrt(0.1 * 0.9 / 360) = 0.0158: 14.8 % is three of them above it."""
    report = (ROOT / "multirun" / NAME / "table.md").read_text(encoding="utf-8")
    accuracies = report.split("\n### ")[1]
    lines = [line for line in accuracies.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    cells = [(row[0], cell) for row in rows for cell in row[1:] if cell != "-"]
    assert len(cells) > 100
    assert [
        (method, cell)
        for method, cell in cells
        if "diverged" in cell or float(cell.split()[0]) < 14.8
    ] == []


def test_small_and_full_benchmark_have_the_same_methods_and_settings():
    small, full = (load_sweep(name, [CONF]) for name in (NAME, "forgetting_benchmark"))
    cells = [
        [block.fields(each) for block in sweep.blocks for each in block.combinations()]
        for sweep in (small, full)
    ]
    assert sorted(cells[0], key=str) == sorted(cells[1], key=str)
    assert len({cell["method"] for cell in cells[0]}) >= 20
    assert len({cell["setting"] for cell in cells[0]}) == 3


@pytest.mark.slow
def test_no_two_methods_have_the_same_losses():
    """Of the committed runs of a setting and seed, no two methods have the same losses in all
    rounds."""
    with all_jobs(ROOT / "multirun" / NAME) as jobs:
        runs = select_runs(load_sweep(NAME, [CONF]), jobs)
        losses = [tuple(run.values("train_loss")) for run in runs["run"]]
    assert len(runs) > 100
    assert not runs.assign(losses=losses).duplicated(["setting", "losses"]).any()
