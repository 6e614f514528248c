"""The small federation on which own parts are checked, and the steps of its runs."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig

from fedexp.algorithms.interfaces import Batch, Context, Network
from fedexp.config.build import build
from fedexp.config.composition import composed, without_hydra
from fedexp.core.errors import ConfigError, HookFailed
from fedexp.core.tree import Params
from fedexp.engine.base import Cohort, Engine, Shared, Trained
from fedexp.engine.hardware import Resolved
from fedexp.engine.network import LiveNetwork
from fedexp.engine.ranks.workers import Workers
from fedexp.engine.sequential import ClientFailure, ClientTraining, Sequential
from fedexp.engine.vectorised.engine import Vectorised
from fedexp.rundir import checkpoint
from fedexp.rundir.reader import RunDirectory
from fedexp.trackers.base import Callbacks, RunInfo, past_rounds
from fedexp.training import exchange
from fedexp.training.exchange import Exchange
from fedexp.training.folder import read_state
from fedexp.training.prepare import prepare
from fedexp.training.recorder import Recorder
from fedexp.training.rounds import play_round, run_rounds
from fedexp.training.simulation import Simulation
from fedexp.training.state import State

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
NOBODY = Callbacks([])
Loss = Callable[[Network, Params, Batch, Context], torch.Tensor]


@contextmanager
def as_assertion() -> Iterator[None]:
    """Raise an AssertionError instead of the error of a run that refuses a part."""
    try:
        yield
    except (ConfigError, HookFailed, ClientFailure) as error:
        raise AssertionError(str(error)) from error


def require(holds: bool, message: str) -> None:
    """Raise AssertionError(message) unless `holds` is true, also under `python -O`."""
    if not holds:
        raise AssertionError(message)


def configure(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of the small federation with further overrides."""
    with composed([*FEDERATION, *overrides]) as composition:
        return without_hydra(composition)


def simulate(config: DictConfig, rounds: int, **parts: Any) -> Simulation:
    """Return a simulation with the given parts in place of those of the configuration.

    The parts are copied, since a resumed run does not restore attributes that a run has set.
    """
    config.rounds = rounds
    return prepare(replace(build(config), **copy.deepcopy(parts)))


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


def assert_engines_agree(
    simulation: Simulation, state: State, engines: Sequence[str], evaluate_local: bool = True
) -> None:
    """Check that the engines give the same result in the next round, within 1e-12.

    Messages, client states, losses and, if `evaluate_local` is true, local accuracies are compared.
    Raises AssertionError if they differ, or if an engine fails where the first does not:
    torch.func.vmap, for example, rejects a hook whose control flow depends on values.
    """
    reference = train(ENGINES[engines[0]], simulation, state, evaluate_local=evaluate_local)
    for engine in engines[1:]:
        where = f"round {state.round + 1}, {engine}"
        try:
            other = train(ENGINES[engine], simulation, state, evaluate_local=evaluate_local)
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


def record(
    simulation: Simulation,
    directory: Path,
    resume: bool = False,
    observers: Callbacks = NOBODY,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> State:
    """Run a simulation, or resume it from its directory, and return the final state.

    The simulation writes its files to the directory. observers: callbacks, which are not finished.
    config: the resolved configuration that they see.
    """
    directory.mkdir(exist_ok=True)
    state, lengths = simulation.initial_state(), None
    found = checkpoint.load(directory) if resume else None
    if found is not None:
        state = read_state(directory, found.state, simulation)
        state.status, lengths = "running", found.state["lengths"]
        observers.load_states(found.state)
    recorder = Recorder(directory, simulation, observers, lengths)
    info = RunInfo(
        directory=directory,
        config=dict(config),
        name="check",
        group="check",
        job_type="check",
        tags=(),
        total_rounds=config.get("rounds", simulation.rounds),
        first_round=state.round,
        classes=simulation.runtime.data.classes,
        best_accuracy=None if state.best is None else state.best[1],
        resumed=found is not None,
        past=partial(past_rounds, RunDirectory(directory), state.records, state.round),
        simulation=simulation,
    )
    observers.call("start", info)
    return run_rounds(simulation, state, recorder)
