"""What algorithms declare, against counted forward and backward passes of the network and the
traffic of a round."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedexp.algorithms.cfed import CFeD
from fedexp.algorithms.fedala import FedALA
from fedexp.algorithms.fedalign import FedAlign
from fedexp.algorithms.fedcurv import FedCurv
from fedexp.algorithms.feddmc import FedDMC
from fedexp.algorithms.fedfomo import FedFOMO
from fedexp.algorithms.fedka import FedKA
from fedexp.core import tree
from fedexp.engine.network import FunctionalNetwork
from fedexp.models import Output
from fedexp.training import exchange, rounds
from method_rows import declared
from test_algorithms import SHIPPED
from test_continual import EVERY as STREAMS
from toy_federation import PLAIN, first_of_each_class, play, play_round

# whole batches of four, so that nothing is padded: two for each client, one for each in streams
SIZES, OF_STREAMS = (8, 8, 8), (4, 4, 4)
FIRST = first_of_each_class(SHIPPED, STREAMS).values()


class Counts(Counter):
    """Number of examples that passed through the network, by place and direction."""

    place = None  # clients, server; None: not counted

    def add(self, direction, examples):
        if self.place:
            self[self.place, direction] += examples


class Seen(torch.autograd.Function):
    """The identity; counts the examples when it is computed, also under vmap."""

    @staticmethod
    def forward(value, counts, direction, examples):
        counts.add(direction, examples)
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None, None

    @staticmethod
    def vmap(federation, in_dims, value, counts, direction, examples):
        return Seen.apply(value, counts, direction, examples * federation.batch_size), in_dims[0]


class Differentiated(torch.autograd.Function):
    """The identity of the parts of an output; counts the examples when any part is
    differentiated."""

    @staticmethod
    def forward(counts, examples, *parts):
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.counts, ctx.examples = inputs[:2]

    @staticmethod
    def backward(ctx, first, *others):
        return None, None, Seen.apply(first, ctx.counts, "backward", ctx.examples), *others

    @staticmethod
    def vmap(federation, in_dims, *given):
        return Differentiated.apply(*given), in_dims[2:]


@pytest.fixture
def counts(monkeypatch):
    """Count the passes of clients and server in a round, without its evaluation."""
    counts = Counts()

    def counted(parts, examples):
        seen = Seen.apply(parts[0], counts, "forward", examples)
        return Differentiated.apply(counts, examples, seen, *parts[1:])

    def forward(self, call, params, x, mask, original=FunctionalNetwork._forward):
        features, logits, maps = original(self, call, params, x, mask)
        parts = [logits, *maps] if features is None else [logits, features, *maps]
        logits, *found = counted(parts, len(x) if mask is None else float(mask.sum()))
        return Output(None if features is None else found.pop(0), logits, tuple(found))

    def slim(self, params, x, *more, original=FunctionalNetwork.slim):
        return counted([original(self, params, x, *more)], len(x))[0]

    def train(*given, original=exchange.Exchange.train):
        counts.place = "clients"
        trained = original(*given)
        counts.place = "server"
        return trained

    def collect(*given, original=rounds.collect_result):
        counts.place = None
        return original(*given)

    monkeypatch.setattr(FunctionalNetwork, "_forward", forward)
    monkeypatch.setattr(FunctionalNetwork, "slim", slim)
    monkeypatch.setattr(exchange.Exchange, "train", train)
    monkeypatch.setattr(rounds, "collect_result", collect)
    return counts


# Additional examples described by `work`, worked by hand: (backward, forward).
def count_additional_examples(algorithm, simulation, epochs):
    federation = simulation.stages[-1].federation
    if isinstance(algorithm, FedCurv):  # all 24 examples, once
        return 24, 24
    if isinstance(algorithm, FedALA):  # 0.8 of 8 examples of three clients, rounded down
        return 0, 3 * 6
    if isinstance(
        algorithm, FedFOMO
    ):  # validation examples are not trained on; the client has two models
        held = sum(len(algorithm.held_out(federation, client)) for client in range(3))
        return -held * epochs, held * (algorithm.slots + 2 - epochs)
    for family, count in declared("ADDITIONAL"):
        if isinstance(algorithm, family):
            return count(algorithm, epochs)
    return 0, 0


# algorithms whose `work` is described in words only
BY_WORD = (CFeD, FedDMC, FedKA, FedAlign)
# algorithms that send matrices with the square of a layer's width
SQUARES = tuple(declared("SQUARES"))


def check_traffic(simulation, state, result):
    """For one client, in multiples of the model. Here `small` is less than a third, except matrices
    with the square of a layer's width. test_continual.py checks streams."""
    algorithm, model = simulation.algorithm, tree.num_bytes(simulation.initial)
    needs = algorithm.needs
    up, down = (number / 3 / model - 1 for number in (result.bytes_up, result.bytes_down))
    slack, less = 0.34 if needs.small else 0.0, 0.34 if needs.unsent else 0.0
    squares = np.inf if isinstance(algorithm, SQUARES) else slack
    assert needs.up - less <= up <= needs.up + squares
    # A client receives at most the models of the two other clients, so one more than with FedAvg.
    least = min(needs.down, 1) if isinstance(algorithm, FedFOMO) else needs.down
    assert least - less <= down <= needs.down + slack
    assert not needs.unsent or (up < 0 and down < 0)
    assert bool(state.clients) == bool(needs.client_state)
    assert bool(state.server.keys() - {"params", "buffers"}) == bool(needs.server_state)
    assert (simulation.stages[0].public is not None) >= bool(needs.public)


@pytest.mark.parametrize(
    ("row", "before"),
    [
        pytest.param(row, before, id=row.name, marks=() if row in FIRST else pytest.mark.slow)
        # in round 3; streams: in the second round of the second task
        for table, before in ((SHIPPED, 2), (STREAMS, 3))
        for row in table
    ],
)
@pytest.mark.parametrize("epochs", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_declared_needs_match_the_counted_passes_and_traffic(row, before, epochs, counts):
    settings = {"local": replace(PLAIN, epochs=epochs), "participation": 1.0}
    simulation = row.simulation(sizes=OF_STREAMS if row in STREAMS else SIZES, **settings)
    state = play(simulation, before)
    next_exchange = exchange.Exchange(
        simulation, simulation.algorithm, state.server, state.clients, before + 1
    )
    federation = next_exchange.federation
    data = sum(len(part) for part in federation.parts)
    counts.clear()
    counts.place = "server"
    result = play_round(simulation, state)
    needs = simulation.algorithm.needs
    gradients = data * (needs.gradients * epochs + needs.gradient_passes)
    forward = gradients + data * (needs.teachers * epochs + needs.forward_passes)
    more = count_additional_examples(simulation.algorithm, simulation, epochs)
    found = counts["clients", "backward"], counts["clients", "forward"]
    expected = gradients + more[0], forward + more[1]
    assert needs.work or more == (0, 0)
    if isinstance(simulation.algorithm, BY_WORD):
        assert needs.work
        assert found != expected
    else:
        assert found == expected
    public = len(simulation.stages[-1].public or ())
    passes = public * needs.server_passes
    asked = public * (needs.server_teachers[0] * 3 + needs.server_teachers[1])
    server = counts["server", "backward"], counts["server", "forward"]
    assert server == (passes, passes + asked) or needs.server_work
    if row not in STREAMS:
        check_traffic(simulation, state, result)
