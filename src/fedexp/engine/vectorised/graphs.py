"""Record local steps as CUDA graphs, so that the CPU launches only one graph per step.

A graph uses fixed memory and a fixed number of clients. The values of each round are therefore
copied to frames. Frames are reused in all rounds. Graphs are recorded for only a few numbers of
clients. A step with another number of clients uses the graph for the next larger number. This graph
also changes the values of clients that have finished, so their results are copied first.
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
from fedexp.engine.vectorised.clients import ClientStack, Frame, local_step, tensors_of

log = logging.getLogger("fedexp")
FRAMES = 2  # maximum number of frames: one for full chunks, one for the last, smaller chunk


def run_steps(clients: ClientStack, graphs: "Graphs | None") -> None:
    """Run all local steps of the clients, and update the clients' frame in place.

    graphs: the CUDA graphs of the run. None: run the steps without graphs.
    """
    if graphs is None or graphs.failed or not clients.padded.steps[0]:  # no steps at all
        steps = Steps(clients)
    else:
        steps = graphs.open(clients)
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
    """The local steps of a round, run without CUDA graphs."""

    def __init__(self, clients: ClientStack):
        self.clients = clients

    @property
    def frame(self) -> Frame:
        """Return the frame with the current values of the clients that have steps left."""
        return self.clients.frame

    def step(self, active: int, batch: Batch) -> None:
        """Run one step of the first `active` clients."""
        local_step(self.clients.shared, self.clients.frame, active, batch)

    def retire(self, active: int) -> None:
        """In the clients' frame, store the final values of the clients that have finished.

        In this class, the method does nothing, because each step updates this frame.

        active: the number of clients that have steps left. They are the first clients.
        """


class CudaCapture:
    """Records CUDA graphs.

    The graphs share the memory for intermediate results, because only one graph runs at a time.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Run the step once, because the initialisation of libraries cannot be recorded."""
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
    """A frame in fixed memory, and the CUDA graphs that read and change its values."""

    shared: Shared
    frame: Frame
    batch: Batch
    replays: dict[int, Callable[[], Any]] = field(default_factory=dict)  # by number of clients
    warm: set[int] = field(default_factory=set)


class Graphs:
    """The CUDA graphs of a run.

    If a step cannot be recorded, a warning is logged once, and all steps run without graphs.
    """

    def __init__(self, capture: CudaCapture):
        self.capture = capture
        self.failed = False
        self._recorded: dict[Any, Recorded] = {}

    def open(self, clients: ClientStack) -> Steps:
        """Return an object that runs the local steps of one round as CUDA graphs."""
        return Replaying(self, clients, self._frame_of(clients))

    def step(self, recorded: Recorded, size: int) -> None:
        """Run one step of the first `size` clients of a frame.

        The first step with this number of clients runs without a graph. At the second step, a graph
        is recorded. This step and all later steps replay the graph.
        """

        def step() -> None:
            tensors = {name: leaf[:size] for name, leaf in tensors_of(recorded.batch).items()}
            batch = recorded.batch._replace(**tensors)
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
                    "local steps run without CUDA graphs, because a step cannot be recorded (%s)",
                    reason,
                )
                return step()
        recorded.replays[size]()

    def clear(self) -> None:
        """Release the memory of the frames and graphs."""
        self._recorded.clear()

    def _frame_of(self, clients: ClientStack) -> Recorded:
        """Return an existing frame that fits the clients, or a new one."""
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
    """The local steps of a round, run as CUDA graphs.

    The steps change the values in `recorded`, a frame that other rounds also use.
    """

    def __init__(self, graphs: Graphs, clients: ClientStack, recorded: Recorded):
        super().__init__(clients)
        self.graphs, self.recorded = graphs, recorded
        # number of active clients when `retire` was last called; at first, all clients
        self.before = clients.count
        source, target = clients.frame, recorded.frame
        target.lr.fill_(source.lr)  # type: ignore[union-attr]
        tree.map(copy_into, vars(target), vars(replace(source, lr=target.lr)))

    @property
    def frame(self) -> Frame:
        return self.recorded.frame

    def step(self, active: int, batch: Batch) -> None:
        into = self.recorded.batch
        for name, leaf in tensors_of(into).items():
            leaf[:active].copy_(getattr(batch, name))
        # The step number is a tensor, because the graph would record a number as a constant.
        into.step.fill_(batch.step)  # type: ignore[attr-defined]
        self.graphs.step(self.recorded, graph_size(active, self.clients.count))

    def retire(self, active: int) -> None:
        """Copy the values of finished clients, because the graph may update them again."""
        done, ours, theirs = slice(active, self.before), self.clients.frame, self.recorded.frame
        names = ["params", "buffers", "losses"]
        names += ["memory"] if self.clients.keeps_optimizer else []
        kept = ([getattr(each, name) for name in names] for each in (ours, theirs))
        tree.map(lambda to, of: to[done].copy_(of[done]), *kept)
        self.before = active


def graph_size(active: int, count: int) -> int:
    """Return the number of clients in the graph that runs a step of `active` clients.

    The number is `active` rounded up to three significant binary digits (1 to 8, 10, 12, 14, 16,
    20, ...), but at most `count`. At most a quarter of the computation is therefore wasted.
    """
    unit = 1 << max(active.bit_length() - 3, 0)
    return min(-(-active // unit) * unit, count)


def make_frame(clients: ClientStack) -> Recorded:
    """Allocate a frame for clients with the same shapes as the given clients.

    The learning rate and the step number become tensors, so that their values can change.
    """
    padded, runtime = clients.padded, clients.shared.runtime
    lr = torch.zeros((), dtype=runtime.dtype, device=runtime.device)
    room = tree.map(empty_like, vars(replace(clients.frame, lr=lr)))
    draws = None if padded.draws is None else torch.zeros_like(padded.draws[0])
    x, y = runtime.load_train(padded.index[0], draws)
    number = torch.zeros((), dtype=torch.int64, device=runtime.device)
    known = runtime.net.known.get(x)
    batch = Batch(x, y, torch.zeros_like(padded.mask[0]), number, known)  # type: ignore[arg-type]
    return Recorded(clients.shared, Frame(**room), batch)


def empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


def copy_into(target: Any, source: Tree) -> None:
    if isinstance(target, Tensor):
        target.copy_(source)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    This is torch.OutOfMemoryError or a similar error raised by a library that torch uses.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)
