"""Clients that train an ordinary module: FedProx, FedVLS, Ditto, and one with its own message."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.ditto import Ditto
from fedexp.algorithms.fedprox import FedProx
from fedexp.algorithms.fedvls import FedVLS
from fedexp.algorithms.plain import PlainClient
from fedexp.core.errors import ConfigError
from fedexp.core.limits import NonNegative
from fedexp.models.cnn import CNN
from fedexp.rundir import checkpoint, files
from fedexp.rundir.checkpoint import ClientStates
from fedexp.testing import assert_equal, check, record
from toy_federation import LOCAL, NOISE, TenClasses, make_simulation, play

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


class PlainVLS(PlainClient):
    """FedVLS (AAAI 2025) in the structure of its released code: counts, then an ordinary loop."""

    lambda_: NonNegative
    mu: NonNegative

    def host_plan(self, federation, client, rng):
        return {"counts": federation.counts[client].astype(np.float64)}

    def fit(self, model, loader, ctx):
        prior = ctx.plan["counts"] / ctx.plan["counts"].sum()
        log_prior, log_even = (prior + 1e-9).log(), np.log(1 / len(prior) + 1e-9)
        vacant = torch.where(prior == 0)[0]
        teacher = copy.deepcopy(model).eval().requires_grad_(False)
        optimizer = ctx.optimizer(model.parameters())
        losses = []
        for _ in range(ctx.epochs):
            for x, y in loader:
                logits = model(x).logits
                own, target = logits[:, vacant], teacher(x).logits[:, vacant]
                distance = F.kl_div(own.log_softmax(1), target.softmax(1), reduction="batchmean")
                spread = (logits - log_prior + log_even) * (1 - F.one_hot(y, len(prior)))
                per_class = torch.logsumexp(spread, 0) - np.log(len(y))
                loss = F.cross_entropy(logits + log_prior, y) + self.lambda_ * distance
                loss = loss + self.mu * (prior * per_class).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses)


class PlainDitto(PlainClient):
    """Ditto (ICML 2021): a kept personal model is pulled towards the received global model."""

    keeps_buffers = True

    lambda_: NonNegative

    def client_init(self, params, federation):
        return {"model": params}

    def fit(self, model, loader, ctx):
        received = {k: v.detach().clone() for k, v in model.named_parameters()}
        own = copy.deepcopy(model)
        own.load_state_dict(ctx.kept["model"])
        optimizers = {each: ctx.optimizer(each.parameters()) for each in (model, own)}
        losses = []
        for _ in range(ctx.epochs):
            for x, y in loader:
                for each, optimizer in optimizers.items():
                    loss = F.cross_entropy(each(x).logits, y)
                    if each is own:
                        pull = sum(
                            (v - received[k]).pow(2).sum() for k, v in own.named_parameters()
                        )
                        loss = loss + self.lambda_ / 2 * pull
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                losses.append(loss.item())
        ctx.kept["model"] = own.state_dict()
        return sum(losses) / len(losses)

    def personal_model(self, server, client, state, federation):
        return state["model"]


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


@pytest.mark.parametrize("model", [{}, {"model": NORMED}], ids=["cnn", "batch norm"])
@pytest.mark.parametrize("dataset", [None, TenClasses(**NOISE)], ids=["4 classes", "10 classes"])
def test_plain_fedvls_equals_fedvls(dataset, model):
    """With four classes, some clients have all; with ten, each lacks two or more."""
    weights, given = {"lambda_": 0.7, "mu": 0.3}, {"dataset": dataset} | model
    found = play(make_simulation(algorithm=PlainVLS(**weights), **given))
    expected = play(make_simulation(algorithm=FedVLS(variant="released", **weights), **given))
    assert_equal(found.server, expected.server, 1e-12)


@pytest.mark.parametrize("model", [{}, {"model": NORMED}], ids=["cnn", "batch norm"])
def test_plain_ditto_with_a_kept_model_equals_ditto(model):
    found = play(make_simulation(algorithm=PlainDitto(lambda_=0.5), **model))
    expected = play(make_simulation(algorithm=Ditto(lambda_=0.5), **model))
    assert_equal(found.server, expected.server, 1e-12)
    kept = {client: state["model"] for client, state in found.clients.items()}
    assert_equal(kept, dict(expected.clients), 1e-12)
    global_model = found.server["params"]
    assert not torch.equal(kept[1]["classifier.weight"], global_model["classifier.weight"])


@pytest.mark.parametrize(
    ("algorithm", "zero"),
    [
        (PlainProx(mu=0.3), PlainProx(mu=0.0)),
        (PlainVLS(lambda_=0.5, mu=0.1), None),
        (PlainDitto(lambda_=0.5), None),
        (Counting(), None),
    ],
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


class Prepared(PlainClient):
    """Its hooks prepare values for `fit`, which copies them to the client's own."""

    def client_init(self, params, federation):
        return {"first": torch.tensor(7.0)}

    def host_plan(self, federation, client, rng):
        return {"counts": federation.counts[client]}

    def personal_broadcast(self, server, client, kept, rng):
        return {"number": torch.tensor(client)}

    def fit(self, model, loader, ctx):
        ctx.kept |= {"counts": ctx.plan["counts"], **ctx.personal}
        return read(loader)


def test_hooks_prepare_what_fit_receives():
    simulation = make_simulation(algorithm=Prepared())
    clients = play(simulation, 2).clients
    assert len(clients) > 2
    for client, kept in clients.items():
        assert (kept["first"], kept["number"]) == (7, client)
        assert kept["counts"].tolist() == simulation.stages[0].federation.counts[client].tolist()


class Forgetting(PlainClient):
    """Clients begin with a note, and remove it in their first round."""

    def client_init(self, params, federation):
        return {"note": torch.tensor(1.0)}

    def fit(self, model, loader, ctx):
        ctx.message["had"] = torch.tensor(float("note" in ctx.kept))
        ctx.kept.clear()
        return read(loader)

    def server_init(self, params, federation):
        return super().server_init(params, federation) | {"had": torch.zeros(())}

    def aggregate(self, server, messages, round):
        return super().aggregate(server, messages, round) | {"had": messages["had"].sum()}


def test_client_that_empties_its_state_keeps_none(tmp_path):
    """All clients take part in each round. The empty states also reach the checkpoint."""
    simulation = make_simulation(algorithm=Forgetting(), participation=1.0)
    assert play(simulation, 1).server["had"] == 5
    assert play(simulation, 2).server["had"] == 0
    state = record(simulation, tmp_path)
    saved = checkpoint.load(tmp_path).state["clients"]
    for states in (state.clients, ClientStates(tmp_path / files.CLIENT_STATES, saved)):
        assert dict(states) == {client: {} for client in range(5)}
    assert not play(make_simulation(algorithm=PlainProx(mu=0.1)), 1).clients


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


def change_received(model: nn.Module, loader: Any, ctx: Any) -> float:
    ctx.received["params"]["classifier.bias"].add_(1)
    return read(loader)


def keep_number(model: nn.Module, loader: Any, ctx: Any) -> float:
    ctx.kept["count"] = 3
    return read(loader)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda m, loader, c: sum(read(loader) for _ in range(3)), "more than ctx.epochs times"),
        (lambda m, loader, c: next(iter(loader)) and read(loader), "before the one before has end"),
        (lambda m, loader, c: None, "returned None; must be the mean loss, a number"),
        (replace_layer, "fit changed classifier.bias of the model from shape"),
        (change_received, r"^algorithm: fit of Own changes ctx.received\['params'\]\["),
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
