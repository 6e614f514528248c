"""How a round changes the state, and the values of its rows in rounds.csv and clients.csv."""

import csv
import math
import random
import signal
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fedexp.algorithms.base import FedAvg
from fedexp.data.held_out import Validation
from fedexp.metrics.forgetting import forgetting_degree
from fedexp.metrics.forgetting_metric import ForgettingDegree, RoundDrop
from fedexp.models.own import OwnModel
from fedexp.rundir import files
from fedexp.trackers.base import Callbacks, Tracker
from fedexp.training.evaluation import evaluate, local_accuracy
from fedexp.training.exchange import Clock, Exchange, aggregate, find_non_finite, sample
from fedexp.training.recorder import (
    Recorder,
    client_rows,
    defer_signals,
    json_value,
    training_values,
)
from fedexp.training.rounds import play_round, record_initial, run_rounds
from fedexp.training.state import Scores
from fedexp.training.summary import summary_of
from toy_federation import SIZES, Normed, assert_close, make_simulation


def test_seconds_and_speed_of_a_round_equal_hand_calculation():
    """12 examples in 2 seconds of training; the 4 seconds of evaluation count only in the total."""
    simulation = make_simulation()
    result = play_round(simulation, simulation.initial_state())
    values = training_values(replace(result, examples=12, seconds={"train": 2.0, "evaluation": 4}))
    assert values["train_samples_per_second"] == 6
    assert (values["train_seconds"], values["evaluation_seconds"], values["seconds"]) == (2, 4, 6)
    assert values["aggregation_seconds"] == 0


def test_client_rows_have_examples_steps_and_metrics():
    """`examples` counts each example once, although clients train for two epochs."""
    metrics = {"forgetting_metric": ForgettingDegree(xi=1e-6)}
    simulation = make_simulation(participation=1.0, **metrics)
    state = simulation.initial_state()
    state.add_tests(0, evaluate(simulation, state.server, {}, 0))
    result = play_round(simulation, state)
    state.advance(result)
    rows = list(client_rows(simulation, state, result))
    (local,) = state.record.local_class_accuracy
    degrees = np.maximum(forgetting_degree(state.record.distributed(1), local), -1).mean(1)
    assert [row["forgetting_degree"] for row in rows] == pytest.approx(degrees.tolist(), abs=1e-12)
    assert [(row["client"], row["examples"]) for row in rows] == list(enumerate(SIZES))
    assert [row["steps"] for row in rows] == [2, 2, 4, 4, 4]


def test_schedules_made_in_advance_equal_those_of_the_round():
    """On a GPU, the schedules of a round are made in the round before."""
    simulation = make_simulation(rounds=2)
    state, clients = simulation.initial_state(), sample(simulation, 2)
    first, second = (
        Exchange(simulation, simulation.algorithm, state.server, {}, number) for number in (1, 2)
    )
    expected = second.assemble(clients).schedules
    first.prepare_next_round()
    assert list(simulation.prepared) == [(2, client) for client in clients]
    found = second.assemble(clients).schedules
    assert not simulation.prepared
    for ours, plain in zip(found, expected, strict=True):
        assert torch.equal(ours.index, plain.index)
        assert ours.lengths.tolist() == plain.lengths.tolist()
    second.prepare_next_round()  # there is no third round
    assert not simulation.prepared


def test_schedules_of_several_exchanges_are_not_made_in_advance():
    """Their order is not known, and they may need the server's new state."""
    simulation = make_simulation(Twice(), rounds=2)
    server = simulation.initial_state().server
    for algorithm in (simulation.algorithm, FedAvg()):
        Exchange(simulation, algorithm, server, {}, 1).prepare_next_round()
        assert not simulation.prepared


@dataclass(frozen=True, kw_only=True)
class Twice(FedAvg):
    """FedAvg twice in a round; its clients count how often they have trained."""

    def exchanges(self, federation):
        return self, self

    def client_init(self, params, federation):
        return {"trained": torch.zeros(())}

    def finish(self, net, params, data, ctx):
        return {"params": params}, {"trained": ctx.client["trained"] + 1}


def test_second_exchange_continues_from_the_first():
    """The second exchange starts from the server's model and the client states after the first.
    Examples and bytes are summed; local models are tested after the second."""
    metric = RoundDrop(local=True)
    once = make_simulation(forgetting_metric=metric)
    first = play_round(once, once.initial_state())
    clients, clock = first.cohort.clients, Clock()
    second = Exchange(once, once.algorithm, first.server, {}, 1).run(clients, clock, True)
    simulation = make_simulation(Twice(), forgetting_metric=metric)
    result = play_round(simulation, simulation.initial_state())
    assert [state["trained"] for state in result.client_states] == [2] * 4
    assert result.losses == first.losses
    assert result.examples == 2 * first.examples
    assert (result.bytes_up, result.bytes_down) == (2 * first.bytes_up, 2 * first.bytes_down)
    found, expected = result.tests["plain"].local, local_accuracy(once, [second], "plain")
    np.testing.assert_array_equal(found, expected)
    assert (found != first.tests["plain"].local).any()
    server = aggregate(once.server_optimizer, once.algorithm, first.server, second)
    assert_close(result.server["params"], server["params"], 0)


def test_clients_with_non_finite_values_are_found():
    """The loss, the message or the running statistics may contain the value."""
    simulation = make_simulation(model=Normed(), participation=1.0)
    server = simulation.initial_state().server
    answers = Exchange(simulation, FedAvg(), server, {}, 1).run(range(5), Clock())
    assert find_non_finite([answers]) == []
    answers.losses[0] = math.inf
    answers.trained.messages["params"]["norm.bias"][2, 1] = math.nan
    answers.trained.buffers["norm.running_mean"][4, 0] = math.nan
    assert find_non_finite([answers]) == [0, 2, 4]


@dataclass(frozen=True, kw_only=True)
class Looks(FedAvg):
    """Keeps the logits of the new model for an image of ones."""

    def refine(self, net, server, messages, round):
        with torch.no_grad():
            return server | {"answers": net(server["params"], IMAGE).logits}


IMAGE = torch.ones(1, 1, 6, 6, dtype=torch.float64)


def test_server_refines_with_new_running_statistics():
    simulation = make_simulation(Looks(), model=Normed())
    server = play_round(simulation, simulation.initial_state()).server
    with torch.no_grad():
        found = simulation.runtime.net(server["params"] | server["buffers"], IMAGE).logits
    assert_close(server["answers"], found)


def state_after(simulation, *accuracies):
    """Return the state after rounds 0, 1, ... with these accuracies in each class."""
    state = simulation.initial_state()
    for number, value in enumerate(accuracies):
        state.add_tests(number, {"plain": Scores(np.full(4, value), value, [], 1.0)})
    return state


def test_initial_model_is_never_the_best():
    """It does not reach a target either."""
    simulation = make_simulation(targets=[0.4, 0.5])
    summary = summary_of(simulation, state_after(simulation, 0.9, 0.3, 0.4, 0.2))
    assert (summary["accuracy"], summary["best_accuracy"]) == (0.2, 0.4)
    assert summary["rounds_to_target"] == {"0.4": 2, "0.5": None}
    assert summary_of(simulation, state_after(simulation, 0.9))["best_accuracy"] == 0.9


@dataclass(frozen=True, kw_only=True)
class Advised(FedAvg):
    hint = "a smaller rate"


def test_run_that_diverges_or_stays_at_chance_gets_a_hint():
    """A run fails if it diverges or never reaches twice the accuracy of chance, 0.25 for four
    classes."""
    simulation = make_simulation(Advised())
    for accuracies, said in [((0.3, 0.4, 0.3), True), ((0.3, 0.5, 0.3), False), ((0.3,), False)]:
        summary = summary_of(simulation, state_after(simulation, *accuracies))
        assert ("hint" in summary) == said
    diverged = state_after(simulation, 0.3, 0.9)
    diverged.status = "diverged"
    assert summary_of(simulation, diverged)["hint"] == "a smaller rate"


def test_values_are_converted_to_plain_numbers_for_json():
    given = [0.5, np.float64(2), np.int64(3), math.nan, math.inf, -math.inf, None, "a"]
    assert [json_value(value) for value in given] == [0.5, 2, 3, None, None, None, None, "a"]
    assert [type(json_value(value)) for value in given[1:3]] == [float, int]


def test_run_that_diverges_in_last_round_is_not_completed():
    simulation = make_simulation(rounds=1)
    state = simulation.initial_state()
    result = play_round(simulation, state)
    assert result.is_last
    state.advance(replace(result, not_finite=[2]))
    assert (state.status, state.not_finite) == ("diverged", [2])


def test_interrupt_waits_until_round_is_written():
    written = []
    # a process that a shell has put into the background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    @defer_signals()
    def write():
        signal.raise_signal(signal.SIGINT)
        written.append(1)

    try:
        with pytest.raises(KeyboardInterrupt):
            write()
    finally:
        signal.signal(signal.SIGINT, before)
    assert written == [1]


def test_trackers_do_not_see_unused_test_set(tmp_path):
    simulation = make_simulation(validation=Validation(fraction=0.25, per_client=False), sizes=(9,))
    tracker = Tracker()
    tracker.after_round = lambda record: setattr(tracker, "record", record)
    recorder = Recorder(tmp_path, simulation, Callbacks([tracker]), None)
    record_initial(simulation, simulation.initial_state(), recorder)
    assert tracker.record.class_accuracy is None
    assert tracker.record.records.keys() == {"validation"}
    assert list(tracker.record.records["validation"].rounds) == [0]


def test_round_without_evaluation_has_no_test_values(tmp_path):
    simulation = make_simulation(rounds=4, eval_interval=2)
    recorder = Recorder(tmp_path, simulation, Callbacks([]), None)
    run_rounds(simulation, simulation.initial_state(), recorder)
    with open(tmp_path / files.ROUNDS, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for name in ("test_accuracy", "test_loss"):
        assert [bool(row[name]) for row in rows] == [True, False, True, False, True], name
    assert not rows[3]["forgetting"]
    assert rows[4]["forgetting"]
    assert all(row["train_loss"] for row in rows[1:])


def drawn() -> float:
    """Return a number from the generators that users' code calls without a seed."""
    return float(torch.rand(())) + np.random.rand() + random.random()  # noqa: NPY002


class DrawnHooks(FedAvg):
    """FedAvg whose server draws from global generators, as for differential privacy."""

    def server_init(self, params, federation):
        return super().server_init(params, federation) | {"first": torch.tensor(drawn())}

    def client_init(self, params, federation):
        return {"kept": torch.tensor(drawn())}

    def finish(self, net, params, data, ctx):
        return {"params": params}, {"kept": ctx.client["kept"] + drawn()}

    def aggregate(self, server, messages, round):
        new = super().aggregate(server, messages, round)
        return new | {"params": {k: v + 1e-3 * drawn() for k, v in new["params"].items()}}


class DrawnParams(FedAvg):
    """The server adds parameters with random values, and each client keeps a copy of its own."""

    def server_init(self, params, federation):
        return {"params": params | {"extra": torch.full((3,), drawn())}}

    def client_init(self, params, federation):
        return {"extra": params["extra"]}

    def objective(self, net, params, batch, ctx):
        own = {name: value for name, value in params.items() if name != "extra"}
        return super().objective(net, own, batch, ctx)


def test_clients_begin_with_the_random_parameters_that_the_server_adds():
    simulation = make_simulation(DrawnParams())
    added = simulation.initial_state().server["params"]["extra"]
    first = simulation.stages[0].federation
    assert_close(simulation.first_client_state(simulation.algorithm, first)["extra"], added, 0)


class DrawnModule(nn.Module):
    """A network whose initial values and training depend on global generators."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.fc = nn.Linear(math.prod(shape), num_classes)
        nn.init.constant_(self.fc.bias, drawn())

    def forward(self, x):
        return self.fc(x.flatten(1)) * (drawn() if self.training else 1.0)


class DrawnModel(OwnModel):
    vectorises: ClassVar[bool] = False

    def network(self, shape, num_classes):
        return DrawnModule(shape, num_classes)


def test_numbers_from_global_generators_depend_only_on_the_seed():
    """An own part may call torch.rand, NumPy's or Python's generator, and runs stay repeatable."""

    def played(before):
        torch.manual_seed(before)
        np.random.seed(before)  # noqa: NPY002
        random.seed(before)
        simulation = make_simulation(algorithm=DrawnHooks(), model=DrawnModel(head="fc"))
        state = simulation.initial_state()
        for _ in range(2):
            state.advance(play_round(simulation, state))
        return state, drawn()

    try:
        (one, after), (other, later) = played(1), played(2)
    finally:
        torch.manual_seed(0)
    assert_close(one.server, other.server, 0)
    assert_close(dict(one.clients), dict(other.clients), 0)
    assert after != later, "the generators of the caller go on as before"
