"""A rank trains clients and evaluates models for rank 0, the server.

It receives orders from rank 0 and runs one order at a time.
"""

import ctypes
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fedexp.algorithms.base import FedAvg
from fedexp.core import tree
from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Shared, Tested, Trained
from fedexp.engine.network import flush_subnormals
from fedexp.engine.ranks.objects import receive, send, share
from fedexp.engine.resolved import Resolved

CPU = torch.device("cpu")


class Failure(NamedTuple):
    """An exception that was raised in a rank."""

    error: Exception
    report: str  # the traceback


class Rank:
    """The state of a rank, and the methods for the orders that it receives.

    An order is a function with the rank as its only argument, such as `partial(Rank.evaluate,
    batches=...)`.
    """

    def load(
        self, runtime: ClientRuntime, features: dict[str, Any], checksum: str
    ) -> tuple[bytes, str]:
        """Load the data of a run, and return the fields of `Mapped` for the ranks of this node.

        Rank 0, which cannot map the file of another node, would map a `Mapped` when it arrives.

        runtime: without data. features: of the examples, if rank 0 has computed them.
        checksum: of rank 0's data.

        Raises ConfigError if the data differ from rank 0's.
        """
        where = f"rank {dist.get_rank()} on {platform.node()}"
        assert runtime.load is not None, "set when the run was prepared"
        try:
            data = runtime.load()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if data.crc() != checksum:
            raise ConfigError(
                f"{where}: the loaded data differ from those of rank 0 (checksum {data.crc()}, not"
                f" {checksum}); data_dir must have the same files on all machines"
            )
        whole = replace(runtime, data=replace(data, **features), load=None)
        mapped, self.file = share(whole)  # it stays open for the other ranks
        return mapped.text, mapped.path

    def begin(
        self, hardware: Resolved, number: int, engine: Engine, runtime: ClientRuntime
    ) -> None:
        """Set up the process for a run.

        hardware: if it does not name a particular GPU, the ranks of a node are distributed among
            its GPUs.
        number: the number of the rank on its node.

        Raises ConfigError if the node does not have the GPU.
        """
        device, gpus = hardware.device, torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise ConfigError(
                f"hardware.device={device}: rank {dist.get_rank()} on {platform.node()} has"
                f" {plural(gpus, 'CUDA device')}; all machines need one, or hardware.device=cpu"
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", number % gpus)
        replace(hardware, device=device).apply()
        self.use(engine, runtime.to(device))

    def use(self, engine: Engine, runtime: ClientRuntime, server: Tree = None) -> None:
        self.engine, self.runtime, self.server = engine, runtime, server

    def publish(self, server: Tree) -> None:
        """Store the server's state for later orders."""
        self.server = tree.to(server, self.runtime.device)

    def train(self, algorithm: FedAvg, cohort: Cohort, lr: float, evaluate_local: bool) -> Trained:
        states, personals = tree.to((cohort.states, cohort.personals), self.runtime.device)
        cohort = replace(cohort, states=states, personals=personals)
        shared = Shared(algorithm, self.runtime, self.server, lr)
        return self.engine.train(shared, cohort, evaluate_local)

    def evaluate(self, batches: range, view: str, round: int) -> Tested:
        self.runtime.net.set_buffers(self.server["buffers"])
        draws = self.runtime.test_draws(view, round)
        return self.runtime.tested_on(view).evaluate(self.server["params"], draws, batches)

    def logits(self, model: Params, numbers: Tensor) -> Tensor:
        return self.runtime.logits(tree.to(model, self.runtime.device), numbers)


Call = Callable[[Rank], Any]  # an order


def cut_evenly(total: int, most: int) -> list[range]:
    """Split the numbers from 0 to `total` - 1 into at most `most` ranges of about equal size."""
    count = min(most, total)
    edges = [total * i // count for i in range(count + 1)]
    return [range(*edge) for edge in pairwise(edges)]


def serve(key: bytes) -> None:
    """Run the orders of rank 0 until it ends or closes the connection."""
    # Ignore signals, because rank 0 decides when to stop. Slurm sends USR2 to a submitit job when
    # its time is up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    rank = Rank()
    with suppress(ConnectionError):
        while True:
            packed = receive(0, key)
            send(answer(packed.unpack, rank), 0, key)


@flush_subnormals()
def answer(orders: Callable[[], Sequence[Call]], rank: Rank) -> Any:
    """Run orders, and return the last result, or a Failure if an exception is raised.

    orders: a function that returns the orders. It fails, for example, if a module is missing.
    """
    result = None
    try:
        for order in importing(orders):
            result = order(rank)
    except Exception as error:
        return failure(error)
    return result


def importing(orders: Callable[[], Sequence[Call]]) -> Sequence[Call]:
    """Return the orders. Raises ConfigError if this machine lacks a class or function in them."""
    try:
        return orders()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"rank {dist.get_rank()} on {platform.node()}: {error}; all ranks must import the same"
            " code"
        ) from error


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
