"""The loop over the rounds of a run: sample, train, aggregate, refine, evaluate, record.

This module contains no code for particular algorithms.
"""

import logging
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedexp.algorithms.base import overrides, reading
from fedexp.algorithms.interfaces import Pixels, ServerNetwork, TaskStart
from fedexp.core import tree
from fedexp.core.errors import RankDied
from fedexp.core.rng import generator_for, seeded, torch_seed
from fedexp.core.tree import Tree
from fedexp.data.changes import describe_change
from fedexp.data.types import ImageData
from fedexp.engine.network import LiveNetwork, flush_subnormals
from fedexp.metrics.quantity import ARRIVED
from fedexp.rundir import files
from fedexp.training.evaluation import evaluate
from fedexp.training.exchange import (
    Clock,
    Exchange,
    aggregate,
    aggregate_all,
    find_non_finite,
    sample,
)
from fedexp.training.recorder import Recorder, defer_signals
from fedexp.training.simulation import Simulation
from fedexp.training.state import CohortResult, RoundResult, State

log = logging.getLogger("fedexp")


def run_rounds(
    simulation: Simulation,
    state: State,
    recorder: Recorder,
) -> State:
    """Run the remaining rounds, until the last round or until a callback ends the run.

    If the run is interrupted or a rank dies, the state after the last complete round is saved.

    state: the state from which the run continues.
    """
    try:
        if not state.record.rounds:
            record_initial(simulation, state, recorder)
        while state.status == "running":
            result = play_round(simulation, state, recorder.wants_epochs(state.round + 1))
            record_round(state, result, recorder)
            del result  # before the next round, since it holds the clients' models
    except (KeyboardInterrupt, RankDied):
        recorder.save_checkpoint(state)
        raise
    return state


def record_initial(simulation: Simulation, state: State, recorder: Recorder) -> None:
    """Test and record the initial model as round 0."""
    tests = evaluate(simulation, state.server, {}, 0)
    with defer_signals():
        state.add_tests(0, tests)
        recorder.write(state)


def record_round(state: State, result: RoundResult, recorder: Recorder) -> None:
    """Advance the state by a round and write the results.

    Ctrl+C takes effect only after the results have been written.
    """
    with defer_signals():
        result.seconds["writing"] = recorder.writing_seconds
        state.advance(result)
        recorder.write(state, result)


@flush_subnormals()
def play_round(simulation: Simulation, state: State, copies_epochs: bool = False) -> RoundResult:
    """Run the next round and return its result. The state is not changed.

    copies_epochs: whether to copy the local models before training and after each local epoch.
    """
    if state.stopped:
        simulation = replace(simulation, stops_in=state.round + 1)
    # An own part may draw from global generators. Those of clients are seeded for each of them.
    with seeded(torch_seed(simulation.seeds.training, "server hooks", state.round + 1)):
        return _play_round(simulation, state, copies_epochs)


def _play_round(simulation: Simulation, state: State, copies_epochs: bool) -> RoundResult:
    clock, number = Clock(), state.round + 1
    algorithm, stage = simulation.algorithm, simulation.stage_of(number)
    if stage.partition.is_change and stage.first_round == number:
        log.info("round %d: %s", number, describe_change(stage.partition))
    server = state.server
    if number > 1 and simulation.round_in_task(number) == 1:
        server = begin_task(simulation, server, number)
        clock.lap("refinement")
    clients = sample(simulation, number)
    dropped = simulation.dropped(number, clients)
    states: Mapping[int, Tree] = state.clients
    done: list[CohortResult] = []

    # 1. Run the exchanges of the round. In each, the cohort trains and the server aggregates.
    for each in algorithm.exchanges(stage.federation):
        local = simulation.tests_local(number) and each.trains_model
        exchange = Exchange(simulation, each, server, states, number, copies_epochs, dropped)
        result = exchange.run(clients, clock, local)
        done.append(result)
        new_states = dict(zip(result.cohort.clients, result.trained.states, strict=True))
        states = ChainMap(new_states, states)  # type: ignore[arg-type]
        if result.arrived:
            server = aggregate(simulation.server_optimizer, each, server, result)
        clock.lap("aggregation")

    # 2. Refine the model on the server. Layers that draw random numbers, such as dropout, are
    # seeded with the number of the round.
    # Without a message, the server keeps its model.
    if overrides(algorithm, "refine") and result.arrived:  # otherwise, no network is needed
        net = simulation.runtime.net
        net.set_buffers(server["buffers"])
        with seeded(torch_seed(simulation.seeds.training, "server layers", number)):
            messages, before = result.messages, server
            with reading(algorithm, "refine", {"server": before, "messages": messages}):
                server = algorithm.refine(LiveNetwork(net), before, messages, result.round)
    clock.lap("refinement")

    # 3. At the end of each task except the last one, run the closing exchanges with all clients.
    if simulation.ends_task(number) and number < simulation.rounds:
        for each in algorithm.closing_exchanges(stage.federation):
            exchange = Exchange(simulation, each, server, states, number)
            server, groups = aggregate_all(exchange, clock)
            done += groups

    # 4. Evaluate the new global model and collect the results of the round.
    return collect_result(simulation, state, server, states, clients, done, clock)


def log_empty(state: State, number: int) -> None:
    """Log the first round from which no message arrives."""
    if all(state.record.cohorts.values()):
        log.warning(
            "round %d: no client's message arrived, so the global model does not change; the column"
            " %s of %s counts the messages of each round",
            *(number, ARRIVED.name, files.ROUNDS),
        )


def collect_result(
    simulation: Simulation,
    state: State,
    server: Tree,
    states: Mapping[int, Tree],
    sampled: Sequence[int],
    done: Sequence[CohortResult],
    clock: Clock,
) -> RoundResult:
    """Test the models, and return the result of the round.

    state: the state of the run before the round.
    server: the server's state after the round.
    states: the clients' states after the round.
    sampled: the clients that were sampled.
    done: the results of the exchanges. The exchanges with the cohort come before the closing
        exchanges.
    clock: the clock that measures the phases of the round.
    """
    number, first = state.round + 1, done[0]
    is_last = number == simulation.rounds
    if not first.arrived:
        log_empty(state, number)
    tests = evaluate(simulation, server, states, number, state.server, done)
    train_loss = mean_loss(first)
    diverged = diverged_clients(number, train_loss, server, done)
    clock.lap("evaluation")
    clock.move("train", "evaluation", sum(each.trained.evaluation_seconds for each in done))
    return RoundResult(
        round=number,
        is_last=is_last,
        server=server,
        sampled=sampled,
        cohort=first.cohort,
        arrived=list(first.round.clients),
        client_states=[states[client] for client in first.cohort.clients],
        federation=first.round.federation,
        losses=first.losses,
        train_loss=train_loss,
        not_finite=diverged,
        lr=simulation.lr_at(number),
        tests=tests,
        before=state.server,
        exchanges=done,
        examples=sum(schedule.examples for each in done for schedule in each.cohort.schedules),
        bytes_up=sum(each.bytes_up for each in done),
        bytes_down=sum(each.bytes_down for each in done),
        seconds=clock.seconds,
    )


def mean_loss(result: CohortResult) -> float:
    """Return the weighted mean of the losses of the clients whose messages arrived.

    Clients without a batch have no loss and do not count. The result is 0 if this applies to all
    clients, and nan if no message arrived.
    """
    if not result.arrived:
        return math.nan
    weights = result.round.weights.cpu().numpy()
    trained = np.array([result.cohort.schedules[i].steps > 0 for i in result.arrived])
    weights = weights * trained if trained.any() else weights
    losses = [result.losses[i] for i in result.arrived]
    return float(np.average(losses, weights=weights.tolist()))


def diverged_clients(
    number: int, train_loss: float, server: Tree, done: Sequence[CohortResult]
) -> list[int] | None:
    """Return the clients whose loss or model is not finite, or None if the run has not diverged.

    The list is empty if only the aggregated model is not finite. This function waits for the
    device.
    """
    model = server["params"], server["buffers"]
    empty = not done[0].arrived
    if (empty or math.isfinite(train_loss)) and tree.is_finite(model):
        return None
    clients = find_non_finite(done)
    what = f"the loss or the model of clients {clients}" if clients else "the aggregated model"
    log.warning("round %d: the run has diverged, because %s is not finite", number, what)
    return clients


def begin_task(simulation: Simulation, server: Tree, number: int) -> Tree:
    """Return the server's state when a new task starts.

    number: the first round of the new task. This function is not called for the run's first task.
    """
    runtime, seed = simulation.runtime, simulation.seeds.training
    data = runtime.data

    def network(server: Tree) -> ServerNetwork:
        runtime.net.set_buffers(server["buffers"])
        return LiveNetwork(runtime.net)

    start = TaskStart(
        federation=simulation.stage_of(number).federation,
        before=simulation.stage_of(number - 1).federation,
        initial=simulation.initial | simulation.initial_buffers,
        pixels=Pixels(data.shape, data.mean, data.std) if isinstance(data, ImageData) else None,
        network=network,
        features=runtime.features,
        rng=lambda purpose: generator_for(seed, purpose, number),
    )
    algorithm = simulation.algorithm
    with (
        seeded(torch_seed(seed, "rehearsal layers", number)),
        reading(algorithm, "begin_task", {"server": server, "start.initial": start.initial}),
    ):
        return algorithm.begin_task(server, start)
