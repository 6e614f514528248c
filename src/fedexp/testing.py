"""Check your own algorithm, in a pytest test or interactively. The checks take a few seconds.

from fedexp.testing import check

check(Smoothed(smoothing=0.1), zero=Smoothed(smoothing=0.0))
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Batch, Context, Network
from fedexp.config.build import build
from fedexp.config.composition import composed, without_hydra
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params
from fedexp.engine.base import Cohort, Engine, Shared, Trained
from fedexp.engine.hardware import Resolved
from fedexp.engine.network import LiveNetwork
from fedexp.engine.ranks.workers import Workers
from fedexp.engine.sequential import ClientTraining, Sequential
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.rundir import checkpoint
from fedexp.trackers.base import Callbacks
from fedexp.training import exchange
from fedexp.training.exchange import Exchange
from fedexp.training.folder import read_state
from fedexp.training.prepare import prepare
from fedexp.training.recorder import Recorder
from fedexp.training.rounds import play_round, run_rounds
from fedexp.training.simulation import Simulation
from fedexp.training.state import State
from fedexp.training.trial import check_padding

# 29 training images, so that clients take different numbers of steps and have partial batches
FEDERATION = (
    *("num_clients=5", "participation=0.8", "min_size=1", "alpha=1"),
    *("validation.fraction=0.98", "evaluate_on=test"),
    *("local.epochs=2", "local.batch_size=4", "local.lr=0.1", "local.weight_decay=1e-3"),
    *("dataset.augmentation.crop_padding=1", "model.channels=[3]", "model.hidden=[8]"),
    *("hardware=cpu", "hardware.engine=sequential", "hardware.precision=fp64", "tracker=none"),
)
PROCESS = Resolved(torch.device("cpu"), "workers", "fp64", 1, 2, Sequential(), "a test")
ENGINES = {
    "sequential": Sequential(),
    # its second rank starts when the engine is first used
    "workers": Workers(Sequential(), PROCESS, 2, share=False),
    "vectorised": Vectorised(None),
    "vectorised, 2 at a time": Vectorised(2),
}
Loss = Callable[[Network, Params, Batch, Context], torch.Tensor]


@contextmanager
def as_assertion() -> Iterator[None]:
    """Convert a ConfigError, with which a run refuses an algorithm, to an AssertionError."""
    try:
        yield
    except ConfigError as error:
        raise AssertionError(str(error)) from error


@as_assertion()
def check(
    algorithm: FedAvg | type[FedAvg],
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

    overrides: changes to the federation, such as ["public.fraction=0.3", "model=resnet10"].

    Raises AssertionError with a message that says what differs and where.
    """
    method = algorithm() if isinstance(algorithm, type) else algorithm
    with composed([*FEDERATION, *overrides]) as composition:
        config = without_hydra(composition)

    def simulation(rounds: int, of: FedAvg = method) -> Simulation:
        config.rounds = rounds
        built = build(config)
        # Copy the algorithm, since a resumed run does not restore attributes that training has set.
        return prepare(replace(built, algorithm=copy.deepcopy(of)))

    whole = simulation(rounds=2)
    state = whole.initial_state()
    # the vectorised engine does not train modules in place
    engines = [name for name in ENGINES if not (method.plain and name.startswith("vectorised"))]
    if not method.plain:
        check_padding(whole, state)
    for _ in range(2):
        assert_engines_agree(whole, state, engines)
        state.advance(play_round(whole, state))
    if zero is not None:
        expected = play(simulation(rounds=3, of=FedAvg())).server["params"]
        found = play(simulation(rounds=3, of=zero)).server["params"]
        assert_equal(found, expected, 1e-12, "zero differs from FedAvg")
    if gradient and not method.plain:
        gradient_of(simulation(rounds=3), method.objective)
    with TemporaryDirectory() as folder:
        never_stopped = record(simulation(rounds=4), Path(folder, "whole"))
        record(simulation(rounds=2), Path(folder, "parts"))
        resumed = record(simulation(rounds=4), Path(folder, "parts"), resume=True)
        what = "the run resumed after round 2 differs from the uninterrupted run"
        assert_equal(resumed.server, never_stopped.server, what=what)
        assert_equal(dict(resumed.clients), dict(never_stopped.clients), what=what)


def play(simulation: Simulation, rounds: int = 3) -> State:
    """Return the state after a number of rounds."""
    state = simulation.initial_state()
    for _ in range(rounds):
        state.advance(play_round(simulation, state))
    return state


def assemble(simulation: Simulation, state: State, number: int) -> Cohort:
    """Return the cohort of round `number`. The round must have a single exchange."""
    clients = exchange.sample(simulation, number)
    algorithm, server = simulation.algorithm, state.server
    return Exchange(simulation, algorithm, server, state.clients, number).assemble(clients)


def train(
    engine: Engine,
    simulation: Simulation,
    state: State,
    cohort: Cohort | None = None,
    evaluate_local: bool = False,
) -> Trained:
    """Train the next round's cohort, and return the clients' messages and new states."""
    cohort = cohort or assemble(simulation, state, state.round + 1)
    sent = exchange.broadcast(simulation.algorithm, state.server)
    return engine.train(
        Shared(simulation.algorithm, simulation.runtime, sent, 0.1), cohort, evaluate_local
    )


def assert_equal(actual: Any, expected: Any, atol: float = 0.0, what: str = "") -> None:
    """Raise AssertionError if entries in two trees of tensors differ by more than `atol`.

    what: the first words of the error message.
    """
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}" if what else text
    )


def assert_engines_agree(simulation: Simulation, state: State, engines: Sequence[str]) -> None:
    """Check that the engines give the same result in the next round, within 1e-12.

    Messages, client states, losses and local accuracies are compared. Raises AssertionError if they
    differ, or if an engine fails where the first does not: torch.func.vmap, for example, rejects a
    hook whose control flow depends on values.
    """
    reference = train(ENGINES[engines[0]], simulation, state, evaluate_local=True)
    for engine in engines[1:]:
        where = f"round {state.round + 1}, {engine}"
        try:
            other = train(ENGINES[engine], simulation, state, evaluate_local=True)
        except Exception as error:
            raise AssertionError(f"{where} fails, {engines[0]} does not: {error}") from error
        what = f"{where} differs from {engines[0]}"
        for name in ("messages", "states", "losses", "class_correct"):
            found, expected = getattr(other, name), getattr(reference, name)
            assert_equal(found, expected, 1e-12, f"{what} in {name}")


def set_up_client(simulation: Simulation, state: State, position: int = -1) -> ClientTraining:
    """Return a client of the next round's cohort after calling `client_setup`.

    position: the position of the client in the cohort.
    """
    algorithm, runtime, number = simulation.algorithm, simulation.runtime, state.round + 1
    sent = exchange.broadcast(algorithm, state.server)
    shared = Shared(algorithm, runtime, sent, simulation.lr_at(number))
    cohort = assemble(simulation, state, number).take([position])
    client = ClientTraining(shared, LiveNetwork(runtime.net), cohort)
    setup = algorithm.client_setup(runtime.net, client.data, client.ctx)
    client.ctx = replace(client.ctx, setup=setup)
    return client


def gradient_of(simulation: Simulation, function: Loss) -> Params:
    """Check a local loss's gradient against finite differences, and return the gradient.

    The gradient is evaluated in round 3, at parameters with added noise, because distillation terms
    and penalties have zero gradient at the initial parameters. Raises AssertionError if the
    gradient and finite differences along a random direction disagree.
    """
    net = simulation.runtime.net
    client = set_up_client(simulation, play(simulation, 2))
    ctx, batch = client.ctx, next(client.data.batches())
    generator = torch.Generator().manual_seed(3)
    params = {}
    for name, value in client.algorithm.initial_params(net, client.data, ctx).items():
        if name not in ctx.server["buffers"]:
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            params[name] = (value + 0.05 * noise).requires_grad_()

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        return function(net, dict(zip(params, leaves, strict=True)), batch, ctx)

    values = tuple(params.values())
    try:
        torch.autograd.gradcheck(
            loss, values, atol=1e-8, rtol=1e-6, check_undefined_grad=False, fast_mode=True
        )
    except RuntimeError as error:  # the exception type of gradcheck is not public
        raise AssertionError(f"the gradient differs from finite differences: {error}") from error
    return torch.func.grad(lambda p: function(net, p, batch, ctx))(params)


def record(simulation: Simulation, directory: Path, resume: bool = False) -> State:
    """Run a simulation, or resume it from its directory, and return the final state.

    The simulation writes its files to the directory.
    """
    directory.mkdir(exist_ok=True)
    state, lengths = simulation.initial_state(), None
    found = checkpoint.load(directory) if resume else None
    if found is not None:
        state = read_state(directory, found.state, simulation)
        state.status, lengths = "running", found.state["lengths"]
    return run_rounds(simulation, state, Recorder(directory, simulation, Callbacks([]), lengths))
