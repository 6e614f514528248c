"""Exchanges between the server and the clients.

In an exchange, the server samples clients and sends its model. The clients train the model and
return messages. The server aggregates the messages.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg, overrides, reading
from fedexp.algorithms.interfaces import Federation, ServerRound
from fedexp.algorithms.local_training import LocalTraining
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.core import tree
from fedexp.core.errors import ConfigError, naming_hook
from fedexp.core.rng import generator_for
from fedexp.core.tree import Params, Tree
from fedexp.data.text import DropoutKeys
from fedexp.data.types import TextData
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Gather, Shared, Trained
from fedexp.engine.schedule import (
    BatchSchedule,
    make_schedule,
    padded_schedule,
    steps_of_pass,
)
from fedexp.training.simulation import Simulation
from fedexp.training.state import CohortResult, rows_of

# what a cohort computes if no client starts
NOTHING_TRAINED = Trained({}, [], torch.zeros(0), {}, None)


class Clock:
    """Measures how many seconds each phase of a round takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the seconds since the previous call of this method to the time of a phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def move(self, phase: str, other: str, seconds: float) -> None:
        """Subtract seconds from the time of `phase` and add them to the time of `other`."""
        self.seconds[phase] -= seconds
        self.seconds[other] += seconds


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round, in which a cohort receives a model, trains it and sends messages.

    `algorithm` is usually the algorithm of the run. If a method has several exchanges per round or
    several roles for clients, its hooks `exchanges` and `roles` return a separate algorithm for
    each exchange or role. The other hooks are then called on these algorithms.
    """

    simulation: Simulation
    algorithm: FedAvg
    server: Tree  # the server's state before the exchange
    states: Mapping[int, Tree]  # states of the clients that have taken part before
    number: int  # the round
    copies_epochs: bool = False  # whether to copy the models after each local epoch
    # clients from which no message arrives; whether they train depends on `cohorts.dropout_at`
    dropped: Sequence[int] = ()

    def run(
        self, clients: Sequence[int], clock: Clock, evaluate_local: bool = False
    ) -> CohortResult:
        """Send the broadcast to the clients, train them and collect their messages."""
        cohort = self.assemble(clients)
        arrived = [i for i, client in enumerate(cohort.clients) if client not in self.dropped]
        if self.copies_epochs and self.algorithm.trains_model:
            cohort = replace(cohort, marks=self.marks(cohort))
        clock.lap("sampling")
        sent = broadcast(self.algorithm, self.server)
        trained = self.train(sent, cohort, evaluate_local) if cohort.clients else NOTHING_TRAINED
        if self.simulation.runtime.device.type == "cuda":
            self.prepare_next_round()  # instead of waiting for the device
        losses = trained.losses.tolist()  # waits for the device, so that the timing is correct
        clock.lap("train")
        messages = trained.messages | {"buffers": trained.buffers}
        up = down = 0
        with reading(self.algorithm, "counted", {"sent": sent, "messages": messages}):
            if cohort.clients:
                up = tree.num_bytes(self.algorithm.counted(messages, up=True))
            for personal in cohort.personals:
                received = sent | {"personal": personal}
                down += tree.num_bytes(self.algorithm.counted(received, up=False))
        described = self.describe(cohort, trained, arrived)
        return CohortResult(cohort, trained, losses, arrived, described, up, down, sent)

    @cached_property
    def federation(self) -> Federation:
        """The server's knowledge of the data that its clients train on."""
        algorithm = self.simulation.algorithm
        federation = self.simulation.stage_of(self.number).federation
        with reading(algorithm, "training_data", {"server": self.server}):
            return algorithm.training_data(self.server, federation)

    def generator(self, name: str, *key: int) -> np.random.Generator:
        """Return the random generator that the round uses for the purpose `name`."""
        return generator_for(self.simulation.seeds.training, name, self.number, *key)

    def assemble(self, clients: Sequence[int]) -> Cohort:
        """Assign a role to each client, and prepare schedule, state and plan of those that start.

        The server does not know which clients will start when it assigns the roles.
        """
        device = self.simulation.runtime.device
        assigned = self.algorithm.roles(self.federation, clients, self.generator("roles"))
        absent = self.dropped if self.simulation.participation.dropout_at == "start" else ()
        started, roles, schedules, states, plans, personals = [], [], [], [], [], []
        for role, client in zip(assigned, clients, strict=True):
            if client in absent:
                continue
            started.append(client)
            roles.append(role)
            schedules.append(self.schedule(role, client))
            state = self.states.get(client)
            if state is None:
                state = self.simulation.first_client_state(role, self.federation)
            states.append(tree.to(state, device))
            with naming_hook("algorithm", "host_plan", type(role)):
                plan = role.host_plan(self.federation, client, self.generator("plan", client))
            plans.append(plan | self.extra_plan(role, client))
            rng = self.generator("personal", client)
            with reading(role, "personal_broadcast", {"server": self.server}):
                personal = role.personal_broadcast(self.server, client, self.states, rng)
            personals.append(tree.to(personal, device))
        return Cohort(self.number, started, roles, schedules, states, plans, personals)

    def prepare_next_round(self) -> None:
        """Make the schedules of the next round, if they do not depend on the server's new state."""
        simulation, following = self.simulation, self.number + 1
        hooks = ("training_data", "roles", "exchanges")
        if self.algorithm is not simulation.algorithm or following > simulation.rounds:
            return
        if any(overrides(self.algorithm, hook) for hook in hooks):
            return
        simulation.prepared.clear()
        ahead = replace(self, number=following)
        for client in sample(simulation, following):
            simulation.prepared[following, client] = ahead.schedule(self.algorithm, client)

    def schedule(
        self, role: FedAvg, client: int, epochs: float | None = None, again: str = ""
    ) -> BatchSchedule:
        """Return the batches that a client trains on.

        epochs: the number of passes over the data. None: the number for the client's role.
        again: a suffix that selects other random numbers for a second schedule in the round.
        """
        usual = role is self.simulation.algorithm and epochs is None and not again
        if usual and (self.number, client) in self.simulation.prepared:
            return self.simulation.prepared.pop((self.number, client))
        runtime, skips = self.simulation.runtime, role.skips_batches
        part = role.training_part(self.federation, client)
        local = replace(runtime.local, drop_last=runtime.local.drop_last and skips)
        skip_single = self.simulation.mixes_examples and skips
        if epochs is None:
            pass_steps = steps_of_pass(part, local, skip_single)
            epochs = role.epochs(self.local_of(client, local, pass_steps))
        return make_schedule(
            part=part,
            local=replace(local, epochs=epochs, steps=None),
            augmentation=runtime.augmentation if role.augments else None,
            image_size=runtime.data.image_size,
            seed=self.simulation.seeds.training,
            round=self.number,
            client=client,
            skip_single=skip_single,
            again=again,
        )

    def local_of(self, client: int, local: LocalTraining, pass_steps: int) -> LocalTraining:
        """Return the local training of a client with the number of epochs that it makes.

        pass_steps: the number of batches of a pass over the client's examples.
        """
        epochs = local.epochs
        if local.steps is not None:
            epochs = local.steps / max(pass_steps, 1)
        assert epochs is not None
        return replace(local, epochs=epochs * self.work.get(client, 1.0), steps=None)

    @cached_property
    def work(self) -> Mapping[int, float]:
        """The fraction of local training that the slow clients of the cohort do, by client."""
        simulation, law = self.simulation, self.simulation.participation
        if not law.stragglers:
            return {}
        clients, total = sample(simulation, self.number), simulation.settings.num_clients
        usual = simulation.runtime.local.steps or simulation.runtime.local.epochs
        seed = simulation.seeds.sampling
        return law.slow(seed, self.number, clients, total, int(usual or 1))

    def extra_plan(self, role: FedAvg, client: int) -> Tree:
        """Return the part of a client's plan with the batches for `FedAvg.extra_batches`."""
        steps = role.extra_batches(self.federation, self.simulation.runtime.local)
        if not steps:
            return {}
        fresh = self.schedule(role, client, epochs=1, again=" after")
        part = role.training_part(self.federation, client)
        example = int((part[0] if isinstance(part, tuple) else part)[0])
        arrays = padded_schedule(fresh, steps, example)
        return {f"after_{name}": array for name, array in arrays.items()}

    def marks(self, cohort: Cohort) -> list[list[int]]:
        """Return the local steps of each client before training and after each local epoch.

        The last epoch may be incomplete.
        """
        found = []
        for each in cohort.schedules:
            ends = range(0, each.steps, max(each.pass_steps, 1))
            found.append([*ends, each.steps] if each.steps else [0])
        return found

    def train(self, sent: Tree, cohort: Cohort, evaluate_local: bool) -> Trained:
        """Train a cohort. Clients with the same role are trained together."""
        runtime, engine = self.simulation.runtime, self.simulation.engine
        # a list, because the fields of a role may not be hashable
        distinct: list[FedAvg] = []
        for role in cohort.roles:
            if role not in distinct:
                distinct.append(role)
        gather = Gather(cohort)
        for role in distinct:
            lr = role.local_lr(self.simulation.lr_at(self.number))
            shared = Shared(role, runtime, sent, lr)
            if len(distinct) == 1:
                return engine.train(shared, cohort, evaluate_local)
            chosen = [position for position, each in enumerate(cohort.roles) if each == role]
            gather.add(chosen, engine.train(shared, cohort.take(chosen), evaluate_local))
        return gather.result()

    def describe(
        self, cohort: Cohort, trained: Trained, arrived: Sequence[int] | None = None
    ) -> ServerRound:
        """Return the description of the round that the server's hooks receive.

        arrived: the positions of the clients whose messages arrived. None: those of all clients.
        """
        simulation, stage = self.simulation, self.simulation.stage_of(self.number)
        runtime, count = simulation.runtime, len(cohort.clients)
        arrived = range(count) if arrived is None else arrived
        clients = [cohort.clients[i] for i in arrived]
        weights = self.federation.weights[clients]
        return ServerRound(
            federation=self.federation,
            clients=clients,
            weights=torch.as_tensor(weights, dtype=runtime.dtype, device=runtime.device),
            previous=self.server,
            buffers=rows_of(trained.buffers, arrived, count),
            lr=simulation.lr_at(self.number),
            local=runtime.local,
            public=public_set(simulation, stage.partition.public),
            surrogate=public_set(simulation, stage.server_unlabelled),
            rng=self.generator("server"),
        )


@dataclass(frozen=True)
class PublicSet:
    """The server's public or surrogate examples, as an algorithm's hooks receive them.

    This class implements the protocol `PublicData`. The examples are never augmented.
    """

    runtime: ClientRuntime
    numbers: torch.Tensor  # int64 [n], indices of training examples
    engine: Engine  # computes the models' logits

    def __len__(self) -> int:
        return len(self.numbers)

    def take(
        self, index: np.ndarray, dropout: np.random.Generator | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, keys = self.numbers[torch.tensor(index)].to(self.runtime.device), None
        if dropout is not None and isinstance(self.runtime.data, TextData):
            keys = torch.from_numpy(DropoutKeys().draw(dropout, len(index))).to(self.runtime.device)
        return self.runtime.load_train(chosen, keys)

    def logits(self, models: Sequence[Params]) -> torch.Tensor:
        return torch.stack(self.engine.logits(self.runtime, models, [self.numbers] * len(models)))

    def logits_of_parts(
        self, models: Sequence[Params], parts: Sequence[np.ndarray]
    ) -> list[torch.Tensor]:
        return self.engine.logits(
            self.runtime, models, [self.numbers[torch.tensor(part)] for part in parts]
        )


def public_set(simulation: Simulation, numbers: np.ndarray) -> PublicSet | None:
    """Return the training examples with these indices as a set of the server, or None without."""
    if not len(numbers):
        return None
    return PublicSet(simulation.runtime, torch.from_numpy(numbers), simulation.engine)


def aggregate(
    optimizer: ServerOptimizer, algorithm: FedAvg, server: Tree, result: CohortResult
) -> Tree:
    """Return the server's state after aggregation and the server optimizer's step."""
    new = aggregated(algorithm, server, result.messages, result)
    require_same_model(algorithm, server["params"], new)
    if algorithm.trains_model:
        buffers = tree.average_buffers(result.round.buffers, result.round.weights)
        return optimizer.step(server, new) | {"buffers": buffers}
    return new


def aggregated(algorithm: FedAvg, server: Tree, messages: Tree, result: CohortResult) -> Tree:
    """Return what `aggregate` returns. Raises ConfigError if it changes its arguments.

    The state before the round is compared with the state after it, so it must not change.
    """
    trees = {"messages": messages, "round.buffers": result.round.buffers}
    with reading(algorithm, "aggregate", trees, {"server": server}, result.cohort.round):
        return algorithm.aggregate(server, messages, result.round)


def require_same_model(algorithm: FedAvg, before: Params, server: Any) -> None:
    """Raise ConfigError unless a server's state has a model with the names, shapes and dtypes of
    `before`. torch would expand a bias of another shape to all units."""
    after = server.get("params") if isinstance(server, Mapping) else None
    what = f"algorithm: aggregate of {type(algorithm).__name__} must return the server's state"
    if not isinstance(after, Mapping):
        raise ConfigError(f"{what}, a dict with params; got {type(server).__name__}")
    for name in sorted({*before, *after}):
        found, expected = (
            f"{list(leaf.shape)}, {leaf.dtype}"
            if isinstance(leaf := params.get(name), Tensor)
            else f"{leaf}"
            for params in (after, before)
        )
        if found != expected:
            raise ConfigError(f"{what}; params[{name!r}] must be {expected}, but is {found}")


def aggregate_all(exchange: Exchange, clock: Clock) -> tuple[Tree, list[CohortResult]]:
    """Run an exchange with all clients, in groups of the size of a cohort.

    The messages of each group are averaged as soon as the group has finished, so `aggregate`
    receives one message and one weight per group. This is sufficient for a weighted mean and needs
    only the memory of one cohort.

    Returns the server's state and the results of the groups.
    """
    settings = exchange.simulation.settings
    total, size = settings.num_clients, settings.cohort_size
    groups, means = [], []
    for start in range(0, total, size):
        group = exchange.run(range(start, min(start + size, total)), clock)
        means.append(tree.weighted_mean(group.trained.messages, group.round.weights))
        groups.append(replace(group, trained=replace(group.trained, messages={})))
    weights = torch.stack([group.round.weights.sum() for group in groups])
    first = replace(groups[0], round=replace(groups[0].round, weights=weights))
    server = aggregated(exchange.algorithm, exchange.server, tree.stack(means), first)
    clock.lap("aggregation")
    return server, groups


def broadcast(algorithm: FedAvg, server: Tree) -> Tree:
    """Return the message to all clients of an exchange, including the running statistics."""
    with reading(algorithm, "broadcast", {"server": server}):
        return {"buffers": server["buffers"]} | algorithm.broadcast(server)


def sample(simulation: Simulation, number: int) -> list[int]:
    """Return the clients that take part in a round, in ascending order.

    The clients are drawn uniformly without replacement, unless the config group `cohorts` has
    planned the cohorts.
    """
    if simulation.cohorts is not None:
        return simulation.cohorts[number]
    total, size = simulation.settings.num_clients, simulation.settings.cohort_size
    sampler = generator_for(simulation.seeds.sampling, "cohort", number)
    return np.sort(sampler.choice(total, size, replace=False)).tolist()


def find_non_finite(done: Sequence[CohortResult]) -> list[int]:
    """Return the clients whose loss, message or running statistics contain NaN or Inf.

    Clients that received NaN or Inf do not count, because an earlier exchange caused it, and
    neither do clients whose messages were lost.
    """
    found: set[int] = set()
    for each in done:
        if not tree.is_finite(each.sent):
            continue
        finite = torch.isfinite(torch.tensor([each.losses[i] for i in each.arrived]))
        for leaf in tree.leaves((each.messages, each.round.buffers)):
            finite &= leaf.isfinite().reshape(len(finite), -1).all(1).cpu()
        found.update(np.array(each.round.clients)[~finite.numpy()].tolist())
    return sorted(found)


def trained_models(done: Sequence[CohortResult]) -> list[dict[str, Params]]:
    """Return the models that the clients trained in a round, in the order of the cohort.

    The models are those sent in the last exchange in which clients send whole models. If there is
    no such exchange, the list is empty.
    """
    for result in reversed(done):
        messages, buffers = result.trained.messages, result.trained.buffers
        if "params" in messages:
            return [
                {"params": tree.row(messages["params"], i), "buffers": tree.row(buffers, i)}
                for i in range(len(result.cohort.clients))
            ]
    return []
