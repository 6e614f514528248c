"""FedProj against its formulas."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.fedproj import FedProj, project
from fedexp.algorithms.optimizers import KEPT
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.engine.base import ScheduledData
from fedexp.engine.network import LiveNetwork
from toy_federation import (
    LOCAL,
    Normed,
    assemble,
    assert_close,
    describe,
    flat,
    float64,
    leaves,
    make_simulation,
    play,
    take_step,
    trained_round,
)

PUBLIC = {"public": 0.15}  # 6 of 40 examples
SETTINGS = {"tau": 2.0, "lr": 0.02, "batch_size": 4, "epochs_on_server": 2}
SETTINGS |= {"memory": 5, "memory_batch": 3, "warmup": 1}


def fedproj(**changes):
    return FedProj(**SETTINGS | changes)


@pytest.mark.parametrize(
    ("gradient", "past", "expected"),
    [
        # <g, m> = -2 + -1 = -3 and ||m||^2 = 5: v = g + 3/5 m
        (([1.0], [-1.0]), ([-2.0], [1.0]), ([-0.2], [-0.4])),
        (([1.0], [1.0]), ([-2.0], [2.0]), ([1.0], [1.0])),  # orthogonal
        (([1.0], [-1.0]), ([2.0], [1.0]), ([1.0], [-1.0])),  # no conflict
        (([1.0], [-1.0]), ([0.0], [0.0]), ([1.0], [-1.0])),  # no gradient on the memory
    ],
)
def test_projection_equals_hand_calculation(gradient, past, expected):
    def params(values):
        return {"a": float64(values[0]), "b": float64(values[1])}

    assert_close(project(params(gradient), params(past)), params(expected), 1e-15)


def test_clients_may_keep_their_optimizer():
    """The server's Adam starts anew in each round."""
    keeping = replace(LOCAL, keep_optimizer=True)
    kept, fresh = (
        play(make_simulation(fedproj(), local=local, participation=1.0, **PUBLIC), 2)
        for local in (keeping, LOCAL)
    )
    assert all(KEPT in each for each in kept.clients.values())
    assert not torch.equal(flat(kept.server["params"]), flat(fresh.server["params"]))


def ensemble_loss(net, w, x, z, tau):
    """Return the mean KL divergence of the model from the ensemble's logits z."""
    p = (z / tau).softmax(-1)
    return (p * (p.log() - (net(w, x).logits / tau).log_softmax(-1))).sum(-1).mean()


def test_clients_project_their_gradients():
    """Round 2 of every client, with batches of 3 of a memory of 5 examples that go round. Both
    cases of the projection occur."""
    simulation, state, trained, _ = trained_round(fedproj(), **PUBLIC)
    net, runtime = simulation.runtime.net, simulation.runtime
    episodic, conflicts = state.server["episodic"], []
    public = torch.from_numpy(simulation.stages[0].partition.public)
    assert len(episodic["numbers"].unique()) == 5
    assert set(episodic["numbers"].tolist()) < set(public.tolist())
    cohort = assemble(simulation, state, 2)
    for row, schedule in enumerate(cohort.schedules):
        w = leaves(state.server["params"])
        sgd = torch.optim.SGD(
            w.values(), 0.1, momentum=LOCAL.momentum, weight_decay=LOCAL.weight_decay
        )
        start = int(cohort.plans[row]["start"])
        for batch in ScheduledData(runtime, schedule).batches():
            places = [(start + 3 * batch.step + i) % 5 for i in range(3)]
            x, _ = runtime.load_train(episodic["numbers"][places], None)
            z = episodic["logits"][places]
            losses = (
                F.cross_entropy(net(w, batch.x).logits, batch.y),
                ensemble_loss(net, w, x, z, 2.0),
            )
            g, m = (torch.autograd.grad(loss, w.values()) for loss in losses)
            g, m = ({k: v for k, v in zip(w, each, strict=True)} for each in (g, m))
            inner = flat(g) @ flat(m)
            conflicts.append(bool(inner < 0))
            for name, value in w.items():
                value.grad = g[name]
                if inner < 0:
                    value.grad = g[name] - inner / (flat(m) @ flat(m)) * m[name]
            sgd.step()
        assert_close(flat(tree.row(trained.messages["params"], row)), flat(w).detach(), 1e-11)
    assert set(conflicts) == {True, False}


def test_server_distils_the_ensemble_and_stores_its_logits():
    algorithm = fedproj(memory=None)
    simulation, state, trained, about = trained_round(algorithm, **PUBLIC)
    net, public = simulation.runtime.net, about.public
    average = algorithm.aggregate(state.server, trained.messages, about)["params"]
    models = [tree.row(trained.messages["params"], i) for i in range(len(about.clients))]
    w = leaves(average)
    adam = torch.optim.Adam(w.values(), 0.02)
    rng = describe(simulation, state, assemble(simulation, state, 2), trained).rng
    for _ in range(2):
        order = rng.permutation(6)
        for numbers in (order[:4], order[4:]):
            x, _ = public.take(numbers)
            z = torch.stack([net(model, x).logits for model in models]).mean(0)
            take_step(adam, 4 * ensemble_loss(net, w, x, z, 2.0))
    server = algorithm.aggregate(state.server, trained.messages, about) | {"buffers": {}}
    server = algorithm.refine(LiveNetwork(net), server, trained.messages, about)
    assert_close(flat(server["params"]), flat(w).detach(), 1e-10)
    order = torch.from_numpy(rng.permutation(6))
    x, _ = public.take(order.numpy())
    expected = torch.stack([net(model, x).logits for model in models]).mean(0)
    assert_close(server["episodic"]["logits"], expected)
    assert torch.equal(
        server["episodic"]["numbers"],
        torch.from_numpy(simulation.stages[0].partition.public)[order],
    )


def test_memory_is_sent_after_the_warmup():
    simulation = make_simulation(fedproj(warmup=2), **PUBLIC)
    assert "episodic" not in play(simulation, 1).server
    assert "episodic" in play(simulation, 2).server


def test_memory_updates_running_statistics():
    """As in the released code. Each step counts two batches: the client's and the memory's."""
    simulation = make_simulation(
        fedproj(lr=1e-9),
        replace(LOCAL, epochs=1),
        (4,),
        model=Normed(),
        participation=1.0,
        **PUBLIC,
    )
    counts = [
        int(play(simulation, rounds).server["buffers"]["norm.num_batches_tracked"])
        for rounds in (1, 2)
    ]
    # the server's four batches of each round, of which those of two examples count, too
    assert [counts[0], counts[1] - counts[0]] == [1 + 4, 2 + 4]


def test_memory_larger_than_the_public_set_is_rejected():
    with pytest.raises(ConfigError, match=r"selects 6 .* needs at least 7"):
        make_simulation(fedproj(memory=7), **PUBLIC)


@pytest.mark.parametrize("name", ["memory", "memory_batch"])
def test_single_example_is_rejected(name):
    """Batch norm cannot normalise it."""
    with pytest.raises(ConfigError, match=rf"algorithm\.{name}=1: must be at least 2"):
        fedproj(**{name: 1})
