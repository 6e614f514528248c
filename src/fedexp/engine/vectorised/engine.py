"""All sampled clients in one program: stacked parameters, one torch.func.vmap per local step,
padded and masked.

Clients are sorted by their number of steps, longest first; a step touches only those that still
have one. Inside a round nothing waits for the device, so that the host can run ahead of it.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.func import vmap

from fedexp.algorithms.base import FedAvg
from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Gather, Probe, Trained
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.engine.measures import no_counts, right_on_own
from fedexp.engine.vectorised.clients import Clients, Frame, Job
from fedexp.engine.vectorised.graphs import CudaCapture, Graphs, is_out_of_memory, run_steps

log = logging.getLogger("fedexp")
# of what is free, for the clients that are trained at once; graphs and evaluation need some too
SHARE_OF_MEMORY = 0.5


class OutOfMemory(RuntimeError):
    """Error: not even one client at a time fits into the memory of the device."""


@dataclass
class Vectorised(Engine):
    """Engine for models whose layers torch.func.vmap knows; running statistics of batch norm are a
    client's own."""

    # clients at a time; None: as many as fit into the memory of the device
    chunk: int | None = None
    # record local steps as CUDA graphs where they can be; no matter on a CPU
    cuda_graphs: bool = True
    # the chunk of the next round
    _fits: int | None = field(default=None, init=False, repr=False, compare=False)
    _graphs: Graphs | None = field(default=None, init=False, repr=False, compare=False)

    def train(
        self,
        algorithm: FedAvg,
        bench: ClientRuntime,
        server: Tree,
        cohort: Cohort,
        lr: float,
        evaluate_local: bool,
    ) -> Trained:
        job = self._job(algorithm, bench, server, lr)
        chunk = min(self._fits or self._first_chunk(job, cohort), len(cohort.clients))
        while (trained := self._attempt(job, cohort, chunk, evaluate_local)) is None:
            chunk = self._fits = chunk // 2
        return trained

    def _job(self, algorithm: FedAvg, bench: ClientRuntime, server: Tree, lr: float) -> Job:
        bench.net.set_buffers(server["buffers"])
        if self._graphs is None and self.cuda_graphs and can_be_recorded(bench):
            self._graphs = Graphs(CudaCapture(bench.device))
        return Job(algorithm, bench, server, lr)

    def _first_chunk(self, job: Job, cohort: Cohort) -> int:
        if self.chunk is None and job.bench.device.type == "cuda":
            self._fits = chunk_that_fits(job, cohort)
            return self._fits
        return self.chunk or len(cohort.clients)

    def _attempt(
        self, job: Job, cohort: Cohort, chunk: int, evaluate_local: bool
    ) -> Trained | None:
        """Train the whole cohort, `chunk` clients at a time; None where that takes too much memory.

        Nothing that was given is changed, so a failed attempt leaves no trace. It returns instead
        of raising because an exception would keep the tensors of its frames alive.
        """
        order, gather = cohort.longest_first(), Gather(len(cohort.clients))
        evaluations: list[tuple[Moment, Moment]] = []
        try:
            for start in range(0, len(order), chunk):
                positions = order[start : start + chunk]
                clients, part = self._train_part(job, cohort.take(positions), evaluations)
                if evaluate_local:
                    before = moment(job.bench.device)
                    models = clients.frame.params | part.buffers
                    part = replace(part, class_correct=class_correct(job, cohort.round, models))
                    evaluations.append((before, moment(job.bench.device)))
                gather.add(positions, part)
            return replace(
                gather.result(), evaluation_seconds=sum(seconds(*ends) for ends in evaluations)
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if chunk == 1:
                raise OutOfMemory(
                    "one client at a time does not fit into the memory of the device; try"
                    " hardware.precision=bf16, a smaller local.batch_size or hardware=cpu"
                    f" ({error})"
                ) from None
        log.warning(
            "out of memory with %d clients at a time; round %d again with %d",
            chunk,
            cohort.round,
            chunk // 2,
        )
        if self._graphs is not None:
            self._graphs.clear()
        if job.bench.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _train_part(
        self, job: Job, cohort: Cohort, evaluations: "list[tuple[Moment, Moment]]"
    ) -> tuple[Clients, Trained]:
        """Train the clients in the order of falling numbers of steps, and return their results
        without evaluation. evaluations: takes the beginnings and ends of the tests in the middle of
        training."""
        clients, count = Clients(job, cohort), len(cohort.clients)
        if cohort.probes:
            clients.watch = watch = FrameWatch(job, cohort.probes, evaluations)
        run_steps(clients, self._graphs)
        messages, states, buffers = clients.finish()
        losses = clients.frame.losses / clients.frame.fixed.steps.clamp(min=1)
        probed = watch.counts if cohort.probes else None
        return clients, Trained(
            messages, tree.unstack(states, count), losses, buffers, None, probed=probed
        )


def class_correct(job: Job, round: int, models: Params) -> dict[str, torch.Tensor]:
    """Return the right answers of stacked models in each test view, in a round; int64 [models, C]
    each."""
    found = {}
    for view in job.bench.views:
        shown = replace(job, bench=job.bench.tested_on(view))
        found[view] = evaluate_together(shown, models, job.bench.test_draws(view, round))
    return found


class FrameWatch:
    """Tests the models of a frame at the marks of their probes, those with a mark at the same step
    together."""

    def __init__(
        self, job: Job, probes: Sequence[Probe], evaluations: "list[tuple[Moment, Moment]]"
    ):
        self.job, self.probes, self.evaluations = job, probes, evaluations
        self.counts = no_counts(job.bench, len(probes), probes[0].room)  # leaves [C, room, ...]

    def __call__(self, step: int, frame: Frame) -> None:
        """Test the clients that have a mark after so many steps."""
        rows = [i for i, probe in enumerate(self.probes) if step in probe.marks]
        if not rows:
            return
        before, bench = moment(self.job.bench.device), self.job.bench
        models = {name: leaf[rows] for name, leaf in (frame.params | frame.buffers).items()}
        shown = replace(self.job, bench=bench.tested_on(bench.views[0]))
        for i, (row, correct) in enumerate(
            zip(rows, evaluate_together(shown, models), strict=True)
        ):
            place, one = (
                self.probes[row].marks.index(step),
                {name: leaf[i] for name, leaf in models.items()},
            )
            self.counts["test"][row, place] = correct
            self.counts["train"][row, place] = right_on_own(bench, one, self.probes[row].numbers)
        self.evaluations.append((before, moment(bench.device)))


def can_be_recorded(bench: ClientRuntime) -> bool:
    """Return True on CUDA, but not in float64: recorded steps take the learning rate from memory,
    which torch has as float32."""
    return bench.device.type == "cuda" and bench.dtype == torch.float32


@torch.no_grad()
def evaluate_together(job: Job, params: Params, draws: torch.Tensor | None = None) -> torch.Tensor:
    """Return class-wise right answers on the test set of models stacked along the first dimension;
    int64 [models, C]. draws: of the augmented view of all test examples
    (ClientRuntime.test_draws)."""
    bench, data = job.bench, job.bench.data
    count = len(next(iter(params.values())))
    # Three times as many images as in training take about as much memory, since no backward pass
    # needs anything kept.
    size = min(3 * bench.local.batch_size, bench.evaluation_batch)
    if uses_batch_statistics(bench.net.module):  # how the test set is cut is part of the result
        size = bench.evaluation_batch
    correct = torch.zeros(count, data.num_classes, dtype=torch.int64, device=bench.device)
    for start in range(0, len(data.y_test), size):
        index = torch.arange(start, min(start + size, len(data.y_test)), device=bench.device)
        x, y = bench.load_test(index, draws)
        answers = vmap(
            lambda p, x=x, i=index: bench.class_logits(bench.net(p, x).logits, i).argmax(-1)
        )(params)
        correct.index_add_(1, y, (answers == y).to(torch.int64))
    return correct


def chunk_that_fits(job: Job, cohort: Cohort) -> int:
    """Return the number of clients that can be trained at once in the free memory; 1 where even
    that is in doubt."""
    try:
        each = max(memory_of_one(job, cohort), 1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return 1
    return max(int(SHARE_OF_MEMORY * free_memory(job.bench.device) / each), 1)


def memory_of_one(job: Job, cohort: Cohort) -> int:
    """Return the bytes that a client takes at its peak, measured in the first step of the longest
    one."""
    device = job.bench.device
    alone = cohort.take(cohort.longest_first()[:1])
    (schedule,) = alone.schedules
    draws = None if schedule.draws is None else schedule.draws[:1]
    first = replace(schedule, index=schedule.index[:1], lengths=schedule.lengths[:1], draws=draws)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_steps(Clients(job, replace(alone, schedules=[first])), None)
    return torch.cuda.max_memory_allocated(device) - before


def free_memory(device: torch.device) -> int:
    """Return the bytes on a CUDA device that nobody uses, or that torch holds without using
    them."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Return the time now, as the device sees it, without waiting for it: on CUDA, when all that it
    was given so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments; wait for the second."""
    if isinstance(start, float) or isinstance(end, float):
        return end - start  # type: ignore[operator]
    end.synchronize()
    return start.elapsed_time(end) / 1000
