"""The parts of a run that stay the same in all rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedexp.algorithms import optimizers
from fedexp.algorithms.base import FedAvg, reading
from fedexp.algorithms.interfaces import Federation
from fedexp.algorithms.server_optimizers import ServerOptimizer
from fedexp.config.cohorts import Cohorts, Rounds
from fedexp.config.settings import LocalEvaluation, Seeds, Settings
from fedexp.core.rng import seeded, torch_seed
from fedexp.core.tree import Params, Tree
from fedexp.data.partitioned import Partition, changed_partition_name, task_partition_name
from fedexp.data.types import Data
from fedexp.engine.base import ClientRuntime, Engine
from fedexp.engine.resolved import Resolved
from fedexp.engine.schedule import BatchSchedule
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.metrics.record import Record
from fedexp.rundir import files
from fedexp.training.state import State


@dataclass(frozen=True)
class Stage:
    """The examples that each client and the server hold from a round on.

    A stage begins with the run, with each further task, and with each scheduled change of the data.
    """

    first_round: int
    partition: Partition
    federation: Federation
    server_unlabelled: np.ndarray  # indices of the server's surrogate examples

    def with_federation(self, **changed: Any) -> "Stage":
        """Return a copy of the stage in which some fields of the federation are replaced."""
        return replace(self, federation=replace(self.federation, **changed))

    def with_partition(self, partition: Partition) -> "Stage":
        """Return a copy of the stage with the given partition."""
        part = replace(self, partition=partition)
        return part.with_federation(parts=partition.parts, counts=partition.counts)


def class_counts(data: Data) -> np.ndarray:
    """Return the number of test examples of each class, int64 [C]."""
    return torch.bincount(data.y_test, minlength=data.num_classes).cpu().numpy()


def first_server_state(
    algorithm: FedAvg, params: Params, federation: Federation, seed: int
) -> Tree:
    """Return the result of the hook `server_init`, which draws the same numbers in each call."""
    drawn = torch_seed(seed, "server_init")
    with seeded(drawn), reading(algorithm, "server_init", {"params": params}):
        return algorithm.server_init(params, federation)


@dataclass(frozen=True)
class Simulation:
    """All parts of a run that stay the same in all rounds, after they were checked and loaded."""

    settings: Settings
    seeds: Seeds
    algorithm: FedAvg
    stages: tuple[Stage, ...]  # in the order of their first rounds
    rounds_per_task: int
    hardware: Resolved
    runtime: ClientRuntime
    engine: Engine
    metrics: Metrics
    initial: Params  # initial global model, with the algorithm's additional parameters
    initial_buffers: Params  # running statistics of the initial model
    mixes_examples: bool  # the model's batch norm needs batches of at least two examples
    # the clients of each round; None: the clients are drawn with seeds.sampling
    cohorts: Rounds | None
    participation: Cohorts  # the option that planned the cohorts
    server_optimizer: ServerOptimizer
    # numbers of clients and examples that training leaves out because of batch norm or
    # local.drop_last
    left_out: dict[str, int]
    local_evaluation: LocalEvaluation
    # int [K, T]: each client's task at each stage; None: the same task for all clients
    task_orders: np.ndarray | None
    # the round with which the run stops early, if it is decided to stop; its models are tested
    stops_in: int | None = None
    # the only part that changes: schedules made in advance, by round and client
    prepared: dict[tuple[int, int], BatchSchedule] = field(default_factory=dict)

    @property
    def drops_out(self) -> bool:
        """Return whether clients of the cohorts may drop out."""
        return self.participation.dropout > 0

    def dropped(self, round: int, clients: Sequence[int]) -> list[int]:
        """Return those of a round's cohort that drop out."""
        return self.participation.dropped(self.seeds.sampling, round, clients)

    def arriving(self, round: int, clients: Sequence[int]) -> list[int]:
        """Return those of a round's cohort whose messages arrive."""
        dropped = self.dropped(round, clients)
        return [client for client in clients if client not in dropped]

    @property
    def num_tasks(self) -> int:
        return self.stages[-1].federation.task + 1

    @property
    def rounds(self) -> int:
        """Return the total number of rounds of all tasks."""
        return self.rounds_per_task * self.num_tasks

    @property
    def has_tasks(self) -> bool:
        """Return whether the run has a scenario, even one with a single task."""
        return self.runtime.data.test_tasks is not None

    def stage_of(self, round: int) -> Stage:
        """Return the stage of a round. The initial model, round 0, belongs to the first one."""
        return [stage for stage in self.stages if stage.first_round <= max(round, 1)][-1]

    def partition_files(self) -> dict[str, Stage]:
        """Return a dict that maps each partition file to the stage whose partition it contains."""
        found = {}
        for stage in self.stages:
            name = task_partition_name(stage.federation.task + 1)
            if stage.partition.is_change:
                name = changed_partition_name(stage.first_round)
            found[files.PARTITION if stage is self.stages[0] else name] = stage
        return found

    def tasks_begun(self, round: int) -> int:
        """Return the number of tasks that have begun by the end of a round.

        The number is 0 for round 0, the initial model.
        """
        return -(-round // self.rounds_per_task)

    def round_in_task(self, round: int) -> int:
        """Return the round's number within its task: 1, 2, ..."""
        return (round - 1) % self.rounds_per_task + 1

    def ends_task(self, round: int) -> bool:
        return round % self.rounds_per_task == 0

    def is_always_tested(self, round: int) -> bool:
        """Return whether the models are tested after a round, however rare tests are."""
        return self.ends_task(round) or round == self.stops_in

    def is_evaluated(self, round: int) -> bool:
        """Return whether the global model is tested after a round."""
        return round % self.settings.eval_interval == 0 or self.is_always_tested(round)

    def tests_local(self, round: int) -> bool:
        """Return whether the local models of a round are tested."""
        if not self.metrics.needs_local or not self.is_evaluated(round):
            return False
        every = self.local_evaluation.every or 1
        return round % every == 0 or self.is_always_tested(round)

    def tests_distributed(self, round: int) -> bool:
        """Return whether the model that clients receive is tested when a round starts.

        This is necessary if the global model may not have been tested after the previous round.
        """
        return self.tests_local(round) and self.settings.eval_interval != 1

    def lr_at(self, round: int) -> float:
        """Return a round's learning rate. The schedule restarts with every task."""
        return self.runtime.local.lr_at(self.round_in_task(round), self.rounds_per_task)

    def first_client_state(self, role: FedAvg, federation: Federation) -> Tree:
        """Return the initial state of a client, before it takes part for the first time."""
        initial = self.initial | self.initial_buffers if role.keeps_buffers else self.initial
        with reading(role, "client_init", {"params": initial}):
            state = role.client_init(initial, federation)
        local = self.runtime.local
        if local.keeps_state:
            state = state | {optimizers.KEPT: optimizers.memory_of(self.initial, local)}
        return state

    def initial_state(self) -> State:
        model = self.runtime.net.own(self.initial)
        federation = self.stages[0].federation
        server = first_server_state(self.algorithm, model, federation, self.seeds.training)
        server |= self.server_optimizer.begin(server["params"])
        records = {view: self.new_record(view) for view in self.runtime.views}
        return State(server | {"buffers": self.initial_buffers}, records)

    def new_record(self, view: str) -> Record:
        """Return a record without accuracies for a test set.

        The record contains the class counts of each client, the rounds in which the counts change
        and, if a metric needs single examples, the labels of the test examples.
        """
        counts, labels = [stage.partition.counts for stage in self.stages], None
        if self.metrics.needs_examples:
            labels = self.runtime.tested_on(view).data.y_test.cpu().numpy()
        return Record(
            np.stack(counts) if len(counts) > 1 else counts[0],
            starts=tuple(stage.first_round for stage in self.stages),
            adds_up=self.num_tasks > 1,
            labels=labels,
            domains=self._domain_record() if self.metrics.needs_domains else None,
        )

    def _domain_record(self) -> Record:
        """Return a record without accuracies, with the domains in place of the classes."""
        data = self.runtime.data
        assert data.train_domains is not None, "the data set declares that it has domains"
        parts = self.stages[0].partition.parts
        return Record(
            np.array(
                [
                    np.bincount(data.train_domains[part], minlength=len(data.domains))
                    for part in parts
                ]
            )
        )
