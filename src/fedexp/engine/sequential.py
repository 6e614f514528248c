"""One client after the other with torch's fused optimizer, in place; also the engine to debug
with."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import Batch, Context
from fedexp.algorithms.families import OwnStart
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.rng import torch_seed
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import (
    ClientRuntime,
    Cohort,
    Engine,
    Gather,
    ScheduledData,
    Shared,
    Trained,
    has_own_step,
)
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.engine.measures import Watch
from fedexp.engine.network import LiveNetwork, seeded_torch
from fedexp.engine.teachers import Kept


class ClientFailure(RuntimeError):
    """An exception in a client's round; the message names client, hook and round."""


@dataclass(frozen=True)
class Sequential(Engine):
    """The reference engine: any model, any algorithm."""

    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        runtime, server = shared.runtime, shared.server
        runtime.net.set_buffers(server["buffers"])
        runtime.net.hold(server["params"])
        live, gather = LiveNetwork(runtime.net), Gather(len(cohort.clients))
        for position, client in enumerate(cohort.clients):
            one = OneClient(shared, live, cohort.take([position]))
            # What layers draw themselves, such as dropout, is the client's own: whoever trains it,
            # in whatever order.
            with seeded_torch(torch_seed(runtime.seed, "layers", cohort.round, client)):
                gather.add([position], one.play(evaluate_local))
        return gather.result()


class OneClient:
    """One client's whole round."""

    def __init__(self, shared: Shared, live: LiveNetwork, alone: Cohort):
        """Begin the round; `alone` is a cohort of this client."""
        self.algorithm, self.runtime, self.server = shared.algorithm, shared.runtime, shared.server
        self.live, runtime = live, shared.runtime
        self.client, self.round = alone.clients[0], alone.round
        self.watch = Watch(runtime, self.server, alone.probes[0]) if alone.probes else None
        self.data = ScheduledData(runtime, alone.schedules[0])
        self.ctx = Context(
            server=self.server,
            personal=alone.personals[0],
            client=alone.states[0],
            plan=tree.map(self._to_tensor, alone.plans[0]),
            setup={},
            lr=shared.lr,
            steps=self._to_tensor(self.data.steps).to(runtime.dtype),
            local=runtime.local,
        )

    def _to_tensor(self, values: np.ndarray | int) -> Tensor:
        return torch.as_tensor(np.asarray(values), device=self.runtime.device)

    def play(self, evaluate_local: bool) -> Trained:
        self.live.load(self.server["params"], self.server["buffers"])
        hook = "client_setup"
        try:
            with torch.no_grad():
                setup = self.algorithm.client_setup(self.live, self.data, self.ctx)
                self.ctx = replace(self.ctx, setup=setup)
                hook = "initial_params"
                if isinstance(self.algorithm, OwnStart):
                    initial = self.algorithm.initial_params(self.live, self.data, self.ctx)
                    self.live.load(initial, self.server["buffers"])
            hook = "local training"
            loss = self.train()
            hook = "finish"
            trained = self.live.snapshot()
            message, state = self.finish(trained)
        except ConfigError:
            raise
        except Exception as error:
            name = type(self.algorithm).__name__
            where = f"round {self.round}, client {self.client}, in {hook} of {name}"
            raise ClientFailure(f"{where}: {error}") from error
        buffers = self.live.buffers()
        correct, seconds, probed = None, 0.0, None
        if evaluate_local:
            start = time.perf_counter()
            correct = self.evaluate(trained, buffers)
            seconds += time.perf_counter() - start
        if self.watch is not None:
            seconds, probed = seconds + self.watch.seconds, self.watch.counts
        messages, buffers = tree.map(lambda leaf: leaf[None], (message, buffers))
        return Trained(messages, [state], loss[None], buffers, correct, seconds, probed)

    def train(self) -> Tensor:
        """Run the local steps; return the mean objective, 0 where the client has no step."""
        algorithm, live, ctx = self.algorithm, self.live, self.ctx
        own = has_own_step(algorithm)
        params = live.snapshot() if own else live.params
        memory, total = optimizers.memory_of(params, ctx.local), torch.zeros_like(ctx.steps)
        self.look(0, params)
        for batch in self.batches():
            if own:
                params, memory, loss = algorithm.local_step(live, params, memory, batch, ctx)
            else:
                loss = self.step(memory, batch)
            total += loss.detach()
            self.look(batch.step + 1, params)
        if own:
            live.load(params, live.buffers())
        return total / ctx.steps.clamp(min=1)

    def step(self, memory: Tree, batch: Batch) -> Tensor:
        """Take the base's local step with autograd and in place; return the loss."""
        params, ctx = self.live.params, self.ctx
        loss = self.algorithm.objective(self.live, params, batch, ctx)
        # Zeros for what the loss does not use, as torch.func.grad has them.
        found = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
        grads = dict(zip(params, found, strict=True))
        with torch.no_grad():
            grads = self.algorithm.transform_grads(grads, params, batch, ctx)
        optimizers.step_in_place(params, grads, memory, ctx.lr, ctx.local, batch.step)
        return loss

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of local training."""
        kept = self.live.kept = outputs_to_keep(self.runtime, self.data)
        try:
            for batch in self.data.batches():
                if kept is not None:
                    kept.show(batch.x, batch.step)
                yield batch
        finally:
            self.live.kept = None

    def look(self, step: int, params: Params) -> None:
        """Test the model after so many local steps, where that is asked for."""
        if self.watch is not None:
            self.watch.after(step, self.live, params)

    @torch.no_grad()
    def finish(self, trained: Params) -> tuple[Tree, Tree]:
        """Call the hook `finish`; what it computes with the trained parameters uses the running
        statistics that belong to them."""
        self.runtime.net.set_buffers(self.live.buffers())
        outcome = self.algorithm.finish(self.live, trained, self.data, self.ctx)
        self.runtime.net.set_buffers(self.server["buffers"])
        return outcome

    def evaluate(self, trained: Params, buffers: Params) -> dict[str, Tensor]:
        """Return class-wise right answers of the local model with its own running statistics; int64
        [1, C] for each test view."""
        runtime, correct = self.runtime, {}
        runtime.net.set_buffers(buffers)
        for view in runtime.views:
            tested, draws = runtime.local_test(view, self.round)
            correct[view] = tested.evaluate(trained, draws).class_correct[None]
        runtime.net.set_buffers(self.server["buffers"])
        runtime.net.hold(self.server["params"])
        return correct


def outputs_to_keep(runtime: ClientRuntime, data: ScheduledData) -> Kept | None:
    """Return room for the outputs of teachers on a client's examples; None where the same input
    does not come twice.

    On a GPU, to look whether they are known would wait for the device.
    """
    drawn = data.draws is not None and runtime.augmentation is not None
    augmented = drawn and runtime.augmentation.changes_inputs  # type: ignore[union-attr]
    if augmented or runtime.device.type != "cpu" or uses_batch_statistics(runtime.net.module):
        return None
    return Kept(data.index, sum(data.lengths))
