"""The workers engine trains clients in several ranks.

Each rank uses one thread or one GPU. The clients with the most steps are trained first, and each
rank that becomes free receives the next client, so that all ranks finish at about the same time.
The results are returned in the order of the cohort, so they do not depend on the number of ranks.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from torch import Tensor

from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.data.views import PLAIN
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Gather, Shared, Tested, Trained
from fedexp.engine.network import flush_subnormals
from fedexp.engine.ranks import world
from fedexp.engine.ranks.objects import Mapped, share
from fedexp.engine.ranks.rank import CPU, Call, Rank, cut_evenly
from fedexp.engine.ranks.world import World
from fedexp.engine.resolved import Resolved

NOT_SENT: Any = None


@dataclass
class Order:
    """A function call that a rank runs, and the position of its return value in the result."""

    name: str  # for messages
    call: Call
    # the positions of the order's clients in the cohort, or the position of its answer
    positions: Sequence[int]


class Workers(Engine):
    """Engine that trains clients in several ranks. Rank 0 is this process, and trains too.

    inner: the engine that each rank uses.
    hardware: the hardware of each rank.
    count: the number of ranks.
    share: whether the cohort is divided among the ranks in advance, so that the vectorised engine
    can train a rank's clients together. False: a rank receives one client at a time.
    """

    def __init__(self, inner: Engine, hardware: Resolved, count: int, share: bool):
        self.inner, self.hardware, self.count, self.share = inner, hardware, count, share

    def start(self, runtime: ClientRuntime) -> None:
        self._ranks(runtime)

    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        # Calls of CUDA in the threads below would disturb the recording of CUDA graphs.
        states, personals = tree.to((cohort.states, cohort.personals), CPU)
        cohort = replace(cohort, states=states, personals=personals)
        shares = [[position] for position in cohort.longest_first()]
        if self.share:
            shares = cohort.shares(self.count)
        orders = []
        for positions in shares:
            part = cohort.take(positions)
            name = f"round {cohort.round}, training client {', '.join(map(str, part.clients))}"
            call = partial(Rank.train, algorithm=shared.algorithm, cohort=part, lr=shared.lr)
            orders.append(Order(name, partial(call, evaluate_local=evaluate_local), positions))
        gather = Gather(cohort)
        for order, answer in self._do(shared.runtime, orders, shared.server):
            part = tree.to(vars(answer), shared.runtime.device)
            gather.add(order.positions, Trained(**part))
        return gather.result(parallel=min(self.count, len(orders)))

    def evaluate(
        self, runtime: ClientRuntime, server: Tree, view: str = PLAIN, round: int = 0
    ) -> Tested:
        orders = []
        pieces = cut_evenly(runtime.tested_on(view).evaluation_batches, self.count)
        for i, piece in enumerate(pieces):
            call = partial(Rank.evaluate, batches=piece, view=view, round=round)
            orders.append(Order("evaluating the global model", call, [i]))
        parts = self._answers(runtime, orders, server)
        here = [replace(part, **tree.to(vars(part), runtime.device)) for part in parts]
        return Tested.joined(here)

    def logits(
        self, runtime: ClientRuntime, models: Sequence[Params], numbers: Sequence[Tensor]
    ) -> list[Tensor]:
        orders = []
        for i, (model, each) in enumerate(zip(tree.to(list(models), CPU), numbers, strict=True)):
            call = partial(Rank.logits, model=model, numbers=each)
            orders.append(Order(f"computing logits of model {i}", call, [i]))
        return [answer.to(runtime.device) for answer in self._answers(runtime, orders)]

    def close(self) -> None:
        world.run_ended()

    def _answers(
        self, runtime: ClientRuntime, orders: Sequence[Order], server: Tree = None
    ) -> list[Any]:
        """Run the orders and return their answers, sorted by position."""
        found = {order.positions[0]: answer for order, answer in self._do(runtime, orders, server)}
        return [found[i] for i in range(len(orders))]

    def _do(
        self, runtime: ClientRuntime, orders: Sequence[Order], server: Tree = None
    ) -> Iterator[tuple[Order, Any]]:
        """Run the orders in the ranks, and yield each with its answer as soon as it arrives.

        server: the server's state. It is sent to ranks that do not have it yet. None: the orders do
            not need the state.
        """
        ranks, waiting = self._ranks(runtime), deque(orders)
        dealing = Dealing(ranks, waiting, server)
        # A call of torch.distributed cannot be interrupted, so each rank has a thread that waits.
        others = range(1, min(self.count, len(orders)))
        threads = [Thread(target=dealing.serve, args=(rank,), daemon=True) for rank in others]
        here = Rank()
        here.use(self.inner, runtime, server)
        try:
            for thread in threads:
                thread.start()
            for _ in orders:
                order = take(waiting) if dealing.answers.empty() else None
                if order is None:
                    order, answer = dealing.answers.get()
                else:
                    with flush_subnormals():
                        answer = order.call(here)
                if isinstance(answer, BaseException):
                    raise answer
                yield order, answer
        except BaseException as error:
            # Otherwise, a late answer would be mistaken for the answer to the next order.
            waiting.clear()
            world.stop(threads)
            if not isinstance(error, KeyboardInterrupt):
                for thread in threads:
                    thread.join()
            raise

    def _ranks(self, runtime: ClientRuntime) -> World:
        """Return the ranks. They receive the model once.

        The ranks that can share memory share the data, which the first of them loads.
        """
        ranks = world.start(self.count, self.hardware.threads)
        others = range(1, self.count)
        known, engine = ranks.known
        if (known is runtime and engine is self) or not others:
            return ranks
        here = replace(runtime.to(CPU), load=None)
        mapped, file = share(here)
        nodes = [place.node for place in ranks.places]
        memories = [(place.node, place.namespaces) for place in ranks.places]
        runtimes = {memories[0]: mapped}
        first = [rank for rank in others if memories.index(memories[rank]) == rank]

        def load(rank: int) -> None:
            order = loading(replace(here, load=runtime.load))
            runtimes[memories[rank]] = Mapped(*ranks.ask(rank, "loading the data", order))

        def begin(rank: int) -> None:
            number = nodes[:rank].count(nodes[rank])
            call = partial(Rank.begin, hardware=self.hardware, number=number, engine=self.inner)
            ranks.ask(rank, "starting", partial(call, runtime=runtimes[memories[rank]]))

        try:
            with file, ThreadPoolExecutor(len(others)) as pool:
                list(pool.map(load, first))
                list(pool.map(begin, others))
        except BaseException:
            world.stop()
            raise
        ranks.known, ranks.servers = (runtime, self), {}
        return ranks


def loading(runtime: ClientRuntime) -> Call:
    """Return the order for the first rank with another memory, which loads the data itself."""
    data, unsent = runtime.data, replace(runtime, data=NOT_SENT)
    features = {"train_features": data.train_features, "test_features": data.test_features}
    return partial(Rank.load, runtime=unsent, features=features, checksum=data.crc())


class Dealing:
    """The orders of one call of the engine that wait for a rank, and the answers."""

    def __init__(self, ranks: World, waiting: deque[Order], server: Tree):
        self.ranks, self.waiting, self.server = ranks, waiting, server
        # the answers, or exceptions, as they arrive
        self.answers: SimpleQueue[tuple[Order, Any]] = SimpleQueue()
        self._publish = partial(Rank.publish, server=tree.to(server, CPU))

    def serve(self, rank: int) -> None:
        """Let a rank run waiting orders, one after the other."""
        servers = self.ranks.servers
        while (order := take(self.waiting)) is not None:
            calls = [order.call]
            publishes = self.server is not None and servers.get(rank) is not self.server
            if publishes:
                calls.insert(0, self._publish)
            try:
                answer = self.ranks.ask(rank, order.name, *calls)
                if publishes:
                    servers[rank] = self.server
                self.answers.put((order, answer))
            except BaseException as error:
                self.answers.put((order, error))
                return


def take(waiting: deque[Order]) -> Order | None:
    """Return the next order, or None if no order is waiting."""
    try:
        return waiting.popleft()
    except IndexError:
        return None
