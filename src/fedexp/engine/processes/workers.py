"""The workers engine: clients in several processes, with one thread each or one GPU each.

The longest clients are trained first, and the next client goes to the first free process, so that
all processes end at about the same time. Results are put in the order of the cohort, so they do not
depend on the number of workers.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.data.views import PLAIN
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Evaluation, Gather, Shared, Trained
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
TRIES = 2  # an order that has ended two processes is not given to a third one


class WorkerDied(RuntimeError):
    """A process died during its work, and so did its replacement."""


@dataclass
class Order:
    """One piece of work."""

    name: str  # for messages
    value: Any
    positions: Sequence[int]  # positions of its clients in the cohort, or of its answer
    tries: int = 0


class Process:
    """A worker process and the connection to it."""

    def __init__(self, hardware: Any, parcels: Sequence[BinaryIO]):
        """Start the process and send it the parcels that other processes already have."""
        ours, theirs = socket.socketpair()
        # The process can import the same modules as this one.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(hardware.threads)}
        arguments = f"{theirs.fileno()}, {os.getpid()}"
        program = f"from fedexp.engine.processes.worker import main; main({arguments})"
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", program],  # -P: do not import from the current directory
            pass_fds=[theirs.fileno()],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl+C in a terminal reaches only the parent
        )
        theirs.close()
        self.channel = Channel(ours)
        self.order: Order | None = None  # the current order
        with pack(Begin(hardware)) as begin:
            for parcel in (begin, *parcels):
                self.send(parcel)

    def send(self, parcel: BinaryIO) -> None:
        """Send a message. A dead process is noticed only when an answer is received."""
        with suppress(ConnectionError):
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
        oom = ", as the system's out-of-memory killer sends it" if code == -signal.SIGKILL else ""
        return f"signal {-code} ({signal.Signals(-code).name}{oom})"

    def kill(self) -> None:
        self.channel.close()
        self.popen.kill()
        self.popen.wait()


class Workers(Engine):
    """Engine over several processes.

    hardware: of each process.
    inner: engine with which a process trains a client or a share of the cohort.
    """

    def __init__(self, inner: Engine, hardware: Sequence[Any], share: bool):
        """Set up the engine.

        share: whether a process receives its share of a cohort at once (to vectorise it), or one
        client at a time.
        """
        self.inner, self.hardware, self.share = inner, hardware, share
        self._processes: list[Process] = []
        # kind of order -> its source and the packed order, for orders that all processes have
        self._sent: dict[type, tuple[Any, BinaryIO]] = {}

    def start(self, runtime: ClientRuntime, server: Tree) -> None:
        published = self._sent[Publish][0] if Publish in self._sent else server
        orders = [Order(f"starting worker {i}", Ready(), [i]) for i in range(len(self.hardware))]
        self._answers(runtime, published, orders)  # one order per worker

    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        shares = [[position] for position in cohort.longest_first()]
        if self.share:
            shares = cohort.shares(len(self.hardware))
        orders = []
        for positions in shares:
            part = cohort.take(positions)
            name = f"round {cohort.round}, training client {', '.join(map(str, part.clients))}"
            orders.append(
                Order(name, Train(shared.algorithm, part, shared.lr, evaluate_local), positions)
            )
        gather = Gather(len(cohort.clients))
        for order, answer in self._do(shared.runtime, shared.server, orders):
            part = move(vars(answer), shared.runtime.device)
            # Clone the states, so that they do not keep the received file alive, which also has
            # the messages.
            part["states"] = tree.map(torch.clone, part["states"])
            gather.add(order.positions, Trained(**part))
        return gather.result(parallel=min(len(self.hardware), len(orders)))

    def evaluate(
        self, runtime: ClientRuntime, server: Tree, view: str = PLAIN, round: int = 0
    ) -> Evaluation:
        pieces = cut_evenly(runtime.tested_on(view).evaluation_batches, len(self.hardware))
        name = "evaluating the global model"
        orders = [Order(name, Evaluate(piece, view, round), [i]) for i, piece in enumerate(pieces)]
        parts = self._answers(runtime, server, orders)
        here = [replace(part, **move(vars(part), runtime.device)) for part in parts]
        return Evaluation.joined(here)

    def logits(
        self, runtime: ClientRuntime, models: Sequence[Params], numbers: Sequence[Tensor]
    ) -> list[Tensor]:
        assert Publish in self._sent, "models are asked after training"
        orders = []
        for i, (model, each) in enumerate(zip(models, numbers, strict=True)):
            orders.append(Order(f"asking model {i}", Ask(model, each), [i]))
        answers = self._answers(runtime, self._sent[Publish][0], orders)
        return [answer.to(runtime.device) for answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for _, parcel in self._sent.values():
            parcel.close()
        self._processes, self._sent = [], {}

    def _answers(self, runtime: ClientRuntime, server: Tree, orders: Sequence[Order]) -> list[Any]:
        """Return the answers in the orders' positions."""
        found = {order.positions[0]: answer for order, answer in self._do(runtime, server, orders)}
        return [found[i] for i in range(len(orders))]

    def _do(
        self, runtime: ClientRuntime, server: Tree, orders: Sequence[Order]
    ) -> Iterator[tuple[Order, Any]]:
        """Run the orders, the first one first, and yield them with their answers on arrival."""
        try:
            self._prepare(runtime, server)
            left = deque(orders)
            with selectors.DefaultSelector() as selector:
                while left or any(process.order for process in self._processes):
                    for i, process in enumerate(self._processes):
                        if left and process.order is None:
                            self._give(i, left.popleft())
                            selector.register(process.channel, selectors.EVENT_READ, i)
                    for key, _ in selector.select():
                        selector.unregister(key.fileobj)
                        order, answer = self._take(key.data)
                        if answer is None:
                            left.appendleft(order)
                        else:
                            yield order, answer
        except BaseException:
            # otherwise a late answer would be taken for the answer to the next order
            self.close()
            raise

    def _prepare(self, runtime: ClientRuntime, server: Tree) -> None:
        """Start the processes and send model and data once, and the server's state if it has
        changed.
        """
        self._send(Setup, runtime, lambda: Setup(runtime.to(CPU), self.inner))
        self._send(Publish, server, lambda: Publish(server))
        while len(self._processes) < len(self.hardware):
            self._processes.append(self._start(len(self._processes)))

    def _send(self, kind: type, source: Any, order: Callable[[], Any]) -> None:
        """Send an order to all processes unless they already have it.

        The order is kept for processes that are started later.
        """
        if kind in self._sent:
            before, parcel = self._sent[kind]
            if before is source:
                return
            parcel.close()
        parcel = pack(order())
        self._sent[kind] = source, parcel
        for process in self._processes:
            process.send(parcel)

    def _start(self, i: int) -> Process:
        return Process(self.hardware[i], [parcel for _, parcel in self._sent.values()])

    def _give(self, i: int, order: Order) -> None:
        self._processes[i].order = order
        order.tries += 1
        with pack(order.value) as parcel:
            self._processes[i].send(parcel)

    def _take(self, i: int) -> tuple[Order, Any]:
        """Return a process's order and its answer.

        If the process has died, replace it and return None as the answer.
        """
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
    """Return the hardware of each of `count` processes.

    On GPUs, each process gets another GPU, unless the user has chosen one.
    """
    if hardware.device.type != "cuda" or hardware.device.index is not None:
        return [hardware] * count
    devices = torch.cuda.device_count()
    return [replace(hardware, device=torch.device("cuda", i % devices)) for i in range(count)]
