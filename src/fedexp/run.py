"""The round loop: sample, train, aggregate, refine, evaluate, record. It knows no algorithm by name."""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from fedexp import tree
from fedexp.algorithms.base import Federation
from fedexp.engine.base import Cohort
from fedexp.engine.schedule import make_schedule
from fedexp.experiment import Experiment, State
from fedexp.profile import profiled
from fedexp.record import Recorder, RoundResult
from fedexp.rng import stream
from fedexp.tree import Params

log = logging.getLogger("fedexp")


def run(experiment: Experiment, state: State, recorder: Recorder) -> State:
    """Goes on from the state's round to the last one. Interrupted, it saves the state after the last whole round."""
    settings, first = experiment.settings, state.round + 1
    profiled_round = min(first + 1, settings.rounds) if settings.profile else None  # the first one warms up
    try:
        if not state.accuracy:
            recorder.record_initial(state, experiment.engine.evaluate(experiment.bench, state.server))
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
    algorithm, info, bench = experiment.algorithm, experiment.federation, experiment.bench
    evaluated = number % experiment.settings.eval_interval == 0 or number == experiment.settings.rounds
    lr = bench.local.lr_at(number)

    # 1. Sample the clients and decide what they train on.
    cohort = assemble(experiment, state, number)
    clock.lap("sampling")

    # 2. Train them.
    evaluate_local = evaluated and experiment.metrics.needs_local
    trained = experiment.engine.train(algorithm, bench, state.server, cohort, lr, evaluate_local)
    losses = trained.losses.tolist()  # waits for the device, so that the clock is true
    clock.lap("train")

    # 3. Aggregate and refine on the server.
    weights = client_weights(info, cohort.clients, bench)
    server = algorithm.aggregate(state.server, trained.messages, weights, info)
    server = server | {"buffers": average_buffers(trained.buffers, weights)}
    clock.lap("aggregation")
    bench.net.set_buffers(server["buffers"])
    server = algorithm.refine(bench.net, server, trained.messages, info)
    clock.lap("refinement")

    # 4. Evaluate the new global model.
    evaluation = experiment.engine.evaluate(bench, server) if evaluated else None
    clock.lap("evaluation")
    clock.seconds["train"] -= trained.evaluation_seconds
    clock.seconds["evaluation"] += trained.evaluation_seconds
    return RoundResult(
        round=number,
        server=server,
        cohort=cohort,
        client_states=trained.states,
        losses=losses,
        train_loss=float(np.average(losses, weights=weights.tolist())),
        lr=lr,
        evaluation=evaluation,
        local_class_correct=trained.class_correct,
        bytes_up=tree.num_bytes(trained.messages) + tree.num_bytes(trained.buffers),
        bytes_down=len(cohort.clients) * tree.num_bytes(state.server),
        seconds=clock.seconds,
    )


def assemble(experiment: Experiment, state: State, number: int) -> Cohort:
    """Samples the clients of a round, uniformly without replacement, and prepares their work."""
    seeds, info, bench = experiment.seeds, experiment.federation, experiment.bench
    sampler = stream(seeds.sampling, "cohort", number)
    chosen = sampler.choice(info.num_clients, experiment.settings.cohort_size, replace=False)
    clients = np.sort(chosen).tolist()
    _, height, width = bench.data.shape
    schedules = [
        make_schedule(
            part=info.parts[client],
            local=bench.local,
            augmentation=bench.augmentation,
            image_size=(height, width),
            seed=seeds.training,
            round=number,
            client=client,
            skip_single=experiment.mixes_examples,
        )
        for client in clients
    ]
    algorithm, kept = experiment.algorithm, state.clients
    states = [kept[c] if c in kept else algorithm.client_init(experiment.initial, info) for c in clients]
    plans = [algorithm.plan(info, c, stream(seeds.training, "plan", number, c)) for c in clients]
    return Cohort(number, clients, schedules, states, plans)


def client_weights(info: Federation, clients: Sequence[int], bench) -> torch.Tensor:
    """[|S|]: numbers of training examples, or ones with weighting=uniform."""
    sizes = [1 if info.weighting == "uniform" else len(info.parts[c]) for c in clients]
    return torch.tensor(sizes, dtype=bench.dtype, device=bench.device)


def average_buffers(stacked: Params, weights: torch.Tensor) -> Params:
    """Running statistics are averaged like parameters; integer buffers (batch counts) take the largest value."""
    return {
        name: tree.weighted_mean(values, weights) if values.is_floating_point() else values.amax(0)
        for name, values in stacked.items()
    }
