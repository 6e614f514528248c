"""The workers engine trains clients in several processes.

Each process uses one thread or one GPU. The clients with the most steps are trained first, and each
process that becomes free receives the next client, so that all processes finish at about the same
time. The results are returned in the order of the cohort, so they do not depend on the number of
workers.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any, BinaryIO, ClassVar

from torch import Tensor

from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.data.views import PLAIN
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Evaluation, Gather, Shared, Trained
from fedexp.engine.processes.channel import Channel, pack
from fedexp.engine.processes.worker import CPU, Call, Failure, Worker, cut_evenly, move

log = logging.getLogger("fedexp")
TRIES = 2  # number of processes that may die while they run the same order, then the run fails
LOST = (EOFError, OSError)  # raised by a channel if the other process has closed the connection


class WorkerDied(RuntimeError):
    """Raised if a worker process and its replacement both died while they ran the same order."""


@dataclass
class Order:
    """A function call that a worker runs, and the position of its return value in the result."""

    name: str  # for messages
    call: Call
    # the positions of the order's clients in the cohort, or the position of its answer
    positions: Sequence[int]
    tries: int = 0


class Process:
    """A process that runs a worker, and the connection to this process."""

    def __init__(self, number: int, threads: int):
        ours, theirs = socket.socketpair()
        # The process must be able to import the same modules as the current process.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
        arguments = f"{number}, {theirs.fileno()}, {os.getpid()}"
        program = f"from fedexp.engine.processes.worker import main; main({arguments})"
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", program],  # -P: do not import from the current directory
            pass_fds=[theirs.fileno()],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl+C in a terminal reaches only the parent
        )
        theirs.close()
        self.number, self.threads = number, threads
        self.name = f"worker {number} (process {self.popen.pid})"
        self.channel = Channel(ours)
        self.order: Order | None = None  # the current order

    def send(self, parcel: BinaryIO) -> None:
        """Send a parcel. If the process has died, only `Channel.receive` raises an exception."""
        with suppress(*LOST):
            self.channel.send(parcel)

    def end(self) -> str:
        """Make sure that the process has ended, and return how it ended."""
        self.channel.close()
        try:
            code = self.popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = self.popen.wait()
        if code >= 0:
            return f"exit code {code}"
        oom = ", perhaps because the system ran out of memory" if code == -signal.SIGKILL else ""
        return f"signal {-code} ({signal.Signals(-code).name}{oom})"

    def close(self) -> None:
        self.channel.close()
        self.popen.kill()
        self.popen.wait()


class Workers(Engine):
    """Engine that trains clients in several processes.

    inner: the engine that each process uses.
    hardware: the hardware of each process (fedexp.engine.hardware.Resolved).
    count: the number of processes.
    share: whether the cohort is divided among the processes in advance, so that the vectorised
    engine can train a process's clients together. False: a process receives one client at a time.
    """

    # the processes of finished runs, for the next run; None: the processes end with their run
    idle: ClassVar[list[Process] | None] = None

    def __init__(self, inner: Engine, hardware: Any, count: int, share: bool):
        self.inner, self.hardware, self.count, self.share = inner, hardware, count, share
        self._processes: list[Process] = []
        # orders that have been sent to all processes: name -> (value that was sent, parcel)
        self._sent: dict[str, tuple[Any, BinaryIO]] = {}

    def start(self, runtime: ClientRuntime, server: Tree) -> None:
        orders = []  # one for each worker
        for i in range(self.count):
            orders.append(Order(f"starting worker {i}", partial(Worker.echo, value=i), [i]))
        self._answers(runtime, orders, server)

    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        shares = [[position] for position in cohort.longest_first()]
        if self.share:
            shares = cohort.shares(self.count)
        orders = []
        for positions in shares:
            part = cohort.take(positions)
            name = f"round {cohort.round}, training client {', '.join(map(str, part.clients))}"
            call = partial(Worker.train, algorithm=shared.algorithm, cohort=part, lr=shared.lr)
            orders.append(Order(name, partial(call, evaluate_local=evaluate_local), positions))
        gather = Gather(cohort)
        for order, answer in self._do(shared.runtime, orders, shared.server):
            part = move(vars(answer), shared.runtime.device)
            # Clone the states. Otherwise, they keep the received file in memory, which also
            # contains the messages.
            part["states"] = tree.map(Tensor.clone, part["states"])
            gather.add(order.positions, Trained(**part))
        return gather.result(parallel=min(self.count, len(orders)))

    def evaluate(
        self, runtime: ClientRuntime, server: Tree, view: str = PLAIN, round: int = 0
    ) -> Evaluation:
        orders = []
        pieces = cut_evenly(runtime.tested_on(view).evaluation_batches, self.count)
        for i, piece in enumerate(pieces):
            call = partial(Worker.evaluate, batches=piece, view=view, round=round)
            orders.append(Order("evaluating the global model", call, [i]))
        parts = self._answers(runtime, orders, server)
        here = [replace(part, **move(vars(part), runtime.device)) for part in parts]
        return Evaluation.joined(here)

    def logits(
        self, runtime: ClientRuntime, models: Sequence[Params], numbers: Sequence[Tensor]
    ) -> list[Tensor]:
        orders = []
        for i, (model, each) in enumerate(zip(models, numbers, strict=True)):
            call = partial(Worker.logits, model=model, numbers=each)
            orders.append(Order(f"computing logits of model {i}", call, [i]))
        return [answer.to(runtime.device) for answer in self._answers(runtime, orders)]

    def close(self) -> None:
        for process in self._processes:
            if Workers.idle is None or process.order is not None:
                process.close()
            else:
                Workers.idle.append(process)
        for _, parcel in self._sent.values():
            parcel.close()
        self._processes, self._sent = [], {}

    def _answers(
        self, runtime: ClientRuntime, orders: Sequence[Order], server: Tree = None
    ) -> list[Any]:
        """Run the orders and return their answers, sorted by position."""
        found = {order.positions[0]: answer for order, answer in self._do(runtime, orders, server)}
        return [found[i] for i in range(len(orders))]

    def _do(
        self, runtime: ClientRuntime, orders: Sequence[Order], server: Tree = None
    ) -> Iterator[tuple[Order, Any]]:
        """Run the orders in the processes, and yield each with its answer as soon as it arrives.

        server: the server's state. It is sent to processes that do not have it yet. None: the
            orders do not need the state.
        """
        try:
            self._prepare(runtime, server)
            waiting = deque(orders)
            while busy := self._give(waiting):
                sockets = {process.channel.connection: process for process in busy}
                for ready in wait(sockets):
                    order, answer = self._take(sockets[ready])  # type: ignore[index]
                    if answer is None:
                        waiting.appendleft(order)
                    else:
                        yield order, answer
        except BaseException:
            # Otherwise, a late answer would be mistaken for the answer to the next order.
            self.close()
            raise

    def _prepare(self, runtime: ClientRuntime, server: Tree) -> None:
        """Start the processes, and send them the values that they do not have yet.

        The model and the data are sent once. The server's state is sent whenever it has changed.
        """
        known = {name: source for name, (source, _) in self._sent.items()}
        if known.get("setup") is not runtime:
            setup = partial(Worker.setup, runtime=runtime.to(CPU), engine=self.inner)
            self._send_to_all("setup", runtime, setup)
        if server is not None and known.get("publish") is not server:
            self._send_to_all("publish", server, partial(Worker.publish, server=server))
        while len(self._processes) < self.count:
            self._processes.append(self._start(len(self._processes)))

    def _send_to_all(self, name: str, source: Any, call: Call) -> None:
        """Send an order to all processes, and store it for processes that are started later."""
        if name in self._sent:
            self._sent[name][1].close()
        parcel = pack(call)
        self._sent[name] = source, parcel
        for process in self._processes:
            process.send(parcel)

    def _start(self, i: int) -> Process:
        """Start process i and send it all orders that the other processes have received."""
        process = take_idle(i, self.hardware.threads) or Process(i, self.hardware.threads)
        with pack(partial(Worker.begin, hardware=self.hardware)) as begin:
            for parcel in (begin, *(parcel for _, parcel in self._sent.values())):
                process.send(parcel)
        return process

    def _give(self, waiting: deque[Order]) -> list[Process]:
        """Send the next orders to the free processes, and return all busy processes."""
        for process in self._processes:
            if waiting and process.order is None:
                process.order = waiting.popleft()
                process.order.tries += 1
                with pack(process.order.call) as parcel:
                    process.send(parcel)
        return [process for process in self._processes if process.order]

    def _take(self, process: Process) -> tuple[Order, Any]:
        """Receive the answer of a process, and return (order, answer).

        If the process has died, it is replaced and the answer is None.
        """
        order, process.order = process.order, None
        assert order is not None
        try:
            answer = process.channel.receive()
        except LOST:
            self._replace(process, order)
            return order, None
        if isinstance(answer, Failure):
            answer.error.add_note(f"in {process.name}:\n{answer.report}")
            raise answer.error
        return order, answer

    def _replace(self, process: Process, order: Order) -> None:
        what = f"{order.name}: {process.name} ended by {process.end()}"
        if order.tries >= TRIES:
            raise WorkerDied(f"{what}; the first worker with this order also died")
        log.warning("%s; starting another worker", what)
        i = self._processes.index(process)
        self._processes[i] = self._start(i)


@contextmanager
def keeping_processes() -> Iterator[None]:
    """Let the runs in the block use the same processes, which end with the block.

    A new process takes seconds to import torch.
    """
    Workers.idle = []
    try:
        yield
    finally:
        for process in Workers.idle:
            process.close()
        Workers.idle = None


def take_idle(number: int, threads: int) -> Process | None:
    """Return a process of an earlier run that is still alive, or None."""
    idle = Workers.idle or []
    for process in idle:
        if (process.number, process.threads) == (number, threads):
            idle.remove(process)
            return process if process.popen.poll() is None else None
    return None
