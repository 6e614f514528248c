"""Train all clients of a cohort together: network, stacked state and local step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.utils.rnn import pad_sequence

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import (
    Batch,
    Context,
    FedAvg,
    Network,
    overrides,
    require_unchanged,
    step_hooks,
)
from fedexp.core import tree
from fedexp.core.private.torch_internals import copy_each
from fedexp.core.tree import Params, Tree
from fedexp.core.unchanged import Unchanged
from fedexp.engine.base import ClientRuntime, Cohort, Shared
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.schedule import BatchSchedule
from fedexp.engine.vectorised.convolution import PerClientLayers
from fedexp.engine.vectorised.streams import beside, join, mark
from fedexp.models import Output

# Maximum size in bytes of the images that are loaded together, for several steps. Loading them
# together launches fewer kernels.
LOAD_BYTES = 1 << 26


class ClientInputs(NamedTuple):
    """The values that the clients' hooks read, as tensors [C, ...] for C clients."""

    personals: Tree
    states: Tree
    plans: Tree
    setups: Tree
    steps: Tensor
    pass_steps: Tensor


@dataclass(frozen=True)
class Frame:
    """All values that a local step of C clients uses, except the batch.

    A step reads the first three fields and changes the other fields in place. Unless noted
    otherwise, tensors have the shape [C, ...].
    """

    server: Tree
    lr: float | Tensor
    inputs: ClientInputs
    params: Params  # leaves [C, ...]
    buffers: Params  # running statistics; leaves [C, ...]
    memory: Tree  # the optimizer's state; leaves [C, ...]
    losses: Tensor  # [C]: sum of the objective over the steps so far


# --- arguments of one client's hooks inside vmap


class ClientNetwork(Network):
    """The network of one client, with the client's running statistics.

    The class corresponds to engine.network.LiveNetwork. A call with the parameters for which
    `gradient` computes a gradient runs in train mode and updates the running statistics. A call
    with any other parameters runs in eval mode. No tensor is changed in place; the method `buffers`
    returns the updated running statistics.
    """

    def __init__(
        self,
        net: FunctionalNetwork,
        buffers: Params,
        reference: Params | None = None,
        teacher: Params | None = None,
        start: torch.cuda.Event | None = None,
    ):
        """Wrap a network.

        buffers: the running statistics of the client.
        reference: the running statistics for models in eval mode. None: the statistics in
            `net`, those of the model that the client received.
        teacher: parameters that exist when a local step starts, those of the received model.
        start: the mark of this start in a recorded step (see `streams`). With it, the first call
            with `teacher` and the batch runs beside the work before it, but only until the first
            gradient: a backward pass uses the same second stream, so its memory may still be read.
        """
        self.net, self._buffers, self._reference = net, buffers, reference or {}
        self._teacher, self._start = teacher, start
        self._moving: Params | None = None
        self._batch: Batch | None = None

    def set_batch(self, batch: Batch) -> Batch:
        """Store the current batch of the client and, if known, its features; return the batch.

        Calls with the inputs of this batch use the mask of the batch.
        """
        self._batch = batch
        if batch.features is not None:
            self.net.known.set(batch.x, batch.features)
        return batch

    def __call__(self, params: Params, x: Tensor, mask: Tensor | None = None) -> Output:
        if mask is None and self._batch is not None and x is self._batch.x:
            mask = self._batch.mask
        with PerClientLayers():
            if params is not self._moving:
                return self._in_eval_mode(params, x, mask)
            moved = {name: value.clone() for name, value in self._buffers.items()}
            output = self.net.call_in_training(params, moved, x, mask)
        if mask is not None and moved:  # a batch without examples does not change the statistics
            there = mask.sum() > 0
            moved = {k: torch.where(there, moved[k], v) for k, v in self._buffers.items()}
        self._buffers = moved
        return output

    def _in_eval_mode(self, params: Params, x: Tensor, mask: Tensor | None) -> Output:
        start, batch = self._start, self._batch
        given = batch is not None and x is batch.x and mask is batch.mask
        if start is None or batch is None or not given or params is not self._teacher:
            return self.net(self._reference | params, x, mask)
        self._start = None
        with beside(batch.x.device, start):
            output = self.net(self._reference | params, x, mask)
        join(batch.x.device)
        return output

    def gradient(
        self, function: Callable[[Params], Tensor], params: Params, moves: bool = True
    ) -> tuple[Params, Tensor]:
        def scored(moving: Params) -> tuple[Tensor, Params]:
            self._moving = moving
            return function(moving), self._buffers

        before = self._buffers
        grads, (value, self._buffers) = grad_and_value(scored, has_aux=True)(params)
        self._moving = self._start = None
        if not moves:
            self._buffers = before
        return grads, value

    def slim(self, params: Params, x: Tensor, width: float, mask: Tensor | None = None) -> Tensor:
        with PerClientLayers():
            return self.net.slim(params, x, width, mask)

    def buffers(self) -> Params:
        return self._buffers


@dataclass(frozen=True)
class PaddedData:
    """The batches of one client inside vmap.

    It implements `ClientData`, the protocol of the hooks' argument `data`.
    """

    runtime: ClientRuntime
    net: ClientNetwork
    index: Tensor  # [S, B]
    mask: Tensor  # [S, B]
    draws: Tensor | None
    pass_steps: int

    def batches(self) -> Iterator[Batch]:
        for step in range(self.steps):
            draws = None if self.draws is None else self.draws[step]
            x, y = self.runtime.load_train(self.index[step], draws)
            yield self.net.set_batch(Batch(x, y, self.mask[step], step))

    def take(self, index: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.runtime.load_train(index, draws)

    @property
    def steps(self) -> int:
        return self.index.shape[0]


def context(shared: Shared, server: Tree, lr: float | Tensor, one: ClientInputs) -> Context:
    """Return the context that is passed to the hooks of one client.

    one: the values of this client.
    """
    rate: Any = lr  # a tensor if the steps are recorded as CUDA graphs
    local = shared.runtime.local
    given = (one.personals, one.states, one.plans, one.setups, rate, one.steps, local)
    return Context(server, *given, one.pass_steps)


def received_by_clients(inputs: ClientInputs) -> dict[str, Tree]:
    """Return what the hooks of clients may only read, by the names for messages."""
    return {
        "ctx.personal": inputs.personals,
        "ctx.client": inputs.states,
        "ctx.plan": inputs.plans,
    }


# --- the schedules of all clients


@dataclass(frozen=True)
class PaddedSchedules:
    """The schedules of C clients as arrays on the device, in the order of the steps."""

    index: Tensor  # int64 [S, C, B]
    mask: Tensor  # [S, C, B]: 1 example, 0 padding
    draws: Tensor | None  # int64 [S, C, B, D]
    steps: np.ndarray  # int [C]: number of steps of each client; on the CPU, which launches kernels
    pass_steps: np.ndarray  # int [C]: number of batches of a whole pass over a client's examples

    def part(self, steps: slice | int, active: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (index, mask, draws) of the given steps for the first `active` clients."""
        draws = None if self.draws is None else self.draws[steps][..., :active, :, :]
        return self.index[steps][..., :active, :], self.mask[steps][..., :active, :], draws


def pad(schedules: Sequence[BatchSchedule], runtime: ClientRuntime) -> PaddedSchedules:
    """Join schedules of different lengths in padded arrays.

    Padding has mask 0 and the index of an example of the same client, or of the first client if the
    client has no example in a batch. Other examples may have invalid labels.

    schedules: those with more steps come first.
    """
    steps = np.array([s.steps for s in schedules])
    batch_size = schedules[0].index.shape[1]
    lengths = pad_sequence([torch.from_numpy(s.lengths) for s in schedules])
    index = pad_sequence([s.index for s in schedules])
    for i, schedule in enumerate(schedules if len(index) else ()):
        valid = schedule if schedule.steps else schedules[0]
        index[schedule.steps :, i] = valid.index[0, 0]
    mask = (torch.arange(batch_size) < lengths[..., None]).to(runtime.dtype)
    draws = [s.draws for s in schedules if s.draws is not None]
    return PaddedSchedules(
        index=upload(index, runtime.device),
        mask=upload(mask, runtime.device),
        draws=upload(pad_sequence(draws), runtime.device) if draws else None,
        steps=steps,
        pass_steps=np.array([s.pass_steps for s in schedules]),
    )


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for the copy.

    The tensor is pinned first, because a copy from pageable memory would wait for all earlier work
    on the device.
    """
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


# --- a round


class ClientStack:
    """The clients of a cohort during one round. Clients with more steps come first."""

    def __init__(self, shared: Shared, cohort: Cohort):
        self.shared, self.count = shared, len(cohort.clients)
        # called after each step with the number of steps so far and the frame
        self.watch: Callable[[int, Frame], None] | None = None
        algorithm, runtime = shared.algorithm, shared.runtime
        self.padded = pad(cohort.schedules, runtime)
        personals = tree.stack(cohort.personals)
        states, kept = optimizers.split_state(tree.stack(cohort.states))
        self.keeps_optimizer = kept is not None

        def stacked(*values: Any) -> Tensor:
            return upload(torch.as_tensor(np.stack(values)), runtime.device)

        plans = tree.map(stacked, *cohort.plans)
        steps, pass_steps = (
            upload(torch.as_tensor(each, dtype=runtime.dtype), runtime.device)
            for each in (self.padded.steps, self.padded.pass_steps)
        )
        inputs = ClientInputs(personals, states, plans, {}, steps, pass_steps)
        # inside vmap, torch does not count changes of a client's values
        self.received = Unchanged({"ctx.server": shared.server}, copies=cohort.round == 1)
        self.received.add(received_by_clients(inputs))
        setups, buffers = self._per_client(algorithm.client_setup, inputs)
        self.require_unchanged("client_setup")
        inputs = inputs._replace(setups=setups)
        self.received.add({"ctx.setup": setups})
        if overrides(algorithm, "initial_params"):
            params, buffers = self._own_start(algorithm, inputs)
            self.require_unchanged("initial_params")
        else:
            params = self._copies("params")
            buffers = {name: value.clone() for name, value in buffers.items()}
        memory = optimizers.memory_of(params, runtime.local, kept)
        losses = torch.zeros_like(steps)
        self.frame = Frame(shared.server, shared.lr, inputs, params, buffers, memory, losses)

    def require_unchanged(self, hook: str) -> None:
        """Raise ConfigError if a hook has changed what the clients received."""
        require_unchanged(self.shared.algorithm, hook, self.received)

    def steps(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield pairs (number of active clients, batches of the next steps).

        A client is active if it has steps left. Each pair contains the batches of several steps.
        The images of these batches are loaded together.
        """
        steps, batch_size = self.padded.steps, self.padded.index.shape[-1]
        images = self.shared.runtime.data.x_train
        image_bytes = math.prod(images.shape[1:]) * self.shared.runtime.dtype.itemsize
        start = 0
        while start < steps[0]:
            active = int((steps > start).sum())
            at_once = max(LOAD_BYTES // (active * batch_size * image_bytes), 1)
            stop = min(int(steps[active - 1]), start + at_once)
            yield active, self._batches(start, stop, active)
            start = stop

    def _batches(self, start: int, stop: int, active: int) -> Iterator[Batch]:
        """Yield the batches of steps `start` to `stop` - 1, as tensors [active, B, ...]."""
        index, mask, draws = self.padded.part(slice(start, stop), active)
        x, y = self.shared.runtime.load_train(index, draws)
        known = self.shared.runtime.net.known.get(x)
        for i, number in enumerate(range(start, stop)):
            yield Batch(x[i], y[i], mask[i], number, None if known is None else known[i])

    def finish(self) -> tuple[Tree, Tree, Params]:
        """Return (messages, new states, running statistics) of C clients, as tensors [C, ...]."""

        def finish(
            net: ClientNetwork, data: PaddedData, ctx: Context, params: Params
        ) -> tuple[Tree, Tree]:
            return self.shared.algorithm.finish(net, params, data, ctx)

        frame = self.frame
        self.require_unchanged(step_hooks(self.shared.algorithm))
        self.received.add({"params": frame.params})
        (messages, states), buffers = self._per_client(
            finish, frame.inputs, frame.buffers, frame.params
        )
        self.require_unchanged("finish")
        if self.keeps_optimizer:
            states = states | {optimizers.KEPT: frame.memory}
        return messages, states, buffers

    def _per_client(
        self,
        hook: Callable[..., Any],
        inputs: ClientInputs,
        own: Params | None = None,
        *values: Tree,
    ) -> tuple[Any, Params]:
        """Call hook(net, data, context, *values) for all clients.

        Returns the results of the hook and the running statistics after the call, as tensors [C,
        ...].

        own: the running statistics of each client; models in eval mode use them too. None: all
        models use the running statistics that the server sent.
        """
        shared, padded = self.shared, self.padded
        first = int(np.minimum(padded.steps, padded.pass_steps).max())

        def call(
            index: Tensor,
            mask: Tensor,
            draws: Tensor | None,
            buffers: Params,
            one: ClientInputs,
            *rest: Tree,
        ) -> tuple[Tree, Params]:
            net = ClientNetwork(shared.runtime.net, buffers, None if own is None else buffers)
            data = PaddedData(shared.runtime, net, index, mask, draws, first)
            ctx = context(shared, shared.server, shared.lr, one)
            before = Unchanged(received_by_clients(one))  # finds changed dicts
            result = hook(net, data, ctx, *rest)
            require_unchanged(shared.algorithm, hook.__name__, before)
            return result, net.buffers()

        if own is None:
            received = shared.server["buffers"]
            own_or_sent = {k: v.expand(self.count, *v.shape) for k, v in received.items()}
        else:
            own_or_sent = own
        dims = (1, 1, None if padded.draws is None else 1, 0, 0, *[0] * len(values))
        arrays = (padded.index, padded.mask, padded.draws)
        return vmap(call, in_dims=dims)(*arrays, own_or_sent, inputs, *values)

    def _copies(self, name: str) -> Params:
        """Return one writable copy per client of the received parameters or buffers, [C, ...].

        name: `params` or `buffers`.
        """
        found = {}
        for key, value in self.shared.server[name].items():
            found[key] = tree.empty_stack(value, self.count).copy_(
                value.expand(self.count, *value.shape)
            )
        return found

    def _own_start(self, algorithm: FedAvg, inputs: ClientInputs) -> tuple[Params, Params]:
        """Return the parameters and running statistics from which each client starts."""
        start, _ = self._per_client(algorithm.initial_params, inputs)
        buffers, params = self._copies("buffers"), {}
        for name, value in start.items():
            if name in buffers:
                buffers[name].copy_(value)
            else:
                # Use the memory layout of the server's model, which makes optimizers and
                # convolutions fast.
                like = self.shared.server["params"].get(name, value[0])
                params[name] = tree.empty_stack(like, self.count).copy_(value)
        return params, buffers


def tensors_of(batch: Batch) -> dict[str, Any]:
    """Return the tensors of a batch by field, without the features if they are not known."""
    names = ("x", "y", "mask", "features")
    return {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}


def local_step(shared: Shared, frame: Frame, active: int, batch: Batch) -> None:
    """Run one local step of the first `active` clients, and update the frame in place.

    batch: the batches of these clients, as tensors [active, B, ...].
    """
    head, buffers, inputs = tree.map(
        lambda leaf: leaf[:active], ((frame.params, frame.memory), frame.buffers, frame.inputs)
    )
    params, memory = head
    algorithm, runtime = shared.algorithm, shared.runtime
    own = overrides(algorithm, "local_step")
    start, teacher = mark(runtime.device), frame.server.get("params")

    def step(
        params: Params, memory: Tree, buffers: Params, tensors: Tree, one: ClientInputs
    ) -> tuple[Any, ...]:
        """Return the result of a client's step, its running statistics and its loss.

        If the algorithm overrides the local step, the result is (parameters, memory). Otherwise,
        the result is the gradient.
        """
        ctx = context(shared, frame.server, frame.lr, one)
        net = ClientNetwork(runtime.net, buffers, teacher=teacher, start=start)
        rows = net.set_batch(batch._replace(**tensors))
        if own:
            *moved, loss = algorithm.local_step(net, params, memory, rows, ctx)
            return tuple(moved), net.buffers(), loss
        grads, loss = net.gradient(lambda p: algorithm.objective(net, p, rows, ctx), params)
        return algorithm.transform_grads(grads, params, rows, ctx), net.buffers(), loss

    tensors = tensors_of(batch)
    new, moved, losses = vmap(step)(params, memory, buffers, tensors, inputs)
    if buffers:
        copy_each(list(buffers.values()), [moved[name] for name in buffers])
    if own:
        pairs: list[tuple[Tensor, Tensor]] = []
        # tree.map pairs the tensors by name, not by order
        tree.map(lambda *pair: pairs.append(pair), head, new)
        old, values = zip(*pairs, strict=True)
        copy_each(list(old), list(values))
    else:
        optimizers.step_in_place(params, new, memory, frame.lr, runtime.local, batch.step)
    frame.losses[:active].add_(losses)
