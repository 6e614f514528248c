"""`fedexp.testing.check` accepts correct algorithms and names the errors of wrong ones."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.plain import PlainClient
from fedexp.core import tree
from fedexp.engine.sequential import Sequential
from fedexp.testing import ENGINES, check


@pytest.fixture(autouse=True)
def workers_in_this_process(request, monkeypatch):
    """Start no ranks, except in the slow test."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setitem(ENGINES, "workers", Sequential())


QUICK = ("num_clients=3", "local.epochs=1")


@pytest.fixture
def one_engine(monkeypatch):
    """Compare no engines, where something else is tested."""
    monkeypatch.setattr("fedexp.testing.federation.ENGINES", {"sequential": ENGINES["sequential"]})


@dataclass(frozen=True, kw_only=True)
class Drifting(FedAvg):
    """Each client is pulled to its last local model, as in the guide."""

    pull: float = 0.5

    def client_init(self, params, info):
        return {"last": params}

    def penalty(self, net, params, ctx):
        moved = [(params[name] - last).square().sum() for name, last in ctx.client["last"].items()]
        return self.pull / 2 * sum(moved)

    def finish(self, net, params, data, ctx):
        return {"params": params}, {"last": {name: params[name] for name in ctx.client["last"]}}


@dataclass(frozen=True, kw_only=True)
class CountsRows(Drifting):
    """Wrong: counts padding."""

    def objective(self, net, params, batch, ctx):
        return super().objective(net, params, batch, ctx) * len(batch.y)


@dataclass(frozen=True, kw_only=True)
class Averages(Drifting):
    """Wrong: the mean over a batch includes padding."""

    def example_loss(self, net, params, batch, ctx):
        return super().example_loss(net, params, batch, ctx) + net(params, batch.x).logits.mean()


@dataclass(frozen=True, kw_only=True)
class Halves(Drifting):
    """Wrong: changes the model that the other clients receive."""

    def client_setup(self, net, data, ctx):
        next(iter(ctx.server["params"].values())).mul_(0.5)
        return {}


@dataclass(frozen=True, kw_only=True)
class PadsFinish(Drifting):
    """Wrong: its message counts padding."""

    def finish(self, net, params, data, ctx):
        message, state = super().finish(net, params, data, ctx)
        rows = sum(len(batch.y) for batch in data.batches())
        return {**message, "rows": ctx.steps * 0 + rows}, state


@dataclass(frozen=True, kw_only=True)
class Detached(Drifting):
    """Wrong: a factor of the loss has no gradient."""

    def penalty(self, net, params, ctx):
        penalty = super().penalty(net, params, ctx)
        return penalty * penalty.detach()


@dataclass(frozen=True, kw_only=True)
class Decides(Drifting):
    """Wrong: vmap rejects control flow that depends on values."""

    def penalty(self, net, params, ctx):
        penalty = super().penalty(net, params, ctx)
        return penalty if penalty > 0 else 0 * penalty


@dataclass(frozen=True, kw_only=True)
class Remembers(Drifting):
    """Wrong: attributes of the object are not in the checkpoint."""

    calls: list[Any] = field(default_factory=list, compare=False)

    def aggregate(self, server, messages, round):
        self.calls.append(round)
        moved = super().aggregate(server, messages, round)
        shrunk = {name: value / len(self.calls) for name, value in moved["params"].items()}
        return moved | {"params": shrunk}


@dataclass(frozen=True, kw_only=True)
class First(Drifting):
    """Wrong: the weights are those of other clients."""

    def aggregate(self, server, messages, round):
        weights = torch.tensor(round.federation.weights[: len(round.clients)], dtype=torch.float64)
        return server | {"params": tree.weighted_mean(messages["params"], weights)}


@dataclass(frozen=True, kw_only=True)
class SendsBack(FedAvg):
    """Wrong: sends the model that it received."""

    def finish(self, net, params, data, ctx):
        return {"params": dict(ctx.server["params"])}, ctx.client


@dataclass(frozen=True, kw_only=True)
class Loses(Drifting):
    """Wrong: the next round has no momentum."""

    def server_init(self, params, federation):
        return super().server_init(params, federation) | {"momentum": params}

    def aggregate(self, server, messages, round):
        return {"params": super().aggregate(server, messages, round)["params"]}


class Stale(Drifting):
    """Wrong: the clients are pulled to the initial model."""

    def finish(self, net, params, data, ctx):
        return {"params": params}, ctx.client


class Unread(Drifting):
    """Wrong: the last model is kept, but not used."""

    def penalty(self, net, params, ctx):
        return 0.0


class Cheats(Drifting):
    """Wrong: a client subtracts the mean of the test images."""

    def finish(self, net, params, data, ctx):
        state = super().finish(net, params, data, ctx)[1]
        mean = data.runtime.data.x_test.double().mean()
        return {"params": {k: v - 0.01 * mean for k, v in params.items()}}, state


class Renames(Drifting):
    """Wrong: `aggregate` of FedAvg does not know the name."""

    def finish(self, net, params, data, ctx):
        message, state = super().finish(net, params, data, ctx)
        return {"model": message["params"]}, state


class Counts(Drifting):
    """Wrong: the message has a number."""

    def finish(self, net, params, data, ctx):
        message, state = super().finish(net, params, data, ctx)
        return message | {"steps": 3}, state


class Unused(PlainClient):
    """Wrong: the loss has no penalty, and the optimizer and the passes are its own."""

    weight: float = 1.0

    def fit(self, model, loader, ctx):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x).logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss


def test_correct_algorithm_passes_the_check(recwarn):
    check(Drifting, zero=Drifting(pull=0.0))
    assert not [each for each in recwarn if "Drifting: " in str(each.message)]


@pytest.mark.usefixtures("one_engine")
def test_check_warns_of_options_without_effect():
    with pytest.warns(UserWarning, match="has no effect in two rounds") as found:
        check(Unused())
    assert [str(each.message).split()[1] for each in found] == [
        "local.epochs",
        "local.lr",
        "weight",
    ]


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (Stale(), "Stale: no client changes its state last in three rounds; return the new one"),
        (Unread(), "Unread: the states that clients keep have no effect in three rounds"),
    ],
)
@pytest.mark.usefixtures("one_engine")
def test_check_warns_of_client_states_without_effect(algorithm, words):
    with pytest.warns(UserWarning, match=words):
        check(algorithm, overrides=QUICK)


@pytest.mark.slow
def test_correct_algorithm_passes_the_check_with_worker_processes():
    check(Drifting, gradient=False, overrides=QUICK)


@pytest.mark.parametrize(
    ("algorithm", "options", "words"),
    [
        (
            CountsRows(),
            {},
            r"loss of CountsRows \(penalty or objective\) depends on rows",
        ),
        (Averages(), {}, r"loss of Averages \(example_loss or penalty\) depends on rows"),
        (Halves(), {}, r"client_setup of Halves changes ctx.server\['params'\]"),
        (PadsFinish(), {}, "round 1, vectorised differs from sequential in messages"),
        (Decides(), {}, "round 1, vectorised fails, sequential does not: .*control flow"),
        (Drifting(), {"zero": Drifting(pull=0.1)}, "zero differs from FedAvg"),
        (Detached(), {}, "the gradient differs from finite differences"),
        (First(), {}, "aggregate of First depends on the order of the clients"),
        (SendsBack(), {}, "SendsBack: two rounds of training do not change the model"),
        (Loses(), {}, "Loses: the server's state loses momentum in two rounds"),
        (Cheats(), {}, "Cheats: training depends on the test examples; use only the data"),
        (Renames(), {}, "finish of Renames sends model, but aggregate of FedAvg needs params"),
        (Counts(), {}, "round 1, client [0-9], in finish of Counts: TypeError"),
        (
            Remembers(),
            {"gradient": False},
            "the run resumed after round 2 differs from the uninterrupted run",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, FedAvg) else "",
)
def test_check_names_the_error_of_an_algorithm(request, algorithm, options, words):
    if "vectorised" not in words:
        request.getfixturevalue("one_engine")
    with pytest.raises(AssertionError, match=words):
        check(algorithm, overrides=QUICK, **options)


def test_workers_are_compared_with_the_sequential_engine(monkeypatch):
    monkeypatch.setitem(ENGINES, "workers", Forgetful())
    with pytest.raises(AssertionError, match="round 1, workers differs from sequential in losses"):
        check(Drifting(), overrides=QUICK)


class Forgetful(Sequential):
    """Wrong: returns half of each loss."""

    def train(self, shared, cohort, evaluate_local):
        trained = super().train(shared, cohort, evaluate_local)
        return replace(trained, losses=trained.losses / 2)


@pytest.mark.usefixtures("one_engine")
def test_gradient_check_and_federation_are_optional():
    check(Detached(), gradient=False, overrides=[*QUICK, "local.momentum=0"])
    assert torch.get_default_dtype() == torch.float32
