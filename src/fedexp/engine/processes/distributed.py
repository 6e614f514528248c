"""The distributed engine: clients in the processes of torch.distributed, on one or several hosts.

torchrun or Slurm starts the processes. Rank 0 leads: only rank 0 reads the configuration and the
data, samples, aggregates, writes and prints. The other ranks have only what rank 0 sends them, and
run its orders until it dismisses them. So only the installed packages must be the same on all
hosts. The result is the same as with one process, because every client is trained separately and
results are put in the order of the cohort.
"""

import io
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedexp.core.errors import ConfigError
from fedexp.core.tree import Tree
from fedexp.data.views import PLAIN
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Evaluation, Gather, Shared, Trained
from fedexp.engine.processes import channel
from fedexp.engine.processes.ranks import Ranks
from fedexp.engine.processes.worker import (
    CPU,
    Begin,
    Evaluate,
    Failure,
    Publish,
    Setup,
    Train,
    Worker,
    cut_evenly,
    move,
    picklable,
)

GATHERING = timedelta(minutes=10)  # until all processes have started
# Rank 0 may take long between two orders (a download, figures). A process that ends is still
# noticed at once, because its connections close (see messages). Only a host that disappears without
# closing its connections is noticed as late as this.
PATIENCE = timedelta(days=1)


class RankLost(RuntimeError):
    """The connection to another rank is broken: its process, its host or its network has failed."""


class Distributed(Engine):
    """Engine over all ranks.

    inner: engine with which each rank trains its share of a cohort.
    hardware: hardware of the ranks, on which each rank sets the number of its GPU.
    """

    def __init__(self, inner: Engine, hardware: Any):
        self.inner, self.hardware = inner, hardware
        self._own: Worker | None = None  # rank 0's part of the work
        self._published: Tree = None

    def start(self, runtime: ClientRuntime, server: Tree) -> None:
        self._prepare(runtime, server if self._published is None else self._published)

    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        self._prepare(shared.runtime, shared.server)
        shares = cohort.shares(dist.get_world_size())
        parts = [cohort.take(positions) for positions in shares]
        answers = self._ask(
            [Train(shared.algorithm, part, shared.lr, evaluate_local) for part in parts]
        )
        gather = Gather(len(cohort.clients))
        for positions, answer in zip(shares, answers, strict=True):
            gather.add(positions, Trained(**move(vars(answer), shared.runtime.device)))
        return gather.result(parallel=len(shares))

    def evaluate(
        self, runtime: ClientRuntime, server: Tree, view: str = PLAIN, round: int = 0
    ) -> Evaluation:
        self._prepare(runtime, server)
        batches = runtime.tested_on(view).evaluation_batches
        pieces = cut_evenly(batches, dist.get_world_size())
        parts = self._ask([Evaluate(piece, view, round) for piece in pieces])
        here = [replace(part, **move(vars(part), runtime.device)) for part in parts]
        return Evaluation.joined(here)

    def close(self) -> None:
        self._own, self._published = None, None

    def _prepare(self, runtime: ClientRuntime, server: Tree) -> None:
        """Send every rank model and data once, and the server's state if it has changed."""
        others = dist.get_world_size() - 1
        if self._own is None:
            for order in (Begin(self.hardware), Setup(runtime.to(CPU), self.inner)):
                self._ask([None, *[order] * others])
            self._own = Worker()
            self._own.device, self._own.runtime, self._own.engine = (
                runtime.device,
                runtime,
                self.inner,
            )
        if self._published is not server:
            self._ask([Publish(server)] * (1 + others))
            self._published = server

    def _ask(self, orders: Sequence[Any]) -> list[Any]:
        """Let rank i run order i, all at the same time, and return the answers.

        All answers are received even after a failure.
        """
        answers: list[Any] = [None] * len(orders)
        packet, before = None, None
        for rank in range(1, len(orders)):
            if packet is None or orders[rank] is not before:  # the same order is packed once
                packet, before = packed(orders[rank]), orders[rank]
            with noting(answers, rank):
                send(packet, rank)
        if orders[0] is not None:
            assert self._own is not None
            answers[0] = attempt(self._own.obey, orders[0])
        for rank in range(1, len(orders)):
            if answers[rank] is None:
                with noting(answers, rank):
                    answers[rank] = receive(rank)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                if rank:
                    answer.error.add_note(f"in rank {rank}:\n{answer.report}")
                raise answer.error
        return answers


@contextmanager
def noting(answers: list[Any], rank: int) -> Iterator[None]:
    """Record a lost rank as a failure, so that the other ranks' answers are still received."""
    try:
        yield
    except RankLost as error:
        answers[rank] = Failure(error, "no answer")


def attempt(action: Any, *arguments: Any) -> Any:
    """Return the result of the action, or a Failure if it raises an exception."""
    try:
        return action(*arguments)
    except Exception as error:
        return Failure(error, traceback.format_exc())


# --- joining and leaving


@contextmanager
def leading(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 use the other ranks in the block, and dismiss them afterwards."""
    join(ranks)
    try:
        yield
    except KeyboardInterrupt:
        raise  # others may be busy; they end when the connection closes
    except BaseException:
        dismiss(ranks)
        raise
    dismiss(ranks)


def dismiss(ranks: Ranks) -> None:
    for rank in range(1, ranks.size):
        with suppress(RankLost):
            send(packed(None), rank)
    dist.destroy_process_group()


def follow(ranks: Ranks) -> int:
    """Run a rank other than 0 until it is dismissed, and return the exit code.

    Signals end such a rank at once, because it has nothing to save.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        join(ranks)
        worker = Worker()
        while (order := receive(0)) is not None:
            # an order that cannot be read, e.g. because a package is missing, is a Failure
            answer = order if isinstance(order, Failure) else attempt(obey, worker, order, ranks)
            if isinstance(answer, Failure):
                answer = answer._replace(error=picklable(answer.error))
            send(packed(answer), 0)
    except (ConfigError, RankLost) as error:
        print(f"fedexp: rank {ranks.rank} on {socket.gethostname()}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    dist.destroy_process_group()
    return 0


def obey(worker: Worker, order: Any, ranks: Ranks) -> Any:
    """Run an order on this rank's device and return an answer, which every order has."""
    if isinstance(order, Begin):
        device = own_device(order.hardware.device, ranks)
        order = Begin(replace(order.hardware, device=device))
    return worker.obey(order) or "done"


def own_device(device: torch.device, ranks: Ranks) -> torch.device:
    """Return the GPU whose number is this process's number on its host."""
    if device.type == "cpu":
        return device
    if not torch.cuda.device_count():
        raise ConfigError(
            f"hardware.device={device}: rank {ranks.rank} ({socket.gethostname()}) has no GPU"
        )
    return torch.device("cuda", ranks.local % torch.cuda.device_count())


def join(ranks: Ranks) -> None:
    """Wait for all ranks.

    Raises ConfigError if they do not all connect.
    """
    os.environ.setdefault("MASTER_PORT", "29500")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    names = [f"fedexp/{rank}" for rank in range(ranks.size)]
    query = f"env://?rank={ranks.rank}&world_size={ranks.size}"
    try:
        store, _, _ = next(dist.rendezvous(query, timeout=GATHERING))
        store.set(names[ranks.rank], "here")
        store.wait(names, GATHERING)
        dist.init_process_group(
            "gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=PATIENCE
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{ranks.size} processes should have met at MASTER_ADDR:MASTER_PORT = {where} and did"
            f" not ({reason}); with several network interfaces, GLOO_SOCKET_IFNAME names the one"
            " to use"
        ) from error


# --- messages
#
# gloo reports a lost connection only to a process that waits for a message of which nothing has
# arrived. A process that is sending, or has received a part, waits forever (gloo's
# Pair::signalException skips operations in progress). So no process waits for these operations. A
# message ends with a mark, which the receiver waits for, and is answered by a receipt, which the
# sender waits for. All earlier parts have arrived by then.

RECEIPT = 1  # the tag; messages have 0
# the last receipt for each rank, which has been delivered when that rank sends again
_receipts: dict[int, Any] = {}


def packed(value: Any) -> Tensor:
    """Return a value's bytes, uint8 [n]."""
    file = io.BytesIO()
    channel.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def send(packet: Tensor, rank: int) -> None:
    """Send packed bytes, and return when the other rank has received them."""
    with connection(rank):
        receipt: Any = dist.irecv(torch.empty(1), rank, tag=RECEIPT)
        parts = (torch.tensor([len(packet)]), packet, torch.zeros(1))
        sent: list[Any] = [dist.isend(part, rank) for part in parts]
        receipt.wait()
        for part in sent:
            part.wait()


def receive(rank: int) -> Any:
    """Return the next value from a rank, or a Failure if it cannot be unpickled here."""
    with connection(rank):
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank)  # arrives in one piece
        packet = torch.empty(int(size), dtype=torch.uint8)
        parts: list[Any] = [dist.irecv(part, rank) for part in (packet, torch.empty(1))]
        for part in reversed(parts):  # the mark first
            part.wait()
        receipt = torch.zeros(1)
        _receipts[rank] = receipt, dist.isend(receipt, rank, tag=RECEIPT)
    return attempt(channel.load, io.BytesIO(packet.numpy().tobytes()))


@contextmanager
def connection(rank: int) -> Iterator[None]:
    """Raise RankLost when torch reports a broken connection."""
    try:
        yield
    except RuntimeError as error:
        time.sleep(0.5)  # Ctrl+C ends all ranks at once, so wait for this process's signal
        raise RankLost(
            f"the connection to rank {rank} is broken ({str(error).splitlines()[0]}): its process"
            " has ended (out of memory, killed), or its host or the network has failed"
        ) from error
