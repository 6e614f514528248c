"""Alignment of neurons (FedNTD Table 2): numbers worked by hand, and a run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedexp
from fedexp.core.errors import ConfigError
from fedexp.engine.network import FunctionalNetwork
from fedexp.models.cnn import CNN
from fedexp_papers.analyses.base import Measured
from fedexp_papers.analyses.neurons import (
    Aligning,
    Alignment,
    alignment,
    alignment_rows,
    dead,
    preferences,
)
from fedexp_papers.analyses.test_set import class_means
from quick_runs import SMALL
from toy_federation import Normed, make_simulation

# Three classes, four neurons: they prefer class 1, 0, 2 and, dead, 0.
H = np.array([[0.1, 2.0, 0.0, 0.0], [0.5, 1.0, 0.3, 0.0], [0.2, 0.0, 0.4, 0.0]])
# 1, 1, 0, 0: two agree
OTHER = np.array([[0.1, 2.0, 0.9, 0.0], [0.5, 3.0, 0.3, 0.0], [0.2, 0.0, 0.4, 0.0]])


def test_preferred_classes_equal_hand_calculation():
    assert preferences(H).tolist() == [1, 0, 2, 0]
    assert dead(H) == 1
    assert alignment(H, OTHER) == 0.5
    assert alignment(H, H) == 1.0
    absent = H.copy()
    absent[1] = np.nan  # no test example of class 1: neuron 0 prefers the better of the others
    assert preferences(absent).tolist() == [2, 0, 2, 0]
    assert dead(absent) == 1


class Table:
    """A network whose activations are the rows x of the parameter `h`: one layer of four
    neurons."""

    def set_buffers(self, buffers):
        self.buffers = buffers

    def own(self, params):
        return params

    def hidden_activations(self, params, x):
        return (params["h"][x],)


def runtime(labels):
    data = SimpleNamespace(y_test=torch.tensor(labels), num_classes=3)
    net = Table()
    return SimpleNamespace(
        data=data,
        net=net,
        device=torch.device("cpu"),
        evaluation_batch=2,  # of the three examples
        load_test=lambda index: (index, data.y_test[index]),
    )


def model(rows):
    return {"params": {"h": torch.tensor(rows, dtype=torch.float64)}, "buffers": {}}


def test_class_means_equal_hand_calculation():
    """Labels 0, 0, 2: class 0 has the mean of two rows, class 1 has no example."""
    params = {"h": torch.tensor([[1.0, 0.0], [3.0, 5.0], [7.0, 2.0]])}
    (means,) = class_means(runtime([0, 0, 2]), params)
    np.testing.assert_array_equal(means, [[2.0, 2.5], [np.nan, np.nan], [7.0, 2.0]])


def test_alignment_of_a_round_equals_hand_calculation():
    """One example per class, so rows are class means. The local models agree in 2 and 4 of 4
    neurons: 0.75 on average, standard deviation 0.25; the new global model agrees in 2."""
    (row,) = alignment_rows(runtime([0, 1, 2]), model(H), model(OTHER), [model(OTHER), model(H)])
    expected = {
        "layer": 1,
        "neurons": 4,
        "dead": 1,
        "local": 0.75,
        "local_std": 0.25,
        "aggregated": 0.5,
    }
    assert row == expected
    (row,) = alignment_rows(runtime([0, 1, 2]), model(H), model(H), [])
    assert (row["local"], row["local_std"], row["aggregated"]) == (None, None, 1.0)


def test_local_models_come_from_the_last_exchange_that_sends_models():
    messages = {"params": {"w": torch.arange(6.0).view(2, 3)}, "more": torch.zeros(2)}
    buffers = {"b": torch.tensor([4, 5])}
    cohort = SimpleNamespace(clients=(3, 8))
    models, changes = (
        SimpleNamespace(trained=SimpleNamespace(messages=sent, buffers=buffers), cohort=cohort)
        for sent in (messages, {"change": torch.zeros(2)})
    )

    def measured(*exchanges):
        return Measured(None, SimpleNamespace(result=SimpleNamespace(exchanges=exchanges)))

    first, second = measured(models, changes).models
    assert second["params"]["w"].tolist() == [3, 4, 5]
    assert first["buffers"]["b"] == 4
    assert measured(changes).models == []


def test_alignment_is_discarded_if_a_further_round_runs():
    """If a run is extended and stops before its new last round, it has no alignment of neurons."""
    callback = Aligning()
    callback.load_state_dict({"rows": [{"layer": 1}]})
    assert callback.summary() == {"alignment": [{"layer": 1}]}
    callback.after_round(SimpleNamespace(result=SimpleNamespace(is_last=False)))
    assert callback.summary() == {}


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_last_hidden_activations_equal_the_features(precision):
    dtype = torch.float64 if precision == "fp64" else torch.float32
    module = CNN(channels=(2,), kernel=3, padding=1, hidden=(6, 5)).build((1, 8, 8), 3).to(dtype)
    net = FunctionalNetwork(module, precision)
    # not the module's own
    params = {name: value + 0.01 for name, value in module.named_parameters()}
    x = torch.rand(4, 1, 8, 8, dtype=dtype)
    first, last = net.hidden_activations(params, x)
    assert (first.shape, last.shape) == ((4, 6), (4, 5))
    torch.testing.assert_close(last.to(dtype), net(params, x).features, rtol=0, atol=0)


@pytest.mark.slow
def test_alignment_is_written_for_the_last_round(tmp_path):
    """With one client, the local model is the new global model, so both agree."""
    options = [*SMALL, "rounds=2", "num_clients=4", "participation=0.25", "alpha=1"]
    options += ["model.hidden=[8,6]", "forgetting_metric=alignment"]
    layers = fedexp.run(options, directory=tmp_path / "run").summary["alignment"]
    assert [(row["layer"], row["neurons"]) for row in layers] == [(1, 8), (2, 6)]
    for row in layers:
        assert (row["local"], row["local_std"]) == (row["aggregated"], 0)


def test_model_without_hidden_layers_is_rejected():
    with pytest.raises(ConfigError, match="hidden layers, but NormedModule has none"):
        Alignment().check_run(make_simulation(model=Normed()))
