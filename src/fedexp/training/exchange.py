"""Exchanges between server and clients: sample, send, train, send back, aggregate.

`exchange` and `role` are algorithms as well, and usually the run's algorithm. A method with several
exchanges per round, or with several kinds of clients, returns from its hooks `exchanges` and
`roles` the algorithms whose other hooks apply to each.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.exemplars import Exemplars
from fedexp.algorithms.families import (
    OwnTraining,
    Personal,
    epochs_of,
    roles_of,
    training_part_of,
)
from fedexp.algorithms.interfaces import Federation, ServerRound
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.core import tree
from fedexp.core.rng import generator_for
from fedexp.core.tree import Tree
from fedexp.engine.base import ClientRuntime, Cohort, Gather, Probe, Shared, Trained
from fedexp.engine.schedule import BatchSchedule, make_schedule, padded_schedule
from fedexp.metrics.analysis import LocalEpochs
from fedexp.rundir.client_states import to
from fedexp.training.simulation import Simulation


class Clock:
    """Seconds that each phase of a round takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def move(self, phase: str, other: str, seconds: float) -> None:
        """Move seconds from one phase to another."""
        self.seconds[phase] -= seconds
        self.seconds[other] += seconds


@dataclass(frozen=True)
class CohortResult:
    """The results of a cohort's exchange."""

    cohort: Cohort
    trained: Trained
    losses: list[float]  # [|S|]
    round: ServerRound
    bytes_up: int
    bytes_down: int
    sent: Tree  # `params` and `buffers` of the broadcast


def run_exchange(
    simulation: Simulation,
    exchange: FedAvg,
    server: Tree,
    kept: Mapping[int, Tree],
    number: int,
    clients: Sequence[int],
    clock: Clock,
    evaluate_local: bool = False,
) -> CohortResult:
    """Send the broadcast to the clients and train them.

    kept: client -> state, for clients that have taken part before.
    """
    cohort = assemble(simulation, exchange, server, kept, number, clients)
    if exchange.trains_model:
        cohort = replace(
            cohort,
            probes=probes_of(simulation, cohort, federation_at(simulation, server, number).parts),
        )
    clock.lap("sampling")
    sent = broadcast(exchange, server)
    trained = train(simulation, sent, cohort, evaluate_local)
    losses = trained.losses.tolist()  # waits for the device, so that the timing is correct
    clock.lap("train")
    messages = trained.messages | {"buffers": trained.buffers}
    broadcasts = [sent | {"personal": personal} for personal in cohort.personals]
    if isinstance(exchange, Personal):
        messages = exchange.counted(messages, up=True)
        broadcasts = [exchange.counted(each, up=False) for each in broadcasts]
    up, down = tree.num_bytes(messages), sum(map(tree.num_bytes, broadcasts))
    model = {part: sent[part] for part in ("params", "buffers")}
    return CohortResult(
        cohort, trained, losses, describe(simulation, server, cohort, trained), up, down, model
    )


def aggregate(
    optimizer: ServerOptimizer, exchange: FedAvg, server: Tree, answers: CohortResult
) -> Tree:
    """Return the server's state after aggregation and the server optimizer's step."""
    new = exchange.aggregate(server, answers.trained.messages, answers.round)
    if exchange.trains_model:
        buffers = tree.average_buffers(answers.trained.buffers, answers.round.weights)
        return optimizer.step(server, new) | {"buffers": buffers}
    return new


def aggregate_all(
    simulation: Simulation,
    exchange: FedAvg,
    server: Tree,
    kept: Mapping[int, Tree],
    number: int,
    clock: Clock,
) -> tuple[Tree, list[CohortResult]]:
    """Run an exchange with all clients, one cohort-sized group at a time.

    Each group's messages are averaged at once, so that `aggregate` receives one message and one
    weight per group. A weighted mean needs no more, and the memory used is that of one cohort.

    Returns the server's state and the groups' results.
    """
    total, size = simulation.stages[0].federation.num_clients, simulation.settings.cohort_size
    groups, means = [], []
    for start in range(0, total, size):
        clients = range(start, min(start + size, total))
        groups.append(run_exchange(simulation, exchange, server, kept, number, clients, clock))
        means.append(tree.weighted_mean(groups[-1].trained.messages, groups[-1].round.weights))
        groups[-1] = replace(groups[-1], trained=replace(groups[-1].trained, messages={}))
    weights = torch.stack([group.round.weights.sum() for group in groups])
    server = exchange.aggregate(
        server, tree.stack(means), replace(groups[0].round, weights=weights)
    )
    clock.lap("aggregation")
    return server, groups


def not_finite(done: Sequence[CohortResult]) -> list[int]:
    """Return the clients whose loss, message or running statistics contain NaN or Inf."""
    found: set[int] = set()
    for answers in done:
        whole = torch.isfinite(torch.tensor(answers.losses))
        for leaf in tree.leaves((answers.trained.messages, answers.trained.buffers)):
            whole &= leaf.isfinite().reshape(len(whole), -1).all(1).cpu()
        found |= {
            client
            for client, is_whole in zip(answers.cohort.clients, whole.tolist(), strict=True)
            if not is_whole
        }
    return sorted(found)


def train(simulation: Simulation, sent: Tree, cohort: Cohort, evaluate_local: bool) -> Trained:
    """Train a cohort. Clients with the same role are trained together."""
    runtime, engine, rate = simulation.runtime, simulation.engine, simulation.lr_at(cohort.round)

    def lr_of(role: FedAvg) -> float:
        return role.local_lr(rate) if isinstance(role, OwnTraining) else rate

    positions: dict[FedAvg, list[int]] = {}
    for position, role in enumerate(cohort.roles):
        positions.setdefault(role, []).append(position)
    if len(positions) == 1:
        (role,) = positions
        return engine.train(Shared(role, runtime, sent, lr_of(role)), cohort, evaluate_local)
    gather = Gather(len(cohort.clients))
    for role, where in positions.items():
        some = cohort.take(where)
        gather.add(
            where, engine.train(Shared(role, runtime, sent, lr_of(role)), some, evaluate_local)
        )
    return gather.result()


def sample(simulation: Simulation, number: int) -> list[int]:
    """Return the clients of a round, ascending.

    They are drawn uniformly without replacement, or read from the file `cohorts.path`.
    """
    if simulation.cohorts is not None:
        return simulation.cohorts[number]
    total, size = simulation.stages[0].federation.num_clients, simulation.settings.cohort_size
    sampler = generator_for(simulation.seeds.sampling, "cohort", number)
    return np.sort(sampler.choice(total, size, replace=False)).tolist()


def assemble(
    simulation: Simulation,
    exchange: FedAvg,
    server: Tree,
    kept: Mapping[int, Tree],
    number: int,
    clients: Sequence[int],
) -> Cohort:
    """Assign a role to each client and prepare its schedule, state and plan."""
    seed, runtime, federation = (
        simulation.seeds.training,
        simulation.runtime,
        federation_at(simulation, server, number),
    )
    roles = roles_of(exchange, federation, clients, generator_for(seed, "roles", number))
    pairs = list(zip(roles, clients, strict=True))
    schedules = [
        schedule_of(simulation, role, federation, number, client) for role, client in pairs
    ]
    found = (
        kept[c] if c in kept else first_state(simulation, role, federation) for role, c in pairs
    )
    states = [to(state, runtime.device) for state in found]
    plans = [
        role.host_plan(federation, c, generator_for(seed, "plan", number, c))
        | plan_after(simulation, role, federation, number, c)
        for role, c in pairs
    ]
    personals: list[Tree] = []
    for role, c in pairs:
        own: Tree = {}
        if isinstance(role, Personal):
            rng = generator_for(seed, "personal", number, c)
            own = to(role.personal_broadcast(server, c, kept, rng), runtime.device)
        personals.append(own)
    return Cohort(number, clients, roles, schedules, states, plans, personals)


def first_state(simulation: Simulation, role: FedAvg, federation: Federation) -> Tree:
    """Return a client's state before it first takes part."""
    initial = simulation.initial
    return role.client_init(
        initial | simulation.initial_buffers if role.keeps_buffers else initial, federation
    )


def federation_at(simulation: Simulation, server: Tree, number: int) -> Federation:
    """Return what the server knows about its clients in a round.

    It includes the examples of earlier tasks that clients keep.
    """
    federation = simulation.stage_of(number).federation
    if isinstance(simulation.algorithm, Exemplars):
        return simulation.algorithm.with_kept(server, federation)
    return federation


def schedule_of(
    simulation: Simulation,
    role: FedAvg,
    federation: Federation,
    number: int,
    client: int,
    epochs: int | None = None,
    again: str = "",
) -> BatchSchedule:
    """Return a client's schedule in a round.

    epochs: number of local epochs. None: the number that the client's role has.
    """
    runtime = simulation.runtime
    return make_schedule(
        part=training_part_of(role, federation, client),
        local=replace(runtime.local, epochs=epochs or epochs_of(role, runtime.local)),
        augmentation=runtime.augmentation if role.augments else None,
        image_size=runtime.data.image_size,
        seed=simulation.seeds.training,
        round=number,
        client=client,
        skip_single=simulation.mixes_examples,
        again=again,
    )


def plan_after(
    simulation: Simulation, role: FedAvg, federation: Federation, number: int, client: int
) -> Tree:
    """Return the batches of `OwnTraining.extra_batches` as a part of a client's plan."""
    steps = (
        role.extra_batches(federation, simulation.runtime.local)
        if isinstance(role, OwnTraining)
        else 0
    )
    if not steps:
        return {}
    fresh = schedule_of(simulation, role, federation, number, client, epochs=1, again=" after")
    part = training_part_of(role, federation, client)
    own = int((part[0] if isinstance(part, tuple) else part)[0])
    return {f"after_{name}": array for name, array in padded_schedule(fresh, steps, own).items()}


def broadcast(exchange: FedAvg, server: Tree) -> Tree:
    """Return what every client of the next exchange receives, including the model's running
    statistics.
    """
    return {"buffers": server["buffers"]} | exchange.broadcast(server)


def describe(simulation: Simulation, server: Tree, cohort: Cohort, trained: Trained) -> ServerRound:
    """Return the round as the server's hooks receive it.

    server: the server's state before the exchange.
    """
    stage, federation = (
        simulation.stage_of(cohort.round),
        federation_at(simulation, server, cohort.round),
    )
    return ServerRound(
        federation=federation,
        clients=cohort.clients,
        weights=client_weights(federation, cohort.clients, simulation.runtime),
        previous=server,
        buffers=trained.buffers,
        lr=simulation.lr_at(cohort.round),
        local=simulation.runtime.local,
        public=stage.public,
        surrogate=stage.surrogate,
        rng=generator_for(simulation.seeds.training, "server", cohort.round),
    )


def client_weights(
    federation: Federation, clients: Sequence[int], runtime: ClientRuntime
) -> torch.Tensor:
    """Return the weights [|S|]: numbers of training examples, or ones with weighting=uniform."""
    return torch.as_tensor(
        federation.weights[list(clients)], dtype=runtime.dtype, device=runtime.device
    )


def probes_of(
    simulation: Simulation, cohort: Cohort, parts: Sequence[np.ndarray]
) -> Sequence[Probe]:
    """Return a probe for each client of the cohort, or an empty sequence if the round is not
    measured.

    The marks are before training and after each local epoch.

    parts: every client's training examples, including those that it keeps.
    """
    number, last = cohort.round, simulation.rounds
    due = [
        part
        for part in simulation.analysis.parts
        if isinstance(part, LocalEpochs) and part.is_due(number, last)
    ]
    if not due:
        return ()
    chosen = len(cohort.clients) if due[0].clients is None else due[0].clients
    epochs = [epochs_of(role, simulation.runtime.local) for role in cohort.roles]
    points = [
        points_of(schedule.steps, e, due[0].between)
        for schedule, e in zip(cohort.schedules, epochs, strict=True)
    ]
    room = max(map(len, points))
    probes = []
    for i, (client, own) in enumerate(zip(cohort.clients, points, strict=True)):
        marks, numbers = zip(*own, strict=True) if i < chosen else ((), ())
        probes.append(Probe(marks, numbers, torch.from_numpy(parts[client]), room))
    return probes


def points_of(steps: int, epochs: int, between: bool) -> list[tuple[int, int]]:
    """Return (local steps, epoch) before training and after each epoch.

    If `between` is False, return only the first and the last point. All epochs have the same number
    of steps.
    """
    if not steps:
        return [(0, 0)]
    return [
        (steps // epochs * epoch, epoch) for epoch in range(0, epochs + 1, 1 if between else epochs)
    ]
