"""The parts of a run (`Experiment`) and what changes from round to round (`State`, all that a
checkpoint holds)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Federation, PublicData
from fedexp.algorithms.server_optimizers import NO_SERVER_OPTIMIZER, ServerOptimizer
from fedexp.config.cohorts import Rounds
from fedexp.core.errors import ConfigError
from fedexp.core.settings import NO_STOP, Seeds, Settings, Stop
from fedexp.core.tree import Params, Tree
from fedexp.core.views import PLAIN, choosing
from fedexp.data.partitioned import Partition
from fedexp.engine.base import ClientRuntime, Engine
from fedexp.metrics.analysis import NO_ANALYSIS, Analysis
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.metrics.history import History
from fedexp.rundir import files
from fedexp.rundir.checkpoint_form import by_view
from fedexp.rundir.client_states import ClientStates, to
from fedexp.rundir.files import CHECKPOINT_FORMAT

# Of what a checkpoint holds.
NOT_OF_THE_STATE = (
    "format",
    "lengths",
    "checksums",
    "views",
    "first_view",
    "history",
    "accuracy",
    "tasks",
)


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
    bench: ClientRuntime
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
        return self.bench.data.test_tasks is not None

    def stage_of(self, round: int) -> Stage:
        """Return the stage of the task trained in round 1, 2, ...; after the last round, that of
        the last task."""
        begun = [stage for first, stage in self.changes if first <= round]
        return (
            begun[-1]
            if begun
            else self.stages[min((round - 1) // self.rounds_per_task, len(self.stages) - 1)]
        )

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Return the stages of all tasks, and those after each change of the clients' data."""
        return self.stages + tuple(stage for _, stage in self.changes)

    def within_task(self, round: int) -> int:
        """Return the round counted from the beginning of its task: 1, 2, ..."""
        return (round - 1) % self.rounds_per_task + 1

    def ends_task(self, round: int) -> bool:
        return round % self.rounds_per_task == 0

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round; its schedule begins anew with every task."""
        return self.bench.local.lr_at(self.within_task(round), self.rounds_per_task)

    def initial_state(self) -> "State":
        model = self.bench.net.own(self.initial)
        server = self.algorithm.server_init(model, self.stages[0].federation)
        server |= self.server_optimizer.begin(server["params"])
        tested = {view: Tested(self.new_history()) for view in self.bench.views}
        return State(server | {"buffers": self.initial_buffers}, tested)

    def new_history(self) -> History:
        """Return a history that begins, with what each client holds and when that changes."""
        counts = [stage.partition.counts for stage in self.all_stages]
        if self.changes:
            return History(np.stack(counts), starts=(1, *(first for first, _ in self.changes)))
        return (
            History(np.stack(counts), self.rounds_per_task)
            if len(counts) > 1
            else History(counts[0])
        )


@dataclass
class Tested:
    """Findings of the tests of a run so far in one view of the test set."""

    history: History
    # (round, test accuracy) of evaluated rounds
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    # (round, test accuracy on each task)
    tasks: list[tuple[int, list[float]]] = field(default_factory=list)

    def to_tree(self) -> Tree:
        return {"accuracy": self.accuracy, "tasks": self.tasks, "history": self.history.to_tree()}

    @classmethod
    def from_tree(cls, saved: Tree) -> "Tested":
        return cls(History.from_tree(saved["history"]), saved["accuracy"], saved["tasks"])


@dataclass
class State:
    """The state after a whole round."""

    server: Tree
    tested: dict[str, Tested]  # view -> results, in the order of ClientRuntime.views
    round: int = 0
    # of those that keep something and took part
    clients: ClientStates = field(default_factory=ClientStates)
    examples: int = 0  # trained on by clients so far
    train_seconds: float = 0.0
    seconds: float = 0.0
    status: str = "running"  # running | completed | diverged | stopped
    # of a run that was stopped: `by` what, and the value of that
    stopped: dict[str, Any] = field(default_factory=dict)
    # of a run that has diverged: the clients it began with
    not_finite: list[int] = field(default_factory=list)
    wandb_id: str | None = None
    # `first` round of each, and with what it was computed
    spans: list[dict[str, Any]] = field(default_factory=list)
    # of neurons in the last round, where it is measured
    alignment: list[dict[str, Any]] = field(default_factory=list)

    @property
    def history(self) -> History:
        """Return the history of the first view."""
        return next(iter(self.tested.values())).history

    @property
    def accuracy(self) -> list[tuple[int, float]]:
        """Return the accuracy in the first view."""
        return next(iter(self.tested.values())).accuracy

    @property
    def best(self) -> tuple[int, float] | None:
        """Return the first round of the highest accuracy in the view that chooses, and that
        accuracy; None before one was evaluated. The initial model does not count."""
        found = [
            each for each in self.tested[choosing(tuple(self.tested))].accuracy if each[0] >= 1
        ]
        return max(found, key=lambda each: each[1], default=None)

    def to_tree(self, versions: dict[int, int]) -> Tree:
        """Return the state as tensors, numbers and strings only, so that it loads with
        weights_only=True. versions: of the client states, which have files of their own."""
        names = (
            "round",
            "examples",
            "train_seconds",
            "seconds",
            "status",
            "not_finite",
            "wandb_id",
            "spans",
        )
        views = {view: tested.to_tree() for view, tested in self.tested.items()}
        first = next(iter(views))
        return {name: getattr(self, name) for name in names} | {
            "format": CHECKPOINT_FORMAT,
            "server": self.server,
            "clients": versions,
            **views.pop(first),
            **({} if first == PLAIN else {"first_view": first}),
            "views": views,
            "alignment": self.alignment,
        }

    @classmethod
    def from_tree(cls, saved: Tree, device: torch.device, directory: Path) -> "State":
        """Rebuild the state. directory: of the run, where the client states are."""
        if saved.get("format") != CHECKPOINT_FORMAT:
            raise ConfigError(
                f"checkpoint: format {saved.get('format')}, this fedexp reads {CHECKPOINT_FORMAT}"
            )
        values: dict[str, Any] = {k: v for k, v in saved.items() if k not in NOT_OF_THE_STATE}
        tested = by_view(saved)
        values["server"] = to(values["server"], device)
        values["clients"] = ClientStates(directory / files.CLIENT_STATES, saved["clients"])
        return cls(tested={view: Tested.from_tree(each) for view, each in tested.items()}, **values)
