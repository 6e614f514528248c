"""The parts of a run, which stay the same from round to round."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Federation, PublicData
from fedexp.algorithms.server_optimizers import NO_SERVER_OPTIMIZER, ServerOptimizer
from fedexp.config.cohorts import Rounds
from fedexp.config.settings import ALL_LOCAL, NO_STOP, LocalEvaluation, Seeds, Settings, Stop
from fedexp.core.tree import Params
from fedexp.data.partitioned import Partition
from fedexp.engine.base import ClientRuntime, Engine
from fedexp.metrics.analysis import NO_ANALYSIS, Analysis
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.metrics.history import History
from fedexp.training.state import State, Tested


@dataclass(frozen=True)
class Stage:
    """The part of a run that belongs to one task; without a scenario there is one, for the whole
    run."""

    partition: Partition
    federation: Federation
    public: PublicData | None
    surrogate: PublicData | None  # the server's unlabelled examples


@dataclass(frozen=True)
class Simulation:
    """Everything that a run is made of, checked and loaded."""

    settings: Settings
    seeds: Seeds
    algorithm: FedAvg
    stages: tuple[Stage, ...]  # one for each task
    rounds_per_task: int
    runtime: ClientRuntime
    engine: Engine
    metrics: Metrics
    initial: Params  # the initial global model, with what the algorithm trains beside it
    initial_buffers: Params  # its running statistics
    mixes_examples: bool  # the model's batch norm needs batches of at least two examples
    cohorts: Rounds | None = None  # who takes part in which round; None: drawn by seeds.sampling
    server_optimizer: ServerOptimizer = NO_SERVER_OPTIMIZER
    # clients and examples that batch norm cannot train on
    left_out: dict[str, int] = field(default_factory=dict)
    stop: Stop = NO_STOP
    local_evaluation: LocalEvaluation = ALL_LOCAL
    # int [K, T]: the task of each client at each stage; None: that of all
    task_orders: np.ndarray | None = None
    analysis: Analysis = NO_ANALYSIS
    # (first round, what counts from then on), of a run without tasks
    changes: tuple[tuple[int, Stage], ...] = ()

    @property
    def rounds(self) -> int:
        """Return the total number of rounds, of all tasks together."""
        return self.rounds_per_task * len(self.stages)

    @property
    def has_tasks(self) -> bool:
        """Return whether this is a scenario of tasks, if only of one."""
        return self.runtime.data.test_tasks is not None

    def stage_of(self, round: int) -> Stage:
        """Return the stage of the task trained in round 1, 2, ...; after the last round, that of
        the last task."""
        begun = [stage for first, stage in self.changes if first <= round]
        if begun:
            return begun[-1]
        return self.stages[min(self.tasks_begun(round), len(self.stages)) - 1]

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Return the stages of all tasks, and those after each change of the clients' data."""
        return self.stages + tuple(stage for _, stage in self.changes)

    def tasks_begun(self, round: int) -> int:
        """Return the number of tasks begun by the end of a round; 0 before the first round."""
        return -(-round // self.rounds_per_task)

    def within_task(self, round: int) -> int:
        """Return the round counted from the beginning of its task: 1, 2, ..."""
        return (round - 1) % self.rounds_per_task + 1

    def ends_task(self, round: int) -> bool:
        return round % self.rounds_per_task == 0

    def is_evaluated(self, round: int) -> bool:
        """Return whether the global model is tested after a round."""
        return round % self.settings.eval_interval == 0 or self.ends_task(round)

    def tests_local(self, round: int) -> bool:
        """Return whether the models that clients train in a round are tested."""
        if not self.metrics.needs_local or not self.is_evaluated(round):
            return False
        every = self.local_evaluation.every or 1
        return round % every == 0 or self.ends_task(round)

    @property
    def tests_distributed(self) -> bool:
        """Return whether the model that clients start from is tested with theirs: the global test
        of the round before is not there, or on other examples."""
        return self.settings.eval_interval > 1 or bool(self.runtime.local_examples)

    @cached_property
    def test_counts(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the examples of each class, int [C], and of each task, int [T], by view."""
        counts = {}
        for view in self.runtime.views:
            data = self.runtime.tested_on(view).data
            tasks = torch.zeros_like(data.y_test) if data.test_tasks is None else data.test_tasks
            classes = torch.bincount(data.y_test, minlength=data.num_classes)
            of_tasks = torch.bincount(tasks, minlength=data.num_tasks)
            counts[view] = (classes.cpu().numpy(), of_tasks.cpu().numpy())
        return counts

    @cached_property
    def local_columns(self) -> tuple[str, ...]:
        """Return the names of what is measured of local models, as of two rounds of a model that
        knows all classes equally well."""
        if not self.metrics.needs_local:
            return ()
        history, classes = self.new_history(), self.runtime.data.num_classes
        even = np.full(classes, 1 / classes)
        history.add(0, even)
        history.add_local(1, np.zeros(1, dtype=np.int64), even[None])
        history.add(1, even)
        return tuple(self.metrics.client_values(history))

    @cached_property
    def local_counts(self) -> dict[str, np.ndarray]:
        """Return the examples of each class on which local models are tested, int [C], by view."""
        counts = {}
        for view in self.runtime.views:
            data = self.runtime.local_test(view, 0)[0].data
            counts[view] = torch.bincount(data.y_test, minlength=data.num_classes).cpu().numpy()
        return counts

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round; its schedule begins anew with every task."""
        return self.runtime.local.lr_at(self.within_task(round), self.rounds_per_task)

    def initial_state(self) -> State:
        model = self.runtime.net.own(self.initial)
        server = self.algorithm.server_init(model, self.stages[0].federation)
        server |= self.server_optimizer.begin(server["params"])
        tested = {view: Tested(self.new_history()) for view in self.runtime.views}
        return State(server | {"buffers": self.initial_buffers}, tested)

    def new_history(self) -> History:
        """Return a history that begins, with what each client holds and when that changes."""
        counts = [stage.partition.counts for stage in self.all_stages]
        if self.changes:
            return History(np.stack(counts), starts=(1, *(first for first, _ in self.changes)))
        if len(counts) > 1:
            return History(np.stack(counts), self.rounds_per_task)
        return History(counts[0])
