"""Clients that train an ordinary module: FedProx, Ditto and a method with a message of its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedprox import FedProx
from fedexp.algorithms.plain import PlainClient
from fedexp.core.errors import ConfigError
from fedexp.core.limits import NonNegative
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.models.cnn import CNN
from fedexp.testing import assert_equal, check
from toy_federation import LOCAL, make_simulation, play

NORMED = CNN(channels=(3,), kernel=3, padding=1, hidden=(8,), unit_features=None, batch_norm=True)


class PlainProx(PlainClient):
    """FedProx as a loop that a user of PFLlib would write."""

    mu: NonNegative

    def fit(self, model, loader, ctx):
        received = {k: v.clone() for k, v in model.named_parameters()}
        optimizer = ctx.optimizer(model.parameters())
        total = 0.0
        for _ in range(ctx.epochs):
            for x, y in loader:
                loss = F.cross_entropy(model(x).logits, y)
                for name, parameter in model.named_parameters():
                    loss = loss + self.mu / 2 * (parameter - received[name].detach()).pow(2).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
        return total / (ctx.epochs * len(loader))


class PlainDitto(PlainClient):
    """Ditto (ICML 2021): a kept personal model is pulled towards the received global model."""

    lambda_: NonNegative

    def fit(self, model, loader, ctx):
        received = {k: v.detach().clone() for k, v in model.named_parameters()}
        optimizer = ctx.optimizer(model.parameters())
        own = ctx.kept.get("model", received)
        kept = {name: value.clone().requires_grad_() for name, value in own.items()}
        for _ in range(ctx.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x).logits, y).backward()
                optimizer.step()
                logits = torch.func.functional_call(model, kept, (x,)).logits
                pull = sum((kept[k] - received[k]).pow(2).sum() for k in kept)
                loss = F.cross_entropy(logits, y) + self.lambda_ / 2 * pull
                slopes = torch.autograd.grad(loss, list(kept.values()))
                with torch.no_grad():
                    for value, slope in zip(kept.values(), slopes, strict=True):
                        value -= ctx.lr * slope
        ctx.kept["model"] = {name: value.detach() for name, value in kept.items()}
        return loss.item()

    def personal_model(self, server, client, state, federation):
        return state.get("model", server["params"])


class Counting(PlainClient):
    """Sends its number of examples, and changes what must not reach the next client."""

    def fit(self, model, loader, ctx):
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())
        seen = sum(len(y) for _, y in loader)
        ctx.message["seen"] = torch.tensor([float(seen)])
        ctx.kept["rounds"] = ctx.kept.get("rounds", torch.zeros(1)) + 1
        model.requires_grad_(False)
        model.eval()
        model.register_forward_hook(lambda *_: None)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * np.random.rand())  # noqa: NPY002
        return 0.0

    def server_init(self, params, federation):
        return super().server_init(params, federation) | {"seen": torch.zeros(())}

    def aggregate(self, server, messages, round):
        new = super().aggregate(server, messages, round)
        return new | {"seen": messages["seen"].sum()}


@pytest.mark.parametrize("model", [{}, {"model": NORMED}], ids=["cnn", "batch norm"])
def test_plain_fedprox_equals_fedprox(model):
    found = play(make_simulation(algorithm=PlainProx(mu=0.3), **model))
    expected = play(make_simulation(algorithm=FedProx(mu=0.3), **model))
    assert_equal(found.server, expected.server, 1e-12)
    plain = play(make_simulation(algorithm=PlainProx(mu=0.0), **model))
    assert_equal(plain.server, play(make_simulation(algorithm=FedAvg(), **model)).server, 1e-12)


@pytest.mark.parametrize(
    ("algorithm", "zero"),
    [(PlainProx(mu=0.3), PlainProx(mu=0.0)), (PlainDitto(lambda_=0.5), None), (Counting(), None)],
    ids=lambda each: type(each).__name__,
)
def test_plain_clients_pass_the_checks(algorithm, zero):
    """Two ranks compute the same, and a resumed run equals an uninterrupted one."""
    check(algorithm, zero=zero)


def test_messages_and_kept_values_reach_server_and_client():
    simulation = make_simulation(algorithm=Counting())
    state = play(simulation, 2)
    sizes = [len(part) for part in simulation.stages[0].federation.parts]
    cohort = state.record.cohorts[2]
    assert state.server["seen"] == sum(sizes[client] for client in cohort)
    rounds = {client: kept["rounds"].item() for client, kept in state.clients.items()}
    both = set(state.record.cohorts[1]) & set(cohort)
    assert {client for client, number in rounds.items() if number == 2} == both


def test_vectorised_engine_is_refused_or_replaced():
    with pytest.raises(ConfigError, match="each client of Counting trains a module of its own"):
        make_simulation(algorithm=Counting(), engine="vectorised")


def fitting(body: Callable[..., Any]) -> PlainClient:
    class Own(PlainClient):
        def fit(self, model, loader, ctx):
            return body(model, loader, ctx)

    return Own()


def read(loader: Any) -> float:
    for _ in loader:
        pass
    return 0.0


def replace_layer(model: nn.Module, loader: Any, ctx: Any) -> float:
    model.classifier = nn.Linear(3, 2)
    return read(loader)


def keep_number(model: nn.Module, loader: Any, ctx: Any) -> float:
    ctx.kept["count"] = 3
    return read(loader)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda m, loader, c: sum(read(loader) for _ in range(3)), "more than local.epochs times"),
        (lambda m, loader, c: next(iter(loader)) and read(loader), "before the one before has end"),
        (lambda m, loader, c: None, "returned None; must be the mean loss, a number"),
        (replace_layer, "fit changed classifier.bias of the model from shape"),
        (keep_number, r"ctx.kept\['count'\] is a int; it must be a tensor"),
    ],
)
def test_wrong_use_is_refused(body, message):
    with pytest.raises(ConfigError, match=message):
        play(make_simulation(algorithm=fitting(body)), 1)


def test_hooks_that_fit_replaces_are_refused():
    with pytest.raises(ConfigError, match="defines penalty, which a PlainClient does not call"):

        class Wrong(PlainClient):
            version: ClassVar[int] = 1

            def penalty(self, net, params, ctx):
                return 0.0


def test_optimizers_have_the_options_of_the_run():
    local = replace(LOCAL, optimizer="adamw", weight_decay=0.25)
    built = []

    def body(model, loader, ctx):
        built.append(ctx.optimizer(model.parameters()))
        return read(loader) if ctx.epochs == 1 else read(loader) + read(loader)

    play(make_simulation(algorithm=fitting(body), local=local), 1)
    (group,) = built[0].param_groups
    assert type(built[0]) is torch.optim.AdamW
    assert (group["lr"], group["weight_decay"]) == (local.lr, 0.25)
    assert not any(isinstance(each, Vectorised) for each in built)
