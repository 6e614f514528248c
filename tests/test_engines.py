"""Engines, schedules and aggregation against plain torch and calculations by hand."""

import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedpac import FedPAC
from fedexp.algorithms.fedreg import FedReg
from fedexp.config.settings import Seeds
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.data.augment import load_batch
from fedexp.engine.base import ScheduledData
from fedexp.engine.hardware import Hardware, make_engine
from fedexp.engine.ranks.workers import Workers
from fedexp.engine.schedule import make_schedule
from fedexp.engine.sequential import ClientFailure, Sequential
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.models.cnn import CNN
from fedexp.testing import assert_equal, train
from fedexp.training.exchange import sample
from fedexp.training.rounds import play_round
from toy_federation import (
    AUGMENTATION,
    ENGINES,
    HARDWARE,
    LARGER,
    LOCAL,
    NTD,
    PLAIN,
    SETTINGS,
    SIZES,
    Normed,
    assemble,
    detached,
    flat,
    leaves,
    make_simulation,
    play,
    take_step,
)

every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def fresh_module(simulation, model=None):
    """The simulation's initial model as an ordinary module in train mode."""
    model = model or CNN(channels=(3,), kernel=3, padding=1, hidden=(8,))
    module = model.build((1, 6, 6), 4).double().train()
    module.load_state_dict(simulation.initial, strict=False)
    return module


# --- a client's training is SGD


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_one_client_equals_torch_sgd(engine, augment):
    """With momentum that restarts every round, weight decay, a decayed learning rate and partial
    batches."""
    local = replace(LOCAL, batch_size=7)
    simulation = make_simulation(
        local=local,
        sizes=(40,),
        participation=1.0,
        engine=engine,
        augment=augment,
        weighting="uniform",
    )
    module, data = fresh_module(simulation), simulation.runtime.data
    state, losses = simulation.initial_state(), []
    for round in (1, 2, 3):
        result = play_round(simulation, state)
        (schedule,) = result.cohort.schedules
        optimizer = torch.optim.SGD(
            module.parameters(), lr=0.1 * 0.9 ** (round - 1), momentum=0.9, weight_decay=1e-3
        )
        losses = []
        for i, length in enumerate([7, 7, 7, 7, 7, 5] * 2):
            index = schedule.index[i, :length]
            if augment:
                draws = schedule.draws[i, :length]
                x = load_batch(
                    data.x_train, index, draws, AUGMENTATION, data.normalise, torch.float64
                )
            else:
                x = ((data.x_train[index].double() / 255 - 0.4) / 0.3).permute(0, 3, 1, 2)
            loss = F.cross_entropy(module(x).logits, data.y_train[index])
            take_step(optimizer, loss)
            losses.append(loss.item())
        state.advance(result)
        trained = detached(dict(module.named_parameters()))
        assert_equal(state.server["params"], trained, atol=1e-12)
        assert result.train_loss == pytest.approx(np.mean(losses), abs=1e-12)
    assert len(schedule.lengths) == 12


@dataclass(frozen=True, kw_only=True)
class SameStep(FedAvg):
    """Overrides the local step without change, so that the engines use the general path."""

    def local_step(self, net, params, memory, batch, ctx):
        return super().local_step(net, params, memory, batch, ctx)


@dataclass(frozen=True, kw_only=True)
class Transposing(FedAvg):
    """Returns gradients with other strides, which torch's fused SGD does not look at."""

    def transform_grads(self, grads, params, batch, ctx):
        return {k: g.transpose(0, -1).contiguous().transpose(0, -1) for k, g in grads.items()}


@pytest.mark.parametrize("algorithm", [SameStep(), Transposing()], ids=lambda a: type(a).__name__)
def test_fused_step_equals_local_step(algorithm):
    """The sequential engine uses a fused optimizer instead of FedAvg.local_step."""
    fused, general = (
        play(make_simulation(each)).server["params"] for each in (FedAvg(), algorithm)
    )
    assert_equal(general, fused, atol=1e-12)


ADAM = replace(LOCAL, optimizer="adam", lr=0.01)


def test_one_client_equals_torch_adam():
    """For the fused and the general step. Adam restarts every round; weight decay is coupled."""
    for algorithm in (FedAvg(), SameStep()):
        simulation = make_simulation(algorithm, ADAM, (10,), participation=1.0)
        state, runtime = simulation.initial_state(), simulation.runtime
        for number in (1, 2):
            (schedule,) = assemble(simulation, state, number).schedules
            w = leaves(state.server["params"])
            optimizer = torch.optim.Adam(
                w.values(), lr=ADAM.lr_at(number), weight_decay=ADAM.weight_decay
            )
            for batch in ScheduledData(runtime, schedule).batches():
                take_step(optimizer, F.cross_entropy(runtime.net(w, batch.x).logits, batch.y))
            state.advance(play_round(simulation, state))
            assert_equal(state.server["params"], detached(w), atol=1e-12)


PAC, REG = (
    FedPAC(lambda_=1.0, head_lr=0.02, head_epochs=1),
    FedReg(gamma=0.5, eta_s=0.1, eta_ratio=0.5, ascent=1),
)


@every_engine
def test_local_evaluation_equals_testing_the_sent_models(engine):
    simulation = make_simulation(NTD)
    state = play(simulation, 1)
    plain, evaluated = (
        train(engine, simulation, state, evaluate_local=local) for local in (False, True)
    )
    assert plain.class_correct is None
    assert_equal(evaluated.messages, plain.messages)
    assert_equal(evaluated.losses, plain.losses)
    for i in range(4):
        local = tree.row(evaluated.messages["params"], i)
        expected = simulation.runtime.evaluate(local).class_correct
        assert_equal(evaluated.class_correct["plain"][i], expected)


# --- aggregation


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_server_averages_models_and_losses_by_client_weight(weighting):
    """sum_k p_k w_k with p_k = n_k / sum n or 1 / |S|, also for the training loss."""
    simulation = make_simulation(weighting=weighting)
    state = simulation.initial_state()
    result = play_round(simulation, state)
    trained = train(simulation.engine, simulation, state)
    sizes = [SIZES[c] if weighting == "examples" else 1 for c in result.cohort.clients]
    for name, leaf in trained.messages["params"].items():
        mean = sum(n / sum(sizes) * w for n, w in zip(sizes, leaf, strict=True))
        assert_equal(result.server["params"][name], mean, atol=1e-14)
    losses = trained.losses.tolist()
    assert result.train_loss == pytest.approx(np.dot(sizes, losses) / sum(sizes), rel=1e-12)
    assert len(set(sizes)) == (4 if weighting == "examples" else 1)


# --- batch norm


NORMED = {
    "sizes": LARGER,
    "model": Normed(),
    "local": replace(LOCAL, batch_size=3),
    "participation": 1.0,
}


def train_in_plain_torch(simulation, schedule, start):
    """Train an ordinary module in one client's round, and return its state."""
    module, data = fresh_module(simulation, Normed()), simulation.runtime.data
    module.load_state_dict(start)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for index, length in zip(schedule.index, schedule.lengths, strict=True):
        x = ((data.x_train[index[:length]].double() / 255 - 0.4) / 0.3).permute(0, 3, 1, 2)
        loss = F.cross_entropy(module(x).logits, data.y_train[index[:length]])
        take_step(optimizer, loss)
    return module.state_dict()


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_running_statistics_are_averaged_like_parameters(weighting):
    """Clients start from the server's statistics. Of counts of batches, the maximum remains."""
    simulation = make_simulation(**NORMED, augment=False, weighting=weighting)
    state = simulation.initial_state()
    before = {k: v.clone() for k, v in (state.server["params"] | state.server["buffers"]).items()}
    result = play_round(simulation, state)
    locals_ = [
        train_in_plain_torch(simulation, schedule, before) for schedule in result.cohort.schedules
    ]
    after = result.server["params"] | result.server["buffers"]
    weights = np.array(LARGER if weighting == "examples" else [1] * 5)
    weights = weights / weights.sum()
    for name, value in after.items():
        values = [one[name] for one in locals_]
        if name == "norm.num_batches_tracked":
            assert value.dtype == torch.int64
            assert value == max(values) == 8  # 12 examples in batches of 3, two epochs
        else:
            expected = sum(w * v for w, v in zip(weights, values, strict=True))
            assert_equal(value, expected, atol=1e-12)
    assert not torch.equal(after["norm.running_mean"], before["norm.running_mean"])
    assert_equal(state.server["params"] | state.server["buffers"], before)


def test_batch_norm_skips_batches_of_one_example():
    """Clients of 1, 3, 7, 12, 8 examples in batches of 3. The first has no step, and the third does
    not use its seventh example."""
    simulation = make_simulation(**NORMED | {"sizes": (1, 3, 7, 12, 8)})
    cohort = assemble(simulation, simulation.initial_state(), 1)
    expected = [[], [3] * 2, [3] * 4, [3] * 8, [3, 3, 2] * 2]
    assert [s.lengths.tolist() for s in cohort.schedules] == expected
    trained = train(simulation.engine, simulation, simulation.initial_state())
    assert_equal(tree.map(lambda leaf: leaf[0], trained.messages["params"]), simulation.initial)
    assert trained.losses[0] == 0
    assert all(trained.losses[1:] > 0)
    plain = make_simulation(participation=1.0, local=NORMED["local"])  # without batch norm
    cohort = assemble(plain, plain.initial_state(), 1)
    assert [s.lengths.tolist() for s in cohort.schedules][:3] == [[1] * 2, [3] * 2, [3, 3, 1] * 2]


def hardware(**changes):
    return Hardware(**HARDWARE | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "tf32"}, "hardware.precision=tf32: must be fp32 or bf16"),
        ({"device": "cuda:99"}, "hardware.device=cuda:99: must be"),
        ({"device": "0"}, "hardware.device=0: must be one of auto, cpu"),
        ({"engine": "sequential", "chunk": 2}, "hardware.chunk=2: must be None with"),
    ],
)
def test_impossible_hardware_is_rejected(changes, words):
    with pytest.raises(ConfigError, match=words):
        hardware(**changes).resolve(cohort_size=1)


def test_hardware_auto_chooses_engine_workers_and_threads(monkeypatch):
    def chosen(cohort_size=10, **changes):
        return hardware(**changes).resolve(cohort_size)

    monkeypatch.setattr("fedexp.engine.hardware.cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    several = chosen()
    assert (several.engine, several.workers, several.threads) == ("workers", 4, 1)
    assert isinstance(make_engine(several), Workers)
    alone = chosen(cohort_size=1)
    assert (alone.engine, alone.workers, alone.threads) == ("sequential", 1, 3)
    assert isinstance(make_engine(alone), Sequential)
    assert chosen(cohort_size=3).workers == 3
    assert chosen(threads=2).workers == 2
    assert (chosen(workers=7).workers, chosen(workers=1).engine) == (7, "workers")
    assert isinstance(make_engine(chosen(engine="sequential")), Sequential)
    assert make_engine(chosen(engine="vectorised", chunk=3)) == Vectorised(3)
    assert (chosen(precision="fp64").dtype, chosen(precision="bf16").dtype) == (
        torch.float64,
        torch.float32,
    )
    with pytest.raises(
        ConfigError, match=r"null with hardware.engine=sequential \(hardware.workers=null\)"
    ):
        hardware(engine="sequential", workers=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert chosen(device="cuda").engine == "vectorised"
    ranks = chosen(device="cuda", workers=2)
    assert (ranks.engine, ranks.workers, ranks.vectorises) == ("workers", 2, True)
    assert hardware(device="cuda", workers=2).for_job(3).device == "cuda"
    assert hardware(device="cuda").for_job(3).device == "cuda:3"


@dataclass(frozen=True, kw_only=True)
class Halving(FedAvg):
    """Clients send half of the smallest normal number."""

    def finish(self, net, params, data, ctx):
        half = torch.tensor(sys.float_info.min / 2, dtype=torch.float64)
        return {"params": params, "half": half}, ctx.client

    def aggregate(self, server, messages, round):
        return super().aggregate(server, messages, round) | {
            "halves": messages["half"].count_nonzero()
        }


@pytest.mark.parametrize("engine", ["sequential", pytest.param("workers", marks=pytest.mark.slow)])
def test_subnormal_numbers_are_zero_in_training(engine):
    simulation = make_simulation(Halving(), engine=engine)
    state = simulation.initial_state()
    state.advance(play_round(simulation, state))
    assert int(state.server["halves"]) == 0
    assert sys.float_info.min / 2 > 0


# --- failures


@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    hook: str

    def client_setup(self, net, data, ctx):
        return self.fail("client_setup", {})

    def penalty(self, net, params, ctx):
        return self.fail("local training", 0.0)

    def finish(self, net, params, data, ctx):
        return self.fail("finish", super().finish(net, params, data, ctx))

    def fail(self, hook, value):
        if hook == self.hook:
            raise ZeroDivisionError("by the test")
        return value


@pytest.mark.parametrize("hook", ["client_setup", "local training", "finish"])
def test_failure_names_client_hook_and_line(hook):
    simulation = make_simulation(Failing(hook=hook))
    first = assemble(simulation, simulation.initial_state(), 1).clients[0]
    line = Failing.fail.__code__.co_firstlineno + 2
    where = rf"client {first}, in {hook} of Failing \(test_engines.py, line {line}\)"
    message = f"^round 1, {where}: ZeroDivisionError: by the test$"
    with pytest.raises(ClientFailure, match=message) as failure:
        play(simulation, 1)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


# --- schedules, sampling, seeds


PART = range(100, 123)


def schedule(part=PART, local=LOCAL, seed=0, round=1, client=0, **options):
    return make_schedule(
        np.array(part), local, AUGMENTATION, (6, 6), seed, round, client, **options
    )


def same(a, b):
    return (
        torch.equal(a.index, b.index)
        and torch.equal(a.draws, b.draws)
        and np.array_equal(a.lengths, b.lengths)
    )


def test_every_epoch_covers_every_example_once():
    """23 examples in batches of 4: five full ones and one of 3, reshuffled in each of 3 epochs."""
    made = schedule(local=replace(LOCAL, epochs=3))
    assert made.lengths.tolist() == [4, 4, 4, 4, 4, 3] * 3
    assert (made.steps, made.examples) == (18, 69)
    rows = [row[:n].tolist() for row, n in zip(made.index, made.lengths, strict=True)]
    epochs = [np.concatenate(rows[i : i + 6]).tolist() for i in (0, 6, 12)]
    assert all(sorted(epoch) == list(PART) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert made.index[5, 3] in PART  # padding: an example of the same client


def test_cohorts_are_uniform_without_replacement():
    """2 of 5 clients: each is in a cohort with probability 2/5; +-5 standard deviations over 1,000
    rounds."""
    simulation = make_simulation(participation=0.4, local=PLAIN, rounds=1000)
    cohorts = [sample(simulation, number) for number in range(1, 1001)]
    assert all(len(set(cohort)) == 2 and cohort == sorted(cohort) for cohort in cohorts)
    counts = np.bincount(np.concatenate(cohorts), minlength=5)
    assert np.abs(counts - 400).max() < 5 * (1000 * 0.4 * 0.6) ** 0.5


@pytest.mark.parametrize("purpose", ["partition", "sampling", "training"])
def test_each_seed_changes_only_what_it_determines(purpose):
    base = {"partition": 0, "sampling": 0, "training": 0}
    before, after = (
        make_simulation(seeds=Seeds(**base | {purpose: s}), participation=0.4, rounds=8)
        for s in (0, 1)
    )
    moved = {"partition": before.stages[0].partition.hash != after.stages[0].partition.hash}
    a, b = (
        [assemble(e, e.initial_state(), round) for round in range(1, 9)] for e in (before, after)
    )
    moved["sampling"] = [c.clients for c in a] != [c.clients for c in b]
    assert moved == {"partition": purpose == "partition", "sampling": purpose == "sampling"}
    assert torch.equal(flat(before.initial), flat(after.initial)) == (purpose != "training")
    if purpose != "sampling":
        for one, other in zip(a, b, strict=True):
            x, y = one.schedules[0], other.schedules[0]
            assert x.lengths.tolist() == y.lengths.tolist()
            assert torch.equal(x.draws, y.draws) == (purpose == "partition")


def test_runs_do_not_use_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = flat(play(make_simulation(NTD), 2).server["params"])
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(flat(play(make_simulation(NTD), 2).server["params"]), first)


@pytest.mark.parametrize(
    ("participation", "clients", "size"),
    [
        (0.29, 100, 29),
        (0.001, 100, 1),
        (0.199, 10, 1),
        (1.0, 7, 7),
    ],
)
def test_cohort_size_is_participation_times_clients_rounded_down(participation, clients, size):
    """max(floor(r K), 1); 0.29 * 100 is 28.999999999999996 in floating point."""
    assert replace(SETTINGS, participation=participation, num_clients=clients).cohort_size == size


def test_evaluation_equals_a_plain_forward_pass():
    simulation = make_simulation()
    module, data = fresh_module(simulation).eval(), simulation.runtime.data
    x = ((data.x_test.double() / 255 - 0.4) / 0.3).permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = module(x).logits
    expected = [int(((logits.argmax(1) == c) & (data.y_test == c)).sum()) for c in range(4)]
    evaluation = simulation.runtime.evaluate(simulation.initial)
    assert evaluation.class_correct.tolist() == expected
    assert_equal(evaluation.loss, nn.CrossEntropyLoss()(logits, data.y_test), atol=1e-14)


# --- memory layouts: torch's fused SGD does not look at strides


def test_eval_interval_always_includes_the_last_round():
    simulation = make_simulation(eval_interval=2, rounds=3)
    state, evaluated = simulation.initial_state(), []
    for _ in range(3):
        result = play_round(simulation, state)
        evaluated.append(bool(result.tests))
        state.advance(result)
    assert evaluated == [False, True, True]
