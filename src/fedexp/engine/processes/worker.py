"""A worker, which trains clients and evaluates models in its process, one order at a time."""

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
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Evaluation, Shared, Trained
from fedexp.engine.network import flush_subnormals
from fedexp.engine.processes.channel import Channel

CPU = torch.device("cpu")


class Failure(NamedTuple):
    """An exception in a worker."""

    error: Exception
    report: str  # the traceback


@dataclass
class Worker:
    """The values that a worker was sent.

    An order is a function of the worker, such as `partial(Worker.evaluate, batches=...)`. An order
    that returns None has no answer.
    """

    number: int  # among the workers on this host
    device: torch.device = CPU
    server: Tree = None

    def begin(self, hardware: Any) -> None:
        """Set up the process.

        hardware: fedexp.engine.hardware.Resolved. If it names no GPU, the workers of a host use
        different GPUs.
        """
        device = hardware.device
        if device.type == "cuda" and device.index is None:
            if not torch.cuda.device_count():
                raise ConfigError(f"hardware.device={device}: {socket.gethostname()} has no GPU")
            device = torch.device("cuda", self.number % torch.cuda.device_count())
        self.device = device
        replace(hardware, device=device).apply()

    def setup(self, runtime: ClientRuntime, engine: Engine) -> None:
        """Store the values that stay the same for the whole run."""
        self.runtime, self.engine = runtime.to(self.device), engine

    def publish(self, server: Tree) -> None:
        """Store the server's state for the orders that follow."""
        self.server = move(server, self.device)

    def echo(self, value: Any) -> Any:
        """Return the value, after all earlier orders are done."""
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
    """Return the numbers 0 ... total - 1 as at most `most` ranges of about equal size."""
    count = min(most, total)
    edges = [total * i // count for i in range(count + 1)]
    return [range(*edge) for edge in pairwise(edges)]


def move(values: Tree, device: torch.device) -> Tree:
    """Return a tree with its tensors on the device."""
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, values)


def serve(channel: Channel, worker: Worker) -> None:
    """Run orders until the order None.

    Raises EOFError or OSError if the other end closes the connection.
    """
    while True:
        try:
            order = channel.receive()
        except (EOFError, OSError):
            raise
        except Exception as error:  # for example, a package is missing here
            answer = failure(error)
        else:
            if order is None:
                return
            answer = run(order, worker)
        if answer is not None:
            channel.send_value(answer)


@flush_subnormals()
def run(order: Call, worker: Worker) -> Any:
    """Return the answer to an order, or a Failure if it raises an exception."""
    try:
        return order(worker)
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> Failure:
    """Return an exception in a form that can be pickled.

    Only fedexp's exceptions are sure to be picklable. For others, type and message are kept.
    """
    report = traceback.format_exc()
    if type(error).__module__.startswith("fedexp.") and len(error.args) == 1:
        return Failure(error, report)
    return Failure(RuntimeError(f"{type(error).__name__}: {error}"), report)


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends.

    This also works after kill -9 and during a long step.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)


def main(number: int, descriptor: int, parent: int) -> None:
    """Run a worker in a separate process.

    descriptor: this process's end of a socket pair.
    parent: process id of the parent.
    """
    die_with(parent)
    # The parent decides when to stop. Slurm sends USR2 to a submitit job when its time is up.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(signal_number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        serve(Channel(socket.socket(fileno=descriptor)), Worker(number))
