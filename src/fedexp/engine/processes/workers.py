"""Clients spread over processes: one thread each on a CPU, or one process for each GPU.

The longest clients go first and the next goes to whoever is free, so the processes end at about the
same time. What comes back is put in the order of the cohort: the result does not depend on the
number of workers.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, TypeVar

import torch

from fedexp.algorithms.base import FedAvg
from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.core.views import PLAIN
from fedexp.engine.base import (
    ClientRuntime,
    Cohort,
    Engine,
    Evaluation,
    Gather,
    PartialEvaluation,
    Trained,
)
from fedexp.engine.processes.channel import Channel, pack
from fedexp.engine.processes.worker import (
    CPU,
    Ask,
    Begin,
    Evaluate,
    Failure,
    Publish,
    Ready,
    Setup,
    Train,
    cut_evenly,
    move,
)

log = logging.getLogger("fedexp")
T = TypeVar("T")
TRIES = 2  # an order that has killed two processes is not given to a third


class WorkerDied(RuntimeError):
    """A process ended in the middle of its work, and so did the one that took its place."""


@dataclass
class Order:
    """One piece of work."""

    name: str  # for messages
    value: Any
    positions: Sequence[int] = ()  # of its clients in the cohort
    tries: int = 0


@dataclass
class Process:
    """A worker and the connection to it."""

    popen: subprocess.Popen
    channel: Channel
    order: Order | None = field(default=None)  # what it is working on

    def end(self) -> str:
        """Make sure that the process is gone; return how it ended."""
        self.channel.close()
        try:
            code = self.popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = self.popen.wait()
        if code >= 0:
            return f"exit code {code}"
        oom = ", as the system's out-of-memory killer sends it" if code == -signal.SIGKILL else ""
        return f"signal {-code} ({signal.Signals(-code).name}{oom})"

    def kill(self) -> None:
        self.channel.close()
        self.popen.kill()
        self.popen.wait()


class Workers(Engine):
    """Engine over processes. `hardware`: of each process; `inner`: how a process trains what it is
    given, one client or a share."""

    def __init__(self, inner: Engine, hardware: Sequence[Any], share: bool):
        """Set up the engine. share: a process takes its part of a cohort at once (to vectorise it),
        else one client after the other."""
        self.inner, self.hardware, self.share = inner, hardware, share
        self._processes: list[Process] = []
        self._setup: tuple[ClientRuntime, BinaryIO] | None = None
        self._published: tuple[Tree, BinaryIO] | None = None

    def start(self, bench: ClientRuntime, server: Tree) -> None:
        published = server if self._published is None else self._published[0]
        orders = [Order(f"starting worker {i}", Ready()) for i in range(len(self.hardware))]
        for _ in self._do(bench, published, orders):  # each has one
            pass

    def train(
        self,
        algorithm: FedAvg,
        bench: ClientRuntime,
        server: Tree,
        cohort: Cohort,
        lr: float,
        evaluate_local: bool,
    ) -> Trained:
        if self.share:
            shares = cohort.shares(len(self.hardware))
        else:
            shares = [[position] for position in cohort.longest_first()]
        orders = []
        for positions in shares:
            part = cohort.take(positions)
            name = (
                f"round {cohort.round}, training client {', '.join(str(c) for c in part.clients)}"
            )
            orders.append(Order(name, Train(algorithm, part, lr, evaluate_local), positions))
        gather = Gather(len(cohort.clients))
        for order, answer in self._do(bench, server, orders):
            part = move(answer.tree(), bench.device)
            # Kept states must not hold on to the file that they came in, which has the messages in
            # it too.
            part["states"] = tree.map(lambda leaf: leaf.clone(), part["states"])
            gather.add(order.positions, Trained(**part))
        return gather.result(parallel=min(len(self.hardware), len(orders)))

    def evaluate(
        self, bench: ClientRuntime, server: Tree, view: str = PLAIN, round: int = 0
    ) -> Evaluation:
        tested = bench.tested_on(view)
        pieces = cut_evenly(tested.evaluation_batches, len(self.hardware))
        name = "evaluating the global model"
        orders = [Order(name, Evaluate(piece, view, round), [i]) for i, piece in enumerate(pieces)]
        parts: list[PartialEvaluation] = [None] * len(pieces)  # type: ignore[list-item]
        for order, answer in self._do(bench, server, orders):
            parts[order.positions[0]] = PartialEvaluation(
                *move(tuple(vars(answer).values()), bench.device)
            )
        return tested.combine(parts)

    def logits(
        self, bench: ClientRuntime, models: Sequence[Params], numbers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        questions = [Ask(model, each) for model, each in zip(models, numbers, strict=True)]
        orders = [Order(f"asking model {i}", question, [i]) for i, question in enumerate(questions)]
        answers: list[torch.Tensor] = [None] * len(orders)  # type: ignore[list-item]
        assert self._published is not None, "models are asked after training"
        for order, answer in self._do(bench, self._published[0], orders):
            answers[order.positions[0]] = answer.to(bench.device)
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for sent in (self._setup, self._published):
            if sent is not None:
                sent[1].close()
        self._processes, self._setup, self._published = [], None, None

    def _do(
        self, bench: ClientRuntime, server: Tree, orders: Sequence[Order]
    ) -> Iterator[tuple[Order, Any]]:
        """Have the orders carried out, the first one first; yield them with their answers as these
        come in."""
        try:
            self._prepare(bench, server)
            left = deque(orders)
            with selectors.DefaultSelector() as selector:
                while left or any(process.order for process in self._processes):
                    for i, process in enumerate(self._processes):
                        if left and process.order is None:
                            self._give(i, left.popleft())
                            selector.register(self._processes[i].channel, selectors.EVENT_READ, i)
                    for key, _ in selector.select():
                        selector.unregister(key.fileobj)
                        order, answer = self._take(key.data)
                        if answer is None:
                            left.appendleft(order)
                        else:
                            yield order, answer
        except BaseException:
            # what is still being worked on would be taken for an answer to the next order
            self.close()
            raise

    def _prepare(self, bench: ClientRuntime, server: Tree) -> None:
        """Start the processes once, and send model and data once and each new state of the server
        once."""
        if self._setup is None or self._setup[0] is not bench:
            self._setup = self._send(bench, Setup(bench.to(CPU), self.inner), self._setup)
        if self._published is None or self._published[0] is not server:
            self._published = self._send(server, Publish(server), self._published)
        if not self._processes:
            self._processes = [self._start(i) for i in range(len(self.hardware))]

    def _send(self, source: T, value: Any, before: tuple[T, BinaryIO] | None) -> tuple[T, BinaryIO]:
        """Send to all processes; kept, for those that are started later."""
        if before is not None:
            before[1].close()
        parcel = pack(value)
        for process in self._processes:
            self._tell(process, parcel)
        return source, parcel

    def _start(self, i: int) -> Process:
        hardware = self.hardware[i]
        ours, theirs = socket.socketpair()
        # The same modules can be imported there, whatever made them importable here.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
        }
        environment["OMP_NUM_THREADS"] = str(hardware.threads)
        program = (
            f"from fedexp.engine.processes.worker import main; main({theirs.fileno()},"
            f" {os.getpid()})"
        )
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", program],  # -P: not the modules of the current directory
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl+C in a terminal reaches the parent only, which then decides
        )
        theirs.close()
        process = Process(popen, Channel(ours))
        assert self._setup is not None
        assert self._published is not None
        for parcel in (pack(Begin(hardware)), self._setup[1], self._published[1]):
            self._tell(process, parcel)
        return process

    def _tell(self, process: Process, parcel: BinaryIO) -> None:
        """Send a message without an answer; that the process is gone shows when an answer is waited
        for."""
        try:
            process.channel.send(parcel)
        except ConnectionError:
            log.debug("process %d is gone", process.popen.pid)

    def _give(self, i: int, order: Order) -> None:
        process = self._processes[i]
        process.order = order
        order.tries += 1
        try:
            process.channel.send_value(order.value)
        except ConnectionError:
            log.debug("process %d is gone", process.popen.pid)

    def _take(self, i: int) -> tuple[Order, Any]:
        """Return the order of a process and its answer; None when it has died, and another has
        taken its place."""
        process = self._processes[i]
        order, process.order = process.order, None
        assert order is not None
        try:
            answer = process.channel.receive()
        except (EOFError, ConnectionError):
            self._replace(i, order)
            return order, None
        if isinstance(answer, Failure):
            answer.error.add_note(f"in worker {i}:\n{answer.report}")
            raise answer.error
        return order, answer

    def _replace(self, i: int, order: Order) -> None:
        process = self._processes[i]
        what = f"{order.name}: worker {i} (process {process.popen.pid}) ended by {process.end()}"
        if order.tries >= TRIES:
            raise WorkerDied(f"{what}, as did the one before it")
        log.warning("%s; starting another", what)
        self._processes[i] = self._start(i)


def spread(hardware: Any, count: int) -> list[Any]:
    """Return the hardware of each of `count` processes: on GPUs each has its own, unless the user
    has named one."""
    if hardware.device.type != "cuda" or hardware.device.index is not None:
        return [hardware] * count
    devices = torch.cuda.device_count()
    return [replace(hardware, device=torch.device("cuda", i % devices)) for i in range(count)]
