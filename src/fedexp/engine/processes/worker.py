"""A worker trains clients and evaluates models in a separate process.

It receives orders from the main process and runs one order at a time.
"""

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg
from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Evaluation, Shared, Trained
from fedexp.engine.network import flush_subnormals
from fedexp.engine.processes.channel import Channel

CPU = torch.device("cpu")


class Failure(NamedTuple):
    """An exception that was raised in a worker."""

    error: Exception
    report: str  # the traceback


@dataclass
class Worker:
    """The state of a worker process, and the methods for the orders that it receives.

    An order is a function with the worker as its only argument, such as `partial(Worker.evaluate,
    batches=...)`. The worker sends the result as its answer, unless the result is None.
    """

    number: int  # from 0
    device: torch.device = CPU
    server: Tree = None

    def begin(self, hardware: Any) -> None:
        """Set up the process for the hardware.

        hardware: fedexp.engine.hardware.Resolved. If it does not name a particular GPU, the
            workers are distributed among the GPUs.
        """
        device = hardware.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", self.number % torch.cuda.device_count())
        self.device = device
        replace(hardware, device=device).apply()

    def setup(self, runtime: ClientRuntime, engine: Engine) -> None:
        """Store the runtime and the engine for the whole run."""
        self.runtime, self.engine = runtime.to(self.device), engine

    def publish(self, server: Tree) -> None:
        """Store the server's state for later calls of `train`."""
        self.server = move(server, self.device)

    def echo(self, value: Any) -> Any:
        """Return the value. When the reply arrives, all earlier calls are finished."""
        return value

    def train(self, algorithm: FedAvg, cohort: Cohort, lr: float, evaluate_local: bool) -> Trained:
        states, personals = move((cohort.states, cohort.personals), self.device)
        cohort = replace(cohort, states=states, personals=personals)
        shared = Shared(algorithm, self.runtime, self.server, lr)
        return self.engine.train(shared, cohort, evaluate_local)

    def evaluate(self, batches: range, view: str, round: int) -> Evaluation:
        self.runtime.net.set_buffers(self.server["buffers"])
        draws = self.runtime.test_draws(view, round)
        return self.runtime.tested_on(view).evaluate(self.server["params"], draws, batches)

    def logits(self, model: Params, numbers: Tensor) -> Tensor:
        return self.runtime.logits(move(model, self.device), numbers)


Call = Callable[[Worker], Any]  # an order


def cut_evenly(total: int, most: int) -> list[range]:
    """Split the numbers from 0 to `total` - 1 into at most `most` ranges of about equal size."""
    count = min(most, total)
    edges = [total * i // count for i in range(count + 1)]
    return [range(*edge) for edge in pairwise(edges)]


def move(values: Tree, device: torch.device) -> Tree:
    """Return a copy of a tree whose tensors are on the device."""
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, values)


def serve(channel: Channel, worker: Worker) -> None:
    """Receive orders and run them.

    Raises EOFError or OSError if the other process closes the connection.
    """
    while True:
        try:
            order = channel.receive()
        except (EOFError, OSError):
            raise
        except Exception as error:  # for example, because a module cannot be imported
            answer = failure(error)
        else:
            answer = run(order, worker)
        if answer is not None:
            channel.send_value(answer)


@flush_subnormals()
def run(order: Call, worker: Worker) -> Any:
    """Run an order and return its answer, or a Failure if the order raises an exception."""
    try:
        return order(worker)
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> Failure:
    """Return an exception and its traceback in a form that can be pickled.

    An exception from another package may not be picklable, so it is replaced by a RuntimeError that
    contains its type and message.
    """
    report = traceback.format_exc()
    if type(error).__module__.startswith("fedexp.") and len(error.args) == 1:
        return Failure(error, report)
    return Failure(RuntimeError(f"{type(error).__name__}: {error}"), report)


def die_with(parent: int) -> None:
    """Let the Linux kernel end this process when its parent process ends.

    This also works if the parent is ended by kill -9, and if this process is busy.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)


def main(number: int, descriptor: int, parent: int) -> None:
    """Run a worker. This is the main function of a worker process.

    number: the number of the worker.
    descriptor: the file descriptor of this process's end of a socket pair.
    parent: the id of the parent process.
    """
    die_with(parent)
    # Ignore signals, because the parent decides when to stop. Slurm sends USR2 to a submitit job
    # when its time is up.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(signal_number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        serve(Channel(socket.socket(fileno=descriptor)), Worker(number))
