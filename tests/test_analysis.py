"""The group `analysis`: measures worked by hand, and what a run writes of them."""

import math

import numpy as np
import pytest
import torch
from torch.func import vmap

from fedexp.algorithms.fedprox import FedProx
from fedexp.cli.arguments import together
from fedexp.config.build import build
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.metrics import weight_divergence as divergence
from fedexp.metrics.analysis import GradientDiversity, NoAnalysis, SeveralAnalyses, WeightDivergence
from fedexp.metrics.gradient_diversity import gradient_diversity
from fedexp.rundir.analyses import TABLES, round_means
from fedexp.training.analysing import local_gradients
from fedexp.training.exchange import sample
from fedexp.training.rounds import play_round
from toy_federation import ENGINES, SoftmaxRegression, composed, make_simulation

IN_ALL = {"rounds": None, "every": 1}
# Two layers, three clients: conv.weight [3, 2], conv.bias [3, 1] and head [3, 1].
REFERENCE = {"conv.weight": torch.tensor([1.0, 2.0]), "conv.bias": torch.tensor([0.0]), "head": torch.tensor([5.0])}
LOCAL = {
    "conv.weight": torch.tensor([[4.0, 2.0], [1.0, 2.0], [1.0, -1.0]]),
    "conv.bias": torch.tensor([[4.0], [0.0], [0.0]]),
    "head": torch.tensor([[5.0], [5.0], [9.0]]),
}
REFERENCE, LOCAL = (tree.map(lambda leaf: leaf.to(torch.float64), each) for each in (REFERENCE, LOCAL))


def plain(values):
    return {layer: value.tolist() for layer, value in values.items()}


def test_divergence_from_the_global_model_by_hand():
    """Differences: client 0 (3, 0), 4 and 0; client 1 none; client 2 (0, -3), 0 and 4. In total L2 sqrt(9 + 16) = 5."""
    assert plain(divergence.from_global(LOCAL, REFERENCE)) == {"conv": [7, 0, 3], "head": [0, 0, 4], "total": [7, 0, 7]}
    found = plain(divergence.from_global(LOCAL, REFERENCE, "l2"))
    assert found == {"conv": [5, 0, 3], "head": [0, 0, 4], "total": [5, 0, 5]}


def test_divergence_from_the_others_by_hand():
    """Client 1 is the global model, so it is 7 from both others; 0 and 2 differ by (3, 3), 4 and 4, together 14."""
    assert plain(divergence.from_others(LOCAL))["total"] == [(7 + 14) / 2, 7, (14 + 7) / 2]
    # L2: client 1 is 5 from both; 0 and 2: sqrt(9 + 9 + 16 + 16) = sqrt(50).
    expected = [(5 + math.sqrt(50)) / 2, 5, (5 + math.sqrt(50)) / 2]
    assert plain(divergence.from_others(LOCAL, "l2"))["total"] == pytest.approx(expected, rel=1e-15)
    assert math.isnan(divergence.from_others(tree.map(lambda leaf: leaf[:1], LOCAL))["total"][0])


def test_divergence_works_inside_vmap():
    """Two rounds at once: the second has the models of the first, reversed."""
    twice = tree.map(lambda leaf: torch.stack([leaf, leaf.flip(0)]), LOCAL)
    together_ = vmap(lambda local: divergence.from_others(local, "l2"))(twice)
    for row, local in enumerate((LOCAL, tree.map(lambda leaf: leaf.flip(0), LOCAL))):
        torch.testing.assert_close(together_["total"][row], divergence.from_others(local, "l2")["total"])


def test_distribution_distance_by_hand():
    """Accuracies 0.6, 0.2 and none for the absent class are shares 3/4 and 1/4; the clients hold (1, 0) and (1/2, 1/2),
    the third one half of what the test set lacks. Without any right answer the shares are 0."""
    counts = np.array([[4, 0, 0], [3, 3, 0], [5, 0, 5]])
    found = divergence.distribution_distance(np.array([0.6, 0.2, np.nan]), counts)
    np.testing.assert_allclose(found, [0.5, 0.5, 0.25 + 0.25 + 0.5], rtol=1e-15)
    np.testing.assert_array_equal(divergence.distribution_distance(np.zeros(3), counts), [1, 1, 1])


def test_gradient_diversity_by_hand():
    """Orthogonal gradients (3, 0) and (0, 4): mean square 25/2, mean (1.5, 2) of square 25/4, so 2; equal ones: 1."""
    gradients = {"a.weight": torch.tensor([[3.0, 0.0], [0.0, 4.0]]), "b": torch.tensor([[2.0], [2.0]])}
    found = plain(gradient_diversity(gradients))
    assert found == {"a": 2.0, "b": 1.0, "total": (25 / 2 + 4) / (25 / 4 + 4)}
    # Weights 3 and 1: mean square 3/4 * 9 + 1/4 * 16, mean (9/4, 1).
    weighted = plain(gradient_diversity(gradients, torch.tensor([3, 1])))
    assert weighted["a"] == pytest.approx((27 / 4 + 4) / (81 / 16 + 1), rel=1e-15)
    assert gradient_diversity({"a": torch.tensor([[1.0], [-1.0]])})["a"] == math.inf


def test_gradient_diversity_has_the_value_of_proposition_1():
    """FedNTD's Proposition 1: class gradients that are orthonormal, clients with gradients p + beta p~.

    With sum_k p^k_c = K/C, Lambda = 1 + C^2/(1+beta)^2 (1 - beta/(C-1))^2 mean_k Var_c[p^k], worked out here: both p
    and p~ sum to 1, the mean gradient is (1+beta)/C in each class, and p^k + beta p~^k deviates from it by
    (1 - beta/(C-1)) (p^k_c - 1/C)."""
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]])
    classes = p.shape[1]
    for beta in (0.0, 0.3, 1.0):
        gradients = torch.from_numpy(p + beta * (1 - p) / (classes - 1))
        scale = classes / (1 + beta) * (1 - beta / (classes - 1))
        expected = 1 + scale**2 * p.var(1).mean()
        assert float(gradient_diversity({"g": gradients})["total"]) == pytest.approx(expected, rel=1e-12)


def test_gradients_of_clients_are_those_of_their_whole_data():
    """Of softmax regression by its formula: dL/dW = mean_i (softmax(W x_i + b) - onehot(y_i)) x_i^T."""
    simulation = make_simulation(model=SoftmaxRegression())
    bench, info = simulation.bench, simulation.stages[0].federation
    found = local_gradients(bench, simulation.initial_state().server, info.parts)
    weight, bias = (simulation.initial[f"classifier.{name}"] for name in ("weight", "bias"))
    for client, part in enumerate(info.parts):
        x, y = bench.load_train(torch.from_numpy(part), None)
        x = x.flatten(1)
        error = (x @ weight.T + bias).softmax(1) - torch.nn.functional.one_hot(y, len(bias))
        torch.testing.assert_close(found["classifier.weight"][client], error.T @ x / len(x))
        torch.testing.assert_close(found["classifier.bias"][client], error.mean(0))


BOTH = SeveralAnalyses(members=[WeightDivergence(**IN_ALL), GradientDiversity(**IN_ALL)], **IN_ALL)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_of_every_engine_is_measured_alike(engine):
    """The rows against the models themselves; every engine has the numbers of the sequential one."""
    simulation = make_simulation(FedProx(mu=0.1), analysis=BOTH)
    state = simulation.initial_state()
    expected = play_round(simulation, state).analyses
    object.__setattr__(simulation, "engine", ENGINES[engine])
    found = play_round(simulation, state).analyses
    for name in expected:
        assert TABLES[name].keys[0] == "round"
        for row, other in zip(found[name], expected[name], strict=True):
            assert row.keys() == other.keys()
            assert [v for v in row.values() if isinstance(v, str | int)] == [
                v for v in other.values() if isinstance(v, str | int)
            ]
            numbers = [[v for v in each.values() if isinstance(v, float)] for each in (row, other)]
            np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-9, atol=1e-12)
    clients = sample(simulation, 1)
    assert [row["client"] for row in found["weight_divergence.csv"] if row["layer"] == "total"] == clients


def test_what_trackers_are_told():
    rows = [
        {
            "layer": layer,
            "l1": l1,
            "l2": math.nan,
            "others_l1": 1.0,
            "others_l2": math.inf,
            "distribution_distance": 0.5,
        }
        for layer, l1 in (("total", 2.0), ("conv", 100.0), ("total", 4.0))
    ]
    expected = {"weight_divergence_l1": 3.0, "weight_divergence_others_l1": 1.0, "distribution_distance": 0.5}
    assert round_means("weight_divergence.csv", rows) == expected


def test_rounds_that_are_measured():
    analysis = WeightDivergence(rounds=None, every=4)
    assert [n for n in range(1, 11) if analysis.is_due(n, 10)] == [4, 8, 10]
    assert [n for n in range(1, 11) if WeightDivergence(rounds=[1, 9], every=4).is_due(n, 10)] == [1, 9]
    assert NoAnalysis().parts == ()


def test_a_list_is_short_for_several():
    built = build(composed(*together(["analysis=[weight_divergence,gradient_diversity]", "analysis.rounds=[1,5]"])))
    assert [type(part) for part in built.analysis.parts] == [WeightDivergence, GradientDiversity]
    assert [part.rounds for part in built.analysis.parts] == [[1, 5], [1, 5]]
    own = together(["analysis=[weight_divergence,gradient_diversity]", "analysis.gradient_diversity.rounds=[2]"])
    assert [part.rounds for part in build(composed(*own)).analysis.parts] == [None, [2]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["analysis=weight_divergence", "analysis.rounds=[0]"], "analysis.rounds=[0]: must be a list of rounds from 1"),
        (["analysis=weight_divergence", "analysis.every=0"], "analysis.every=0: must be at least 1"),
        (["analysis=[weight_divergance]"], "analysis.members=weight_divergance: no such analysis (nearest:"),
        (["analysis=[weight_divergence,weight_divergence]"], "must be different analyses"),
    ],
)
def test_bad_values(overrides, message):
    with pytest.raises(ConfigError) as error:
        build(composed(*together(overrides)))
    assert message in str(error.value)
