"""Whole rounds on a CUDA device, for every algorithm."""

import os

import pytest
import torch

import toy_federation
from fedexp.core import tree
from fedexp.models.cnn import CNN
from test_edge_cases import ROWS
from toy_federation import play

WIDE = CNN(channels=(16, 32), kernel=3, padding=1, hidden=(8,))
DEVICE = os.environ.get("FEDEXP_TEST_DEVICE", "cuda")  # `cpu` tries the tests without a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ROWS)
def test_rounds_on_a_gpu_equal_rounds_on_the_cpu(name, engine, monkeypatch):
    """In float64, after two rounds, for every algorithm."""
    expected = play(ROWS[name].simulation(), 2)
    monkeypatch.setitem(toy_federation.SIMULATED, "device", DEVICE)
    whole = ROWS[name].simulation(engine=engine)
    state = play(whole, 2)
    assert {leaf.device.type for leaf in state.server["params"].values()} == {DEVICE}
    on_host = tree.map(lambda leaf: leaf.cpu(), state.server)
    torch.testing.assert_close(on_host, expected.server, rtol=0, atol=1e-9)
    for view, found in state.records.items():
        assert found.accuracy == expected.records[view].accuracy


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("model", [None, WIDE], ids=["few channels", "wide"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ROWS)
def test_rounds_in_low_precision_are_near_float64(name, engine, model, precision, monkeypatch):
    """For every algorithm, the change of the parameters in a round differs by less than half.

    The vectorised engine has kernels for the convolutions of the wide network. FedDecorr divides by
    the standard deviations of a few features, which bf16 may change by more.
    """
    tolerance = 5 if name == "FedDecorr" else 0.5
    changes = {} if model is None or ROWS[name].model else {"model": model}
    exact = ROWS[name].simulation(**changes)
    start, expected = exact.initial_state().server["params"], play(exact, 1).server["params"]
    monkeypatch.setitem(toy_federation.SIMULATED, "device", DEVICE)
    monkeypatch.setitem(toy_federation.SIMULATED, "precision", precision)
    found = play(ROWS[name].simulation(engine=engine, **changes), 1).server["params"]
    for key, value in found.items():
        error = (value.double().cpu() - expected[key]).norm()
        assert error < tolerance * (expected[key] - start[key]).norm() + 1e-3, key
