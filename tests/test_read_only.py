"""Own hooks that change what they may only read are refused with their name, on every engine."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedexp
from fedexp.algorithms.base import FedAvg, masked_mean
from fedexp.core import tree
from fedexp.core.errors import ConfigError, HookFailed
from fedexp.core.unchanged import Unchanged
from fedexp.testing import assert_equal
from fedexp.training.trial import check_padding
from quick_runs import SMALL
from toy_federation import LOCAL, PAIR, TWO_TASKS, make_simulation, play


# --- trees
def test_changes_of_a_tree_are_found():
    leaf, nan = torch.ones(2), torch.tensor([float("nan")])

    def change_data():
        leaf.data.zero_()

    def found(change, **options):
        given = {"a": {"b": leaf, "c": nan}, "d": {}}
        before = Unchanged({"tree": given}, **options)
        change(given)
        try:
            before.check("this hook", "clone")
        except ConfigError as error:
            return str(error).removeprefix("this hook changes ").removesuffix("; clone")
        return None

    assert found(lambda given: None, copies=True) is None
    assert found(lambda given: leaf.add_(1)) == "tree['a']['b']"
    assert found(lambda given: given["a"].update(b=leaf.clone())) == "tree['a']['b']"
    assert found(lambda given: given["d"].update(e=leaf)) == "tree['d']"
    assert found(lambda given: given.pop("a")) == "tree"
    # torch does not count changes of tensor.data
    assert found(lambda given: change_data()) is None
    leaf.fill_(1)
    assert found(lambda given: change_data(), copies=True) == "tree['a']['b']"


# --- hooks of an algorithm
class Kept(FedAvg):
    """Its clients keep a model and a number."""

    change: Any

    def server_init(self, params, federation):
        return super().server_init(params, federation) | {"zero": torch.zeros(1)}

    def client_init(self, params, federation):
        last = {name: leaf.clone() for name, leaf in params.items()}
        return {"last": last, "count": torch.zeros(1)}


def first(params):
    return next(iter(params.values()))


class Aggregate(Kept):
    def aggregate(self, server, messages, round):
        mean = tree.weighted_mean(messages["params"], round.weights)
        self.change(server, mean)
        return {**server, "params": mean}


class Messages(Kept):
    def aggregate(self, server, messages, round):
        self.change(messages, messages["params"])
        return super().aggregate(server, messages, round)


def copy_in_place(server, mean):
    for name, leaf in server["params"].items():
        leaf.copy_(mean[name])


def copy_data(server, mean):
    for name, leaf in server["params"].items():
        leaf.data.copy_(mean[name])


def replace_parts(server, mean):
    server["params"].update(mean)


def halve(ctx):
    first(ctx.server["params"]).mul_(0.5)


class Setup(Kept):
    def client_setup(self, net, data, ctx):
        self.change(ctx)
        return {}


class Start(Kept):
    def initial_params(self, net, data, ctx):
        self.change(ctx)
        return ctx.server["params"]


class Gradients(Kept):
    def transform_grads(self, grads, params, batch, ctx):
        self.change(ctx)
        return grads


class Finish(Kept):
    def finish(self, net, params, data, ctx):
        self.change(ctx, params)
        return {"params": params}, ctx.client


class Shared(Finish):
    """The first state of all clients is the initial model itself."""

    def client_init(self, params, federation):
        return {"last": params}


def remember(ctx, params):
    for name, leaf in ctx.client["last"].items():
        leaf.copy_(params[name])


@pytest.mark.parametrize("engine", PAIR)
@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        (Aggregate, copy_in_place, r"aggregate of Aggregate changes server\['params'\]\["),
        (Aggregate, copy_data, r"aggregate of Aggregate changes server\['params'\]\["),
        (Aggregate, replace_parts, r"aggregate of Aggregate changes server\['params'\]\["),
        (Aggregate, lambda server, mean: server.pop("zero"), "Aggregate changes server;"),
        (Messages, lambda messages, params: first(params).zero_(), r"changes messages\['params'\]"),
        (Setup, halve, r"client_setup of Setup changes ctx.server\['params'\]"),
        (
            Setup,
            lambda ctx: ctx.server.update(mine=1),
            "client_setup of Setup changes ctx.server;",
        ),
        (
            Setup,
            lambda ctx: ctx.client.update(mine=ctx.steps),
            "client_setup of Setup changes ctx.client;",
        ),
        (Start, halve, r"initial_params of Start changes ctx.server\['params'\]"),
        (
            Gradients,
            lambda ctx: ctx.client["count"].add_(1),
            r"transform_grads of Gradients changes ctx.client\['count'\];",
        ),
        (Finish, remember, r"finish of Finish changes ctx.client\['last'\]\["),
        (Shared, remember, r"finish of Shared changes ctx.client\['last'\]\["),
        (Finish, lambda ctx, params: first(params).zero_(), r"finish of Finish changes params\["),
    ],
)
def test_hook_that_changes_its_arguments_is_refused(kind, change, what, engine):
    with pytest.raises(ConfigError, match=f"^algorithm: .*{what}.*: return new tensors, or clone"):
        play(make_simulation(kind(change=change), engine=engine), 1)


class Plan(FedAvg):
    change: Any

    def host_plan(self, federation, client, rng):
        self.change(federation, client, rng)
        return {"counts": federation.counts[client]}


def no_counts(federation, client, rng):
    federation.counts[client] = 0


def equal_weights(federation, client, rng):
    federation.weights[:] = 1


def other_labels(federation, client, rng):
    federation.labels[federation.parts[client]] += 1


@pytest.mark.parametrize("engine", PAIR)
@pytest.mark.parametrize(
    "change",
    [
        no_counts,
        equal_weights,
        other_labels,
        lambda federation, client, rng: rng.shuffle(federation.parts[client]),
        lambda federation, client, rng: federation.shared.sort(),
    ],
)
def test_hook_that_changes_arrays_of_the_federation_is_refused(change, engine):
    message = r"algorithm: host_plan of Plan \(test_read_only.py, line \d+\): .*read-only"
    with pytest.raises(HookFailed, match=message):
        play(make_simulation(Plan(change=change), engine=engine), 1)


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
@pytest.mark.parametrize("engine", PAIR)
def test_plan_may_have_arrays_of_the_federation(engine):
    def change(federation, client, rng):
        rng.shuffle(federation.parts[client].copy())

    play(make_simulation(Plan(change=change), engine=engine), 1)


@pytest.mark.parametrize("engine", PAIR)
def test_hook_may_change_tensors_of_its_own(engine):
    def change(ctx, params):
        own = {**ctx.client["last"]}
        own.update({name: leaf.clone().mul_(2) for name, leaf in params.items()})

    play(make_simulation(Finish(change=change), engine=engine), 2)


class OnServer(FedAvg):
    hook: str

    def _change(self, hook, params):
        if hook == self.hook:
            first(params).add_(1)

    def server_init(self, params, federation):
        self._change("server_init", params)
        return super().server_init(params, federation)

    def client_init(self, params, federation):
        self._change("client_init", params)
        return {}

    def broadcast(self, server):
        self._change("broadcast", server["params"])
        return super().broadcast(server)

    def personal_broadcast(self, server, client, kept, rng):
        self._change("personal_broadcast", server["params"])
        return {}

    def training_data(self, server, federation):
        self._change("training_data", server["params"])
        return federation

    def counted(self, sent, up):
        self._change("counted", sent["params"])
        return sent

    def refine(self, net, server, messages, round):
        self._change("refine", server["params"])
        return server

    def begin_task(self, server, start):
        self._change("begin_task", server["params"])
        return server


HOOKS = [name for name in vars(OnServer) if hasattr(FedAvg, name) and name[0] != "_"]


@pytest.mark.parametrize("hook", [name for name in HOOKS if callable(getattr(FedAvg, name))])
def test_server_side_hook_that_changes_its_arguments_is_refused(hook):
    def run():
        play(make_simulation(OnServer(hook=hook), scenario=TWO_TASKS), 3)

    with pytest.raises(ConfigError, match=f"^algorithm: {hook} of OnServer changes "):
        run()


# --- padding
class Padded(FedAvg):
    """A term that depends on padding, and is zero in the first step."""

    weight: float

    def penalty_of(self, net, params, batch, ctx):
        moved = net(params, batch.x).logits - net(ctx.server["params"], batch.x).logits
        return moved.square().mean()

    def objective(self, net, params, batch, ctx):
        loss = super().objective(net, params, batch, ctx)
        return loss + self.weight * self.penalty_of(net, params, batch, ctx)


class Masked(Padded):
    def penalty_of(self, net, params, batch, ctx):
        moved = net(params, batch.x).logits - net(ctx.server["params"], batch.x).logits
        return masked_mean(moved.square().mean(1), batch.mask)


def test_objective_that_depends_on_padding_is_refused():
    def check(algorithm, **options):
        simulation = make_simulation(algorithm, engine="vectorised", **options)
        before = tree.map(torch.clone, simulation.initial_state().server)
        check_padding(simulation, state := simulation.initial_state())
        assert_equal(state.server, before)

    message = r"loss of Padded \(objective\) depends on rows that only pad .* masked_mean"
    with pytest.raises(ConfigError, match=message):
        check(Padded(weight=0.1))
    check(Padded(weight=0.0))
    check(Masked(weight=10.0))
    check(Padded(weight=0.1), local=replace(LOCAL, batch_size=1))  # never padded
    kept = replace(LOCAL, optimizer="rmsprop", keep_optimizer=True)
    with pytest.raises(ConfigError, match=message):
        check(Padded(weight=0.1), local=kept)
    check(Masked(weight=10.0), local=kept)


def test_trial_that_fails_otherwise_decides_nothing():
    class Broken(FedAvg):
        def client_setup(self, net, data, ctx):
            raise ZeroDivisionError

        def penalty(self, net, params, ctx):
            return 0.0

    simulation = make_simulation(Broken(), engine="vectorised")
    check_padding(simulation, simulation.initial_state())


OWN = """
from fedexp.algorithms.base import FedAvg


class Counts(FedAvg):
    def objective(self, net, params, batch, ctx):
        return super().objective(net, params, batch, ctx) * len(batch.y)
"""


def test_command_refuses_an_objective_before_it_writes_files(tmp_path, monkeypatch):
    (tmp_path / "counts_rows.py").write_text(OWN)
    (tmp_path / "conf/algorithm").mkdir(parents=True)
    option = tmp_path / "conf/algorithm/counts.yaml"
    option.write_text("# Wrong.\n_target_: counts_rows.Counts\n")
    monkeypatch.syspath_prepend(tmp_path)

    def run(engine):
        given = [*SMALL, "rounds=1", "algorithm=counts", f"hardware.engine={engine}"]
        return fedexp.run(given, tmp_path / engine, tmp_path / "conf")

    with pytest.raises(ConfigError, match=r"the loss of Counts .* depends on rows that only pad"):
        run("vectorised")
    assert not (tmp_path / "vectorised").exists()
    assert run("sequential").status == "completed"  # never padded
