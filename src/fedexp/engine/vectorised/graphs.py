"""Local steps recorded once and replayed (CUDA graphs), so that the host launches one graph a step
and not its kernels.

A graph works on fixed memory and a fixed number of clients. So a round is copied into frames that
stay from round to round, there is a graph for each of a few numbers of clients, and a step of fewer
clients takes the next larger graph: what that does to the clients that are already done is thrown
away, since they are copied out as soon as they are done.
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
FRAMES = 2  # kept at a time: a whole chunk and the rest of the cohort


def run_steps(clients: Clients, graphs: "Graphs | None") -> None:
    """Run all local steps of the clients, in place."""
    steps = Steps(clients) if graphs is None or graphs.failed else graphs.open(clients)
    if clients.watch is not None:
        clients.watch(0, steps.frame)
    for run in clients.runs():
        steps.keep(run.active)
        for batch in clients.batches(run):
            steps.step(run.active, batch)
            if clients.watch is not None:
                clients.watch(batch.step + 1, steps.frame)
    steps.keep(0)


class Steps:
    """The steps of a round, carried out one by one, kernel by kernel."""

    def __init__(self, clients: Clients):
        self.clients = clients

    @property
    def frame(self) -> Frame:
        """Return the frame in which the clients are that still run."""
        return self.clients.frame

    def step(self, active: int, batch: Batch) -> None:
        """Do one step of the first `active` clients."""
        local_step(self.clients.shared, self.clients.frame, active, batch)

    def keep(self, active: int) -> None:
        """Keep only the first `active` clients running: the others must be as they should be. Here
        a step touches only those that still have one."""


class CudaCapture:
    """Recording with CUDA graphs, which share the memory of what they compute in between: only one
    runs at a time."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Carry out the step, so that libraries have done by then what may not be recorded."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            step()
        here.wait_stream(self.stream)

    def record(self, step: Callable[[], None]) -> Callable[[], Any]:
        """Record the step without carrying it out; what is returned carries it out."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream),
        ):
            step()
        return graph.replay


@dataclass
class Recorded:
    """A frame that stays where it is, and the graphs that work on it."""

    shared: Shared
    frame: Frame
    batch: Batch
    replays: dict[int, Callable[[], Any]] = field(default_factory=dict)  # by number of clients
    warm: set[int] = field(default_factory=set)


class Graphs:
    """The graphs of a run. Where a step cannot be recorded, steps run without graphs, after one log
    line."""

    def __init__(self, capture: CudaCapture):
        self.capture = capture
        self.failed = False
        self._recorded: dict[Any, Recorded] = {}

    def open(self, clients: Clients) -> Steps:
        """Open the frame for one round of clients."""
        return Replaying(self, clients, self._frame_of(clients))

    def step(self, recorded: Recorded, size: int) -> None:
        """Do one step of the first `size` clients of a frame: first carried out, then recorded,
        then replayed."""

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
                    "a local step cannot be recorded as a CUDA graph (%s); going on without graphs",
                    reason,
                )
                return step()
        recorded.replays[size]()

    def clear(self) -> None:
        """Give back the memory of frames and graphs."""
        self._recorded.clear()

    def _frame_of(self, clients: Clients) -> Recorded:
        """Return the frame into which these clients fit; a new one where there is none."""
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
    """The steps of a round in a frame that stays."""

    def __init__(self, graphs: Graphs, clients: Clients, recorded: Recorded):
        super().__init__(clients)
        self.graphs, self.recorded = graphs, recorded
        # clients that had a step when `keep` was last called; first: all
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
        # a tensor: a number would be recorded
        into.step.fill_(batch.step)  # type: ignore[attr-defined]
        self.graphs.step(self.recorded, rounded(active, self.clients.count))

    def keep(self, active: int) -> None:
        """Copy out the clients that are done, before a graph of more clients than are active spoils
        them."""
        done, ours, theirs = slice(active, self.before), self.clients.frame, self.recorded.frame
        kept = ((each.params, each.buffers, each.losses) for each in (ours, theirs))
        tree.map(lambda to, of: to[done].copy_(of[done]), *kept)
        self.before = active


def rounded(active: int, count: int) -> int:
    """Return the number of clients of the graph to use: `active` with three binary digits, rounded
    up; at most `count`.

    1 to 8, 10, 12, 14, 16, 20, ...: at most a quarter is computed for nothing.
    """
    unit = 1 << max(active.bit_length() - 3, 0)
    return min(-(-active // unit) * unit, count)


def make_frame(clients: Clients) -> Recorded:
    """Allocate memory for such clients; the learning rate and the number of the step become
    tensors, which can change."""
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
    """Return True for torch.cuda.OutOfMemoryError, and for what the libraries below it raise."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)
