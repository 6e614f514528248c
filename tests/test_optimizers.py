"""Optimizers and schedules of clients compared with torch.optim, server optimizers with Algorithm
2 of Reddi et al.
"""

import functools
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedavgm import FedAvgM
from fedexp.algorithms.local_training import OPTIMIZERS, LocalTraining
from fedexp.algorithms.server_optimizers import STATE, ServerOptimizer
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.engine.base import ScheduledData
from fedexp.testing import assert_engines_agree
from fedexp.training.checks import server_problems
from fedexp.training.rounds import play_round
from method_rows import stream
from test_algorithms import SHIPPED, assert_equal
from test_continual import ROWS as CONTINUAL
from toy_federation import (
    DRAWN,
    KEPT,
    LARGER,
    LOCAL,
    ON_THE_SERVER,
    STRUCTURE,
    assemble,
    assert_engines_play,
    engines_compared,
    first_of_each_class,
    leaves,
    make_simulation,
    one_of_each_kind,
    play,
    random,
)

# algorithms with a state of their own, whose clients also keep the optimizer's
KEEPERS = ("Moon", "FedDyn", "FedKA", "FedSAM", "FedALA", "FedFOMO")
TORCH = {
    "sgd": functools.partial(torch.optim.SGD, momentum=LOCAL.momentum),
    "nesterov": functools.partial(torch.optim.SGD, momentum=LOCAL.momentum, nesterov=True),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
}


def local_of(name: str) -> LocalTraining:
    return replace(LOCAL, optimizer=name, lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_equals_torch(name):
    """Five float64 steps on a quartic bowl, by the pure step, the step in place and torch.optim."""
    local, start = local_of(name), {"a": random(3, 2), "b": random(4, seed=1)}
    theirs = list(leaves(start).values())
    optimizer = TORCH[name](theirs, local.lr, weight_decay=local.weight_decay)
    pure, memory = start, optimizers.memory_of(start, local)
    placed = {k: v.clone() for k, v in start.items()}
    kept = optimizers.memory_of(placed, local)
    for number in range(5):
        optimizer.zero_grad()
        sum(((p - 1) ** 4).sum() for p in theirs).backward()
        optimizer.step()
        pure, memory = optimizers.step(
            pure, {k: 4 * (v - 1) ** 3 for k, v in pure.items()}, memory, local.lr, local, number
        )
        grads = {k: 4 * (v - 1) ** 3 for k, v in placed.items()}
        optimizers.step_in_place(placed, grads, kept, local.lr, local, number)
        expected = dict(zip(start, (p.detach() for p in theirs), strict=True))
        assert_equal(pure, expected, atol=1e-12)
        assert_equal(placed, expected, atol=1e-12)
        assert_equal(kept, memory, atol=1e-12)
    assert not torch.equal(pure["a"], start["a"])


@pytest.mark.parametrize("name", ["adam", "adamw", "adamax"])
def test_bias_correction_is_exact_if_the_step_is_a_tensor(name):
    """In fp32, as when steps are recorded on a GPU, 1 - 0.999^2 would have only four correct
    digits.
    """
    local, start = local_of(name), {"w": torch.linspace(-1, 1, 7)}
    memory = {key: {"w": torch.full((7,), 0.1)} for key in optimizers.memory_of(start, local)}
    for number in (0, 1, 5):
        exact, _ = optimizers.step(start, start, memory, 0.1, local, number)
        for count in (torch.tensor(number), torch.tensor(float(number))):
            found, kept = optimizers.step(start, start, memory, 0.1, local, count)
            assert {found["w"].dtype, kept["mean"]["w"].dtype} == {torch.float32}
            torch.testing.assert_close(found["w"], exact["w"], rtol=2e-7, atol=1e-7)


@engines_compared
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_engines_agree_on_every_optimizer(name, engines):
    """Two rounds are played, since the optimizer state is new in each round."""
    assert_engines_play(make_simulation(local=local_of(name)), engines)


# --- schedules


@pytest.mark.parametrize(
    ("changes", "make"),
    [
        ({"schedule": "exponential"}, lambda o, s, n: s.ExponentialLR(o, 0.9)),
        ({"schedule": "constant"}, lambda o, s, n: s.LambdaLR(o, lambda _: 1.0)),
        ({"schedule": "step", "step_rounds": 3}, lambda o, s, n: s.StepLR(o, 3, gamma=0.9)),
        (
            {"schedule": "cosine", "lr_min": 0.01},
            lambda o, s, n: s.CosineAnnealingLR(o, n, eta_min=0.01),
        ),
        (
            {"schedule": "rates", "rates": {9: LOCAL.lr / 100, 6: LOCAL.lr / 10}},
            lambda o, s, n: s.MultiStepLR(o, [n - 7, n - 4]),
        ),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedules_equal_torch(changes, make, warmup):
    """12 rounds with and without a warm-up by torch's LinearLR."""
    rounds, local = 12, replace(LOCAL, warmup=warmup, **changes)
    schedules = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LOCAL.lr)
    after = make(optimizer, schedules, rounds - warmup)
    scheduler = after
    with warnings.catch_warnings():
        # torch: SequentialLR steps its parts with a deprecated argument
        warnings.simplefilter("ignore")
        if warmup:
            rise = schedules.LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
            scheduler = schedules.SequentialLR(optimizer, [rise, after], milestones=[warmup])
        for number in range(1, rounds + 1):
            expected = optimizer.param_groups[0]["lr"]
            assert local.lr_at(number, rounds) == pytest.approx(expected, rel=1e-12), number
            optimizer.step()
            scheduler.step()


def test_schedule_restarts_with_each_task():
    simulation = stream(FedAvg(), local=replace(LOCAL, schedule="cosine", warmup=1), rounds=3)
    per_task = simulation.rounds_per_task
    first = [simulation.lr_at(number) for number in range(1, per_task + 1)]
    second = [simulation.lr_at(number) for number in range(per_task + 1, 2 * per_task + 1)]
    assert first == second
    assert first[0] == LOCAL.lr / 2
    assert first[1] == LOCAL.lr


# --- server optimizers


def test_server_steps_equal_hand_calculation():
    """One parameter x = 1, tau = 0.5 (v = 0.25 at first), lr = 0.1, beta1 = 0.9, beta2 = 0.75.
    Aggregation would move it by Delta = 2 in round 1, so that Delta^2 = 4, and by Delta = -1 in
    round 2.

    adagrad with beta1 = 0.9: round 1 m = 0.1 * 2 = 0.2, v = 0.25 + 4 = 4.25;
                              round 2 m = 0.9 * 0.2 - 0.1 = 0.08, v = 4.25 + 1 = 5.25.
    adam:    v = 0.75 * 0.25 + 0.25 * 4 = 1.1875; then 0.75 * 1.1875 + 0.25 * 1 = 1.140625.
    yogi:    v = 0.25 - 0.25 * 4 * sign(0.25 - 4) = 1.25; then 1.25 - 0.25 * 1 * sign(1.25 - 1) = 1.
    Each x <- x + 0.1 m / (sqrt(v) + 0.5).
    """
    squares = {"adagrad": (4.25, 5.25), "adam": (1.1875, 1.140625), "yogi": (1.25, 1.0)}
    for name, (first, second) in squares.items():
        optimizer = ServerOptimizer(optimizer=name, lr=0.1, beta1=0.9, beta2=0.75, tau=0.5)
        x = torch.ones(1, dtype=torch.float64)
        server = {"params": {"x": x}, "else": 7} | optimizer.begin({"x": x})
        expected = 1.0
        for delta, m, v in ((2.0, 0.2, first), (-1.0, 0.08, second)):
            expected += 0.1 * m / (v**0.5 + 0.5)
            server = optimizer.step(
                server, server | {"params": {"x": server["params"]["x"] + delta}}
            )
            assert server["params"]["x"].item() == pytest.approx(expected, rel=1e-15), name
            assert server[STATE]["v"]["x"].item() == pytest.approx(v, rel=1e-15)
            assert server["else"] == 7
    assert ServerOptimizer(optimizer="sgd", lr=0.5, momentum=0.5).step(
        {"params": {"x": x}, STATE: {"m": {"x": torch.full_like(x, 4.0)}}}, {"params": {"x": x + 2}}
    )["params"]["x"].item() == 1 + 0.5 * (0.5 * 4 + 2)


def with_server(simulation, **options):
    return replace(simulation, server_optimizer=ServerOptimizer(**options))


def test_sgd_with_momentum_is_fedavgm():
    beta = 0.7
    theirs = play(make_simulation(FedAvgM(beta=beta))).server["params"]
    ours = play(with_server(make_simulation(), optimizer="sgd", momentum=beta)).server["params"]
    assert_equal(ours, theirs, atol=1e-12)


ROWS = first_of_each_class(SHIPPED, CONTINUAL)


@one_of_each_kind("name", ROWS, *KEPT, *DRAWN, *ON_THE_SERVER, *STRUCTURE, "own_step", "public")
def test_algorithms_support_or_reject_server_optimizers(name):
    row = ROWS[name]
    algorithm, server = row.make(), ServerOptimizer(optimizer="adam", lr=0.01)
    problems = list(server_problems(algorithm, server))
    if algorithm.own_step:
        assert problems[0].startswith(f"server.optimizer=adam: cannot be used with {name}: it")
        return
    assert problems == []
    simulation = row.simulation()
    state = play(replace(simulation, server_optimizer=server), row.rounds)
    assert all(bool(value.isfinite().all()) for value in state.server["params"].values())
    same = play(with_server(simulation, optimizer="sgd"), row.rounds).server["params"]
    assert_equal(same, play(simulation, row.rounds).server["params"], atol=0)
    assert STATE in state.server
    assert not any(
        torch.equal(same[k], v) for k, v in state.server["params"].items() if v.is_floating_point()
    )


KEEPING = replace(LOCAL, keep_optimizer=True)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adagrad"])
def test_kept_optimizers_equal_torch(name, drop_last):
    """One object of torch.optim per client for the whole run, and some clients in each round."""
    local = replace(local_of(name), keep_optimizer=True, drop_last=drop_last)
    simulation = make_simulation(local=local, sizes=LARGER, participation=0.6, rounds=4)
    state, runtime = simulation.initial_state(), simulation.runtime
    models = [
        {k: v.clone().requires_grad_() for k, v in simulation.initial.items()} for _ in LARGER
    ]
    used = [
        TORCH[name](list(w.values()), local.lr, weight_decay=local.weight_decay) for w in models
    ]
    idle = 0
    for number in range(1, 5):
        cohort, losses = assemble(simulation, state, number), []
        weights = np.array([float(LARGER[client]) for client in cohort.clients])
        for client, schedule in zip(cohort.clients, cohort.schedules, strict=True):
            steps = LARGER[client] // 4 if drop_last else -(-LARGER[client] // 4)
            assert schedule.steps == local.epochs * steps
            assert not drop_last or set(schedule.lengths) <= {4}
            model, optimizer, own = models[client], used[client], []
            with torch.no_grad():
                for k, v in state.server["params"].items():
                    model[k].copy_(v)
            optimizer.param_groups[0]["lr"] = local.lr_at(number)
            for batch in ScheduledData(runtime, schedule).batches():
                optimizer.zero_grad()
                loss = F.cross_entropy(runtime.net(model, batch.x).logits, batch.y)
                loss.backward()
                optimizer.step()
                own.append(loss.item())
            losses.append(np.mean(own) if own else np.nan)
        expected = {
            k: sum(w * models[c][k].detach() for w, c in zip(weights, cohort.clients, strict=True))
            / weights.sum()
            for k in simulation.initial
        }
        result = play_round(simulation, state)
        trained = ~np.isnan(losses)
        idle += (~trained).sum()
        mean = np.average(np.array(losses)[trained], weights=weights[trained])
        assert result.train_loss == pytest.approx(mean, abs=1e-12)
        state.advance(result)
        assert_equal(state.server["params"], expected, atol=1e-12)
    assert (idle > 0) == drop_last


@pytest.mark.parametrize(
    "algorithm",
    [None, *(first_of_each_class(SHIPPED)[name].make() for name in KEEPERS)],
    ids=lambda each: type(each).__name__,
)
@engines_compared
def test_engines_agree_on_kept_optimizers(algorithm, engines):
    local = replace(KEEPING, drop_last=True)
    simulation = make_simulation(algorithm, local=local, sizes=LARGER)
    state = simulation.initial_state()
    for _ in range(3):
        assert_engines_agree(simulation, state, engines)
        state.advance(play_round(simulation, state))


@one_of_each_kind("row", first_of_each_class(SHIPPED, CONTINUAL))
def test_each_algorithm_keeps_the_optimizer_or_refuses(row):
    algorithm = row.make()
    if why := algorithm.fresh_optimizer:
        with pytest.raises(ConfigError, match=rf"keep_optimizer=true: .*{re.escape(why)}"):
            row.simulation(local=KEEPING)
        return
    of_tasks = row in CONTINUAL  # their partitions have other sizes
    options = {} if of_tasks else {"sizes": LARGER}
    local = replace(KEEPING, drop_last=not of_tasks)
    state = play(row.simulation(local=local, **options), 2)
    assert tree.is_finite(state.server["params"])
    assert all(optimizers.KEPT in each for each in state.clients.values())
