"""Clients spread over the processes of torch.distributed, on one host or several, started by
torchrun or Slurm.

Rank 0 leads: it alone reads the configuration and the data, samples, aggregates, writes and prints.
The others follow: they hold nothing but what rank 0 has sent them, and obey until it dismisses
them. So nothing has to be the same on all hosts but the installed packages, and the result is that
of one process: every client is trained alone, and what comes back is put in the order of the
cohort.

A message is a short pickle and one flat tensor with the bytes of all tensors in it, sent from one
rank to another: by gloo, or by nccl where every rank has a GPU of its own and the tensors lie on
GPUs at both ends.
"""

import io
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist

from fedexp.algorithms.base import FedAvg
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Tree
from fedexp.core.views import PLAIN
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Evaluation, Gather, Trained
from fedexp.engine.processes.channel import Place, TensorPickler
from fedexp.engine.processes.ranks import Ranks
from fedexp.engine.processes.worker import (
    Evaluate,
    Failure,
    Publish,
    Setup,
    Train,
    Worker,
    move,
    picklable,
)

CPU = torch.device("cpu")
GATHERING = timedelta(minutes=10)  # until all processes have started
# Rank 0 may take long between two orders (a download, pictures). A process that ends is noticed at
# once all the same, because its connections close (see messages); only a host that vanishes without
# a word is noticed as late as this.
PATIENCE = timedelta(days=1)


class RankLost(RuntimeError):
    """The connection to another rank is broken: its process has ended, or its host or network
    has."""


@dataclass(frozen=True)
class Prepare:
    """The order that carries what stays the same for the whole run; the answer is the name of the
    GPU, or an empty text."""

    hardware: Any  # fedexp.engine.hardware.Resolved
    bench: ClientRuntime  # on the CPU
    engine: Engine  # how a rank trains what it is given


@dataclass(frozen=True)
class Call:
    """An order, and whether its answer goes from GPU to GPU."""

    order: Any  # None: go home
    direct: bool = False


class Distributed(Engine):
    """Engine over all ranks. `inner`: how each rank trains its share of a cohort; `hardware`: of
    each rank, which adapts the GPU's number."""

    def __init__(self, inner: Engine, hardware: Any):
        self.inner, self.hardware = inner, hardware
        self._own: Worker | None = None  # rank 0's part of the work
        self._direct = False
        self._published: Tree = None

    def start(self, bench: ClientRuntime, server: Tree) -> None:
        self._prepare(bench, server if self._published is None else self._published)

    def train(
        self,
        algorithm: FedAvg,
        bench: ClientRuntime,
        server: Tree,
        cohort: Cohort,
        lr: float,
        evaluate_local: bool,
    ) -> Trained:
        self._prepare(bench, server)
        shares = cohort.shares(dist.get_world_size())
        orders = [
            Train(algorithm, cohort.take(positions), lr, evaluate_local) for positions in shares
        ]
        gather = Gather(len(cohort.clients))
        for positions, part in zip(shares, self._ask(orders, self._direct), strict=True):
            values = move(part.tree(), bench.device)
            # Kept states must not hold on to the flat tensor that they came in, which has the
            # messages in it too.
            values["states"] = tree.map(torch.clone, values["states"])
            gather.add(positions, Trained(**values))
        return gather.result(parallel=len(shares))

    def evaluate(
        self, bench: ClientRuntime, server: Tree, view: str = PLAIN, round: int = 0
    ) -> Evaluation:
        self._prepare(bench, server)
        tested = bench.tested_on(view)
        count = min(dist.get_world_size(), tested.evaluation_batches)
        edges = [tested.evaluation_batches * i // count for i in range(count + 1)]
        parts = self._ask([Evaluate(range(*edge), view, round) for edge in pairwise(edges)])
        return tested.combine([replace(part, **move(vars(part), bench.device)) for part in parts])

    def close(self) -> None:
        self._own, self._published = None, None

    def _prepare(self, bench: ClientRuntime, server: Tree) -> None:
        """Send every rank what it needs, once, and the server's state whenever it is another."""
        everyone = dist.get_world_size()
        if self._own is None:
            own = Worker()
            own.device, own.bench, own.engine = bench.device, bench, self.inner
            order = Prepare(self.hardware, bench.to(CPU), self.inner)
            gpus = [gpu_name(bench.device), *self._ask([None, *[order] * (everyone - 1)])[1:]]
            self._direct = all(gpus) and len(set(gpus)) == everyone
            self._own = own
        if self._published is not server:
            self._ask([Publish(server)] * everyone, self._direct)
            self._published = server

    def _ask(self, orders: Sequence[Any], direct: bool = False) -> list[Any]:
        """Have rank i carry out order i, all at the same time; return the answers. After a failure,
        too, no rank owes an answer."""
        answers: list[Any] = [None] * len(orders)
        # The same order for several ranks is packed once (and not compared by its content).
        for _, group in groupby(range(1, len(orders)), key=lambda rank: id(orders[rank])):
            same = list(group)
            order = orders[same[0]]
            packet = Packet.pack(Call(order, direct), self._link(order, direct))
            for rank in same:
                with noting(answers, rank):
                    packet.send(rank)
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

    def _link(self, order: Any, direct: bool) -> torch.device:
        return self.hardware.device if direct and isinstance(order, Publish) else CPU


@contextmanager
def noting(answers: list[Any], rank: int) -> Iterator[None]:
    """Record the rank that is lost as failed; the others are still heard."""
    try:
        yield
    except RankLost as error:
        answers[rank] = Failure(error, "no answer")


def attempt(action: Any, *arguments: Any) -> Any:
    """Return the answer or a Failure."""
    try:
        return action(*arguments)
    except Exception as error:
        return Failure(error, traceback.format_exc())


# --- joining and leaving


@contextmanager
def leading(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 use the other ranks inside; dismiss them afterwards."""
    join(ranks)
    try:
        yield
    except KeyboardInterrupt:
        raise  # others may be busy and not listen; they end when the connection closes
    except BaseException:
        dismiss(ranks)
        raise
    dismiss(ranks)


def dismiss(ranks: Ranks) -> None:
    for rank in range(1, ranks.size):
        with suppress(RankLost):
            Packet.pack(Call(None), CPU).send(rank)
    dist.destroy_process_group()


def follow(ranks: Ranks) -> int:
    """Run the other ranks until they are dismissed; return the exit code. They hold nothing that
    could be lost, so signals end them at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        join(ranks)
        follower = Follower(ranks)
        while follower.serve():
            pass
    except (ConfigError, RankLost) as error:
        print(f"fedexp: rank {ranks.rank} on {socket.gethostname()}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    dist.destroy_process_group()
    return 0


class Follower:
    """Receiver of the orders of rank 0, each of which has an answer."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.worker = ranks, Worker()

    def serve(self) -> bool:
        """Carry out the next order; return False when there is none any more."""
        call = receive(0)
        # it could not be read, such as for a package that is not here
        if isinstance(call, Failure):
            answer, direct = call, False
        elif call.order is None:
            return False
        else:
            answer, direct = (
                attempt(self.obey, call.order),
                call.direct and isinstance(call.order, Train),
            )
        if isinstance(answer, Failure):
            answer = replace(answer, error=picklable(answer.error))
            direct = False
        Packet.pack(answer, self.worker.device if direct else CPU).send(0)
        return True

    def obey(self, order: Any) -> Any:
        match order:
            case Prepare(hardware, bench, engine):
                hardware = replace(hardware, device=self.own_device(hardware.device))
                self.worker.obey(hardware)
                self.worker.obey(Setup(bench, engine))
                return gpu_name(self.worker.device)
        return self.worker.obey(order) or "done"

    def own_device(self, device: torch.device) -> torch.device:
        """Return the GPU whose number is that of this process on its host."""
        if device.type == "cpu":
            return device
        if not torch.cuda.device_count():
            raise ConfigError(
                f"hardware.device={device}: rank {self.ranks.rank} ({socket.gethostname()}) has"
                " no GPU"
            )
        device = torch.device("cuda", self.ranks.local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device


def gpu_name(device: torch.device) -> str:
    """Return the name of all GPUs in the world; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def join(ranks: Ranks) -> None:
    """Wait for all ranks; raise ConfigError where they do not come together."""
    os.environ.setdefault("MASTER_PORT", "29500")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    names = [f"fedexp/{rank}" for rank in range(ranks.size)]
    query = f"env://?rank={ranks.rank}&world_size={ranks.size}"
    try:
        store, _, _ = next(dist.rendezvous(query, timeout=GATHERING))
        store.set(names[ranks.rank], "here")
        store.wait(names, GATHERING)
        backend = (
            "cpu:gloo,cuda:nccl"
            if torch.cuda.is_available() and dist.is_nccl_available()
            else "gloo"
        )
        dist.init_process_group(
            backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=PATIENCE
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{ranks.size} processes should have met at MASTER_ADDR:MASTER_PORT = {where} and did"
            f" not ({reason}); with several network interfaces, GLOO_SOCKET_IFNAME and"
            " NCCL_SOCKET_IFNAME name the one to use"
        ) from error


# --- messages
#
# gloo tells only those who wait for a message that has not begun to come that the connection is
# lost. Who sends, or has received a part, waits for ever (gloo's Pair::signalException passes over
# the operations under way). So nobody waits for these: a message ends with a mark, for which the
# receiver waits, and is answered by a receipt, for which the sender waits. What came before either
# is through by then.

RECEIPT = 1  # the tag; messages have 0
# the last that each rank was sent: it is out when that rank sends again
_receipts: dict[int, Any] = {}


@dataclass(frozen=True)
class Packet:
    """A value ready to be sent, once or to several ranks."""

    pickled: bytes
    flat: torch.Tensor  # uint8: the bytes of its tensors

    @classmethod
    def pack(cls, value: Any, device: torch.device) -> "Packet":
        """Pack a value: tensors keep values, dtype and strides, and arrive on the CPU, or from GPU
        to GPU where that is `device`."""
        buffer = io.BytesIO()
        pickler = TensorPickler(buffer)
        pickler.dump(value)
        flat = torch.empty(pickler.size, dtype=torch.uint8, device=device)
        for tensor, place in pickler.tensors:
            view(flat, place).copy_(tensor.detach())
        return cls(buffer.getvalue(), flat)

    def send(self, rank: int) -> None:
        """Send it; return when the other side has it."""
        direct = self.flat.is_cuda
        header = torch.tensor([len(self.pickled), self.flat.numel(), int(direct)])
        pickled = torch.frombuffer(bytearray(self.pickled), dtype=torch.uint8)
        parts = [header, pickled, *([self.flat] if self.flat.numel() and not direct else [])]
        with connection(rank):
            receipt: Any = dist.irecv(torch.empty(1), rank, tag=RECEIPT)
            sent: list[Any] = [dist.isend(part, rank) for part in (*parts, torch.zeros(1))]
            receipt.wait()
            for part in sent:
                part.wait()
            if direct and self.flat.numel():
                dist.send(self.flat, rank)


def receive(rank: int) -> Any:
    """Return the next value from a rank, or a Failure where it cannot be read here."""
    with connection(rank):
        header = torch.zeros(3, dtype=torch.int64)
        dist.recv(header, rank)  # comes in one piece
        length, size, direct = header.tolist()
        pickled = torch.empty(length, dtype=torch.uint8)
        flat = torch.empty(size, dtype=torch.uint8, device="cuda" if direct else "cpu")
        coming = [pickled, flat] if size and not direct else [pickled]
        parts: list[Any] = [dist.irecv(part, rank) for part in (*coming, torch.empty(1))]
        for part in reversed(parts):  # the mark first
            part.wait()
        receipt = torch.zeros(1)
        _receipts[rank] = receipt, dist.isend(receipt, rank, tag=RECEIPT)
        if direct and size:
            dist.recv(flat, rank)
    return attempt(_Unpickler(io.BytesIO(pickled.numpy().tobytes()), flat).load)


class _Unpickler(pickle.Unpickler):
    """An unpickler that only ever reads what this run's own processes have sent."""

    def __init__(self, file: io.BytesIO, flat: torch.Tensor):
        super().__init__(file)
        self.flat = flat

    def persistent_load(self, place: Any) -> torch.Tensor:
        return view(self.flat, place)


def view(flat: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the tensor that lies at a place of a flat one."""
    part = flat[place.offset : place.offset + place.count * place.dtype.itemsize]
    return part.view(place.dtype).as_strided(place.shape, place.strides)


@contextmanager
def connection(rank: int) -> Iterator[None]:
    """Raise what torch raises on a broken connection as RankLost."""
    try:
        yield
    except RuntimeError as error:
        time.sleep(0.5)  # after Ctrl+C, which ends all ranks at once, our own signal is on its way
        raise RankLost(
            f"the connection to rank {rank} is broken ({str(error).splitlines()[0]}): its process"
            " has ended (out of memory, killed), or its host or the network has failed"
        ) from error
