"""Local steps recorded as CUDA graphs, so that the host launches one graph per step.

A graph works on fixed memory and a fixed number of clients. So each round is copied into frames
that are reused in all rounds. There is a graph for each of a few numbers of clients, and a step
with fewer clients uses the next larger graph. The graph's results for finished clients are
discarded, because finished clients are copied out first.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fedexp.algorithms.base import Batch
from fedexp.core import tree
from fedexp.core.tree import Tree
from fedexp.engine.base import Shared
from fedexp.engine.vectorised.clients import Clients, Frame, local_step

log = logging.getLogger("fedexp")
FRAMES = 2  # kept at a time: one for full chunks, one for the rest of the cohort


def run_steps(clients: Clients, graphs: "Graphs | None") -> None:
    """Run all local steps of the clients in place."""
    steps = Steps(clients) if graphs is None or graphs.failed else graphs.open(clients)
    if clients.watch is not None:
        clients.watch(0, steps.frame)
    for active, batches in clients.steps():
        steps.retire(active)
        for batch in batches:
            steps.step(active, batch)
            if clients.watch is not None:
                clients.watch(batch.step + 1, steps.frame)
    steps.retire(0)


class Steps:
    """A round's steps, run kernel by kernel."""

    def __init__(self, clients: Clients):
        self.clients = clients

    @property
    def frame(self) -> Frame:
        """Return the frame with the clients that still run."""
        return self.clients.frame

    def step(self, active: int, batch: Batch) -> None:
        """Take one step of the first `active` clients."""
        local_step(self.clients.shared, self.clients.frame, active, batch)

    def retire(self, active: int) -> None:
        """Finish all clients except the first `active`, whose values must be final in the clients'
        frame.

        Here this needs no work, because a step changes only the clients that still have one.
        """


class CudaCapture:
    """Records CUDA graphs.

    The graphs share memory for intermediate results, because only one runs at a time.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Run the step, so that libraries do work that cannot be recorded."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            step()
        here.wait_stream(self.stream)

    def record(self, step: Callable[[], None]) -> Callable[[], Any]:
        """Record the step without running it, and return a function that runs it."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream),
        ):
            step()
        return graph.replay


@dataclass
class Recorded:
    """A frame at a fixed place in memory, and the graphs that work on it."""

    shared: Shared
    frame: Frame
    batch: Batch
    replays: dict[int, Callable[[], Any]] = field(default_factory=dict)  # by number of clients
    warm: set[int] = field(default_factory=set)


class Graphs:
    """The graphs of a run.

    If a step cannot be recorded, a warning is logged once and steps run without graphs.
    """

    def __init__(self, capture: CudaCapture):
        self.capture = capture
        self.failed = False
        self._recorded: dict[Any, Recorded] = {}

    def open(self, clients: Clients) -> Steps:
        """Return the steps of one round of clients in a frame."""
        return Replaying(self, clients, self._frame_of(clients))

    def step(self, recorded: Recorded, size: int) -> None:
        """Take one step of the first `size` clients of a frame.

        The first step is run, the second is recorded, and all later steps are replayed.
        """

        def step() -> None:
            x, y, mask = (leaf[:size] for leaf in recorded.batch[:3])  # type: ignore[index]
            batch = Batch(x, y, mask, recorded.batch.step)
            local_step(recorded.shared, recorded.frame, size, batch)

        if self.failed or size not in recorded.warm:
            recorded.warm.add(size)
            return self.capture.warm_up(step)
        if size not in recorded.replays:
            try:
                recorded.replays[size] = self.capture.record(step)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.failed = True
                reason = str(error).strip().split("\n")[0]
                log.warning(
                    "local steps run without CUDA graphs, because one cannot be recorded (%s)",
                    reason,
                )
                return step()
        recorded.replays[size]()

    def clear(self) -> None:
        """Release the memory of frames and graphs."""
        self._recorded.clear()

    def _frame_of(self, clients: Clients) -> Recorded:
        """Return a frame that fits these clients, a new one if necessary."""
        leaves, structure = tree_flatten(vars(replace(clients.frame, lr=0.0)))
        shapes = []
        for leaf in leaves:
            tensor = isinstance(leaf, Tensor)
            shapes.append((leaf.shape, leaf.dtype) if tensor else leaf)
        key = repr((structure, shapes))
        if key in self._recorded:
            before, now = self._recorded[key].shared, clients.shared
            if before.runtime is now.runtime and before.algorithm == now.algorithm:
                return self._recorded[key]
        if len(self._recorded) >= FRAMES:
            self.clear()
        self._recorded[key] = make_frame(clients)
        return self._recorded[key]


class Replaying(Steps):
    """A round's steps in a reused frame."""

    def __init__(self, graphs: Graphs, clients: Clients, recorded: Recorded):
        super().__init__(clients)
        self.graphs, self.recorded = graphs, recorded
        # clients that had a step when `retire` was last called; all at first
        self.before = clients.count
        source, target = clients.frame, recorded.frame
        target.lr.fill_(source.lr)  # type: ignore[union-attr]
        tree.map(copy_into, vars(target), vars(replace(source, lr=target.lr)))

    @property
    def frame(self) -> Frame:
        return self.recorded.frame

    def step(self, active: int, batch: Batch) -> None:
        into = self.recorded.batch
        for name in ("x", "y", "mask"):
            getattr(into, name)[:active].copy_(getattr(batch, name))
        # a tensor, because a number would be recorded as a constant
        into.step.fill_(batch.step)  # type: ignore[attr-defined]
        self.graphs.step(self.recorded, graph_size(active, self.clients.count))

    def retire(self, active: int) -> None:
        """Copy out the finished clients, before a graph for more clients overwrites them."""
        done, ours, theirs = slice(active, self.before), self.clients.frame, self.recorded.frame
        kept = ((each.params, each.buffers, each.losses) for each in (ours, theirs))
        tree.map(lambda to, of: to[done].copy_(of[done]), *kept)
        self.before = active


def graph_size(active: int, count: int) -> int:
    """Return the number of clients of the graph to use, at most `count`.

    It is `active` rounded up to three binary digits: 1 to 8, 10, 12, 14, 16, 20, ... At most a
    quarter of the computation is wasted.
    """
    unit = 1 << max(active.bit_length() - 3, 0)
    return min(-(-active // unit) * unit, count)


def make_frame(clients: Clients) -> Recorded:
    """Allocate a frame for such clients.

    The learning rate and the step number become tensors, whose values can change.
    """
    padded, runtime = clients.padded, clients.shared.runtime
    lr = torch.zeros((), dtype=runtime.dtype, device=runtime.device)
    room = tree.map(empty_like, vars(replace(clients.frame, lr=lr)))
    draws = None if padded.draws is None else torch.zeros_like(padded.draws[0])
    x, y = runtime.load_train(torch.zeros_like(padded.index[0]), draws)
    number = torch.zeros((), dtype=torch.int64, device=runtime.device)
    batch = Batch(x, y, torch.zeros_like(padded.mask[0]), number)  # type: ignore[arg-type]
    return Recorded(clients.shared, Frame(**room), batch)


def empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


def copy_into(target: Any, source: Tree) -> None:
    if isinstance(target, Tensor):
        target.copy_(source)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is torch.cuda.OutOfMemoryError or a similar error of a library below
    it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)
