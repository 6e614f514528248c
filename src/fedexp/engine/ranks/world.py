"""The ranks of a command: processes that torch.distributed connects.

Rank 0 is the server. The other ranks run its orders (see fedexp.engine.ranks.rank). `torchrun` and
`srun` start all ranks of a command, also on several machines. Otherwise, rank 0 starts the others
on its own machine. The ranks stay for the next run of a sweep.
"""

import atexit
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hydra.core.utils import env_override

import fedexp
from fedexp.core.errors import INTERRUPTED, ConfigError, RankDied
from fedexp.core.interrupts import raise_received
from fedexp.core.launch import Launch, given, launch_of, named
from fedexp.engine.ranks.objects import receive, send, signature
from fedexp.engine.ranks.rank import Call, Failure, die_with, serve

JOINING = timedelta(minutes=10)  # how long a rank waits for the others to start
CONNECTING = timedelta(minutes=2)  # and then for their connections
FIRST_WORD, NEXT_WORD = (
    1.0,
    30.0,
)  # seconds until a rank says that it waits, and until it repeats it
KEY = "FEDEXP_KEY"  # environment variable: the secret that ranks sign their messages with
HOST = "127.0.0.1"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
Processes = Sequence[subprocess.Popen[bytes]]


class Location(NamedTuple):
    """Where a rank runs. Ranks of the same node and the same namespaces can share memory."""

    name: str  # process and host
    node: str
    versions: str = ""  # of the packages that train
    address: str = ""  # that gloo gives to the other ranks; empty if GLOO_SOCKET_IFNAME is set
    namespaces: str = ""  # of Linux; containers on one node have different ones
    missing: str = ""  # an interface in GLOO_SOCKET_IFNAME that the machine does not have


@dataclass
class World:
    """The ranks of a command, as rank 0 sees them."""

    places: list[Location]
    key: bytes
    launched: bool = False  # by torchrun or srun; otherwise by rank 0
    processes: Processes = ()  # that rank 0 has started: ranks 1, 2, ...
    # what the ranks have received last: a runtime with its engine, and rank -> the server's state
    known: tuple[Any, Any] = (None, None)
    servers: dict[int, Any] = field(default_factory=dict)
    # threads that waited for an answer when a run was stopped
    waiting: list[Thread] = field(default_factory=list)
    code: int = INTERRUPTED  # exit code of the command

    def ask(self, rank: int, what: str, *orders: Call) -> Any:
        """Let a rank run orders, and return the result of the last one.

        what: the orders in words, for messages.

        Raises RankDied if the rank has ended, or the exception that was raised in the rank.
        """
        name = f"rank {rank} ({self.places[rank].name})"
        try:
            send(orders, rank, self.key)
            packed = receive(rank, self.key)
        except ConnectionError as error:
            reason = "ended, or its connection was lost"
            if self.processes:
                reason = how_it_ended(self.processes[rank - 1])
            raise RankDied(f"{what}: {name} {reason}") from error
        result = packed.unpack()
        if isinstance(result, Failure):
            result.error.add_note(f"in {name}:\n{result.report}")
            raise result.error
        return result


_world: World | None = None
_keeps = False  # whether the ranks stay when a run ends


def launched_ranks() -> int:
    """Return the number of ranks that torchrun or srun has started, or 0."""
    return len(_world.places) if _world is not None and _world.launched else 0


def join() -> bool:
    """Join the ranks that torchrun or srun has started.

    On rank 0, return True. Other ranks run the orders of rank 0 until it ends, and return False.

    Raises ConfigError if the ranks cannot connect.
    """
    global _world
    key, launch = os.environ.get(KEY, "").encode(), launch_of(os.environ)
    _world = World([], key, launched=True)
    atexit.register(leave)  # first, so that it is called last
    waiting = Waiting(launch)
    try:
        store = open_store(launch, waiting, _world)
        waiting.for_ranks(store)
        _world.places = connect(store, launch.rank, launch.size, key, waiting.check)
    except (RuntimeError, ValueError) as error:
        time.sleep(1)  # the store ends with rank 0; let the others read from it what is wrong
        raise ConfigError(f"the ranks cannot connect: {error}") from error
    if launch.rank:
        serve(key)
        return False
    return True


class Waiting:
    """Says for which ranks a launched rank waits, soon and then again and again.

    Variables that an earlier program has left behind look like those of a slow rank.
    """

    def __init__(self, launch: Launch):
        self.launch, self.next = launch, time.monotonic() + FIRST_WORD
        self._who: Callable[[], str] = lambda: "rank 0"

    def for_ranks(self, store: dist.Store) -> None:
        """Say from now on which ranks the store lacks."""
        ranks = range(self.launch.size)
        self._who = lambda: plural_ranks([n for n in ranks if not store.check([str(n)])])

    def check(self) -> None:
        """Say it if it is time. Raises KeyboardInterrupt if a signal was received."""
        raise_received()
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + NEXT_WORD
        rank, size, host, port = self.launch
        print(
            f"fedexp: rank {rank} of {size} waits for {self._who()} (all meet at {host}:{port}),"
            f" because {given(os.environ)} say that {size} ranks were started; if this is the only"
            f" process, unset {named(os.environ)[0]}",
            file=sys.stderr,
            flush=True,
        )


def plural_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def open_store(launch: Launch, waiting: Waiting, here: World) -> dist.Store:
    """Return the store of rank 0, once it can be reached.

    torch's call waits without a look at signals, so another thread makes it.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun has the store
    found: list[dist.Store | RuntimeError] = []

    def connect_store() -> None:
        arguments = launch.host, launch.port, launch.size, launch.rank == 0 and not agent
        try:
            store = dist.TCPStore(*arguments, JOINING, wait_for_workers=False, multi_tenant=True)
            found.append(store)
        except RuntimeError as error:
            found.append(error)

    thread = Thread(target=connect_store, daemon=True)
    here.waiting.append(thread)
    thread.start()
    while not found:
        waiting.check()
        thread.join(0.01)
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def ends_with(code: int) -> None:
    """Set the exit code that `leave` ends the command with."""
    if _world is not None:
        _world.code = code


def leave() -> None:
    """End this process if its threads still wait for ranks, after Ctrl+C or the death of a rank.

    An answer that arrives while Python is shut down would abort the process.
    """
    if _world is not None and any(thread.is_alive() for thread in _world.waiting):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_world.code)


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    key: bytes,
    check: Callable[[], None] = lambda: None,
) -> list[Location]:
    """Connect this rank with the others, and return where they run.

    check: called again and again while this rank waits for the others.

    Raises ConfigError if a rank does not join, or if it has another key or other versions.
    """
    host = platform.node()
    # torchrun numbers the nodes, and two of them may have the same host name.
    node = os.environ.get("GROUP_RANK", host)
    versions = f"fedexp {fedexp.__version__}, torch {torch.__version__}"
    own = "\n".join(
        Location(
            name=f"process {os.getpid()} on {host}",
            node=node,
            versions=versions,
            address=host_address(),
            namespaces=namespaces(),
            missing=missing_interface(),
        )
    )
    store.set(str(rank), f"{signature(key, own.encode()).hex()}\n{own}")
    keys = [str(each) for each in range(size)]
    latest = time.monotonic() + JOINING.total_seconds()
    # Unlike torch.distributed, this can be interrupted, and notices a rank that ends.
    while not store.check(keys):
        check()
        if time.monotonic() > latest:
            missing = [each for each in keys if not store.check([each])]
            raise ConfigError(f"rank {missing[0]} has not started within {JOINING}")
        time.sleep(0.01)
    places = []
    for each in keys:
        signed, _, place = store.get(each).partition(b"\n")
        found = Location(*place.decode().split("\n"))
        if signed.decode() != signature(key, place).hex():
            raise ConfigError(f"{KEY}: differs between rank {rank} and rank {each} ({found.name})")
        if found.versions != versions:
            raise ConfigError(
                f"rank {rank} has {versions}, but rank {each} ({found.name}) has {found.versions};"
                " all machines need the same versions"
            )
        if found.missing:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={found.missing}: rank {each} ({found.name}) has no such"
                " network interface"
            )
        places.append(found)
    check_addresses(places)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=CONNECTING)
    notice_lost_machines()
    return places


def host_address() -> str:
    """Return the address of this machine's host name, which gloo uses to listen.

    If GLOO_SOCKET_IFNAME selects the address, return an empty string.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        return str(socket.getaddrinfo(platform.node(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return HOST  # as gloo does


def missing_interface() -> str:
    """Return an interface in GLOO_SOCKET_IFNAME that this machine does not have, or nothing."""
    wanted = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    known = [name for _, name in socket.if_nameindex()]
    return next((name for name in wanted if name not in known), "")


def namespaces() -> str:
    """Return the Linux namespaces on which the access to another process's memory depends."""
    try:
        return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user"))
    except OSError:
        return ""  # another system


def notice_lost_machines() -> None:
    """Let connections fail if nothing answers for five minutes, as after a power failure.

    A rank waits for the next order without a limit, and gloo does not check idle connections. The
    system answers for a busy rank. This has no effect on other systems than Linux.
    """
    for path in Path("/proc/self/fd").glob("*"):
        if not path.is_socket():
            continue
        # not all sockets are TCP's
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def check_addresses(places: Sequence[Location]) -> None:
    """Raise ConfigError if another machine could not reach the address of a rank."""
    if len({place.name.rpartition(" ")[2] for place in places}) == 1:  # one machine
        return
    for rank, place in enumerate(places):
        if place.address.startswith("127.") or place.address == "::1":
            raise ConfigError(
                f"rank {rank} ({place.name}): its host name stands for {place.address}, which other"
                " machines cannot reach; set GLOO_SOCKET_IFNAME to the network interface, such as"
                " eth0"
            )


def start(count: int, threads: int) -> World:
    """Return at least `count` ranks. They are started if this is necessary.

    threads: the number of CPU threads of each rank.
    """
    global _world
    if _world is None or (len(_world.places) < count and not _world.launched):
        stop()
        _world = World([Location("", "")], b"")
        if count > 1:
            _world = start_processes(count, threads)
    return _world


def start_processes(count: int, threads: int) -> World:
    listener = socket.create_server((HOST, 0))
    port, secret = listener.getsockname()[1], secrets.token_hex()
    store = dist.TCPStore(
        *(HOST, port, count, True, JOINING),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # of this machine only
        use_libuv=False,  # with libuv, torch 2.6 refuses this socket
    )
    # The ranks must be able to import the same modules as the current process.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads), KEY: secret, **LOOPBACK}
    processes: list[subprocess.Popen[bytes]] = []

    def check() -> None:
        for rank, process in enumerate(processes, start=1):
            if process.poll() is not None:
                raise RankDied(f"starting: rank {rank} {how_it_ended(process)}")

    try:
        for rank in range(1, count):
            arguments = f"{rank}, {count}, {port}, {os.getpid()}"
            program = f"from fedexp.engine.ranks.world import main; main({arguments})"
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],  # -P: no imports from the current directory
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl+C in a terminal reaches only rank 0
            )
            processes.append(process)
        key = secret.encode()
        with env_override(LOOPBACK):
            places = connect(store, 0, count, key, check)
        return World(places, key, processes=processes)
    except BaseException:
        end(processes)
        raise


def main(rank: int, size: int, port: int, parent: int) -> None:
    """Run a rank. This is the main function of the processes that rank 0 starts.

    port: the port of rank 0's store.
    parent: the process id of rank 0.
    """
    die_with(parent)
    key = os.environ[KEY].encode()
    connect(dist.TCPStore(HOST, port, size, False, JOINING), rank, size, key)
    serve(key)


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Make sure that a process has ended, and return how it ended."""
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code >= 0:
        return f"ended by exit code {code}"
    oom = ", perhaps because the system ran out of memory" if code == -signal.SIGKILL else ""
    return f"ended by signal {-code} ({signal.Signals(-code).name}{oom})"


def end(processes: Processes) -> None:
    for process in processes:
        process.kill()
        process.wait()


def stop(threads: Sequence[Thread] = ()) -> None:
    """End the ranks that rank 0 has started.

    threads: threads that wait for an answer of a rank.
    """
    global _world
    if _world is None:
        return
    if _world.launched:
        _world.waiting += threads
        return
    end(_world.processes)
    for thread in threads:
        thread.join()
    if _world.processes:
        dist.destroy_process_group()
    _world = None


def run_ended() -> None:
    """End the ranks that rank 0 has started, unless they are kept for the next run."""
    if not _keeps:
        stop()


@contextmanager
def keeping_ranks() -> Iterator[None]:
    """Let the runs in the block use the same ranks, which end with the block.

    A new rank takes seconds to import torch.
    """
    global _keeps
    _keeps = True
    try:
        yield
    finally:
        _keeps = False
        stop()
