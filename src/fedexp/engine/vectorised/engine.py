"""The vectorised engine trains all sampled clients together with torch.func.vmap.

Parameters are stacked, and batches are padded and masked. Clients are sorted by decreasing number
of steps, and each step includes only the clients that have steps left. No code inside a round
waits for the device, so that the CPU can launch work ahead of the device.
"""

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedexp.core import tree
from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Gather, Shared, Trained
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.engine.vectorised.clients import ClientStack, Frame
from fedexp.engine.vectorised.graphs import CudaCapture, Graphs, is_out_of_memory, run_steps

log = logging.getLogger("fedexp")
# fraction of the free memory that clients may use; graphs and evaluation also need memory
SHARE_OF_MEMORY = 0.5


class OutOfMemory(RuntimeError):
    """Raised if the memory of the device is too small even for one client at a time."""


@dataclass
class Vectorised(Engine):
    """Engine for models whose layers support torch.func.vmap.

    Each client has separate running statistics for batch norm.
    """

    # number of clients trained at the same time; None: as many as fit into the device's memory
    chunk: int | None = None
    # whether to record local steps as CUDA graphs if possible; no effect on a CPU
    cuda_graphs: bool = True
    # number of clients that fit into memory, from measurements or failed attempts; None: unknown
    _fits: int | None = field(default=None, init=False, repr=False, compare=False)
    _graphs: Graphs | None = field(default=None, init=False, repr=False, compare=False)

    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        runtime = shared.runtime
        runtime.net.set_buffers(shared.server["buffers"])
        if self._graphs is None and self.cuda_graphs and can_be_recorded(runtime):
            self._graphs = Graphs(CudaCapture(runtime.device))
        if self._fits is None and self.chunk is None and runtime.device.type == "cuda":
            self._fits = chunk_that_fits(shared, cohort)
        chunk = min(self._fits or self.chunk or len(cohort.clients), len(cohort.clients))
        while (trained := self._attempt(shared, cohort, chunk, evaluate_local)) is None:
            chunk = self._fits = chunk // 2
        return trained

    def _attempt(
        self, shared: Shared, cohort: Cohort, chunk: int, evaluate_local: bool
    ) -> Trained | None:
        """Train the cohort, `chunk` clients at a time, or return None if memory runs out.

        The arguments are not changed, so a failed attempt has no side effects. If memory runs out,
        the method returns None instead of raising an exception, because an exception would keep
        the tensors in its stack frames alive.
        """
        order, gather = cohort.longest_first(), Gather(cohort)
        testing = Stopwatch(shared.runtime.device)
        try:
            for start in range(0, len(order), chunk):
                positions = order[start : start + chunk]
                part = self._part(shared, cohort.take(positions), evaluate_local, testing)
                gather.add(positions, part)
            return replace(gather.result(), evaluation_seconds=testing.seconds)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if chunk == 1:
                raise OutOfMemory(
                    "the memory of the device is too small even for one client at a time; try"
                    " hardware.precision=bf16, a smaller local.batch_size or hardware=cpu"
                    f" ({error})"
                ) from None
        what = "out of memory with %d clients at a time; repeating round %d with %d"
        log.warning(what, chunk, cohort.round, chunk // 2)
        if self._graphs is not None:
            self._graphs.clear()
        if shared.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _part(
        self, shared: Shared, cohort: Cohort, evaluate_local: bool, testing: "Stopwatch"
    ) -> Trained:
        """Train clients together and return their results.

        cohort: the clients. Clients with more steps come first.
        testing: the stopwatch that measures the time for tests.
        """
        clients, correct = ClientStack(shared, cohort), None
        epochs: list[list[Params]] = [[] for _ in cohort.marks]

        def copy_models(step: int, frame: Frame) -> None:
            models = frame.params | frame.buffers
            for position, marks in enumerate(cohort.marks):
                if step in marks:
                    one = {name: leaf[position].cpu().clone() for name, leaf in models.items()}
                    epochs[position].append(one)

        if cohort.marks:
            clients.watch = copy_models
        run_steps(clients, self._graphs)
        messages, states, buffers = clients.finish()
        if evaluate_local:
            with testing:
                models = clients.frame.params | buffers
                correct = class_correct(shared.runtime, cohort.round, models)
        losses = clients.frame.losses / clients.frame.inputs.steps.clamp(min=1)
        each = tree.unstack(states, len(cohort.clients))
        return Trained(messages, each, losses, buffers, correct, epochs=epochs)


def can_be_recorded(runtime: ClientRuntime) -> bool:
    """Return whether local steps can be recorded as CUDA graphs.

    This is not possible in float64, because recorded steps read the learning rate from a tensor,
    and torch requires this tensor to be float32.
    """
    return runtime.device.type == "cuda" and runtime.dtype == torch.float32


# --- tests of local models


def class_correct(runtime: ClientRuntime, round: int, models: Params) -> dict[str, Tensor]:
    """Return the correct predictions of stacked models in each view, int64 [models, C].

    round: the number of the round; it selects the random numbers of the augmented view.
    """
    found = {}
    for view in runtime.views:
        tested, draws = runtime.tested_on(view), runtime.test_draws(view, round)
        found[view] = evaluate_together(tested, models, draws)
    return found


@torch.no_grad()
def evaluate_together(
    runtime: ClientRuntime, params: Params, draws: Tensor | None = None
) -> Tensor:
    """Return the correct predictions of stacked models on the test set, int64 [models, C].

    params: the models, stacked along the first dimension.
    draws: the random numbers from `ClientRuntime.test_draws`. None: no augmentation.
    """
    data, count = runtime.data, len(next(iter(params.values())))
    # Without a backward pass, three times as many images need about as much memory as training.
    size = min(3 * runtime.local.batch_size, runtime.evaluation_batch)
    if uses_batch_statistics(runtime.net.module):  # the batches affect the result
        size = runtime.evaluation_batch
    correct = torch.zeros(count, data.num_classes, dtype=torch.int64, device=runtime.device)
    for index in torch.arange(len(data.y_test), device=runtime.device).split(size):
        x, y = runtime.load_test(index, draws)

        def answer(one: Params, x: Tensor = x, index: Tensor = index) -> Tensor:
            return runtime.class_logits(runtime.net(one, x).logits, index).argmax(-1)

        correct.index_add_(1, y, (vmap(answer)(params) == y).to(torch.int64))
    return correct


class Stopwatch:
    """Measures how many seconds its `with` blocks take on the device.

    Entering and leaving a block does not wait for the device. On CUDA, the time of a block starts
    when all work that was launched before the block has finished.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._marks: list[Any] = []  # starts and ends of blocks, in turn

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append(event)

    @property
    def seconds(self) -> float:
        """Return the seconds so far. This waits for the device."""
        total = 0.0
        for start, end in zip(self._marks[::2], self._marks[1::2], strict=True):
            if isinstance(start, float):
                total += end - start
            else:
                end.synchronize()
                total += start.elapsed_time(end) / 1000
        return total


# --- memory


def chunk_that_fits(shared: Shared, cohort: Cohort) -> int:
    """Return how many clients can be trained together in the free memory, at least 1."""
    try:
        each = max(client_memory(shared, cohort), 1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return 1
    return max(int(SHARE_OF_MEMORY * free_gpu_memory(shared.runtime.device) / each), 1)


def client_memory(shared: Shared, cohort: Cohort) -> int:
    """Return the peak memory per client in bytes.

    The memory is measured in the first step of the client with the most steps.
    """
    device = shared.runtime.device
    alone = cohort.take(cohort.longest_first()[:1])
    (schedule,) = alone.schedules
    draws = None if schedule.draws is None else schedule.draws[:1]
    first = replace(schedule, index=schedule.index[:1], lengths=schedule.lengths[:1], draws=draws)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_steps(ClientStack(shared, replace(alone, schedules=[first])), None)
    return torch.cuda.max_memory_allocated(device) - before


def free_gpu_memory(device: torch.device) -> int:
    """Return the unused memory of a CUDA device in bytes.

    This includes memory that torch has reserved but does not use.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
