"""Whole rounds on a CUDA device, for every algorithm."""

import os

import pytest
import torch

import toy_federation
from fedexp.core import tree
from test_edge_cases import ROWS
from toy_federation import play

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
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ROWS)
def test_rounds_in_low_precision_are_near_float64(name, engine, precision, monkeypatch):
    """For every algorithm, the change of the parameters in a round differs by less than half.

    FedDecorr divides by the standard deviations of a few features, which bf16 may change by more.
    """
    tolerance = 5 if name == "FedDecorr" else 0.5
    exact = ROWS[name].simulation()
    start, expected = exact.initial_state().server["params"], play(exact, 1).server["params"]
    monkeypatch.setitem(toy_federation.SIMULATED, "device", DEVICE)
    monkeypatch.setitem(toy_federation.SIMULATED, "precision", precision)
    found = play(ROWS[name].simulation(engine=engine), 1).server["params"]
    for key, value in found.items():
        error = (value.double().cpu() - expected[key]).norm()
        assert error < tolerance * (expected[key] - start[key]).norm() + 1e-3, key
