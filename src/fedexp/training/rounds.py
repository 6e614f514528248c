"""The round loop: sample, train, aggregate, refine, evaluate, record. It knows no algorithm by
name."""

import logging
import math
import time
from collections import ChainMap, deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from fedexp.algorithms.interfaces import Pixels
from fedexp.core import tree
from fedexp.core.errors import BudgetSpent
from fedexp.core.rng import generator_for, torch_seed
from fedexp.core.tree import Tree
from fedexp.data.changes import in_words
from fedexp.data.types import ImageData
from fedexp.engine.base import Evaluation, has_own
from fedexp.engine.network import LiveNetwork, seeded_torch, subnormals_as_zero
from fedexp.training.analysing import analyse
from fedexp.training.deadline import Deadline
from fedexp.training.exchange import (
    Clock,
    CohortResult,
    aggregate,
    aggregate_all,
    not_finite,
    run_exchange,
    sample,
)
from fedexp.training.neurons import measure, trained_in
from fedexp.training.personal import evaluate_personal
from fedexp.training.profiling import profiled
from fedexp.training.recorder import Recorder, RoundResult
from fedexp.training.simulation import Simulation, State
from fedexp.training.stopping import Stopping, Watch

log = logging.getLogger("fedexp")


def run_rounds(
    simulation: Simulation,
    state: State,
    recorder: Recorder,
    deadline: Deadline | None = None,
    watch: Watch | None = None,
) -> State:
    """Run from the state's round to the last one, or until `stop` or `watch` ends it. Interrupted,
    it saves the state after the last whole round; so it does, and raises BudgetSpent, before a
    round that would not be saved by the deadline."""
    settings, first, deadline = simulation.settings, state.round + 1, deadline or Deadline()
    # seconds of rounds
    recent = deque([state.seconds / state.round] if state.round else [deadline.needed], maxlen=3)
    stopping = Stopping(simulation, watch, recorder.summary)
    # the first one warms up
    profiled_round = min(first + 1, simulation.rounds) if settings.profile else None
    try:
        if not state.accuracy:
            recorder.record_initial(state, evaluate(simulation, state.server, 0))
        # it was resumed and stays so
        if state.status == "running" and stopping.out_of_patience(state):
            recorder.stop(state, stopping.reason(state, 0.0))
        if state.status == "running":
            simulation.engine.start(simulation.bench, model_of(state.server))
        while state.status == "running":
            number, start = state.round + 1, time.perf_counter()
            deadline.check(max(recent) + recorder.saving_seconds)
            if number in dict(simulation.changes):
                log.info("round %d: %s", number, in_words(simulation.stage_of(number).partition))
            with (
                profiled(recorder.directory, number) if number == profiled_round else nullcontext()
            ):
                result = play_round(simulation, state)
            recorder.record_round(state, result)
            recent.append(time.perf_counter() - start)
            if state.status == "running" and (why := stopping.reason(state, max(recent))):
                recorder.stop(state, why)
    except (KeyboardInterrupt, BudgetSpent):
        recorder.save_checkpoint(state)
        raise
    return state


@subnormals_as_zero()
def play_round(simulation: Simulation, state: State) -> RoundResult:
    """Compute one round from a state that it leaves unchanged."""
    clock, number = Clock(), state.round + 1
    algorithm, bench, info = (
        simulation.algorithm,
        simulation.bench,
        simulation.stage_of(number).federation,
    )
    server = state.server
    if number > 1 and simulation.within_task(number) == 1:
        server = begin_task(simulation, server, number)
        clock.lap("refinement")
    clients = sample(simulation, number)
    kept: Mapping[int, Tree] = state.clients
    done: list[CohortResult] = []

    # 1. The exchanges of the round: each sends, trains the cohort and aggregates.
    for exchange in algorithm.exchanges(info):
        local = (
            is_evaluated(simulation, number)
            and simulation.metrics.needs_local
            and exchange.trains_model
        )
        done.append(run_exchange(simulation, exchange, server, kept, number, clients, clock, local))
        kept = ChainMap(dict(zip(clients, done[-1].trained.states, strict=True)), kept)  # type: ignore[arg-type]
        server = aggregate(simulation.server_optimizer, exchange, server, done[-1])
        clock.lap("aggregation")

    # 2. Refine on the server. What layers draw themselves there, such as dropout, is the round's
    # own.
    if has_own(algorithm, "refine"):
        bench.net.set_buffers(server["buffers"])
        with seeded_torch(torch_seed(simulation.seeds.training, "server layers", number)):
            server = algorithm.refine(
                LiveNetwork(bench.net), server, done[-1].trained.messages, done[-1].round
            )
    clock.lap("refinement")

    # 3. At the end of a task that another follows, what all clients are asked for.
    if simulation.ends_task(number) and number < simulation.rounds:
        for exchange in algorithm.closing_exchanges(info):
            server, groups = aggregate_all(
                simulation, exchange, server, state.clients, number, clock
            )
            done += groups

    # 4. Evaluate the new global model, and gather what the round has produced.
    return concluded(simulation, state, server, kept, done, clock)


def concluded(
    simulation: Simulation,
    state: State,
    server: Tree,
    kept: Mapping[int, Tree],
    done: Sequence[CohortResult],
    clock: Clock,
) -> RoundResult:
    """Return the result of the round after `state`, with the measurements that are due in it.

    server, kept: the states of the server and of clients after the round. done: its exchanges, the
    cohort's first.
    """
    number, first = state.round + 1, done[0]
    evaluated = is_evaluated(simulation, number)
    evaluations = evaluate(simulation, server, number) if evaluated else {}
    personal = {}
    if evaluated and simulation.metrics.needs_personal:
        personal = evaluate_personal(simulation, server, kept, number, evaluations)
    alignment = align(simulation, state.server, server, done) if number == simulation.rounds else []
    analyses = analyse(simulation, state, done)
    train_loss = float(np.average(first.losses, weights=first.round.weights.tolist()))
    # waits for the device, before the clock
    finite = math.isfinite(train_loss) and tree.is_finite(server["params"])
    clock.lap("evaluation")
    clock.move("train", "evaluation", sum(each.trained.evaluation_seconds for each in done))
    evaluated_local = [
        each.trained.class_correct for each in done if each.trained.class_correct is not None
    ]
    return RoundResult(
        round=number,
        server=server,
        cohort=first.cohort,
        client_states=[kept[client] for client in first.cohort.clients],
        losses=first.losses,
        train_loss=train_loss,
        not_finite=None if finite else not_finite(done),
        lr=simulation.lr_at(number),
        evaluations=evaluations,
        local_class_correct=evaluated_local[-1] if evaluated_local else None,
        personal=personal,
        alignment=alignment,
        analyses=analyses,
        local_models=trained_in(done) if simulation.settings.keeps_local_models(number) else [],
        examples=sum(schedule.examples for each in done for schedule in each.cohort.schedules),
        bytes_up=sum(each.bytes_up for each in done),
        bytes_down=sum(each.bytes_down for each in done),
        seconds=clock.seconds,
    )


def is_evaluated(simulation: Simulation, number: int) -> bool:
    """Return whether the global model is tested after round `number`."""
    return number % simulation.settings.eval_interval == 0 or simulation.ends_task(number)


def begin_task(simulation: Simulation, server: Tree, number: int) -> Tree:
    """Return the server's state at the start of a task after the first."""
    algorithm, bench, info = (
        simulation.algorithm,
        simulation.bench,
        simulation.stage_of(number).federation,
    )
    before = simulation.stage_of(number - 1).federation
    server = algorithm.begin_task(server, simulation.initial | simulation.initial_buffers, info)
    if has_own(algorithm, "keep_examples"):
        rng = generator_for(simulation.seeds.training, "kept examples", number)
        model = server["params"] | server["buffers"]
        server = algorithm.keep_examples(
            server, lambda numbers: bench.features(model, numbers), before, info, rng
        )
    if not has_own(algorithm, "rehearse"):
        return server
    assert isinstance(bench.data, ImageData), "TARGET and its like are defined for images"
    bench.net.set_buffers(server["buffers"])
    pixels = Pixels(bench.data.shape, bench.data.mean, bench.data.std)
    rng = generator_for(simulation.seeds.training, "rehearsal", number)
    with seeded_torch(torch_seed(simulation.seeds.training, "rehearsal layers", number)):
        return algorithm.rehearse(LiveNetwork(bench.net), server, pixels, info, rng)


def evaluate(simulation: Simulation, server: Tree, number: int) -> dict[str, Evaluation]:
    """Test the global model after round `number` in each test view."""
    # once: an engine of several processes sends each object that it has not seen
    model = model_of(server)
    bench = simulation.bench
    return {view: simulation.engine.evaluate(bench, model, view, number) for view in bench.views}


def align(
    simulation: Simulation, before: Tree, after: Tree, done: Sequence[CohortResult]
) -> list[dict[str, Any]]:
    """Compute the alignment of neurons over this round, where a metric asks for it."""
    if not simulation.metrics.needs_neurons:
        return []
    bench = simulation.bench.tested_on(simulation.bench.views[0])
    return measure(bench, model_of(before), model_of(after), trained_in(done))


def model_of(server: Tree) -> Tree:
    """Return the model alone, without the server's other state."""
    return {name: server[name] for name in ("params", "buffers")}
