"""The sequential engine trains one client after another.

The model is updated in place by torch's fused optimizer. Use this engine for debugging.
"""

import copy
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import Batch, Context, overrides, require_unchanged, step_hooks
from fedexp.algorithms.plain import (
    Loader,
    PlainClient,
    PlainContext,
    require_same_shapes,
    require_tensors,
    state_of,
)
from fedexp.core import tree
from fedexp.core.errors import ConfigError, describe, line_of
from fedexp.core.rng import seeded, torch_seed
from fedexp.core.tree import Params, Tree
from fedexp.core.unchanged import Unchanged
from fedexp.engine.base import (
    Cohort,
    Engine,
    Gather,
    ScheduledData,
    Shared,
    Trained,
)
from fedexp.engine.network import LiveNetwork


class ClientFailure(RuntimeError):
    """Raised if the training of a client fails.

    The message names the round, the client, the hook that raised the exception, and the line of the
    algorithm's file.
    """


@dataclass(frozen=True)
class Sequential(Engine):
    """Engine that trains one client after another and supports all models and algorithms."""

    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        runtime, server = shared.runtime, shared.server
        runtime.net.set_buffers(server["buffers"])
        live, gather = LiveNetwork(runtime.net), Gather(cohort)
        for position, client in enumerate(cohort.clients):
            training = ClientTraining(shared, live, cohort.take([position]))
            # The random numbers of layers such as dropout, and those that an own part draws from
            # global generators, depend only on the client and the round, not on the process or on
            # the order in which clients are trained.
            with seeded(torch_seed(runtime.seed, "layers", cohort.round, client)):
                gather.add([position], training.run(evaluate_local))
        return gather.result()


class ClientTraining:
    """The training of one client in one round."""

    def __init__(self, shared: Shared, live: LiveNetwork, alone: Cohort):
        """Prepare the training.

        live: the network that is trained.
        alone: a cohort that contains only this client.
        """
        self.algorithm, self.runtime, self.server = shared.algorithm, shared.runtime, shared.server
        self.live, runtime = live, shared.runtime
        self.client, self.round = alone.clients[0], alone.round
        self.marks = alone.marks[0] if alone.marks else ()
        self.copies: list[Params] = []
        self.outcome: PlainContext  # of a plain client
        self.data = ScheduledData(runtime, alone.schedules[0])
        own, self.kept = optimizers.split_state(alone.states[0])
        self.ctx = Context(
            server=self.server,
            personal=alone.personals[0],
            client=own,
            plan=tree.map(self._to_tensor, alone.plans[0]),
            setup={},
            lr=shared.lr,
            steps=self._to_tensor(self.data.steps).to(runtime.dtype),
            local=runtime.local,
            pass_steps=self._to_tensor(self.data.whole_pass).to(runtime.dtype),
        )
        sent = "ctx.received" if self.algorithm.plain else "ctx.server"
        trees = {f"ctx.{name}": getattr(self.ctx, name) for name in ("client", "personal", "plan")}
        self.received = Unchanged(trees | {sent: self.server}, copies=self.round == 1)

    def _to_tensor(self, values: np.ndarray | int) -> Tensor:
        return torch.tensor(np.asarray(values), device=self.runtime.device)

    def run(self, evaluate_local: bool) -> Trained:
        self.live.load(self.server["params"], self.server["buffers"])
        hook = "client_setup"
        try:
            with torch.no_grad():
                setup = self.algorithm.client_setup(self.live, self.data, self.ctx)
                self.require_unchanged(hook)
                self.ctx = replace(self.ctx, setup=setup)
                self.received.add({"ctx.setup": setup})
                hook = "initial_params"
                if overrides(self.algorithm, hook):
                    initial = self.algorithm.initial_params(self.live, self.data, self.ctx)
                    self.require_unchanged(hook)
                    self.live.load(initial, self.server["buffers"])
            hook = "local training"
            loss = self.train()
            self.require_unchanged(step_hooks(self.algorithm))
            hook = "finish"
            trained = self.live.snapshot()
            self.received.add({"params": trained})
            message, state = self.finish(trained)
            self.require_unchanged(hook)
            message = tree.map(lambda leaf: leaf[None], message)
            if self.kept is not None:
                state = state | {optimizers.KEPT: self.kept}
        except ConfigError:
            raise
        except Exception as error:
            kind = type(self.algorithm)
            where = f"client {self.client}, in {hook} of {kind.__name__}{line_of(kind, error)}"
            message = f"round {self.round}, {where}: {describe(error)}"
            raise ClientFailure(message) from error
        buffers = self.live.buffers()
        correct, seconds = None, 0.0
        if evaluate_local:
            start = time.perf_counter()
            correct = self.evaluate(trained, buffers)
            seconds += time.perf_counter() - start
        buffers = tree.map(lambda leaf: leaf[None], buffers)
        epochs = [self.copies] if self.marks else []
        return Trained(message, [state], loss[None], buffers, correct, seconds, epochs)

    def require_unchanged(self, hook: str) -> None:
        require_unchanged(self.algorithm, hook, self.received)

    def train(self) -> Tensor:
        """Run the local steps and return the mean objective, or 0 if there are no steps."""
        algorithm, live, ctx = self.algorithm, self.live, self.ctx
        if isinstance(algorithm, PlainClient):
            return self.fit(algorithm)
        own = overrides(algorithm, "local_step")
        params = live.snapshot() if own else live.params
        memory = optimizers.memory_of(params, ctx.local, self.kept)
        total = torch.zeros_like(ctx.steps)
        self.copy_model(0, params)
        for batch in self.data.batches():
            if own:
                params, memory, loss = algorithm.local_step(live, params, memory, batch, ctx)
            else:
                loss = self.step(memory, batch)
            total += loss.detach()
            self.copy_model(batch.step + 1, params)
        if own:
            live.load(params, live.buffers())
        if self.kept is not None:
            self.kept = memory
        return total / ctx.steps.clamp(min=1)

    def fit(self, algorithm: PlainClient) -> Tensor:
        """Let a plain client train a copy of the module, and return the loss."""
        ctx, live = self.ctx, self.live
        if self.marks:
            raise ConfigError(
                f"algorithm: {type(algorithm).__name__} trains in fit, whose local epochs cannot be"
                " seen; leave out analysis.local_epochs"
            )
        self.outcome = PlainContext(
            self.client,
            self.round,
            self.server,
            ctx.personal,
            ctx.plan,
            ctx.lr,
            ctx.local,
            steps=self.data.steps,
            epochs=-(-self.data.steps // max(self.data.whole_pass, 1)),
            kept=tree.map(torch.clone, dict(ctx.client)),
        )
        if not self.data.steps:
            return torch.zeros_like(ctx.steps)
        # `fit` may change requires_grad, the mode or hooks, which the next client must not see
        module = copy.deepcopy(live.module)
        loader = Loader(self.data.batches(), self.data.steps, self.data.whole_pass)
        is_bf16, device = self.runtime.net.precision == "bf16", ctx.steps.device.type
        precision = torch.autocast(device, torch.bfloat16) if is_bf16 else nullcontext()
        with precision:
            loss = algorithm.fit(module, loader, self.outcome)
        values = state_of(module)
        require_same_shapes(state_of(live.module), values)
        live.load(live.params | {k: v for k, v in values.items() if k in live.params}, values)
        require_tensors(self.outcome.kept, "ctx.kept")
        require_tensors(self.outcome.message, "ctx.message")
        if not isinstance(loss, Tensor | float | int) or torch.as_tensor(loss).numel() != 1:
            raise ConfigError(
                f"algorithm: fit of {type(algorithm).__name__} returned {loss!r}; must be the mean"
                " loss, a number"
            )
        return torch.as_tensor(loss, device=ctx.steps.device).detach().to(ctx.steps).reshape(())

    def step(self, memory: Tree, batch: Batch) -> Tensor:
        """Run FedAvg's local step, update the parameters in place, and return the loss."""
        params, ctx = self.live.params, self.ctx
        loss = self.algorithm.objective(self.live, params, batch, ctx)
        # materialize_grads: zeros for unused parameters, as in torch.func.grad
        found = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
        grads = dict(zip(params, found, strict=True))
        with torch.no_grad():
            grads = self.algorithm.transform_grads(grads, params, batch, ctx)
        optimizers.step_in_place(params, grads, memory, ctx.lr, ctx.local, batch.step)
        return loss

    def copy_model(self, step: int, params: Params) -> None:
        """Copy the model if the cohort marks the current step.

        step: the number of local steps so far.
        """
        if step in self.marks:
            model = params | self.live.buffers()
            self.copies.append({name: leaf.detach().cpu().clone() for name, leaf in model.items()})

    @torch.no_grad()
    def finish(self, trained: Params) -> tuple[Tree, Tree]:
        """Call the hook `finish` and return its result.

        During the call, the network has the running statistics of the trained model.
        """
        if self.algorithm.plain:
            return {**self.outcome.message, "params": trained}, self.outcome.kept
        self.runtime.net.set_buffers(self.live.buffers())
        outcome = self.algorithm.finish(self.live, trained, self.data, self.ctx)
        self.runtime.net.set_buffers(self.server["buffers"])
        return outcome

    def evaluate(self, trained: Params, buffers: Params) -> dict[str, Tensor]:
        """Return the correct predictions of the local model in each view, int64 [1, C].

        buffers: the running statistics of the local model.
        """
        runtime, correct = self.runtime, {}
        runtime.net.set_buffers(buffers)
        for view in runtime.views:
            tested, draws = runtime.tested_on(view), runtime.test_draws(view, self.round)
            correct[view] = tested.evaluate(trained, draws).class_correct[None]
        runtime.net.set_buffers(self.server["buffers"])
        return correct
