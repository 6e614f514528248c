"""One client after the other with torch's fused optimizer, in place; also the engine to debug
with."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import Batch, ClientData, Context, FedAvg
from fedexp.algorithms.families import OwnStart
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.rng import torch_seed
from fedexp.core.tree import Params, Tree
from fedexp.engine.answers import Answers
from fedexp.engine.base import (
    ClientRuntime,
    Cohort,
    Engine,
    Gather,
    ScheduledData,
    Trained,
    has_own_step,
    to_tensors,
)
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.engine.network import LiveNetwork, seeded_torch
from fedexp.engine.probes import Watch


class ClientFailure(RuntimeError):
    """An exception in a client's round; the message names client, hook and round."""


@dataclass(frozen=True)
class Sequential(Engine):
    """The reference engine: any model, any algorithm."""

    def train(
        self,
        algorithm: FedAvg,
        bench: ClientRuntime,
        server: Tree,
        cohort: Cohort,
        lr: float,
        evaluate_local: bool,
    ) -> Trained:
        bench.net.set_buffers(server["buffers"])
        bench.net.hold(server["params"])
        live, gather = LiveNetwork(bench.net), Gather(len(cohort.clients))
        for position in range(len(cohort.clients)):
            # What layers draw themselves, such as dropout, is the client's own: whoever trains it,
            # in whatever order.
            with seeded_torch(
                torch_seed(bench.seed, "layers", cohort.round, cohort.clients[position])
            ):
                part = play_client(
                    algorithm, bench, live, server, cohort.take([position]), lr, evaluate_local
                )
            gather.add([position], part)
        return gather.result()


def play_client(
    algorithm: FedAvg,
    bench: ClientRuntime,
    live: LiveNetwork,
    server: Tree,
    alone: Cohort,
    lr: float,
    evaluate_local: bool,
) -> Trained:
    """Run one client's whole round; `alone` is a cohort of this client."""
    (client,), (schedule,), (state,), (plan,) = (
        alone.clients,
        alone.schedules,
        alone.states,
        alone.plans,
    )
    (personal,) = alone.personals
    live.load(server["params"], server["buffers"])
    steps = torch.tensor(float(schedule.steps), dtype=bench.dtype, device=bench.device)
    ctx = Context(
        server, personal, state, to_tensors(plan, bench.device), {}, lr, steps, bench.local
    )
    data = ScheduledData(bench, schedule)
    hook = "client_setup"
    try:
        with torch.no_grad():
            ctx = replace(ctx, setup=algorithm.client_setup(live, data, ctx))
            hook = "initial_params"
            if isinstance(algorithm, OwnStart):
                load_start(live, algorithm.initial_params(live, data, ctx), server["buffers"])
        hook = "local training"
        watch = Watch(bench, server, alone.probes[0]) if alone.probes else None
        loss = train_client(algorithm, live, data, ctx, watch)
        hook = "finish"
        trained = live.snapshot()
        message, state = finish(algorithm, bench, live, trained, data, ctx)
    except ConfigError:
        raise
    except Exception as error:
        where = f"round {alone.round}, client {client}, in {hook} of {type(algorithm).__name__}"
        raise ClientFailure(f"{where}: {error}") from error
    buffers = live.buffers()
    start = time.perf_counter()
    correct = (
        evaluate_trained(bench, trained, buffers, server, alone.round) if evaluate_local else None
    )
    seconds = time.perf_counter() - start if evaluate_local else 0.0
    seconds, probed = seconds + (watch.seconds if watch else 0.0), watch.counts if watch else None
    messages, buffers = tree.map(lambda leaf: leaf[None], (message, buffers))
    return Trained(messages, [state], loss[None], buffers, correct, seconds, probed)


def load_start(live: LiveNetwork, start: Params, sent: Params) -> None:
    """Load the parameters that training starts from, with running statistics of its own or, if
    none, those that were sent."""
    own = {name: start.get(name, buffer) for name, buffer in sent.items()}
    live.load({name: value for name, value in start.items() if name not in sent}, own)


@torch.no_grad()
def finish(
    algorithm: FedAvg,
    bench: ClientRuntime,
    live: LiveNetwork,
    trained: Params,
    data: ClientData,
    ctx: Context,
) -> tuple[Tree, Tree]:
    """Call the hook `finish`; what it computes with the trained parameters uses the running
    statistics that belong to them."""
    bench.net.set_buffers(live.buffers())
    outcome = algorithm.finish(live, trained, data, ctx)
    bench.net.set_buffers(ctx.server["buffers"])
    return outcome


def evaluate_trained(
    bench: ClientRuntime, params: Tree, buffers: Tree, server: Tree, round: int
) -> dict[str, torch.Tensor]:
    """Return class-wise right answers of a local model with its own running statistics; int64 [1,
    C] for each test view."""
    bench.net.set_buffers(buffers)
    correct = {
        view: bench.tested_on(view)
        .evaluate(params, bench.test_draws(view, round))
        .class_correct[None]
        for view in bench.views
    }
    bench.net.set_buffers(server["buffers"])
    bench.net.hold(server["params"])
    return correct


def train_client(
    algorithm: FedAvg,
    live: LiveNetwork,
    data: ScheduledData,
    ctx: Context,
    watch: Watch | None = None,
) -> torch.Tensor:
    """Run the local steps on `live`; return the mean objective, 0 when the client has no step."""
    if watch is not None:
        watch.after(0, live, live.params)
    live.answers = answers_on(data.bench, data)
    steps = functional_steps if has_own_step(algorithm) else fused_steps
    try:
        total = steps(algorithm, live, data, ctx, watch)
    finally:
        live.answers = None
    return total / ctx.steps.clamp(min=1)


def batches_shown(live: LiveNetwork, data: ClientData) -> Iterator[Batch]:
    """Yield the batches of local training, and tell the network which one it will be called
    with."""
    for batch in data.batches():
        if live.answers is not None:
            live.answers.show(batch.x, batch.step)
        yield batch


def answers_on(bench: ClientRuntime, data: ScheduledData) -> Answers | None:
    """Return room for the answers on a client's examples; None where the same input does not come
    twice.

    On a GPU, to look whether they are known would wait for the device.
    """
    augmented = (
        data.draws is not None
        and bench.augmentation is not None
        and bench.augmentation.changes_inputs
    )
    if augmented or bench.device.type != "cpu" or uses_batch_statistics(bench.net.module):
        return None
    return Answers(data.index, sum(data.lengths))


def fused_steps(
    algorithm: FedAvg, live: LiveNetwork, data: ClientData, ctx: Context, watch: Watch | None
) -> torch.Tensor:
    """Do the base's local steps with autograd and in place."""
    params = live.params
    memory, total = optimizers.memory_of(params, ctx.local), torch.zeros_like(ctx.steps)
    for batch in batches_shown(live, data):
        loss = algorithm.objective(live, params, batch, ctx)
        # Zeros for what the loss does not use, as torch.func.grad has them.
        found = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
        grads = dict(zip(params, found, strict=True))
        with torch.no_grad():
            grads = algorithm.transform_grads(grads, params, batch, ctx)
        optimizers.step_in_place(params, grads, memory, ctx.lr, ctx.local, batch.step)
        total += loss.detach()
        if watch is not None:
            watch.after(batch.step + 1, live, params)
    return total


def functional_steps(
    algorithm: FedAvg, live: LiveNetwork, data: ClientData, ctx: Context, watch: Watch | None
) -> torch.Tensor:
    """Do the local steps of algorithms with a local step of their own."""
    params = live.snapshot()
    memory, total = optimizers.memory_of(params, ctx.local), torch.zeros_like(ctx.steps)
    for batch in batches_shown(live, data):
        params, memory, loss = algorithm.local_step(live, params, memory, batch, ctx)
        total += loss.detach()
        if watch is not None:
            watch.after(batch.step + 1, live, params)
    live.load(params, live.buffers())
    return total
