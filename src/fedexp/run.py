"""The round loop: sample, train, aggregate, refine, evaluate, record. It knows no algorithm by name."""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from fedexp import tree
from fedexp.algorithms.contract import Federation, ServerRound
from fedexp.client_states import to
from fedexp.engine.base import Cohort, Trained, Workbench, has_own
from fedexp.engine.network import LiveNetwork
from fedexp.engine.schedule import make_schedule
from fedexp.experiment import Experiment, State
from fedexp.profile import profiled
from fedexp.record import Recorder, RoundResult
from fedexp.rng import stream
from fedexp.tree import Params, Tree

log = logging.getLogger("fedexp")


def run(experiment: Experiment, state: State, recorder: Recorder) -> State:
    """Goes on from the state's round to the last one. Interrupted, it saves the state after the last whole round."""
    settings, first = experiment.settings, state.round + 1
    profiled_round = min(first + 1, settings.rounds) if settings.profile else None  # the first one warms up
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
        """Everything since the last lap was this phase."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def play_round(experiment: Experiment, state: State) -> RoundResult:
    """Computes one round from a state that it leaves unchanged."""
    clock, number = Clock(), state.round + 1
    algorithm, bench = experiment.algorithm, experiment.bench
    evaluated = number % experiment.settings.eval_interval == 0 or number == experiment.settings.rounds
    lr = bench.local.lr_at(number)

    # 1. Sample the clients and decide what they train on.
    cohort = assemble(experiment, state, number)
    clock.lap("sampling")

    # 2. Train them.
    evaluate_local = evaluated and experiment.metrics.needs_local
    sent = broadcast(experiment, state)
    trained = experiment.engine.train(algorithm, bench, sent, cohort, lr, evaluate_local)
    losses = trained.losses.tolist()  # waits for the device, so that the clock is true
    clock.lap("train")

    # 3. Aggregate and refine on the server.
    server_round = describe(experiment, state, cohort, trained)
    server = algorithm.aggregate(state.server, trained.messages, server_round)
    server = server | {"buffers": average_buffers(trained.buffers, server_round.weights)}
    clock.lap("aggregation")
    if has_own(algorithm, "refine"):
        bench.net.set_buffers(server["buffers"])
        server = algorithm.refine(LiveNetwork(bench.net), server, trained.messages, server_round)
    clock.lap("refinement")

    # 4. Evaluate the new global model.
    evaluation = experiment.engine.evaluate(bench, model_of(server)) if evaluated else None
    clock.lap("evaluation")
    clock.seconds["train"] -= trained.evaluation_seconds
    clock.seconds["evaluation"] += trained.evaluation_seconds
    return RoundResult(
        round=number,
        server=server,
        cohort=cohort,
        client_states=trained.states,
        losses=losses,
        train_loss=float(np.average(losses, weights=server_round.weights.tolist())),
        lr=lr,
        evaluation=evaluation,
        local_class_correct=trained.class_correct,
        bytes_up=tree.num_bytes(trained.messages) + tree.num_bytes(trained.buffers),
        bytes_down=len(cohort.clients) * tree.num_bytes(sent) + tree.num_bytes(cohort.personals),
        seconds=clock.seconds,
    )


def assemble(experiment: Experiment, state: State, number: int) -> Cohort:
    """Samples the clients of a round, uniformly without replacement, and prepares their work."""
    seeds, info, bench = experiment.seeds, experiment.federation, experiment.bench
    algorithm, kept = experiment.algorithm, state.clients
    local = replace(bench.local, epochs=algorithm.epochs(bench.local))
    sampler = stream(seeds.sampling, "cohort", number)
    chosen = sampler.choice(info.num_clients, experiment.settings.cohort_size, replace=False)
    clients = np.sort(chosen).tolist()
    _, height, width = bench.data.shape
    schedules = [
        make_schedule(
            part=algorithm.training_part(info, client),
            local=local,
            augmentation=bench.augmentation,
            image_size=(height, width),
            seed=seeds.training,
            round=number,
            client=client,
            skip_single=experiment.mixes_examples,
        )
        for client in clients
    ]
    states = [
        to(kept[c], bench.device) if c in kept else algorithm.client_init(experiment.initial, info) for c in clients
    ]
    plans = [algorithm.plan(info, c, stream(seeds.training, "plan", number, c)) for c in clients]
    personals = [
        to(algorithm.personal(state.server, c, kept, info, stream(seeds.training, "personal", number, c)), bench.device)
        for c in clients
    ]
    return Cohort(number, clients, schedules, states, plans, personals)


def broadcast(experiment: Experiment, state: State) -> Tree:
    """What every client of the next round receives."""
    return experiment.algorithm.broadcast(state.server) | {"buffers": state.server["buffers"]}


def model_of(server: Tree) -> Tree:
    """The global model alone."""
    return {name: server[name] for name in ("params", "buffers")}


def describe(experiment: Experiment, state: State, cohort: Cohort, trained: Trained) -> ServerRound:
    """The round as the server's hooks see it. `state` is that before the round."""
    return ServerRound(
        info=experiment.federation,
        clients=cohort.clients,
        weights=client_weights(experiment.federation, cohort.clients, experiment.bench),
        previous=state.server,
        buffers=trained.buffers,
        lr=experiment.bench.local.lr_at(cohort.round),
        local=experiment.bench.local,
        public=experiment.public,
        rng=stream(experiment.seeds.training, "server", cohort.round),
    )


def client_weights(info: Federation, clients: Sequence[int], bench: Workbench) -> torch.Tensor:
    """[|S|]: numbers of training examples, or ones with weighting=uniform."""
    return torch.as_tensor(info.weights[list(clients)], dtype=bench.dtype, device=bench.device)


def average_buffers(stacked: Params, weights: torch.Tensor) -> Params:
    """Running statistics are averaged like parameters; integer buffers (batch counts) take the largest value."""
    return {
        name: tree.weighted_mean(values, weights) if values.is_floating_point() else values.amax(0)
        for name, values in stacked.items()
    }
