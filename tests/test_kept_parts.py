"""FedRep, FedBN, Ditto, FedProto: whole rounds against the loops of the released codes, written
with torch.optim."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms import heads
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.ditto import Ditto
from fedexp.algorithms.fedbn import FedBN
from fedexp.algorithms.fedproto import FedProto
from fedexp.algorithms.fedrep import FedRep
from fedexp.algorithms.prototypes import average_prototypes
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.engine.base import ScheduledData
from fedexp.training.rounds import play_round
from toy_federation import (
    LOCAL,
    PLAIN,
    Normed,
    assemble,
    assert_close,
    flat,
    leaves,
    make_simulation,
    play,
    take_step,
)

SIZES = (7, 12, 10)
PROTO = FedProto(lambda_=0.7)


def sgd(params, lr, local=LOCAL):
    return torch.optim.SGD(
        list(params), lr, momentum=local.momentum, weight_decay=local.weight_decay
    )


def batches(simulation, state, number):
    """Return client -> its batches in the round after `state`."""
    cohort = assemble(simulation, state, number)
    pairs = zip(cohort.clients, cohort.schedules, strict=True)
    return {
        client: list(ScheduledData(simulation.runtime, schedule).batches())
        for client, schedule in pairs
    }


def mean_of(models, names=None):
    """Return the mean of models, weighted by the clients' numbers of examples."""
    found = {}
    for name in names or models[0]:
        parts = zip(SIZES, models, strict=True)
        found[name] = sum(size * model[name].detach() for size, model in parts) / sum(SIZES)
    return found


def test_fedrep_round_equals_released_code():
    """Two rounds of three clients: one epoch of the classifier and two of the body, with separate
    optimizers."""
    simulation = make_simulation(FedRep(head_epochs=1), sizes=SIZES, participation=1.0)
    net, state = simulation.runtime.net, simulation.initial_state()
    kept = {client: heads.head(state.server["params"]) for client in range(3)}
    for number in (1, 2):
        lr, models = LOCAL.lr_at(number), []
        for client, passed in batches(simulation, state, number).items():
            w = leaves(state.server["params"] | kept[client])
            body = [v for k, v in w.items() if k not in heads.HEAD]
            phases, head_steps = (
                (sgd((w[k] for k in heads.HEAD), lr), sgd(body, lr)),
                len(passed) // 3,
            )
            for batch in passed:
                optimizer = phases[0 if batch.step < head_steps else 1]
                for p in w.values():
                    p.grad = None
                F.cross_entropy(net(w, batch.x).logits, batch.y).backward()
                optimizer.step()
            kept[client] = heads.head({k: v.detach() for k, v in w.items()})
            models.append(w)
        result = play_round(simulation, state)
        state.advance(result)
        body = mean_of(models, state.server["params"].keys() - set(heads.HEAD))
        assert_close({name: state.server["params"][name] for name in body}, body)
        assert_close(dict(state.clients), kept)
    numbers = sum(leaf.numel() for leaf in body.values())
    assert result.bytes_up == result.bytes_down == 3 * 8 * numbers


def test_fedbn_round_equals_released_code():
    """Two rounds with state dicts, averaged as in the released code: all keys except those of batch
    norm."""
    local = replace(LOCAL, epochs=1)
    simulation = make_simulation(
        FedBN(), sizes=SIZES, participation=1.0, model=Normed(), local=local
    )
    state = simulation.initial_state()
    modules = [copy.deepcopy(simulation.runtime.net.module).requires_grad_().train() for _ in SIZES]
    for number in (1, 2):
        for client, passed in batches(simulation, state, number).items():
            optimizer = sgd(modules[client].parameters(), local.lr_at(number))
            for batch in passed:
                take_step(optimizer, F.cross_entropy(modules[client](batch.x).logits, batch.y))
        shared = [name for name in modules[0].state_dict() if "norm" not in name]
        assert len(shared) == 4
        mean = mean_of([module.state_dict() for module in modules], shared)
        for module in modules:
            module.load_state_dict(mean, strict=False)
        state.advance(play_round(simulation, state))
        for client, module in enumerate(modules):
            model = simulation.algorithm.personal_model(
                state.server, client, state.clients[client], None
            )
            assert_close(dict(model), dict(module.state_dict()))
    assert not torch.equal(state.clients[0]["norm.weight"], state.clients[1]["norm.weight"])


def test_ditto_round_equals_released_code():
    """Two rounds as in the released code: v <- v - lr (grad F(v) + lambda (v - w_t)), then w <- w -
    lr grad F(w)."""
    simulation = make_simulation(Ditto(lambda_=0.7), sizes=SIZES, participation=1.0, local=PLAIN)
    net, state = simulation.runtime.net, simulation.initial_state()

    def gradient(params, batch):
        return torch.func.grad(lambda p: F.cross_entropy(net(p, batch.x).logits, batch.y))(params)

    start = state.server["params"]
    own = [start] * 3
    for number in (1, 2):
        models = []
        for client, passed in batches(simulation, state, number).items():
            w = start
            for batch in passed:
                grads = gradient(own[client], batch)
                own[client] = {
                    k: v - PLAIN.lr * (grads[k] + 0.7 * (v - start[k]))
                    for k, v in own[client].items()
                }
                grads = gradient(w, batch)
                w = {k: v - PLAIN.lr * grads[k] for k, v in w.items()}
            models.append(w)
        start = mean_of(models)
        result = play_round(simulation, state)
        state.advance(result)
        assert_close(state.server["params"], start)
        assert_close([state.clients[client] for client in range(3)], own)
    assert result.bytes_up == result.bytes_down == 3 * 8 * sum(v.numel() for v in start.values())


def test_ditto_server_optimizer_steps_once_per_round():
    """A server optimizer with momentum is applied only to the exchange that trains the global
    model."""
    found = []
    for algorithm in (FedAvg(), Ditto(lambda_=0.7)):
        simulation = make_simulation(algorithm, participation=1.0)
        optimizer = ServerOptimizer(optimizer="sgd", momentum=0.5)
        found.append(flat(play(replace(simulation, server_optimizer=optimizer)).server["params"]))
    assert_close(*found, atol=0.0)
    assert not torch.equal(
        found[0], flat(play(make_simulation(participation=1.0)).server["params"])
    )


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_fedproto_round_equals_loops(weighting):
    """Round 2: the target is the label's prototype if the server has one, otherwise the feature
    itself. A prototype is the mean over the clients with the class, with equal weights (the code)
    or weighted by their examples (the paper)."""
    simulation = make_simulation(PROTO, sizes=SIZES, participation=1.0, weighting=weighting)
    net, state = simulation.runtime.net, play(simulation, 1)
    server, info = state.server["prototypes"], simulation.stages[0].federation
    server["known"][2] = 0  # as if no client had had it
    sums, total = torch.zeros_like(server["mean"]), torch.zeros(4).double()
    passes = batches(simulation, state, 2)
    expected = {}
    for client, passed in passes.items():
        w = leaves(state.clients[client])
        optimizer = sgd(w.values(), LOCAL.lr_at(2))
        for batch in passed:
            out = net(w, batch.x)
            target = out.features.detach().clone()
            for row, label in enumerate(batch.y.tolist()):
                if server["known"][label]:
                    target[row] = server["mean"][label]
            take_step(
                optimizer,
                F.cross_entropy(out.logits, batch.y) + 0.7 * F.mse_loss(target, out.features),
            )
        expected[client] = {k: v.detach() for k, v in w.items()}
        first = passed[: -(-SIZES[client] // LOCAL.batch_size)]
        features = torch.cat([net(expected[client], batch.x).features for batch in first])
        labels = torch.cat([batch.y for batch in first])
        for label in range(4):
            if (labels == label).any():
                weight = float((labels == label).sum()) if weighting == "examples" else 1.0
                sums[label] += weight * features[labels == label].mean(0)
                total[label] += weight
    result = play_round(simulation, state)
    state.advance(result)
    assert_close(dict(state.clients), expected)
    assert (info.counts.sum(0) > 0).all()
    assert_close(state.server["prototypes"]["mean"], sums / total[:, None])
    assert state.server["prototypes"]["known"].tolist() == [1] * 4
    # 8 numbers of a mean and its weight: up for each client's classes, down for 3 known classes
    assert result.bytes_up == 8 * 9 * int((info.counts > 0).sum())
    assert result.bytes_down == 8 * 9 * 3 * 3


def test_prototype_of_an_absent_class_is_kept():
    """By hand: two clients have class 0 with 1 and 3 examples, (1 * 2 + 3 * 6) / 4 = 5; no client
    of this round has class 1, and no client ever had class 2."""
    old = {"mean": torch.tensor([[9.0], [7.0], [0.0]]), "known": torch.tensor([1.0, 1.0, 0.0])}
    means, weights = torch.zeros(2, 3, 1), torch.zeros(2, 3)
    means[:, 0, 0], weights[:, 0] = torch.tensor([2.0, 6.0]), torch.tensor([1.0, 3.0])
    new = average_prototypes(old, means, weights)
    assert new["mean"].tolist() == [[5], [7], [0]]
    assert new["known"].tolist() == [1, 1, 0]
