"""A worker process of the workers engine, which trains clients, one order at a time."""

import ctypes
import os
import signal
import socket
import sys
import traceback
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedexp.algorithms.base import FedAvg
from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Evaluation, Shared, Trained
from fedexp.engine.network import subnormals_as_zero
from fedexp.engine.processes.channel import Channel

CPU = torch.device("cpu")

# --- orders


class Begin(NamedTuple):
    """The first order."""

    hardware: Any  # fedexp.engine.hardware.Resolved, of this process


class Setup(NamedTuple):
    """Values that stay the same for the whole run."""

    runtime: ClientRuntime  # on the CPU
    engine: Engine  # engine with which this process trains clients


class Publish(NamedTuple):
    """The server's state for the orders that follow."""

    server: Tree


class Ready(NamedTuple):
    """Request for an answer after all earlier orders are done."""


class Train(NamedTuple):
    algorithm: FedAvg
    cohort: Cohort
    lr: float
    evaluate_local: bool


class Evaluate(NamedTuple):
    batches: range
    view: str
    round: int


class Ask(NamedTuple):
    """Request for a model's logits on training examples."""

    model: Params
    numbers: Tensor


class Failure(NamedTuple):
    """An exception in the worker."""

    error: Exception
    report: str  # the traceback


class Worker:
    """Runs orders. It has only the data that it was sent."""

    def __init__(self) -> None:
        self.device = CPU
        self.server: Tree = None

    @subnormals_as_zero()
    def obey(self, order: Any) -> Trained | Evaluation | Tensor | Ready | None:
        """Run an order and return its answer, or None if the order has no answer."""
        match order:
            case Begin(hardware):
                hardware.apply()
                self.device = hardware.device
            case Setup(runtime, engine):
                self.runtime, self.engine = runtime.to(self.device), engine
            case Publish(server):
                self.server = move(server, self.device)
            case Ready():
                return order
            case Train(algorithm, cohort, lr, evaluate_local):
                states, personals = move((cohort.states, cohort.personals), self.device)
                cohort = replace(cohort, states=states, personals=personals)
                return self.engine.train(
                    Shared(algorithm, self.runtime, self.server, lr), cohort, evaluate_local
                )
            case Evaluate(batches, view, number):
                self.runtime.net.set_buffers(self.server["buffers"])
                draws = self.runtime.test_draws(view, number)
                return self.runtime.tested_on(view).evaluate(self.server["params"], draws, batches)
            case Ask(model, numbers):
                return self.runtime.logits(move(model, self.device), numbers)
        return None


def cut_evenly(total: int, most: int) -> list[range]:
    """Return the numbers 0 ... total - 1 as at most `most` ranges of about equal size."""
    count = min(most, total)
    edges = [total * i // count for i in range(count + 1)]
    return [range(*edge) for edge in pairwise(edges)]


def move(values: Tree, device: torch.device) -> Tree:
    """Return a tree with its tensors on the device."""
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, values)


def serve(channel: Channel) -> None:
    """Run orders until the other end closes the connection."""
    worker = Worker()
    while True:
        try:
            order = channel.receive()
        except (EOFError, ConnectionError):
            return
        answer: Any
        try:
            answer = worker.obey(order)
        except Exception as error:
            answer = Failure(picklable(error), traceback.format_exc())
        if answer is not None:
            channel.send_value(answer)


def picklable(error: Exception) -> Exception:
    """Return the exception in a form that can be pickled.

    Only fedexp's exceptions are sure to be picklable. For others, type and message are kept.
    """
    if type(error).__module__.startswith("fedexp.") and len(error.args) == 1:
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends.

    This also works after kill -9 and during a long step.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Run a worker in a separate process.

    descriptor: this process's end of a socket pair.
    parent: process id of the parent.
    """
    die_with(parent)
    # The parent decides when to stop. Slurm sends USR2 to a submitit job when its time is up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    serve(Channel(socket.socket(fileno=descriptor)))
