"""The distributed engine, which trains clients in processes on one or more hosts.

The processes are started by torchrun or Slurm. Rank 0 leads the run: it reads the configuration and
the data, samples clients, aggregates, writes the results and prints. It starts a worker process for
its share of the clients. The other ranks are also workers, connected to rank 0 by TCP. They receive
all data from rank 0, so the hosts only need the same installed packages.
"""

import hmac
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from fedexp.core.errors import ConfigError
from fedexp.engine.base import Engine
from fedexp.engine.processes.channel import NetworkChannel
from fedexp.engine.processes.ranks import Ranks
from fedexp.engine.processes.worker import Worker, serve
from fedexp.engine.processes.workers import LOST, Process, Workers

START_TIMEOUT = timedelta(minutes=10)  # time within which all processes must have started
KEY_TIMEOUT = 10.0  # seconds within which a process that connects must send the key
# Number of bytes in the key. Rank 0 accepts only processes that have read it from torch's store.
KEY = 32
STORE_NAME = "fedexp"  # name under which the store contains the port and the key of rank 0

# rank -> connection, used by all runs of this command
connected: dict[int, NetworkChannel] = {}


class RankLost(RuntimeError):
    """Raised if the connection to another rank is broken."""

    def __init__(self, rank: int):
        super().__init__(
            f"the connection to rank {rank} is broken: the process of this rank has ended, for"
            " example because it ran out of memory or was killed, or its host or the network has"
            " failed"
        )


class Rank(Process):
    """A rank other than 0. If its process has ended, it cannot be started again."""

    def __init__(self, number: int):
        super().__init__(f"rank {number}", connected[number])
        self.number = number

    def end(self) -> str:
        # Ctrl+C ends all ranks at the same time, so first wait for the signal to this process.
        time.sleep(0.5)
        raise RankLost(self.number)


class Distributed(Workers):
    """Engine that trains clients in a worker process of rank 0 and in all other ranks."""

    def __init__(self, inner: Engine, hardware: Any):
        super().__init__(inner, hardware, hardware.workers, share=True)

    def _connect(self, i: int) -> Process:
        if i == 0:
            return super()._connect(i)
        with suppress(*LOST):  # the error occurs again when an answer is received
            skip_answers(connected[i])
        return Rank(i)


def skip_answers(channel: NetworkChannel) -> None:
    """Wait until a rank has finished its orders from a failed run, and ignore their answers."""
    channel.send_value(partial(Worker.echo, value=STORE_NAME))
    answer = None
    while not isinstance(answer, str):  # the answers to other orders are never strings
        answer = channel.receive()


@contextmanager
def leading(ranks: Ranks) -> Iterator[None]:
    """Connect rank 0 to the other ranks while the block runs, and dismiss them afterwards."""
    accept(ranks)
    try:
        yield
    except KeyboardInterrupt:
        raise  # the other ranks may be busy; they end when the connection is closed
    except BaseException:
        dismiss()
        raise
    dismiss()


def dismiss() -> None:
    for channel in connected.values():
        with suppress(*LOST):
            skip_answers(channel)
            channel.send_value(None)
        channel.close()
    connected.clear()


def follow(ranks: Ranks) -> int:
    """Run a rank other than 0 until it is dismissed, and return the exit code.

    Signals end the process of such a rank at once, because it has no results to save.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    error: Exception
    try:
        serve(connect(ranks), Worker(ranks.local))
        return 0
    except ConfigError as wrong:
        error, code = wrong, 2
    except LOST:
        error, code = RankLost(0), 1
    print(f"fedexp: rank {ranks.rank} on {socket.gethostname()}: {error}", file=sys.stderr)
    return code


# --- connections


def accept(ranks: Ranks) -> None:
    """Connect rank 0 to all other ranks."""
    key = secrets.token_bytes(KEY)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with (
        convert_errors(ranks),
        socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server,
    ):
        server.settimeout(START_TIMEOUT.total_seconds())
        store = open_store(ranks)
        store.set(STORE_NAME, f"{server.getsockname()[1]} {key.hex()}")
        while len(connected) < ranks.size - 1:
            connection, _ = server.accept()
            connection.settimeout(KEY_TIMEOUT)
            channel = NetworkChannel(connection)
            with suppress(*LOST):  # if the process is not a rank, ignore its errors
                if hmac.compare_digest(channel.receive_bytes(KEY), key):
                    connected[channel.receive()] = configure(channel)


def connect(ranks: Ranks) -> NetworkChannel:
    """Connect a rank other than 0 to rank 0."""
    with convert_errors(ranks):
        port, key = open_store(ranks).get(STORE_NAME).decode().split()  # waits for rank 0
        address = os.environ["MASTER_ADDR"], int(port)
        channel = NetworkChannel(socket.create_connection(address, START_TIMEOUT.total_seconds()))
        channel.connection.sendall(bytes.fromhex(key))
        channel.send_value(ranks.rank)
        return configure(channel)


def open_store(ranks: Ranks) -> dist.Store:
    """Return torch's key-value store, which all ranks can read and write."""
    os.environ.setdefault("MASTER_PORT", "29500")
    query = f"env://?rank={ranks.rank}&world_size={ranks.size}"
    store, _, _ = next(dist.rendezvous(query, timeout=START_TIMEOUT))
    return store


def configure(channel: NetworkChannel) -> NetworkChannel:
    """Set the options of a connection and return it.

    The connection has no timeout, because hours may pass between two messages.
    """
    channel.connection.settimeout(None)
    channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    channel.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return channel


@contextmanager
def convert_errors(ranks: Ranks) -> Iterator[None]:
    """Convert errors raised in the block to ConfigError, because the ranks could not connect."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"MASTER_ADDR:MASTER_PORT={place}: {ranks.size} processes could not connect through"
            f" this address ({reason}); must be an address of the first process that all hosts can"
            " reach"
        ) from error
