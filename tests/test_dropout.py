"""Clients that drop out: who does, what the server and the client then know, files and resume."""

import csv
import json
import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.ditto import Ditto
from fedexp.algorithms.feddyn import FedDyn
from fedexp.algorithms.fednova import FedNova
from fedexp.algorithms.scaffold import Scaffold
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.cli import main
from fedexp.config.build import build
from fedexp.config.cohorts import Uniform
from fedexp.config.participation import Markov
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.engine.base import ScheduledData
from fedexp.testing import ENGINES, record
from fedexp.training.evaluation import evaluate
from fedexp.training.exchange import Exchange, sample
from fedexp.training.recorder import client_rows, round_row
from fedexp.training.rounds import play_round
from quick_runs import SMALL
from toy_federation import (
    ALL,
    LOCAL,
    SIZES,
    SoftmaxRegression,
    assert_close,
    composed,
    detached,
    engines_compared,
    leaves,
    make_simulation,
    play,
)

START, UPLOAD = (Uniform(dropout=0.5, dropout_at=at) for at in ("start", "upload"))
both = pytest.mark.parametrize("law", [START, UPLOAD], ids=["start", "upload"])


# --- who drops out


def test_draws_depend_on_round_and_client_only():
    """So a client of a larger cohort, or at a higher rate, drops out whenever it did before."""
    few, all_ = [3, 7, 50], range(200)
    for number in (1, 2, 30):
        found = Uniform(dropout=0.4).dropped(0, number, all_)
        assert Uniform(dropout=0.4).dropped(0, number, few) == [k for k in few if k in found]
        assert set(found) < set(Uniform(dropout=0.6).dropped(0, number, all_))
        assert Uniform(dropout=0.4, dropout_at="upload").dropped(0, number, all_) == found
        assert Markov(dropout=0.4).dropped(0, number, all_) == found
    rounds = [tuple(Uniform(dropout=0.4).dropped(s, n, few)) for s in (0, 1) for n in range(9)]
    assert len(set(rounds)) > 4
    assert Uniform().dropped(0, 1, all_) == []


def test_share_of_dropped_clients_is_the_rate():
    """40,000 draws: the standard error is below 0.0025."""
    for rate in (0.2, 0.8):
        law = Uniform(dropout=rate)
        numbers = [len(law.dropped(0, number, range(400))) for number in range(1, 101)]
        assert np.mean(numbers) / 400 == pytest.approx(rate, abs=0.01)
        assert np.var(numbers) == pytest.approx(400 * rate * (1 - rate), rel=0.5)


def test_cohorts_are_those_without_dropout():
    plain, failing = make_simulation(), make_simulation(cohorts=START)
    assert [sample(plain, n) for n in (1, 2, 3)] == [sample(failing, n) for n in (1, 2, 3)]


# --- against a loop

KNOWN = {"weight_decay": 1e-3, "momentum": 0.9}


class Loop:
    """A slow federation in plain torch. A method defines `loss`, `correct`, `keep` and `serve`."""

    def __init__(self, simulation):
        self.simulation, self.w = simulation, simulation.initial
        self.kept, self.number = {}, 0
        self.begin()

    def zeros(self):
        return {k: torch.zeros_like(v) for k, v in self.w.items()}

    def batches(self, client):
        one = Exchange(self.simulation, FedAvg(), {}, {}, self.number)
        schedule = one.schedule(FedAvg(), client)
        return list(ScheduledData(self.simulation.runtime, schedule).batches())

    def sgd(self, client, start, extra=lambda w: 0.0, correct=lambda g: g):
        """Return the model after the local steps, and their number."""
        w, velocity, lr = leaves(start), None, self.lr
        for batch in (batches := self.batches(client)):
            loss = F.cross_entropy(self.simulation.runtime.net(w, batch.x).logits, batch.y)
            grads = torch.autograd.grad(loss + extra(w), list(w.values()))
            grads = correct(dict(zip(w, grads, strict=True)))
            step = {k: grads[k] + 1e-3 * w[k].detach() for k in w}
            velocity = step if velocity is None else {k: 0.9 * velocity[k] + step[k] for k in w}
            w = leaves({k: w[k] - lr * velocity[k] for k in w})
        return detached(w), len(batches)

    def play_round(self, at):
        self.number += 1
        self.lr = 0.1 * 0.9 ** (self.number - 1)
        clients = sample(self.simulation, self.number)
        dropped, sent = self.simulation.dropped(self.number, clients), {}
        for client in clients:
            if client in dropped and at == "start":
                continue
            message, self.kept[client] = self.train(client)
            if client not in dropped:
                sent[client] = message
        if sent:
            self.serve(sent)
        return dropped, sent

    def shares(self, sent):
        total = sum(SIZES[client] for client in sent)
        return {client: SIZES[client] / total for client in sent}

    def mean(self, models):
        shares = self.shares(models)
        return {k: sum(shares[c] * models[c][k] for c in models) for k in self.w}


class NovaLoop(Loop):
    def begin(self):
        pass

    def train(self, client):
        trained, steps = self.sgd(client, self.w)
        weights = [sum(0.9**j for j in range(steps - i)) for i in range(steps)]
        return (trained, sum(weights)), {}

    def serve(self, sent):
        shares = self.shares(sent)
        effective = sum(shares[c] * sent[c][1] for c in sent)
        self.w = {
            k: v + effective * sum(shares[c] * (sent[c][0][k] - v) / sent[c][1] for c in sent)
            for k, v in self.w.items()
        }


class ScaffoldLoop(Loop):
    def begin(self):
        self.c = self.zeros()

    def train(self, client):
        own = self.kept.get(client, self.zeros())
        trained, steps = self.sgd(
            client, self.w, correct=lambda g: {k: g[k] - own[k] + self.c[k] for k in g}
        )
        new = {k: own[k] - self.c[k] + (self.w[k] - trained[k]) / (steps * self.lr) for k in self.w}
        return (trained, tree.subtract(new, own)), new

    def serve(self, sent):
        self.c = {k: v + sum(sent[c][1][k] for c in sent) / 5 for k, v in self.c.items()}
        self.w = self.mean({client: trained for client, (trained, _) in sent.items()})


class DynLoop(Loop):
    def begin(self):
        self.h = self.zeros()

    def train(self, client):
        own, start = self.kept.get(client, self.zeros()), self.w

        def extra(w):
            terms = [own[k] * w[k] + 0.5 * (w[k] - start[k]) ** 2 for k in w]
            return 0.1 * sum(term.sum() for term in terms)

        trained, _ = self.sgd(client, start, extra)
        return trained, {k: own[k] + trained[k] - start[k] for k in own}

    def serve(self, sent):
        moved = {k: sum(each[k] - self.w[k] for each in sent.values()) for k in self.w}
        self.h = {k: v + moved[k] / 5 for k, v in self.h.items()}
        self.w = tree.add(self.mean(sent), self.h)


class DittoLoop(Loop):
    def begin(self):
        self.start = self.w

    def train(self, client):
        def extra(v):
            return 0.5 * 0.7 * sum(((v[k] - self.w[k]) ** 2).sum() for k in v)

        personal, _ = self.sgd(client, self.kept.get(client, self.start), extra)
        return self.sgd(client, self.w)[0], personal

    def serve(self, sent):
        self.w = self.mean(sent)


LOOPS = {
    "fednova": (NovaLoop, FedNova(variant="plain"), None, None),
    "scaffold": (ScaffoldLoop, Scaffold(divisor="steps", variates="uniform"), "c", "c"),
    "feddyn": (DynLoop, FedDyn(clip=0.0, alpha=0.1, per_client_alpha=False), "h", "h"),
    "ditto": (DittoLoop, Ditto(lambda_=0.7), None, None),
}


def assert_equals_loop(state, loop, on_server, on_client):
    """Check the model, the server's value `on_server`, and the clients' values `on_client`."""
    assert_close(state.server["params"], loop.w)
    if on_server:
        assert_close(state.server[on_server], getattr(loop, on_server))
    for client, own in loop.kept.items():
        if own:
            found = state.clients[client]
            assert_close(found[on_client] if on_client else found, own)


@both
@pytest.mark.parametrize("name", LOOPS)
@engines_compared
def test_lost_messages_equal_a_loop(name, law, engines):
    """The server's state, and the state of every client, after each of six rounds. Some rounds lose
    all messages, some clients that lost a message come back."""
    kind, algorithm, on_server, on_client = LOOPS[name]
    for engine in engines:
        simulation = make_simulation(
            algorithm, cohorts=law, rounds=6, model=SoftmaxRegression(), participation=0.6
        )
        simulation = replace(simulation, engine=ENGINES[engine])
        state, loop, arrivals, came_back = simulation.initial_state(), kind(simulation), [], set()
        lost: set[int] = set()
        for _ in range(6):
            result = play_round(simulation, state)
            state.advance(result)
            dropped, sent = loop.play_round(law.dropout_at)
            assert result.arrived == list(sent)
            assert_equals_loop(state, loop, on_server, on_client)
            assert set(state.clients) == {c for c, own in loop.kept.items() if own}
            arrivals.append(len(sent))
            came_back |= lost & set(sent)
            lost |= set(dropped)
        assert min(arrivals) == 0 < max(arrivals)
        assert came_back


def test_lost_message_of_scaffold_leaves_the_servers_variate():
    """The server's variate is the mean of the clients' until a message is lost, and not after."""
    for law, equal in ((START, True), (UPLOAD, False)):
        simulation = make_simulation(LOOPS["scaffold"][1], cohorts=law, rounds=6)
        state = play(simulation, 4)
        assert set(range(5)) - set(state.clients) or not equal
        mean = {
            k: sum(each["c"][k] for each in dict(state.clients).values()) / 5
            for k in state.server["c"]
        }
        apart = max(float((mean[k] - v).abs().max()) for k, v in state.server["c"].items())
        assert (apart < 1e-12) is equal


# --- a round without messages

NONE = partial(Uniform, dropout=0.99)


@pytest.mark.parametrize("at", ["start", "upload"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_round_without_messages_leaves_the_model_and_says_so_once(at, engine, caplog):
    simulation = make_simulation(
        cohorts=NONE(dropout_at=at), engine=engine, forgetting_metric=ALL, rounds=2
    )
    state = simulation.initial_state()
    before = tree.map(torch.clone, state.server)
    state.add_tests(0, evaluate(simulation, state.server, {}, 0))
    with caplog.at_level(logging.WARNING, "fedexp"):
        for number in (1, 2):
            result = play_round(simulation, state)
            state.advance(result)
            assert (result.arrived, len(result.sampled)) == ([], 4)
            assert len(result.cohort.clients) == (0 if at == "start" else 4)
            assert np.isnan(result.train_loss)
            assert result.not_finite is None
            row = round_row(simulation, state, result)
            assert row["arrived_clients"] == 0
            assert row["test_accuracy"] == state.record.accuracy[0]
            assert number in state.record.cohorts
    assert_close(state.server, before, atol=0)
    assert [each.message.count("no client's message arrived") for each in caplog.records] == [1]
    assert state.status == "completed"


def test_server_optimizer_takes_no_step_without_messages():
    simulation = make_simulation(cohorts=UPLOAD, rounds=6, participation=0.6)
    simulation = replace(simulation, server_optimizer=ServerOptimizer(optimizer="adam"))
    state, empty = simulation.initial_state(), 0
    for _ in range(6):
        before = tree.map(torch.clone, state.server)
        result = play_round(simulation, state)
        state.advance(result)
        if not result.arrived:
            assert_close(state.server, before, atol=0)
            empty += 1
    assert 0 < empty < 6


# --- traffic and tables


@both
def test_traffic_counts_what_was_sent(law):
    """Down: the model to each client that starts. Up: the model of each client that trained, also
    if it was lost."""
    simulation = make_simulation(cohorts=law, rounds=3)
    state, size = simulation.initial_state(), tree.num_bytes(simulation.initial)
    for _ in range(3):
        result = play_round(simulation, state)
        started = 4 if law is UPLOAD else len(result.arrived)
        assert (result.bytes_down, result.bytes_up) == (started * size, started * size)
        assert result.examples == sum(2 * SIZES[client] for client in result.cohort.clients)
        rows = list(client_rows(simulation, state, result))
        assert [row["client"] for row in rows] == sample(simulation, state.round + 1)
        assert [row["client"] for row in rows if row["arrived"]] == result.arrived
        assert [row["client"] for row in rows if row["steps"]] == list(result.cohort.clients)
        state.advance(result)


@both
def test_train_loss_is_the_mean_over_arrived_messages(law):
    simulation = make_simulation(cohorts=law)
    result = play_round(simulation, simulation.initial_state())
    losses = dict(zip(result.cohort.clients, result.losses, strict=True))
    assert 0 < len(result.arrived) < 4
    sizes = [SIZES[client] for client in result.arrived]
    expected = np.average([losses[client] for client in result.arrived], weights=sizes)
    assert result.train_loss == pytest.approx(expected, rel=1e-12)


@both
@pytest.mark.parametrize("name", ["scaffold", "ditto"])
def test_resumed_run_equals_uninterrupted_run(name, law, tmp_path):
    """Slow clients, too, are drawn again in each round."""
    algorithm, local = LOOPS[name][1], replace(LOCAL, epochs=5)
    given = {"cohorts": replace(law, stragglers=0.5), "forgetting_metric": ALL}

    def simulation(rounds):
        return make_simulation(algorithm, local, rounds=rounds, participation=0.6, **given)

    whole = record(simulation(6), tmp_path / "whole")
    record(simulation(3), tmp_path / "parts")
    resumed = record(simulation(6), tmp_path / "parts", resume=True)
    assert_close(resumed.server, whole.server, atol=0)
    assert_close(dict(resumed.clients), dict(whole.clients), atol=0)
    assert resumed.record.cohorts == whole.record.cohorts
    assert min(map(len, whole.record.cohorts.values())) == 0
    for file in ("clients.csv", "class_accuracy.csv", "local_class_accuracy.csv"):
        one, other = ((tmp_path / part / file).read_bytes() for part in ("whole", "parts"))
        assert one == other


def test_run_with_a_law_of_participation_fails_and_resumes(here):
    given = [*SMALL, "cohorts=markov", "cohorts.dropout=0.5", "hydra.run.dir=run"]
    assert main.main([*given, "rounds=3"]) == 0
    assert main.main(["resume=run", "rounds=5"]) == 0
    with open("run/rounds.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open("run/clients.csv", newline="") as file:
        clients = list(csv.DictReader(file))
    assert list(rows[0])[-1] == "arrived_clients"
    assert list(clients[0])[-1] == "arrived"
    for row in rows[1:]:
        there = [each for each in clients if each["round"] == row["round"]]
        assert int(row["arrived_clients"]) == sum(int(each["arrived"]) for each in there)
    assert json.loads((here / "run" / "summary.json").read_text())["status"] == "completed"


def test_cohorts_of_a_failing_run_can_be_repeated(here):
    given = [*SMALL, "rounds=3", "cohorts.dropout=0.5"]
    assert main.main([*given, "hydra.run.dir=first"]) == 0
    assert main.main([*given, "cohorts.path=first/clients.csv", "hydra.run.dir=again"]) == 0
    for file in ("clients.csv", "class_accuracy.csv"):
        assert (here / "first" / file).read_bytes() == (here / "again" / file).read_bytes()


# --- what cannot be


def test_server_of_fedfomo_needs_every_message():
    with pytest.raises(ConfigError, match=r"^cohorts.dropout_at=upload: cannot be used with FedF"):
        make_simulation(build(composed("algorithm=fedfomo")).algorithm, cohorts=UPLOAD)


def test_bad_values_are_refused(capsys, here):
    for given, words in (
        ("cohorts.dropout=1", "cohorts.dropout=1.0: must be at least 0 and less than 1"),
        ("cohorts.dropout_at=upload", "cohorts.dropout_at=upload: this option only has an effect"),
    ):
        assert main.main([*SMALL, given]) == 2
        assert words in capsys.readouterr().err
    assert not any(here.rglob("config.yaml"))
