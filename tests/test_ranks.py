"""Friedman and Nemenyi tests against the example of Demsar (JMLR 2006), and the report of a
benchmark."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from scipy import stats

from fedexp.analysis.benchmark import benchmark_sections, rankings, select_runs
from fedexp.analysis.draw_sweep import rank_diagram
from fedexp.analysis.ranks import (
    Comparison,
    compare_methods,
    critical_difference,
    friedman,
    iman_davenport,
    p_value,
    ranks_of,
)
from fedexp.analysis.sweep import Sweep, read_block


def test_friedman_and_nemenyi_match_the_example_of_the_paper():
    """Section 3.2.2: C4.5, +m, +cf, +m+cf on 14 data sets have mean ranks 3.143, 2.000, 2.893,
    1.964. By hand: the sum of squares is 9.878 + 4 + 8.369 + 3.857 = 26.105, minus 4 * 25 / 4 = 25,
    times 12 * 14 / 20 = 8.4 gives 9.28; F = 13 * 9.28 / (14 * 3 - 9.28) = 3.69; CD = 2.569 sqrt(4 *
    5 / (6 * 14)) = 1.25 at 0.05 and 1.12 at 0.10."""
    means = np.array([3.143, 2.000, 2.893, 1.964])
    assert friedman(means, 14) == pytest.approx(9.28, abs=0.01)
    assert iman_davenport(9.28, 14, 4) == pytest.approx(3.69, abs=0.01)
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.01)
    assert critical_difference(4, 14, alpha=0.10) == pytest.approx(1.12, abs=0.01)


@pytest.mark.parametrize(
    ("chi_square", "blocks", "expected"),
    [
        # F = 1 * 2 / (2 * 2 - 2) = 1, with 2 and 2 degrees of freedom: (1 + 2 * 1 / 2)^(-1)
        (2.0, 2, 1 / 2),
        (3.0, 3, 1 / 4),  # F = 2 * 3 / (3 * 2 - 3) = 2, with 2 and 4: (1 + 2 * 2 / 4)^(-2)
        (0.0, 3, 1.0),
    ],
)
def test_p_value_with_two_degrees_of_freedom_equals_its_formula(chi_square, blocks, expected):
    """With 2 and d degrees of freedom P(F >= f) = (1 + 2 f / d)^(-d / 2), where d = 2 (N - 1)."""
    assert p_value(chi_square, blocks, 3) == pytest.approx(expected)


@pytest.mark.parametrize(("count", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_difference_uses_the_quantiles_of_the_paper(count, q):
    assert critical_difference(count, 1) / math.sqrt(count * (count + 1) / 6) == pytest.approx(
        q, abs=0.001
    )


def test_friedman_without_ties_equals_scipy():
    values = np.random.default_rng(0).normal(size=(7, 5))
    chi_square, _ = stats.friedmanchisquare(*values.T)
    assert friedman(ranks_of(values).mean(0), 7) == pytest.approx(chi_square)


def test_ties_share_a_rank_and_failed_runs_are_last():
    assert ranks_of(np.array([[0.5, 0.5, 0.9, -np.inf]])).tolist() == [[2.5, 2.5, 1.0, 4.0]]


def test_the_same_order_in_all_blocks_is_significant():
    found = compare_methods(["a", "b", "c"], np.array([[0.1, 0.3, 0.2]] * 4))
    assert (found.methods, found.ranks, found.p) == (("b", "c", "a"), (1.0, 2.0, 3.0), 0.0)


@pytest.mark.parametrize(
    ("ranks", "cliques"),
    [
        ((1.0, 1.5, 2.2, 4.0), [(0, 1), (1, 2)]),
        # the second and the third method are part of the first group
        ((1.0, 1.25, 1.5, 3.0), [(0, 2)]),
        # section 3.2.2: ranks differ if they are at least the critical difference apart
        ((1.0, 1.5, 2.0), [(0, 1), (1, 2)]),
    ],
)
def test_methods_within_the_critical_difference_share_a_group(ranks, cliques):
    """The critical difference is 1."""
    assert Comparison(tuple("abcd")[: len(ranks)], ranks, 5, 0.01, 1.0).cliques == cliques


# --- the report


def summary(accuracy, forgetting, **more):
    return {"status": "completed", "accuracy": accuracy, "forgetting": forgetting, "seed": 0} | more


def run_of(overrides, sent, **values):
    diverged = values.get("status") == "diverged"
    columns = {"bytes_up": [sent], "bytes_down": [sent], "seconds": [1.5, 1.5]}
    return SimpleNamespace(
        overrides=overrides, summary=values, diverged=diverged, values=columns.__getitem__
    )


@pytest.fixture
def sweep():
    text = """
    - experiment: {one: {setting: skew}, two: {setting: tasks}}
      algorithm: {fedavg: {method: FedAvg}, fedntd: {method: FedNTD}}
      measures: []
    - experiment: {two: {setting: tasks}}
      algorithm: {cfed: {method: CFeD}}
      with: [surrogate.fraction=0.1]
      measures: []
    """
    blocks = tuple(read_block(node, ()) for node in yaml.safe_load(text))
    ranks = {"accuracy": ("average_accuracy", "accuracy"), "F": ("task_forgetting", "forgetting")}
    return Sweep(name="x", title="A benchmark", blocks=blocks, ranks=ranks)


@pytest.fixture
def finished():
    def of(place, method, seed, **values):
        more = ["surrogate.fraction=0.1"] if method == "cfed" else []
        overrides = [f"experiment={place}", f"algorithm={method}", f"seed={seed}", *more]
        return run_of(overrides, 2_000_000, **summary(0.0, 0.0, seed=seed) | values)

    tasks = {"average_accuracy": 0.4, "task_forgetting": 0.5}
    return [
        *(of("one", "fedavg", s, accuracy=0.5 + 0.1 * s, forgetting=0.3) for s in (0, 1)),
        *(of("one", "fedntd", s, accuracy=0.7 + 0.1 * s, forgetting=0.2) for s in (0, 1)),
        *(of("two", "fedavg", s, **tasks) for s in (0, 1)),
        *(of("two", "fedntd", s, **tasks | ({"status": "diverged"} if s else {})) for s in (0, 1)),
        *(of("two", "cfed", s, **tasks | {"average_accuracy": 0.6}) for s in (0, 1)),
    ]


def test_measure_without_values_is_a_dash(sweep, finished):
    """A run with one task has no forgetting between tasks."""
    for run in finished[:2]:
        run.summary["forgetting"] = None
    results, *_ = benchmark_sections(sweep, finished)
    assert results.table.loc["FedAvg", "skew"] == "55.0 ± 7.1 (-)"


def test_report_has_results_costs_and_ranks(sweep, finished):
    """The standard deviation over two seeds is 0.1 / sqrt(2) = 7.1 points."""
    results, costs, *ranks = benchmark_sections(sweep, finished)
    assert results.table.loc["FedAvg"].tolist() == [
        "55.0 ± 7.1 (0.30 ± 0.00)",
        "40.0 ± 0.0 (0.50 ± 0.00)",
    ]
    assert results.table.loc["FedNTD", "tasks"] == "40.0 (0.50), 1 of 2 diverged"
    assert results.table.loc["CFeD", "skew"] == "-"
    assert set(costs.table["tasks"]) == {"4.0 MB, 3.0 s"}
    assert [len(each.table) for each in ranks] == [2, 2, 3, 3]  # CFeD was run on tasks only


def test_methods_are_ranked_within_the_settings_that_they_share(sweep, finished):
    """By hand, accuracy, (skew 0, skew 1, tasks 0, tasks 1): FedNTD wins both of skew, ties in
    tasks 0 and has diverged in tasks 1: (1 + 1 + 1.5 + 2) / 4 = 1.375, FedAvg 1.625. With tasks
    alone CFeD is first in both, then FedAvg (2.5 + 2) / 2 and FedNTD (2.5 + 3) / 2. Less forgetting
    is better."""
    both, forgetting, tasks, _ = rankings(sweep, select_runs(sweep, finished))
    assert (both.settings, both.seeds) == (("skew", "tasks"), (0, 1))
    assert dict(zip(both.comparison.methods, both.comparison.ranks, strict=True)) == {
        "FedNTD": 1.375,
        "FedAvg": 1.625,
    }
    assert (both.measure, forgetting.measure) == ("accuracy", "F")
    assert forgetting.comparison.methods[0] == "FedNTD"
    assert tasks.settings == ("tasks",)
    assert tasks.comparison.ranks == (1.0, 2.25, 2.75)


def test_method_with_a_missing_seed_is_not_ranked(sweep, finished):
    both, *_ = rankings(
        sweep, select_runs(sweep, [run for run in finished if run is not finished[2]])
    )
    assert both.settings == ("tasks",)


def test_diagram_has_a_bar_of_the_critical_difference_for_each_method(sweep, finished):
    ranking = rankings(sweep, select_runs(sweep, finished))[2]
    (axes,) = rank_diagram(ranking).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["CFeD", "FedAvg", "FedNTD"]
    assert axes.lines[0].get_xdata() == pytest.approx(ranking.comparison.ranks)
    lengths = [abs(end[0] - start[0]) for start, end in axes.collections[0].get_segments()]
    assert lengths == pytest.approx([ranking.comparison.critical_difference] * 3)
