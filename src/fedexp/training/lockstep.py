"""Several runs in one process, round by round: the clients of all of them are trained as one cohort
where they can be.

Each run has a thread, of which one works at a time: it gives way only while it waits for the others
to have a cohort too. So nothing that a process has once (random numbers, settings of torch, the
console) is used by two at a time.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedexp.algorithms.base import FedAvg
from fedexp.core.tree import Tree
from fedexp.engine.base import ClientRuntime, Cohort, Engine, Trained
from fedexp.engine.vectorised.engine import Request, Vectorised
from fedexp.engine.vectorised.joint import Joint
from fedexp.training.prepare import Prepared


@dataclass
class Waiting:
    """A run that waits for its cohort to be trained."""

    number: int  # of its run
    request: Request
    result: Trained | BaseException | None = None


class Lockstep:
    """The runs of a group, and the point at which they meet."""

    def __init__(self) -> None:
        self._turn = threading.Condition()  # held by the run that works
        self._running = self._joined = 0
        self._waiting: list[Waiting] = []
        self._joint: Joint | None = None
        self._interrupted = False

    def run(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Call all of them, each in a thread of its own, until the last has ended. They raise
        nothing but KeyboardInterrupt, which is raised here too after all have stopped at the end of
        a round."""
        self._running = len(jobs)
        stopped: list[BaseException] = []
        threads = [
            threading.Thread(target=self._call, args=(job, stopped), daemon=True) for job in jobs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join(0.2)
                except KeyboardInterrupt:
                    self._interrupted = True
        if stopped or self._interrupted:
            raise stopped[0] if stopped else KeyboardInterrupt

    def _call(self, job: Callable[[], object], stopped: list[BaseException]) -> None:
        with self._turn:
            try:
                job()
            except BaseException as error:
                stopped.append(error)
            self._running -= 1
            self._serve()

    def join(self, prepared: Prepared) -> Prepared:
        """Return a run whose cohorts are trained with those of the others, where its engine can."""
        engine = prepared.simulation.engine
        if not isinstance(engine, Vectorised):
            return prepared
        self._joint = self._joint or Joint(engine)
        self._joined += 1
        return replace(
            prepared, simulation=replace(prepared.simulation, engine=Joined(self, self._joined))
        )

    def train(self, number: int, request: Request) -> Trained:
        """Train the cohort of a run together with those of the others, as soon as each has one."""
        if self._interrupted:
            raise KeyboardInterrupt
        waiting = Waiting(number, request)
        self._waiting.append(waiting)
        self._serve()
        while waiting.result is None:
            self._turn.wait()
        if isinstance(waiting.result, BaseException):
            raise waiting.result
        return waiting.result

    def _serve(self) -> None:
        """Train what waits, where nobody else is to come."""
        if not self._waiting or len(self._waiting) < self._running:
            return
        # In one order, whoever came first: recorded steps belong to the first run of a group.
        waiting, self._waiting = sorted(self._waiting, key=lambda each: each.number), []
        assert self._joint is not None
        try:
            results: Sequence[Trained | BaseException] = self._joint.train(
                [each.request for each in waiting]
            )
        except Exception as error:
            results = [error] * len(waiting)
        for each, result in zip(waiting, results, strict=True):
            each.result = result
        self._turn.notify_all()


class Joined(Engine):
    """The vectorised engine of one run of a group."""

    def __init__(self, lockstep: Lockstep, number: int):
        self.lockstep, self.number = lockstep, number

    def train(
        self,
        algorithm: FedAvg,
        bench: ClientRuntime,
        server: Tree,
        cohort: Cohort,
        lr: float,
        evaluate_local: bool,
    ) -> Trained:
        """Train the cohort with those of the other runs."""
        return self.lockstep.train(
            self.number, Request(algorithm, bench, server, cohort, lr, evaluate_local)
        )
