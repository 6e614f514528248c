"""The round loop: sample, train, aggregate, refine, evaluate, record. It knows no algorithm by name."""

import logging
import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedexp import tree
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.contract import Federation, ServerRound
from fedexp.client_states import to
from fedexp.engine.base import Cohort, Gather, Trained, Workbench, has_own
from fedexp.engine.network import LiveNetwork
from fedexp.engine.schedule import make_schedule
from fedexp.experiment import Experiment, State
from fedexp.profile import profiled
from fedexp.record import Recorder, RoundResult
from fedexp.rng import stream
from fedexp.tree import Tree

log = logging.getLogger("fedexp")


def run(experiment: Experiment, state: State, recorder: Recorder) -> State:
    """Goes on from the state's round to the last one. Interrupted, it saves the state after the last whole round."""
    settings, first = experiment.settings, state.round + 1
    profiled_round = min(first + 1, experiment.rounds) if settings.profile else None  # the first one warms up
    try:
        if not state.accuracy:
            recorder.record_initial(state, experiment.engine.evaluate(experiment.bench, model_of(state.server)))
        while state.status == "running":
            number = state.round + 1
            with profiled(recorder.directory, number) if number == profiled_round else nullcontext():
                result = play_round(experiment, state)
            recorder.record_round(state, result)
    except KeyboardInterrupt:
        recorder.save_checkpoint(state)
        raise
    return state


class Clock:
    """Seconds of each phase of a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Everything since the last lap belongs to this phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def play_round(experiment: Experiment, state: State) -> RoundResult:
    """Computes one round from a state that it leaves unchanged."""
    clock, number = Clock(), state.round + 1
    algorithm, bench, info = experiment.algorithm, experiment.bench, experiment.stage_of(number).federation
    evaluated = number % experiment.settings.eval_interval == 0 or experiment.ends_task(number)
    server = state.server
    if number > 1 and experiment.within_task(number) == 1:
        server = algorithm.begin_task(server, experiment.initial | experiment.initial_buffers, info)
    clients = sample(experiment, number)
    kept: Mapping[int, Tree] = state.clients
    done: list[Answers] = []

    # 1. The exchanges of the round: each sends, trains the cohort and aggregates.
    for exchange in algorithm.exchanges(info):
        local = evaluated and experiment.metrics.needs_local and exchange.trains_model
        done.append(ask(experiment, exchange, server, kept, number, clients, clock, local))
        kept = ChainMap(dict(zip(clients, done[-1].trained.states, strict=True)), kept)  # type: ignore[arg-type]
        server = merge(exchange, server, done[-1])
        clock.lap("aggregation")

    # 2. Refine on the server.
    if has_own(algorithm, "refine"):
        bench.net.set_buffers(server["buffers"])
        server = algorithm.refine(LiveNetwork(bench.net), server, done[-1].trained.messages, done[-1].round)
    clock.lap("refinement")

    # 3. At the end of a task that another follows, what all clients are asked for.
    if experiment.ends_task(number) and number < experiment.rounds:
        for exchange in algorithm.closing(info):
            server, groups = survey(experiment, exchange, server, state.clients, number, clock)
            done += groups

    # 4. Evaluate the new global model.
    evaluation = experiment.engine.evaluate(bench, model_of(server)) if evaluated else None
    clock.lap("evaluation")
    evaluating = sum(each.trained.evaluation_seconds for each in done)
    clock.seconds["train"] -= evaluating
    clock.seconds["evaluation"] += evaluating
    evaluated_local = [each.trained.class_correct for each in done if each.trained.class_correct is not None]
    return RoundResult(
        round=number,
        server=server,
        cohort=done[0].cohort,
        client_states=[kept[client] for client in clients],
        losses=done[0].losses,
        train_loss=float(np.average(done[0].losses, weights=done[0].round.weights.tolist())),
        lr=experiment.lr_at(number),
        evaluation=evaluation,
        local_class_correct=evaluated_local[-1] if evaluated_local else None,
        examples=sum(schedule.examples for each in done for schedule in each.cohort.schedules),
        bytes_up=sum(each.bytes_up for each in done),
        bytes_down=sum(each.bytes_down for each in done),
        seconds=clock.seconds,
    )


@dataclass(frozen=True)
class Answers:
    """What came back from a cohort."""

    cohort: Cohort
    trained: Trained
    losses: list[float]  # [|S|]
    round: ServerRound
    bytes_up: int
    bytes_down: int


def ask(
    experiment: Experiment,
    exchange: FedAvg,
    server: Tree,
    kept: Mapping[int, Tree],
    number: int,
    clients: Sequence[int],
    clock: Clock,
    evaluate_local: bool = False,
) -> Answers:
    """Sends, and trains the clients. kept: what they have kept."""
    cohort = assemble(experiment, exchange, server, kept, number, clients)
    clock.lap("sampling")
    sent = broadcast(exchange, server)
    trained = train(experiment, sent, cohort, evaluate_local)
    losses = trained.losses.tolist()  # waits for the device, so that the clock is true
    clock.lap("train")
    up = tree.num_bytes(trained.messages) + tree.num_bytes(trained.buffers)
    down = len(clients) * tree.num_bytes(sent) + tree.num_bytes(cohort.personals)
    return Answers(cohort, trained, losses, describe(experiment, server, cohort, trained), up, down)


def merge(exchange: FedAvg, server: Tree, answers: Answers) -> Tree:
    """The server's state after aggregation."""
    new = exchange.aggregate(server, answers.trained.messages, answers.round)
    if exchange.trains_model:
        return new | {"buffers": tree.average_buffers(answers.trained.buffers, answers.round.weights)}
    return new


def survey(
    experiment: Experiment, exchange: FedAvg, server: Tree, kept: Mapping[int, Tree], number: int, clock: Clock
) -> tuple[Tree, list[Answers]]:
    """An exchange with all clients, as many at a time as a cohort has: the server's state, and what came back.

    The messages of each group are averaged at once, so that `aggregate` sees one message with one weight per group: all
    that a weighted mean needs, at the memory of a cohort.
    """
    total, size = experiment.stages[0].federation.num_clients, experiment.settings.cohort_size
    groups, means = [], []
    for start in range(0, total, size):
        clients = range(start, min(start + size, total))
        groups.append(ask(experiment, exchange, server, kept, number, clients, clock))
        means.append(tree.weighted_mean(groups[-1].trained.messages, groups[-1].round.weights))
        groups[-1] = replace(groups[-1], trained=replace(groups[-1].trained, messages={}))
    weights = torch.stack([group.round.weights.sum() for group in groups])
    server = exchange.aggregate(server, tree.stack(means), replace(groups[0].round, weights=weights))
    clock.lap("aggregation")
    return server, groups


def train(experiment: Experiment, sent: Tree, cohort: Cohort, evaluate_local: bool) -> Trained:
    """Trains a cohort, those with one role together."""
    bench, engine, lr = experiment.bench, experiment.engine, experiment.lr_at(cohort.round)
    positions: dict[FedAvg, list[int]] = {}
    for position, role in enumerate(cohort.roles):
        positions.setdefault(role, []).append(position)
    if len(positions) == 1:
        return engine.train(cohort.roles[0], bench, sent, cohort, cohort.roles[0].rate(lr), evaluate_local)
    gather = Gather(len(cohort.clients))
    for role, where in positions.items():
        gather.add(where, engine.train(role, bench, sent, cohort.take(where), role.rate(lr), evaluate_local))
    return gather.result()


def sample(experiment: Experiment, number: int) -> list[int]:
    """The clients of a round, uniformly without replacement; ascending."""
    total, size = experiment.stages[0].federation.num_clients, experiment.settings.cohort_size
    sampler = stream(experiment.seeds.sampling, "cohort", number)
    return np.sort(sampler.choice(total, size, replace=False)).tolist()


def assemble(
    experiment: Experiment,
    exchange: FedAvg,
    server: Tree,
    kept: Mapping[int, Tree],
    number: int,
    clients: Sequence[int],
) -> Cohort:
    """Decides who does what, and prepares the work of each client."""
    seed, bench, info = experiment.seeds.training, experiment.bench, experiment.stage_of(number).federation
    roles = exchange.roles(info, clients, stream(seed, "roles", number))
    pairs = list(zip(roles, clients, strict=True))
    schedules = [
        make_schedule(
            part=role.training_part(info, client),
            local=replace(bench.local, epochs=role.epochs(bench.local)),
            augmentation=bench.augmentation if role.augments else None,
            image_size=bench.data.image_size,
            seed=seed,
            round=number,
            client=client,
            skip_single=experiment.mixes_examples,
        )
        for role, client in pairs
    ]
    states = [
        to(kept[c], bench.device) if c in kept else role.client_init(experiment.initial, info) for role, c in pairs
    ]
    plans = [role.plan(info, c, stream(seed, "plan", number, c)) for role, c in pairs]
    personals = [
        to(role.personal(server, c, kept, info, stream(seed, "personal", number, c)), bench.device) for role, c in pairs
    ]
    return Cohort(number, clients, roles, schedules, states, plans, personals)


def broadcast(exchange: FedAvg, server: Tree) -> Tree:
    """What every client of the next exchange receives, with the running statistics of the model in it."""
    return {"buffers": server["buffers"]} | exchange.broadcast(server)


def model_of(server: Tree) -> Tree:
    """The global model alone."""
    return {name: server[name] for name in ("params", "buffers")}


def describe(experiment: Experiment, server: Tree, cohort: Cohort, trained: Trained) -> ServerRound:
    """The round as the server's hooks see it. `server` is its state before the exchange."""
    stage = experiment.stage_of(cohort.round)
    return ServerRound(
        info=stage.federation,
        clients=cohort.clients,
        weights=client_weights(stage.federation, cohort.clients, experiment.bench),
        previous=server,
        buffers=trained.buffers,
        lr=experiment.lr_at(cohort.round),
        local=experiment.bench.local,
        public=stage.public,
        surrogate=stage.surrogate,
        rng=stream(experiment.seeds.training, "server", cohort.round),
    )


def client_weights(info: Federation, clients: Sequence[int], bench: Workbench) -> torch.Tensor:
    """[|S|]: numbers of training examples, or ones with weighting=uniform."""
    return torch.as_tensor(info.weights[list(clients)], dtype=bench.dtype, device=bench.device)
