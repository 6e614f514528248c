"""Check an algorithm."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.base import overrides as has_own
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.rng import seeded
from fedexp.core.tree import Params, Tree
from fedexp.testing import federation
from fedexp.testing.federation import (
    assert_engines_agree,
    assert_equal,
    configure,
    gradient_of,
    play,
    record,
    require,
    simulate,
)
from fedexp.training import exchange
from fedexp.training.exchange import Exchange
from fedexp.training.rounds import play_round
from fedexp.training.simulation import Simulation
from fedexp.training.state import CohortResult, State
from fedexp.training.trial import check_padding

# for each option of local training, another value than that of the small federation
CHANGES = {"local.epochs": 3, "local.lr": 0.05}


def check_algorithm(
    algorithm: FedAvg,
    zero: FedAvg | None = None,
    gradient: bool = True,
    overrides: Sequence[str] = (),
) -> None:
    """Check an algorithm's implementation on five clients in float64.

    The checks are:

    - No hook changes what it receives, and the loss does not depend on rows that only pad a batch.
    - All engines (sequential, vectorised, two ranks) give the same result in rounds 1
      and 2, within 1e-12.
    - The rounds keep all parts of the server's state, and change its model, unless clients do not
        train it. `aggregate` does not depend on the order of the clients.
    - `zero` and FedAvg give the same model, within 1e-12. `zero` is the algorithm with parameter
        values for which it is equivalent to FedAvg. If `zero` is None, this check is skipped.
    - The gradient of `objective` agrees with finite differences. If the objective treats some terms
      as constants in the gradient, pass gradient=False to skip this check. A PlainClient has none,
      and is not trained by the vectorised engine.
    - A run that is resumed after round 2 and an uninterrupted run end with bit-identical states.
    - Other test examples do not change what two rounds train.

    A warning names each of `local.epochs`, `local.lr` and the algorithm's numbers that has no
    effect, and states of clients that never change or that have no effect.
    """
    config = configure(overrides)

    def simulation(rounds: int, of: FedAvg = algorithm) -> Simulation:
        return simulate(config, rounds, algorithm=of)

    whole = simulation(rounds=2)
    state = whole.initial_state()
    plain = algorithm.plain  # the vectorised engine does not train modules in place
    engines = [each for each in federation.ENGINES if not (plain and each.startswith("vectorised"))]
    if not plain:
        check_padding(whole, state)
    initial = state.server
    for _ in range(2):
        assert_engines_agree(whole, state, engines)
        check_order(whole, state)
        state.advance(play_round(whole, state))
    check_effects(algorithm, initial, state, overrides)
    check_client_states(simulation(rounds=3))
    if zero is not None:
        expected = play(simulation(rounds=3, of=FedAvg())).server["params"]
        found = play(simulation(rounds=3, of=zero)).server["params"]
        assert_equal(found, expected, 1e-12, "zero differs from FedAvg")
    if gradient and not plain:
        gradient_of(simulation(rounds=3), algorithm.objective)
    with TemporaryDirectory() as folder:
        never_stopped = record(simulation(rounds=4), Path(folder, "whole"))
        record(simulation(rounds=2), Path(folder, "parts"))
        resumed = record(simulation(rounds=4), Path(folder, "parts"), resume=True)
        what = "the run resumed after round 2 differs from the uninterrupted run"
        assert_equal(resumed.server, never_stopped.server, what=what)
        assert_equal(dict(resumed.clients), dict(never_stopped.clients), what=what)
    check_test_data(simulation(rounds=2), state)


def check_order(simulation: Simulation, state: State) -> None:
    """Raise AssertionError if `aggregate` depends on the order of the cohort's clients."""
    number = state.round + 1
    federation = simulation.stage_of(number).federation
    algorithm = simulation.algorithm.exchanges(federation)[0]
    exchanging = Exchange(simulation, algorithm, state.server, state.clients, number)
    cohort = exchanging.assemble(exchange.sample(simulation, number))
    trained = exchanging.train(exchange.broadcast(algorithm, state.server), cohort, False)
    positions = [*range(len(cohort.clients))]

    def aggregated(order: Sequence[int]) -> Params:
        given = cohort.take(order)
        moved = replace(
            trained,
            messages=tree.map(lambda leaf: leaf[order], trained.messages),
            buffers=tree.map(lambda leaf: leaf[order], trained.buffers),
            losses=trained.losses[order],
        )
        described = exchanging.describe(given, moved)
        result = CohortResult(given, moved, moved.losses.tolist(), positions, described, 0, 0, {})
        with seeded(0):
            found = exchange.aggregate(simulation.server_optimizer, algorithm, state.server, result)
        return found["params"]

    usual = aggregated(positions)
    if not equal(aggregated(positions), usual):
        return  # the resumed run differs, too, and its check says why
    what = (
        f"aggregate of {type(algorithm).__name__} depends on the order of the clients; weight"
        " messages by round.weights, whose order is that of messages and of round.clients"
    )
    assert_equal(aggregated(positions[::-1]), usual, 1e-9, what)


def check_effects(algorithm: FedAvg, initial: Tree, state: State, overrides: Sequence[str]) -> None:
    """Raise AssertionError if two rounds lose a part of the server's state, or leave a model as it
    is that clients train. Warn of options that have no effect.

    initial: the server's state before the rounds. state: the state after them.
    """
    name = type(algorithm).__name__
    lost = ", ".join(sorted(initial.keys() - state.server.keys()))
    advice = "return server | {...} from aggregate"
    require(not lost, f"{name}: the server's state loses {lost} in two rounds; {advice}")
    if not algorithm.trains_model or algorithm.tests_clients:
        return
    require(
        not equal(initial["params"], state.server["params"]),
        f"{name}: two rounds of training do not change the model; train the model that is given,"
        " and return its trained parameters",
    )
    changes = [(key, algorithm, [f"{key}={value}"]) for key, value in CHANGES.items()]
    for key, value in vars(algorithm).items():
        if isinstance(value, float):
            with suppress(ConfigError):  # the value is out of range
                half: dict[str, Any] = {key: value / 2 or 0.5}
                changes.append((key, replace(algorithm, **half), []))
    for key, changed, more in changes:
        other = play(simulate(configure([*overrides, *more]), 2, algorithm=changed), 2)
        if equal([other.server, dict(other.clients)], [state.server, dict(state.clients)]):
            warnings.warn(f"{name}: {key} has no effect in two rounds", stacklevel=2)


def check_test_data(simulation: Simulation, state: State) -> None:
    """Raise AssertionError if other test examples change what two rounds train.

    state: the state after two rounds with the test examples of the simulation.
    """
    data = simulation.runtime.data
    # a training image takes the place of all test images
    images = data.x_train[torch.zeros(len(data.y_test), dtype=torch.int64)]
    tested = replace(data, x_test=images, y_test=torch.zeros_like(data.y_test))
    changed = replace(simulation, runtime=replace(simulation.runtime, data=tested))
    other = play(changed, 2)
    require(
        equal([other.server, dict(other.clients)], [state.server, dict(state.clients)]),
        f"{type(simulation.algorithm).__name__}: training depends on the test examples; use only"
        " the data that a hook is given, such as data.batches() and round.public",
    )


def check_client_states(simulation: Simulation) -> None:
    """Warn of states that clients keep, but that three rounds do not change or need."""
    algorithm, state = simulation.algorithm, play(simulation)
    name = type(algorithm).__name__
    first = simulation.first_client_state(algorithm, simulation.stages[0].federation)
    for key, value in first.items():
        kept = [each.get(key) for each in state.clients.values()]
        if tree.leaves(value) and all(equal(each, value) for each in kept):
            text = f"{name}: no client changes its state {key} in three rounds; return the new one"
            warnings.warn(f"{text} from finish", stacklevel=2)
            return
    if algorithm.tests_clients or has_own(algorithm, "personal_model"):
        return
    forgetful = simulation.initial_state()
    for _ in range(3):
        forgetful.advance(play_round(simulation, forgetful))
        forgetful.clients.clear()
    if first and equal(forgetful.server, state.server):
        warnings.warn(
            f"{name}: the states that clients keep have no effect in three rounds", stacklevel=2
        )


def equal(one: Any, other: Any) -> bool:
    """Return whether two trees have equally many tensors, which are equal within 1e-12."""
    mine, theirs = tree.leaves(one), tree.leaves(other)
    return len(mine) == len(theirs) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12)
        for a, b in zip(mine, theirs, strict=True)
    )
