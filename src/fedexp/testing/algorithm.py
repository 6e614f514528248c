"""Check an algorithm."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from fedexp.algorithms.base import FedAvg
from fedexp.testing import federation
from fedexp.testing.federation import (
    assert_engines_agree,
    assert_equal,
    configure,
    gradient_of,
    play,
    record,
    simulate,
)
from fedexp.training.rounds import play_round
from fedexp.training.simulation import Simulation
from fedexp.training.trial import check_padding


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
    - `zero` and FedAvg give the same model, within 1e-12. `zero` is the algorithm with parameter
        values for which it is equivalent to FedAvg. If `zero` is None, this check is skipped.
    - The gradient of `objective` agrees with finite differences. If the objective treats some terms
      as constants in the gradient, pass gradient=False to skip this check. A PlainClient has none,
      and is not trained by the vectorised engine.
    - A run that is resumed after round 2 and an uninterrupted run end with bit-identical states.
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
    for _ in range(2):
        assert_engines_agree(whole, state, engines)
        state.advance(play_round(whole, state))
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
