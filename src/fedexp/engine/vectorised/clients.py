"""C clients as one: their stacked state and the local step that changes it in place."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.func import vmap

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import Batch, Context, FedAvg
from fedexp.algorithms.families import OwnStart, Prepared, start_of
from fedexp.core import tree
from fedexp.core.private.of_torch import copy_each
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime, Cohort, has_own_step
from fedexp.engine.schedule import Schedule
from fedexp.engine.vectorised.network import ClientNetwork

# of images that are loaded at once: several steps, so that few kernels are launched
LOAD_BYTES = 1 << 26


@dataclass(frozen=True)
class Job:
    """The values that all clients of a round have in common."""

    algorithm: FedAvg
    bench: ClientRuntime
    server: Tree
    lr: float


class Fixed(NamedTuple):
    """The values of each client that a step reads; leaves [C, ...]."""

    personals: Tree
    states: Tree
    plans: Tree
    begun: Tree
    steps: torch.Tensor


@dataclass(frozen=True)
class Frame:
    """All but the batch that a local step reads (the first three) and changes in place (the
    others)."""

    server: Tree
    lr: float | torch.Tensor
    fixed: Fixed
    params: Params  # leaves [C, ...]
    buffers: Params  # running statistics; leaves [C, ...]
    memory: Tree  # of the optimizer; leaves [C, ...]
    losses: torch.Tensor  # [C]: sum of the objective over the steps so far


@dataclass(frozen=True)
class PaddedSchedules:
    """The schedules of C clients as arrays on the device, step by step."""

    index: torch.Tensor  # int64 [S, C, B]
    mask: torch.Tensor  # [S, C, B]: 1 example, 0 padding
    draws: torch.Tensor | None  # int64 [S, C, B, D]
    steps: np.ndarray  # int [C]; on the host, which decides what to launch


class PaddedData:
    """ClientData inside vmap: index and mask are [S, B] there."""

    def __init__(
        self,
        bench: ClientRuntime,
        net: ClientNetwork,
        index: torch.Tensor,
        mask: torch.Tensor,
        draws: torch.Tensor | None,
    ):
        self.bench, self.net, self.index, self.mask, self.draws = bench, net, index, mask, draws

    def batches(self) -> Iterator[Batch]:
        for step in range(self.index.shape[0]):
            draws = None if self.draws is None else self.draws[step]
            x, y = self.bench.load_train(self.index[step], draws)
            yield self.net.show(Batch(x, y, self.mask[step], step))

    def take(
        self, index: torch.Tensor, draws: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.bench.load_train(index, draws)

    @property
    def steps(self) -> int:
        return self.index.shape[0]


class Run(NamedTuple):
    """Steps start .. stop - 1, which the first `active` clients have, and whose images are loaded
    at once."""

    start: int
    stop: int
    active: int


class Clients:
    """The clients of a cohort, which must be sorted by falling number of steps, during one
    round."""

    def __init__(self, job: Job, cohort: Cohort):
        self.job, self.count = job, len(cohort.clients)
        # is shown the frame after each number of steps
        self.watch: Callable[[int, Frame], None] | None = None
        bench = job.bench
        self.padded = pad(cohort.schedules, bench)
        personals, states = tree.stack(cohort.personals), tree.stack(cohort.states)
        plans = stack_plans(cohort.plans, bench.device)
        steps = upload(torch.as_tensor(self.padded.steps, dtype=bench.dtype), bench.device)
        fixed = Fixed(personals, states, plans, {}, steps)
        if isinstance(job.algorithm, Prepared):
            begun, buffers = self._prepared(job.algorithm, fixed)
        else:
            begun, buffers = self._begun(fixed)
        fixed = fixed._replace(begun=begun)
        params, buffers = self._start(fixed, buffers)
        memory = optimizers.memory_of(params, bench.local)
        losses = torch.zeros_like(steps)
        self.frame = Frame(job.server, job.lr, fixed, params, buffers, memory, losses)

    def runs(self) -> Iterator[Run]:
        """Yield all steps, in order."""
        steps, batch_size = self.padded.steps, self.padded.index.shape[-1]
        images = self.job.bench.data.x_train
        image_bytes = images[0].numel() * self.job.bench.dtype.itemsize
        start = 0
        while start < steps[0]:
            active = int((steps > start).sum())
            at_once = max(LOAD_BYTES // (active * batch_size * image_bytes), 1)
            stop = min(int(steps[active - 1]), start + at_once)
            yield Run(start, stop, active)
            start = stop

    def batches(self, run: Run) -> Iterator[Batch]:
        """Yield the batches of a run; leaves [active, B, ...]."""
        index, mask, draws = (
            None if array is None else array[run.start : run.stop, : run.active]
            for array in (self.padded.index, self.padded.mask, self.padded.draws)
        )
        assert index is not None
        assert mask is not None
        x, y = self.job.bench.load_train(index, draws)
        for number in range(run.start, run.stop):
            i = number - run.start
            yield Batch(x[i], y[i], mask[i], number)

    def finish(self) -> tuple[Tree, Tree, Params]:
        """Return (messages, new states, running statistics); leaves [C, ...]."""
        frame = self.frame
        (messages, states), buffers = self._per_client(
            self._finish, frame.buffers, frame.params, *frame.fixed
        )
        return messages, states, buffers

    def _per_client(self, hook: Any, buffers: Params | None, *values: Tree) -> tuple[Any, Params]:
        """Run a hook for all clients; it gets their network and data beside `values`. buffers: of
        each client, with which eval mode is called too; None: the server's. Return what the hook
        did, and the running statistics."""
        padded, job = self.padded, self.job

        def call(
            index: torch.Tensor,
            mask: torch.Tensor,
            draws: torch.Tensor | None,
            own: Params,
            *rest: Tree,
        ) -> tuple[Tree, Params]:
            net = ClientNetwork(job.bench.net, own, None if buffers is None else own)
            return hook(net, PaddedData(job.bench, net, index, mask, draws), *rest), net.buffers()

        start = buffers
        if start is None:
            start = self._received("buffers")
        in_draws = None if padded.draws is None else 1
        in_dims = (1, 1, in_draws, 0) + (0,) * len(values)
        return vmap(call, in_dims=in_dims)(padded.index, padded.mask, padded.draws, start, *values)

    def _received(self, name: str) -> Params:
        """Return the parameters or buffers that each client was sent, as views; leaves [C, ...]."""
        return {
            key: value.expand(self.count, *value.shape)
            for key, value in self.job.server[name].items()
        }

    def _start(self, fixed: Fixed, buffers: Params) -> tuple[Params, Params]:
        """Return parameters and running statistics at the start of training, in memory that may be
        changed; leaves [C, ...]."""
        sent, held = self.job.server["params"], self.job.server["buffers"]
        if not isinstance(self.job.algorithm, OwnStart):
            received = self._received("params")
            params = {k: tree.room_for(p, self.count).copy_(received[k]) for k, p in sent.items()}
            return params, {name: value.clone() for name, value in buffers.items()}
        start, _ = self._per_client(self._initial, None, *fixed)
        received = self._received("buffers")
        own = {k: tree.room_for(v, self.count).copy_(received[k]) for k, v in held.items()}
        for name in own.keys() & start.keys():
            own[name].copy_(start.pop(name))
        # Like the server's model in memory, which the fused optimizer and the convolutions want.
        return {
            k: stacked_copy(sent.get(k, v[0]), self.count).copy_(v) for k, v in start.items()
        }, own

    def _begun(self, fixed: Fixed) -> tuple[Tree, Params]:
        """Run `client_setup`; return its constants and the running statistics after it, leaves [C,
        ...]."""
        return self._per_client(self._begin, None, *fixed)

    def _prepared(self, algorithm: Prepared, fixed: Fixed) -> tuple[Tree, Params]:
        """Run `prepare` on each batch of the first pass, for those clients that have it; leaves [C,
        batches, ...], 0 where a client has none. Return that and the server's running statistics,
        leaves [C, ...]."""
        bench, sent = self.job.bench, self.job.server["buffers"]

        def call(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, *values: Tree) -> Tree:
            net = ClientNetwork(bench.net, sent)
            batch = net.show(Batch(x, y, mask, 0))
            return algorithm.prepare(net, batch, mask, self._context(Fixed(*values)))

        own = -(-self.padded.steps // bench.local.epochs)
        room: Tree = {}
        for step in range(own.max()):
            active = int((own > step).sum())
            index, mask = self.padded.index[step, :active], self.padded.mask[step, :active]
            draws = None if self.padded.draws is None else self.padded.draws[step, :active]
            made = vmap(call)(
                *bench.load_train(index, draws),
                mask,
                *tree.map(lambda leaf, a=active: leaf[:a], fixed),
            )
            if not step:
                room = tree.map(
                    lambda leaf: leaf.new_zeros(self.count, own.max(), *leaf.shape[1:]), made
                )
            tree.map(lambda all, some, s=step, a=active: all[:a, s].copy_(some), room, made)
        received = self._received("buffers")
        return room, {
            name: tree.room_for(value, self.count).copy_(received[name])
            for name, value in sent.items()
        }

    def _begin(self, net: ClientNetwork, data: PaddedData, *fixed: Tree) -> Tree:
        return self.job.algorithm.client_setup(net, data, self._context(Fixed(*fixed)))

    def _initial(self, net: ClientNetwork, data: PaddedData, *fixed: Tree) -> Params:
        return start_of(self.job.algorithm, net, data, self._context(Fixed(*fixed)))

    def _finish(
        self, net: ClientNetwork, data: PaddedData, params: Params, *fixed: Tree
    ) -> tuple[Tree, Tree]:
        return self.job.algorithm.finish(net, params, data, self._context(Fixed(*fixed)))

    def _context(self, one: Fixed) -> Context:
        return make_context(self.job, self.job.server, self.job.lr, one)


def local_step(job: Job, frame: Frame, active: int, batch: Batch) -> None:
    """Do one step of the first `active` clients, in place. batch: leaves [active, B, ...]."""
    head, buffers, fixed = tree.map(
        lambda leaf: leaf[:active], ((frame.params, frame.memory), frame.buffers, frame.fixed)
    )
    params, memory = head
    own = has_own_step(job.algorithm)
    step = partial(_client_step, job, frame, batch.step, own)
    *new, moved, losses = vmap(step)(params, memory, buffers, batch.x, batch.y, batch.mask, fixed)
    if buffers:
        copy_each(list(buffers.values()), [moved[name] for name in buffers])
    if own:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        # by name, not by order
        tree.map(lambda old, value: pairs.append((old, value)), head, tuple(new))
        copy_each([old for old, _ in pairs], [value for _, value in pairs])
    else:
        optimizers.step_in_place(params, new[0], memory, frame.lr, job.bench.local, batch.step)
    frame.losses[:active].add_(losses)


def _client_step(
    job: Job,
    frame: Frame,
    number: int,
    own: bool,
    params: Params,
    memory: Tree,
    buffers: Params,
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
    fixed: Fixed,
) -> tuple[Any, ...]:
    """Return one client's (params, memory, running statistics, loss) after the algorithm's own
    local step, or its (gradient, running statistics, loss) in the base's."""
    ctx = make_context(job, frame.server, frame.lr, fixed)
    net = ClientNetwork(job.bench.net, buffers)
    batch = net.show(Batch(x, y, mask, number))
    if own:
        params, memory, loss = job.algorithm.local_step(net, params, memory, batch, ctx)
        return params, memory, net.buffers(), loss
    grads, loss = net.gradient(lambda p: job.algorithm.objective(net, p, batch, ctx), params)
    return job.algorithm.transform_grads(grads, params, batch, ctx), net.buffers(), loss


def make_context(job: Job, server: Tree, lr: float | torch.Tensor, one: Fixed) -> Context:
    """Return the context that the hooks of one client see; inside vmap."""
    rate: Any = lr  # a tensor where steps are recorded
    return Context(
        server, one.personals, one.states, one.plans, one.begun, rate, one.steps, job.bench.local
    )


def stacked_copy(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """Copy a leaf [...] -> [count, ...], each in the memory layout of the leaf."""
    return tree.room_for(leaf, count).copy_(leaf.expand(count, *leaf.shape))


def stack_plans(plans: Sequence[Tree], device: torch.device) -> Tree:
    """Stack trees of numpy arrays into one tree of tensors [C, ...] on the device."""
    return tree.map(lambda *values: upload(torch.as_tensor(np.stack(values)), device), *plans)


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Upload to the device without waiting for it: from ordinary memory, CUDA would first finish
    all that it was given."""
    return (
        host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host.to(device)
    )


def pad(schedules: Sequence[Schedule], bench: ClientRuntime) -> PaddedSchedules:
    """Pad schedules of different lengths to arrays; what is padded has mask 0 and, as its number,
    an example of the same client."""
    steps = np.array([s.steps for s in schedules])
    longest, batch_size = max(steps), schedules[0].index.shape[1]

    def stack(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        stacked = arrays[0].new_zeros(longest, len(arrays), *arrays[0].shape[1:])
        for i, array in enumerate(arrays):
            stacked[: len(array), i] = array
        return stacked

    lengths = stack([torch.from_numpy(s.lengths) for s in schedules])
    index = stack([s.index for s in schedules])
    for i, schedule in enumerate(schedules):
        if schedule.steps:
            index[schedule.steps :, i] = schedule.index[0, 0]
    mask = (torch.arange(batch_size) < lengths[..., None]).to(bench.dtype)
    draws = [s.draws for s in schedules if s.draws is not None]
    return PaddedSchedules(
        index=upload(index, bench.device),
        mask=upload(mask, bench.device),
        draws=upload(stack(draws), bench.device) if len(draws) == len(schedules) else None,
        steps=steps,
    )
