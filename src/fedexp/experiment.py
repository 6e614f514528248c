"""What a run is made of (`Experiment`) and what changes from round to round (`State`, all that a checkpoint holds)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedexp import files
from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.contract import Federation, PublicData
from fedexp.client_states import ClientStates, to
from fedexp.data.partition import Partition
from fedexp.engine.base import Engine, Workbench
from fedexp.errors import ConfigError
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.metrics.history import History
from fedexp.settings import Seeds, Settings
from fedexp.tree import Params, Tree

CHECKPOINT_FORMAT = 2


@dataclass(frozen=True)
class Stage:
    """What belongs to one task; without a scenario there is one, for the whole run."""

    partition: Partition
    federation: Federation
    public: PublicData | None
    surrogate: PublicData | None  # the server's unlabelled examples


@dataclass(frozen=True)
class Experiment:
    """Everything that a run is made of, checked and loaded."""

    settings: Settings
    seeds: Seeds
    algorithm: FedAvg
    stages: tuple[Stage, ...]  # one for each task
    rounds_per_task: int
    bench: Workbench
    engine: Engine
    metrics: Metrics
    initial: Params  # the initial global model, with what the algorithm trains beside it
    initial_buffers: Params  # its running statistics
    mixes_examples: bool  # the model's batch norm needs batches of at least two examples
    left_out: dict[str, int] = field(default_factory=dict)  # clients and examples that batch norm cannot train on

    @property
    def rounds(self) -> int:
        """Of all tasks."""
        return self.rounds_per_task * len(self.stages)

    @property
    def has_tasks(self) -> bool:
        """Whether this is a scenario of tasks, if only of one."""
        return self.bench.data.test_tasks is not None

    def stage_of(self, round: int) -> Stage:
        """The task that is trained in round 1, 2, ...; after the last round it would be the last task."""
        return self.stages[min((round - 1) // self.rounds_per_task, len(self.stages) - 1)]

    def within_task(self, round: int) -> int:
        """The round counted from the beginning of its task: 1, 2, ..."""
        return (round - 1) % self.rounds_per_task + 1

    def ends_task(self, round: int) -> bool:
        return round % self.rounds_per_task == 0

    def lr_at(self, round: int) -> float:
        """Its decay begins anew with every task."""
        return self.bench.local.lr_at(self.within_task(round))

    def initial_state(self) -> "State":
        model = self.bench.net.own(self.initial)
        server = self.algorithm.server_init(model, self.stages[0].federation)
        counts = [stage.partition.counts for stage in self.stages]
        history = History(np.stack(counts), self.rounds_per_task) if len(counts) > 1 else History(counts[0])
        return State(server | {"buffers": self.initial_buffers}, history)


@dataclass
class State:
    """The state after a whole round."""

    server: Tree
    history: History
    round: int = 0
    clients: ClientStates = field(default_factory=ClientStates)  # of those that keep something and took part
    accuracy: list[tuple[int, float]] = field(default_factory=list)  # (round, test accuracy) of evaluated rounds
    tasks: list[tuple[int, list[float]]] = field(default_factory=list)  # (round, test accuracy on each task)
    examples: int = 0  # trained on by clients so far
    train_seconds: float = 0.0
    seconds: float = 0.0
    status: str = "running"  # running | completed | diverged
    not_finite: list[int] = field(default_factory=list)  # of a run that has diverged: the clients it began with
    wandb_id: str | None = None
    alignment: list[dict[str, Any]] = field(default_factory=list)  # of neurons in the last round, where it is measured

    def to_tree(self, versions: dict[int, int]) -> Tree:
        """Tensors, numbers and strings only, so that it loads with weights_only=True. versions: of the client states,
        which have files of their own."""
        names = ("round", "examples", "train_seconds", "seconds", "status", "not_finite", "wandb_id")
        return {name: getattr(self, name) for name in names} | {
            "format": CHECKPOINT_FORMAT,
            "server": self.server,
            "clients": versions,
            "accuracy": self.accuracy,
            "tasks": self.tasks,
            "alignment": self.alignment,
            "history": self.history.to_tree(),
        }

    @classmethod
    def from_tree(cls, saved: Tree, device: torch.device, directory: Path) -> "State":
        """directory: of the run, where the client states are."""
        if saved.get("format") != CHECKPOINT_FORMAT:
            raise ConfigError(f"checkpoint: format {saved.get('format')}, this fedexp reads {CHECKPOINT_FORMAT}")
        values: dict[str, Any] = {k: v for k, v in saved.items() if k not in ("format", "history", "lengths")}
        values["server"] = to(values["server"], device)
        values["clients"] = ClientStates(directory / files.CLIENT_STATES, saved["clients"])
        return cls(history=History.from_tree(saved["history"]), **values)
