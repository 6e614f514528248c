"""CCVR and local training: calibration against independent statistics, and the mean of clients."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.local_only import LocalOnly
from fedexp.config.cohorts import Uniform
from fedexp.core import tree
from fedexp.data.views import PLAIN
from fedexp.training.rounds import play_round
from fedexp_continual.algorithms.ccvr import CCVR, class_sums
from method_rows import stream
from toy_federation import (
    CLASSES,
    Normed,
    assert_close,
    float64,
    leaves,
    make_simulation,
    play,
    random,
)

ALGORITHM = CCVR(samples=5, epochs_on_server=2, batch_size=4, lr=0.1, covariance="full")


# --- CCVR


def mean_and_covariance(sums, c):
    count, total = sums["count"][c], sums["sum"][c]
    mean = total / count
    return mean, (sums["square"][c] - count * torch.outer(mean, mean)) / (count - 1)


def test_sums_of_clients_give_the_covariance_of_the_paper():
    """Against the formula for the means and covariances of three clients, computed by numpy, and
    against all examples. Rows of padding do not count."""
    features, padding = random(3, 7, 3) + 2, random(2, 3)
    labels = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 1, 1, 2, 2]])
    each = []
    for x, y in zip(features, labels, strict=True):
        members = torch.cat([F.one_hot(y, 4), torch.zeros(2, 4)])
        each.append(class_sums(torch.cat([x, padding]), members, "full"))
    sums = tree.map(lambda leaf: leaf.sum(0), tree.stack(each))
    assert not any(leaf[3].any() for leaf in sums.values())
    for c in range(3):
        rows = features[labels == c].numpy()
        total, mean, numerator = len(rows), rows.mean(0), 0.0
        for x, y in zip(features.numpy(), labels.numpy(), strict=True):
            own = x[y == c]
            center = own.mean(0)
            numerator += (len(own) - 1) * np.cov(own.T) + len(own) * np.outer(center, center)
        expected = (numerator - total * np.outer(mean, mean)) / (total - 1)
        found = mean_and_covariance(sums, c)
        assert_close(found, (torch.from_numpy(mean), torch.from_numpy(expected)))
        assert_close(found[1], torch.from_numpy(np.cov(rows.T)))
    flat = class_sums(features[0], F.one_hot(labels[0], 4), "diagonal")["square"]
    full = class_sums(features[0], F.one_hot(labels[0], 4), "full")["square"]
    assert_close(flat, full.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_virtual_features_have_the_mean_and_covariance(covariance):
    """Of 40,000 features; the standard error of a covariance is about 1 / 200 of the variances. The
    features of class 2 lie in a plane, and class 1 has no examples."""
    root = float64(
        [[[2.0, 0, 0], [1, 1, 0], [0, 1, 1]], [[0] * 3] * 3, [[1, 0, 0], [1, 2, 0], [0] * 3]]
    )
    full = root @ root.mT
    mean, count = float64([[1.0, 2, 3], [0, 0, 0], [-1, 0, 4]]), float64([9, 0, 7])
    outer = mean[:, :, None] * mean[:, None]
    square = (count - 1).view(-1, 1, 1) * full + count.view(-1, 1, 1) * outer
    if covariance == "diagonal":
        square = square.diagonal(dim1=1, dim2=2)
    sums = {"count": count, "sum": count[:, None] * mean, "square": square}
    algorithm = replace(ALGORITHM, samples=40000, covariance=covariance)
    x, y = algorithm.virtual_features(sums, np.random.default_rng(0))
    assert y.bincount().tolist() == [40000, 0, 40000]
    for c in (0, 2):
        expected = full[c] if covariance == "full" else full[c].diag().diag()
        assert_close(x[y == c].mean(0), mean[c], 0.04)
        assert_close(x[y == c].T.cov(), expected, 0.12)


def test_calibration_is_sgd_on_the_virtual_features():
    """Two epochs of one batch: with momentum, the second step also repeats 0.9 of the first."""
    head = {"classifier.weight": random(4, 3), "classifier.bias": random(4, seed=1)}
    x, y = random(6, 3, seed=2), torch.tensor([0, 1, 2, 3, 1, 1])
    found = replace(ALGORITHM, batch_size=6).calibrated(head, x, y, np.random.default_rng(0))
    expected, moved = leaves(head), {name: 0.0 for name in head}
    for _ in range(2):
        logits = x @ expected["classifier.weight"].T + expected["classifier.bias"]
        grads = torch.autograd.grad(F.cross_entropy(logits, y), list(expected.values()))
        moved = {k: 0.9 * moved[k] + g for k, g in zip(expected, grads, strict=True)}
        expected = leaves({k: v - 0.1 * moved[k] for k, v in expected.items()})
    assert_close(found, {k: v.detach() for k, v in expected.items()})


def test_feature_sums_are_computed_with_the_averaged_model():
    """Its features of all examples of the cohort, without augmentation."""
    simulation = make_simulation(ALGORITHM, participation=1.0)
    server, runtime = play(simulation, 2).server, simulation.runtime
    index = torch.from_numpy(np.concatenate(simulation.stages[0].federation.parts))
    x, y = runtime.load_train(index, None)
    features = runtime.net(server["local"], x).features
    for c in range(CLASSES):
        rows = features[y == c]
        assert_close(mean_and_covariance(server["sums"], c), (rows.mean(0), rows.T.cov()))


# --- local training


@pytest.mark.parametrize("model", [None, Normed()], ids=["cnn", "batch norm"])
def test_local_only_clients_train_as_if_they_were_alone(model, tmp_path):
    """A client's model equals that of FedAvg with this client as the only one in every round."""
    settings = {"sizes": (3, 7, 8), "model": model}
    alone = make_simulation(LocalOnly(), participation=1.0, **settings)
    state = play(alone, 3)
    for client in range(3):
        path = tmp_path / f"{client}.json"
        path.write_text(json.dumps({str(number): [client] for number in (1, 2, 3)}))
        chosen = Uniform(draw="seed", path=str(path))
        server = play(make_simulation(participation=0.34, cohorts=chosen, **settings), 3).server
        assert_close(state.clients[client], server["params"] | server["buffers"])
    assert_close(state.server["params"], alone.initial, 0.0)


def test_local_only_accuracy_is_the_mean_over_all_clients():
    """On the whole test set, also for a client that has not taken part, and for each task."""
    simulation = stream(LocalOnly(), sizes=(3, 4, 4), participation=0.67, surrogate=0.0)
    state, runtime = simulation.initial_state(), simulation.runtime
    result = play_round(simulation, state)
    assert (result.bytes_up, result.bytes_down) == (0, 0)
    state.advance(result)
    models = [state.clients.get(client, simulation.initial) for client in range(3)]
    assert len(state.clients) == 2
    x, y = runtime.load_test(torch.arange(20), None)
    right = torch.stack([runtime.net(model, x).logits.argmax(1) == y for model in models]).double()
    scores = result.tests[PLAIN]
    assert scores.accuracy == pytest.approx(float(right.mean()), abs=1e-12)
    classes = [float(right[:, y == c].mean()) for c in range(CLASSES)]
    assert scores.class_accuracy.tolist() == pytest.approx(classes, abs=1e-12)
    tasks = [float(right[:, (y < 2) == first].mean()) for first in (True, False)]
    assert scores.task_accuracy == pytest.approx(tasks, abs=1e-12)
    losses = [float(F.cross_entropy(runtime.net(model, x).logits, y)) for model in models]
    assert scores.loss == pytest.approx(sum(losses) / 3, abs=1e-12)
