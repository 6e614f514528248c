"""Features of a frozen backbone, which are computed once per run (training/model_fit.py)."""

import logging
from dataclasses import replace

import pytest
import torch
from torch.func import grad, vmap

from fedexp.algorithms.base import FedAvg
from fedexp.core import memory
from fedexp.training import prepare
from fedexp.training.model_fit import has_fixed_features
from test_algorithms import assert_equal
from test_own_models import ROWS, Net, Own
from toy_federation import LOCAL, make_simulation, one_of_each_kind, play

FROZEN = Own(head="fc", freeze=("backbone",))
# They reject such a model.
OTHERS = ("FedAlign", "FedBN")
STORING = {k: v for k, v in ROWS.items() if k not in OTHERS and not v.cls.needs_inputs}
CHANGING = ("example_loss", "objective", "local_step", "client_setup", "finish", "refine", "heads")


@pytest.fixture
def plainly(monkeypatch):
    """Return a function that prepares a simulation in which every step computes the features."""

    def make(function, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "has_fixed_features", lambda *_: False)
            return function(*args, **options)

    return make


@pytest.mark.parametrize(
    "engine", ["sequential", pytest.param("vectorised", marks=pytest.mark.slow)]
)
@one_of_each_kind("name", STORING, *CHANGING)
def test_training_on_stored_features_equals_training_on_images(name, engine, plainly):
    """Also for algorithms that change the inputs, such as FedReg."""
    options = {"model": FROZEN, "augment": False, "engine": engine}
    make = ROWS[name].simulation
    fast, slow = make(**options), plainly(make, **options)
    assert fast.runtime.data.train_features is not None
    assert slow.runtime.data.train_features is None
    states = play(fast, 2), play(slow, 2)
    assert_equal(states[0].server, states[1].server, atol=1e-12)
    tested = [
        each.runtime.evaluate(state.server["params"])
        for each, state in zip((fast, slow), states, strict=True)
    ]
    assert_equal(*[vars(one) for one in tested], atol=1e-12)


def test_backbone_does_not_run_in_rounds(monkeypatch):
    simulations = [
        make_simulation(model=FROZEN, augment=False, engine=engine)
        for engine in ("sequential", "vectorised")
    ]
    monkeypatch.setattr(Net, "forward", None)
    states = [play(each, 2) for each in simulations]
    assert_equal(states[1].server, states[0].server, atol=1e-12)
    simulations[0].runtime.evaluate(states[0].server["params"])


def test_features_of_changed_inputs_are_computed_again():
    """The features of stored inputs are known, but not those of changed inputs."""
    net = (runtime := make_simulation(model=FROZEN, augment=False).runtime).net
    params, index = net.parameters(), torch.arange(3)
    x, _ = runtime.load_train(index, None)
    stored = runtime.data.train_features[index]
    assert net(params, x).features.data_ptr() == net.known.get(x).data_ptr()
    assert_equal(net(params, x).features, stored)
    assert_equal(net(params, x.clone()).features, stored, atol=1e-12)
    assert not torch.allclose(net(params, 2 * x).features, stored)
    slope = grad(lambda images: net(params, images).logits.sum())(x)
    assert slope.abs().sum() > 0
    assert torch.equal(
        vmap(lambda head: net(head, x).features, 0)(
            {name: torch.stack([value] * 2) for name, value in params.items()}
        )[1],
        stored,
    )
    weights = params | {"backbone.inner.bias": torch.ones(6, dtype=x.dtype)}
    assert not torch.allclose(net(weights, x).features, stored)
    x.requires_grad_()
    assert net(params, x).features.requires_grad
    x.detach().mul_(2)
    assert not torch.allclose(net(params, x.detach()).features, stored)
    assert net.known.get(x) is None


def test_features_are_selected_with_validation_examples():
    data = make_simulation(model=FROZEN, augment=False).runtime.data
    numbers = torch.tensor([5, 2])
    held = replace(data, validation=numbers).with_validation_as_test()
    assert torch.equal(held.test_features, data.train_features[numbers])


@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        (FROZEN, True),
        (Own(head="fc"), False),  # trains the backbone
        (Own(freeze=("inner", "stem")), False),  # unknown features
        (Own(head="fc", freeze=("backbone",), dropout=0.5), False),
        (Own(head="fc", freeze=("fc.bias", "backbone")), True),
    ],
)
def test_features_are_fixed_only_below_a_frozen_deterministic_backbone(model, fixed):
    module = model.build((1, 6, 6), 4)
    assert has_fixed_features(module, torch.zeros(2, 1, 6, 6)) == fixed


class Reading(FedAvg):
    needs_inputs = True


@pytest.mark.parametrize(
    ("options", "stored"),
    [({}, True), ({"algorithm": Reading()}, False), ({"augment": True}, False)],
)
def test_features_are_stored_only_if_they_never_change(options, stored):
    data = make_simulation(**{"model": FROZEN, "augment": False} | options).runtime.data
    assert (data.train_features is not None) == stored


def test_first_rounds_do_not_depend_on_the_number_of_rounds():
    """The features are stored even if a run passes over less than all examples."""
    options = {"model": FROZEN, "augment": False, "local": replace(LOCAL, epochs=1)}
    short, long = (make_simulation(**options, rounds=rounds) for rounds in (1, 2))
    assert_equal(short.runtime.data.train_features, long.runtime.data.train_features)
    assert_equal(play(short, 1).server, play(long, 1).server)


def test_features_that_need_too_much_memory_are_not_stored(monkeypatch, caplog):
    """40 training and 20 test images with 6 features of 8 bytes: 2,880 bytes, a quarter of 11,520
    bytes."""
    for free, stored in ((11_519, False), (11_520, True)):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        with caplog.at_level(logging.INFO, logger="fedexp"):
            data = make_simulation(model=FROZEN, augment=False).runtime.data
        assert (data.train_features is not None) == stored
        said = "computed once for all examples" if stored else "computed in every step"
        assert said in caplog.text
        assert ("the last digits of results can differ" in caplog.text) == (not stored)
        caplog.clear()
