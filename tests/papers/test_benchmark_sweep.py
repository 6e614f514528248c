"""The benchmark of nine methods: equal budgets, and the commands with the chosen values."""

import json
from collections import Counter

import pytest

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
