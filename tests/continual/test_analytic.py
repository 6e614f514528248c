"""AFCL and RegMean: classifiers in closed form and merged layers, against independent solutions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_models import Adapted

import toy_federation
from fedexp.core import tree
from fedexp_continual.algorithms.afcl import AFCL
from fedexp_continual.algorithms.regmean import RegMean
from method_rows import stream
from toy_federation import (
    LOCAL,
    TWO_TASKS,
    Normed,
    assert_close,
    make_simulation,
    play,
    trained_round,
)

ONE_ROUND = replace(TWO_TASKS, rounds_per_task=1)


def joint_ridge(simulation, gamma, tasks):
    """Return the classifier [C, D] of ridge regression on all examples of all clients and tasks.

    It minimises ||[X; sqrt(gamma) I] W - [Y; 0]||, solved with numpy's lstsq.
    """
    parts = [part for stage in simulation.stages[:tasks] for part in stage.federation.parts]
    index = torch.from_numpy(np.concatenate(parts))
    runtime = simulation.runtime
    x, y = runtime.load_train(index, None)
    features = runtime.net(simulation.initial, x).features.numpy()
    width = features.shape[1]
    rows = np.concatenate([features, gamma**0.5 * np.eye(width)])
    targets = np.concatenate([np.eye(4)[y.numpy()], np.zeros((width, 4))])
    return torch.from_numpy(np.linalg.lstsq(rows, targets, rcond=1e-12)[0].T)


@pytest.mark.parametrize("gamma", [0.0, 0.1])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_result_after_each_task_is_joint_ridge_regression(gamma, engine):
    """The claim of AFL and AFCL: clients and tasks make no difference. With gamma = 0, the smallest
    least-squares solution (8 features, and some have no effect)."""
    simulation = stream(
        AFCL(gamma=gamma), scenario=ONE_ROUND, participation=1.0, engine=engine, surrogate=0.0
    )
    for tasks in (1, 2):
        params = play(simulation, tasks).server["params"]
        expected = joint_ridge(simulation, gamma, tasks)
        assert_close(params["classifier.weight"], expected, 1e-10)
        assert not params["classifier.bias"].any()
        assert expected.abs().max() > 0.1


def test_backbone_is_frozen_and_not_augmented():
    """Only the classifier is sent, running statistics do not change, and every pass has the same
    features."""
    simulation = make_simulation(AFCL(gamma=0.1), model=Normed(), participation=1.0)
    state = play(simulation, 2)
    assert simulation.initial.keys() == {"classifier.weight", "classifier.bias"}
    assert_close(state.server["buffers"], simulation.initial_buffers, 0.0)
    other = make_simulation(
        AFCL(gamma=0.1), replace(LOCAL, epochs=1), model=Normed(), participation=1.0, augment=False
    )
    assert_close(play(other, 1).server["params"], state.server["params"], 1e-12)
    assert tree.is_finite(state.server)


# --- RegMean

WIDTHS = {"hidden.0": 27, "classifier": 8}  # linear layers of the small CNN, and their inputs


def test_merged_layers_minimise_the_distance_to_the_clients_outputs():
    """Against least squares on the layers' inputs, which hooks record; the other parameters are
    averaged."""
    simulation, state, trained, about = trained_round(
        RegMean(off_diagonal=1.0), augment=False, sizes=(20, 10, 5, 5), participation=1.0
    )
    runtime, parts, inputs = simulation.runtime, trained.messages["params"], {}
    assert simulation.algorithm.widths == WIDTHS
    for position, client in enumerate(about.clients):
        x, _ = runtime.load_train(torch.from_numpy(about.federation.parts[client]), None)
        seen = {}
        handles = [remember(runtime.net.module.get_submodule(k), seen, k) for k in WIDTHS]
        runtime.net(tree.row(parts, position), x)
        for handle in handles:
            handle.remove()
        for name in WIDTHS:
            inputs.setdefault(name, []).append(seen[name])
    merged = simulation.algorithm.aggregate(state.server, trained.messages, about)["params"]
    mean = tree.weighted_mean(parts, about.weights)
    for name, value in merged.items():
        layer, _, end = name.rpartition(".")
        if layer not in WIDTHS or end == "bias":
            assert_close(value, mean[name], 0.0)
            continue
        pairs = zip(inputs[layer], parts[name] - mean[name], strict=True)
        answers = torch.cat([rows @ change.T for rows, change in pairs])
        every = torch.cat(inputs[layer])
        # of all solutions, lstsq returns the smallest, here the one closest to the mean
        solution = np.linalg.lstsq(every.numpy(), answers.numpy(), rcond=1e-12)[0]
        assert_close(value - mean[name], torch.from_numpy(solution.T), 1e-8)
        assert (value - mean[name]).abs().max() > 1e-3


def test_merge_of_singular_matrices_in_float32_is_that_in_float64(monkeypatch):
    """17 examples cannot determine the weights of 27 inputs. The rounding of Gram matrices in
    float32 changed them by 5."""
    merged = []
    for precision in ("fp64", "fp32"):
        monkeypatch.setitem(toy_federation.SIMULATED, "precision", precision)
        simulation, state, trained, about = trained_round(
            RegMean(off_diagonal=1.0), augment=False, sizes=(5, 4, 4, 4), participation=1.0
        )
        found = simulation.algorithm.aggregate(state.server, trained.messages, about)["params"]
        merged.append(found["hidden.0.weight"].double())
    assert_close(merged[1], merged[0], 1e-4)


def remember(module, seen, name):
    return module.register_forward_hook(lambda module, inputs, _: seen.update({name: inputs[0]}))


def test_only_trained_layers_are_merged():
    """model.freeze=[backbone]: the head alone."""
    simulation = make_simulation(RegMean(off_diagonal=0.5), model=Adapted(freeze=("0", "1")))
    assert simulation.algorithm.widths.keys() == {"classifier", *ADAPTERS}


ADAPTERS = [f"backbone.{layer}.{end}" for layer in ("0.1", "1.0") for end in ("down", "up")]
