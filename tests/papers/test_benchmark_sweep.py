"""The benchmark of nine methods: equal budgets, and the commands with the chosen values."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedexp.analysis.sweep import load_named_sweep
from fedexp.config.options import conf_directories
from fedexp.core.errors import ConfigError
from fedexp_papers.benchmark import write_commands
from quick_runs import change_summary, write_run


def test_every_method_has_the_same_budget_and_no_seed_of_the_benchmark():
    search, final = (
        load_named_sweep(name, conf_directories()) for name in ("benchmark_search", "benchmark")
    )
    jobs = Counter()
    for block in search.blocks:
        (method,) = block.values_of("algorithm")
        assert list(block.values_of("seed")) == ["10"]
        jobs[method] += len(list(block.combinations()))
    (block,) = final.blocks
    assert jobs == dict.fromkeys(block.values_of("algorithm"), 27)
    assert len(jobs) == 9
    assert len(list(block.combinations())) == 243
    assert "10" not in block.values_of("seed")
    assert "public.fraction=0.025" in search.also
    assert set(search.also) == set(final.also)


def write_search(folder, scores):
    """Write a run for each (algorithm, values, alpha) with the given validation accuracy."""
    for number, ((algorithm, values, alpha, score)) in enumerate(scores):
        given = {"algorithm": algorithm, "alpha": alpha} | values
        run = write_run(folder / f"run{number}", given, rounds=2)
        change_summary(
            run, validation_accuracy=score, status="diverged" if score is None else "completed"
        )


FEDPROX = [
    # mean 0.55, with the best single run; mean 0.6; diverged with alpha=0.1, so (0.9 + 0) / 2
    ("fedprox", {"algorithm.mu": "0.01"}, "0.1", 0.2),
    ("fedprox", {"algorithm.mu": "0.01"}, "0.3", 0.9),
    ("fedprox", {"algorithm.mu": "0.1"}, "0.1", 0.5),
    ("fedprox", {"algorithm.mu": "0.1"}, "0.3", 0.7),
    ("fedprox", {"algorithm.mu": "1"}, "0.1", None),
    ("fedprox", {"algorithm.mu": "1"}, "0.3", 0.9),
]
FEDAVG = [("fedavg", {}, "0.1", 0.4), ("fedavg", {}, "0.3", 0.5)]


def test_best_mean_over_the_settings_is_chosen(tmp_path):
    write_search(tmp_path, [*FEDPROX, *FEDAVG])
    (path,) = write_commands(tmp_path, figures=False)
    assert path.read_text().splitlines() == [
        "set -e",
        'fedexp --multirun sweep=benchmark algorithm=fedavg "$@"  # 0.4500',
        'fedexp --multirun sweep=benchmark algorithm=fedprox algorithm.mu=0.1 "$@"  # 0.6000',
    ]


def test_foreign_runs_are_left_out(tmp_path):
    """A better run of another sweep in the directory does not change the choice."""
    write_search(tmp_path, [*FEDPROX, *FEDAVG])
    content = {"hydra": {"sweep": {"dir": str(tmp_path)}}}
    (tmp_path / "multirun.yaml").write_text(json.dumps(content))
    (path,) = write_commands(tmp_path, figures=False)
    before = path.read_text()
    for alpha in ("0.1", "0.3"):
        run = write_run(tmp_path / f"other{alpha}", {"algorithm": "fedavg", "alpha": alpha})
        change_summary(run, validation_accuracy=1.0, status="completed", sweep="another")
    write_commands(tmp_path, figures=False)
    assert path.read_text() == before


def test_incomplete_search_is_refused(tmp_path):
    write_search(tmp_path, [*FEDPROX[1:], *FEDAVG])
    with pytest.raises(ConfigError, match=r"fedprox .*mu=0\.01 has 1 finished runs, others have 2"):
        write_commands(tmp_path, figures=False)


def test_the_page_has_the_numbers_of_the_committed_runs():
    """Recompute the table of the page from each run: means, intervals, sign flips and Holm."""
    root = Path(__file__).parents[2]
    runs = pd.read_csv(root / "multirun/benchmark/runs.csv")
    assert runs.groupby(["setting", "method"]).size().tolist() == [9] * 27
    page = (root / "docs/guide/sweeps.md").read_text()
    text = page[page.index("## A benchmark of nine methods") : page.index("**MNIST.**")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| \w", line)
    ]
    table = runs.pivot(index=["method", "seed"], columns="setting", values="accuracy") * 100
    means = table.mean(axis=1).unstack("seed")
    differences = (means - means.loc["fedavg"]).drop("fedavg")
    signs = np.array(list(itertools.product((1, -1), repeat=9)))
    flipped = {
        name: np.mean(np.abs(signs @ row) >= abs(row.sum()) - 1e-9)
        for name, row in zip(differences.index, differences.to_numpy(), strict=True)
    }
    adjusted, worst = {}, 0.0
    for rank, name in enumerate(sorted(flipped, key=lambda name: flipped[name])):
        worst = max(worst, min(1.0, flipped[name] * (len(flipped) - rank)))
        adjusted[name] = worst
    expected = []
    for name in means.mean(axis=1).sort_values(ascending=False).index:
        settings = table.loc[name]
        cells = [f"{settings[s].mean():.1f} ± {settings[s].std():.1f}" for s in settings]
        if name != "fedavg":
            row = differences.loc[name]
            low, high = stats.t.interval(0.95, 8, row.mean(), stats.sem(row))
            cells += [f"{row.mean():+.1f} [{low:.1f}, {high:.1f}]", f"{adjusted[name]:.2f}"]
        expected.append([name, *cells])
    assert [[row[0].lower(), *filter(None, row[1:])] for row in rows] == expected
