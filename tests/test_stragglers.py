"""Slow clients, a number of local steps, and fractions of epochs, on all engines."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedexp.algorithms.base import FedAvg, first_pass
from fedexp.algorithms.fedpac import FedPAC
from fedexp.algorithms.fedproto import FedProto
from fedexp.algorithms.fedreg import FedReg
from fedexp.algorithms.fedrep import FedRep
from fedexp.algorithms.mixins import OnePass
from fedexp.algorithms.plain import PlainClient
from fedexp.cli import main
from fedexp.config.cohorts import Uniform
from fedexp.core.errors import ConfigError
from fedexp.engine.schedule import make_schedule, steps_of_pass
from fedexp.testing import ENGINES, assemble, assert_engines_agree
from fedexp.training.exchange import Exchange, sample
from fedexp.training.rounds import play_round
from quick_runs import SMALL
from test_dropout import LOOPS, assert_equals_loop
from toy_federation import (
    LARGER,
    LOCAL,
    Normed,
    SoftmaxRegression,
    engines_compared,
    make_simulation,
)

PASSES = [1, 1, 2, 3, 3]  # batches of a pass over 1, 3, 7, 12 and 10 examples
MANY = {"sizes": LARGER, "participation": 1.0}
FIVE = replace(LOCAL, epochs=5)


def steps_in(simulation, number=1):
    return [
        each.steps for each in assemble(simulation, simulation.initial_state(), number).schedules
    ]


# --- how many steps


def test_steps_replace_epochs():
    assert steps_in(make_simulation(local=replace(LOCAL, steps=4), **MANY)) == [4] * 5
    assert replace(LOCAL, steps=4).epochs is None
    assert replace(LOCAL, epochs=None, steps=4).steps == 4
    with pytest.raises(ConfigError, match=r"local.epochs=null: must be .* without local.steps"):
        replace(LOCAL, epochs=None)


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(0.5, [1, 1, 1, 2, 2]), (1.5, [2, 2, 3, 5, 5]), (2.0, [2, 2, 4, 6, 6]), (0.01, [1] * 5)],
)
def test_fractions_of_epochs_are_rounded_to_steps(epochs, expected):
    """Half a step is rounded up, and there is at least one."""
    simulation = make_simulation(local=replace(LOCAL, epochs=epochs), **MANY)
    assert steps_in(simulation) == expected
    assert type(replace(LOCAL, epochs=2.0).epochs) is int


def test_steps_are_the_first_ones_of_the_epochs():
    """Four steps are the first of five epochs, also in the middle of an epoch."""
    whole = make_simulation(local=FIVE, **MANY)
    part = make_simulation(local=replace(LOCAL, steps=4), **MANY)
    cohorts = [assemble(each, each.initial_state(), 1).schedules for each in (whole, part)]
    for long, short in zip(*cohorts, strict=True):
        assert torch.equal(short.index, long.index[:4])
        assert short.lengths.tolist() == long.lengths[:4].tolist()
        assert short.pass_steps == long.pass_steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("skip_single", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batches_of_a_pass_are_counted(size, drop_last, skip_single):
    for sizes in ((1,), (7,), (8,), (9,), (5, 3), (4, 1)):
        parts = tuple(np.arange(n) for n in sizes)
        part = parts if len(parts) > 1 else parts[0]
        local = replace(LOCAL, epochs=1, batch_size=size, drop_last=drop_last)
        given = (None, (6, 6), 0, 1, 0)
        made = make_schedule(part, local, *given, skip_single=skip_single)
        expected = [
            min(size, n - i)
            for n in sizes
            for i in range(0, n, size)
            if (n - i >= size or not drop_last) and not (skip_single and min(size, n - i) == 1)
        ]
        assert sorted(made.lengths.tolist()) == sorted(expected)
        assert made.pass_steps == steps_of_pass(part, local, skip_single) == len(expected)
        three = replace(local, epochs=None, steps=3)
        assert make_schedule(part, three, *given, skip_single=skip_single).steps == (
            3 if expected else 0
        )


def test_client_without_a_batch_takes_no_step():
    """Batch norm skips the only example of the first client."""
    simulation = make_simulation(local=replace(LOCAL, steps=3), model=Normed(), **MANY)
    assert steps_in(simulation) == [0, 3, 3, 3, 3]


# --- who is slow


def test_stragglers_of_a_round_are_a_share_of_the_cohort():
    law, cohort = Uniform(stragglers=0.5), list(range(10, 30))
    chosen = [frozenset(law.slow(0, number, cohort, 50, 5)) for number in range(1, 40)]
    assert {len(each) for each in chosen} == {10}
    assert set().union(*chosen) == {*cohort}
    assert len({*chosen}) > 30
    assert law.slow(0, 7, cohort, 50, 5) == law.slow(0, 7, cohort, 50, 5)


def test_slow_clients_stay_slow():
    """A fifth of all 50 clients, with one fraction each, also in other cohorts."""
    law = Uniform(stragglers=0.2, stragglers_drawn="client")
    all_ = law.slow(0, 1, range(50), 50, 20)
    assert len(all_) == 10
    assert len({*all_.values()}) > 3
    for number in (1, 2, 9):
        cohort = [3, *list(all_)[:4], 49]
        expected = {client: share for client, share in all_.items() if client in cohort}
        assert law.slow(0, number, cohort, 50, 20) == expected


def test_work_is_uniform_over_whole_epochs():
    """From 1 to E = 5, as in FedProx: 4,000 draws, with a standard error of 0.0063 of a share."""
    law = Uniform(stragglers=1.0)
    shares = [s for n in range(1, 101) for s in law.slow(0, n, range(40), 40, 5).values()]
    values, counts = np.unique(shares, return_counts=True)
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert counts / 4000 == pytest.approx([0.2] * 5, abs=0.02)
    assert {*Uniform(stragglers=1.0, straggler_work=0.3).slow(0, 1, range(9), 9, 5).values()} == {
        0.3
    }


def test_slow_clients_take_whole_epochs_or_a_fraction():
    drawn = make_simulation(local=FIVE, cohorts=Uniform(stragglers=1.0), **MANY)
    works = set()
    for number in (1, 2, 3):
        for steps, pass_steps in zip(steps_in(drawn, number), PASSES, strict=True):
            assert steps % pass_steps == 0
            works.add(steps // pass_steps)
    assert {1} < works <= {1, 2, 3, 4, 5}
    half = make_simulation(local=FIVE, cohorts=Uniform(stragglers=1.0, straggler_work=0.5), **MANY)
    assert steps_in(half) == [3, 3, 5, 8, 8]  # of 5, 5, 10, 15, 15
    fixed = replace(LOCAL, steps=7)
    half = make_simulation(local=fixed, cohorts=Uniform(stragglers=0.4, straggler_work=0.5), **MANY)
    assert sorted(steps_in(half)) == [4, 4, 7, 7, 7]


def test_schedules_made_in_advance_know_the_stragglers():
    """On a GPU, the schedules of a round are made in the round before."""
    law = Uniform(stragglers=0.5, straggler_work=0.5)
    simulation = make_simulation(local=FIVE, cohorts=law, rounds=2)
    state = simulation.initial_state()
    first, second = (
        Exchange(simulation, simulation.algorithm, state.server, {}, number) for number in (1, 2)
    )
    clients = sample(simulation, 2)
    expected = [each.steps for each in second.assemble(clients).schedules]
    first.prepare_next_round()
    assert [each.steps for each in second.assemble(clients).schedules] == expected
    assert len({*expected}) > 1


# --- what methods do with it


SLOW = Uniform(stragglers=0.6, straggler_work=0.4)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("local", [replace(LOCAL, epochs=3), replace(LOCAL, steps=5)], ids=str)
@engines_compared
def test_unequal_steps_equal_a_loop(name, local, engines):
    """FedNova's a_k and SCAFFOLD's m_k are those of the steps that a client has done."""
    kind, algorithm, on_server, on_client = LOOPS[name]
    law = replace(SLOW, dropout=0.3, dropout_at="upload")
    for engine in engines:
        simulation = make_simulation(
            algorithm, local, cohorts=law, rounds=4, model=SoftmaxRegression()
        )
        simulation = replace(simulation, engine=ENGINES[engine])
        state, loop, seen = simulation.initial_state(), kind(simulation), set()
        for _ in range(4):
            result = play_round(simulation, state)
            seen |= {schedule.steps for schedule in result.cohort.schedules}
            state.advance(result)
            loop.play_round("upload")
            assert_equals_loop(state, loop, on_server, on_client)
        assert len(seen) > 1


class Passing(FedAvg):
    """Sends how many examples its first pass has, and which batches."""

    def finish(self, net, params, data, ctx):
        count, steps = torch.zeros_like(ctx.steps), torch.zeros_like(ctx.steps)
        for _, mask in first_pass(data, ctx):
            count, steps = count + mask.sum(), steps + (mask.sum() > 0)
        return {"params": params, "count": count, "steps": steps}, ctx.client


METHODS = [
    Passing(),
    FedProto(lambda_=1.0),
    FedRep(head_epochs=1),
    FedPAC(lambda_=1.0, head_lr=0.02, head_epochs=1),
    FedReg(gamma=0.5, eta_s=0.1, eta_ratio=0.5, ascent=1),
]
LENGTHS = {
    "steps": (replace(LOCAL, steps=2), Uniform()),
    "half epochs": (replace(LOCAL, epochs=1.5), Uniform()),
    "slow": (replace(LOCAL, epochs=4), Uniform(stragglers=0.6)),
    "very slow": (replace(LOCAL, epochs=2), Uniform(stragglers=0.6, straggler_work=0.2)),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda each: type(each).__name__)
@engines_compared
def test_engines_agree_with_unequal_lengths(algorithm, length, engines):
    """Also for methods that use the first pass, or the number of passes."""
    local, law = LENGTHS[length]
    simulation = make_simulation(algorithm, local, cohorts=law, **MANY)
    state = simulation.initial_state()
    for _ in range(2):
        assert_engines_agree(simulation, state, engines)
        state.advance(play_round(simulation, state))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_first_pass_is_whole_or_all_steps(engine):
    """The client of 12 examples makes two of three steps, those of 1 to 7 examples a whole pass."""
    simulation = make_simulation(Passing(), replace(LOCAL, steps=2), engine=engine, **MANY)
    result = play_round(simulation, simulation.initial_state())
    assert result.exchanges[0].messages["steps"].tolist() == [1, 1, 2, 2, 2]
    assert result.exchanges[0].messages["count"].tolist()[:4] == [1, 3, 7, 8]


def test_head_phase_is_not_shortened():
    """FedRep's head trains for its epochs, and the body for the epochs of a slow client."""
    law = Uniform(stragglers=1.0, straggler_work=0.5)
    simulation = make_simulation(
        FedRep(head_epochs=2), replace(LOCAL, epochs=2), cohorts=law, **MANY
    )
    assert steps_in(simulation) == [3 * each for each in PASSES]


class Counting(OnePass):
    pass


def test_pass_without_training_stays_whole():
    law = Uniform(stragglers=1.0, straggler_work=0.1)
    simulation = make_simulation(Counting(), replace(LOCAL, steps=1), cohorts=law, **MANY)
    assert steps_in(simulation) == PASSES


class Reading(PlainClient):
    """Trains nothing; returns the batches of each epoch as the loss, in decimal digits."""

    def fit(self, model, loader, ctx):
        epochs = [sum(1 for _ in loader) for _ in range(ctx.epochs)]
        assert sum(epochs) == ctx.steps
        return float("".join(map(str, epochs)))


def test_loader_of_an_ordinary_loop_ends_with_the_steps():
    """Four steps are 1+1+1+1, 2+2 and 3+1 batches."""
    simulation = make_simulation(Reading(), replace(LOCAL, steps=4), **MANY)
    result = play_round(simulation, simulation.initial_state())
    assert result.losses == [1111, 1111, 22, 31, 31]
    simulation = make_simulation(Reading(), LOCAL, **MANY)
    result = play_round(simulation, simulation.initial_state())
    assert result.losses == [11, 11, 22, 33, 33]


def test_copies_after_epochs_end_with_the_last_step():
    simulation = make_simulation(local=replace(LOCAL, steps=4), **MANY)
    exchange = Exchange(simulation, FedAvg(), simulation.initial_state().server, {}, 1)
    marks = exchange.marks(exchange.assemble(range(5)))
    assert marks == [[0, 1, 2, 3, 4]] * 2 + [[0, 2, 4], [0, 3, 4], [0, 3, 4]]


# --- runs


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["local.steps=3"], "local.steps=3 and local.epochs=1: both set the length of local"),
        (["local.steps=0"], "local.steps=0: must be at least 1, or null"),
        (["local.epochs=0"], "local.epochs=0.0: must be greater than 0 and at most 1000000"),
        (["cohorts.stragglers=2"], "cohorts.stragglers=2.0: must be from 0 to 1"),
        (
            ["cohorts.stragglers=0.5"],
            "cohorts.stragglers=0.5: their number of epochs is drawn from",
        ),
        (
            ["cohorts.stragglers=0.5", "cohorts.straggler_work=1"],
            "cohorts.straggler_work=1.0: must",
        ),
        (["cohorts.straggler_work=0.5"], "cohorts.straggler_work=0.5: this option only has an"),
        (
            ["cohorts.stragglers=0.5", "cohorts.stragglers_drawn=clients"],
            "one of round, client (nearest: 'client')",
        ),
    ],
)
def test_bad_values_are_refused(given, words, capsys, here):
    assert main.main([*SMALL, *given]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert not any(here.rglob("config.yaml"))
