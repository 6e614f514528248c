"""The state of a run after a round, as stored in checkpoints, and the result of a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedexp.algorithms.interfaces import Federation, ServerRound
from fedexp.core import tree
from fedexp.core.tree import Tree
from fedexp.data.views import selection_view
from fedexp.engine.base import Cohort, Trained
from fedexp.metrics.record import Record
from fedexp.rundir import files
from fedexp.rundir.checkpoint import ClientStates
from fedexp.rundir.files import CHECKPOINT_FORMAT

# attributes of State that a checkpoint stores unchanged
SAVED = (
    "round",
    "examples",
    "train_seconds",
    "seconds",
    "status",
    "not_finite",
)


@dataclass
class Scores:
    """The results of the models of a round on one test set."""

    class_accuracy: np.ndarray  # float64 [C]; nan if a class has no test examples
    accuracy: float
    task_accuracy: list[float]  # [T]; nan if a task has no test examples; empty without tasks
    loss: float  # mean cross-entropy
    right: np.ndarray | None = None  # bool [M]: correct predictions, if a metric needs them
    local: np.ndarray | None = None  # float64 [|S|, C]: local models
    # float64 [C]: the model before the round, if it was not tested after the previous one
    distributed: np.ndarray | None = None
    personal: np.ndarray | None = None  # float64 [K, C]: personal models
    # the accuracies on each client's own test examples, float64 [K], by the name of the model
    own: dict[str, np.ndarray] = field(default_factory=dict)
    own_examples: np.ndarray | None = None  # int64 [K]: numbers of these test examples
    domain_accuracy: np.ndarray | None = None  # float64 [D]; nan: a domain without test examples


@dataclass(frozen=True)
class CohortResult:
    """The results of an exchange with a cohort, without clients that never started."""

    cohort: Cohort
    trained: Trained
    losses: list[float]  # [|S|]
    arrived: list[int]  # positions in the cohort of the clients whose messages arrived
    round: ServerRound  # with the clients whose messages arrived
    bytes_up: int  # with lost messages, which were sent
    bytes_down: int
    sent: Tree  # the broadcast

    @property
    def messages(self) -> Tree:
        """The messages that arrived."""
        return rows_of(self.trained.messages, self.arrived, len(self.cohort.clients))


def rows_of(stacked: Tree, positions: Sequence[int], count: int) -> Tree:
    """Return the rows at some positions of stacked trees, or the same tree if these are all."""
    if len(positions) == count:
        return stacked
    return tree.map(lambda leaf: leaf[list(positions)], stacked)


@dataclass(frozen=True)
class RoundResult:
    """What a round computed: new states, test results, analyses, traffic and times."""

    round: int
    is_last: bool
    server: Tree
    sampled: Sequence[int]  # the clients that were sampled
    cohort: Cohort  # those of them that started
    arrived: list[int]  # those of them whose messages arrived
    client_states: list[Tree]
    federation: Federation
    losses: list[float]  # [|S|]
    train_loss: float  # weighted like the aggregation; nan if no message arrived
    # clients whose loss or model is not finite; None: everything is finite
    not_finite: list[int] | None
    lr: float
    tests: dict[str, Scores]  # by the name of the test set; empty: this round is not evaluated
    before: Tree  # the server's state before the round
    # the exchanges with clients, those with the cohort first
    exchanges: Sequence[CohortResult]
    examples: int  # number of examples trained on
    bytes_up: int
    bytes_down: int
    seconds: dict[str, float]  # phase -> wall time


@dataclass
class State:
    """The state of a run after a complete round."""

    server: Tree
    # name of a test set -> results, in the order of ClientRuntime.views
    records: dict[str, Record]
    round: int = 0
    # states of the clients that have taken part and keep a state
    clients: ClientStates = field(default_factory=ClientStates)
    examples: int = 0  # number of examples that clients have trained on
    train_seconds: float = 0.0
    seconds: float = 0.0
    status: str = "running"  # running | completed | diverged | stopped
    # why the run stopped early: `by` is the reason; another key is the option that caused it. While
    # the run goes on, the next round is its last one.
    stopped: dict[str, Any] = field(default_factory=dict)
    # clients whose loss or model was not finite when the run diverged
    not_finite: list[int] = field(default_factory=list)

    def advance(self, result: RoundResult) -> None:
        """Update the state with the result of a round.

        result: the result of the round.
        """
        self.server, self.round = result.server, result.round
        cohort = result.cohort.clients
        kept = zip(cohort, result.cohort.states, result.client_states, strict=True)
        # an empty state replaces one that the client had
        self.clients.update({client: new for client, old, new in kept if new or old})
        self.examples += result.examples
        self.train_seconds += result.seconds["train"]
        self.seconds += sum(result.seconds.values())
        for record in self.records.values():
            record.add_cohort(self.round, result.arrived)
        self.add_tests(self.round, result.tests, cohort)
        if result.not_finite is not None:
            self.status, self.not_finite = "diverged", result.not_finite
        elif result.is_last:
            self.status, self.stopped = "completed", {}
        elif self.stopped:
            self.status = "stopped"

    def add_tests(
        self, number: int, tests: Mapping[str, Scores], cohort: Sequence[int] = ()
    ) -> None:
        """Add the test results of a round to the records.

        number: the number of the round. cohort: the clients whose local models were tested.
        """
        for name, test in tests.items():
            record = self.records[name]
            overall = (test.accuracy, test.loss)
            record.add(number, test.class_accuracy, test.right, overall, test.task_accuracy)
            if test.personal is not None:
                record.add_personal(number, test.personal)
            if record.domains is not None and test.domain_accuracy is not None:
                record.domains.add(number, test.domain_accuracy)
            if test.own_examples is not None:
                record.add_own(test.own, test.own_examples)
            if test.local is not None:
                record.add_local(number, np.array(cohort), test.local, test.distributed)

    def stop(self, why: Mapping[str, Any]) -> None:
        """Stop the run, after the next round if the models of this one were not tested.

        The results of a run are those of its last round, so the next round is tested.

        why: the reason, which is stored in the attribute `stopped`.
        """
        self.stopped = dict(why)
        if self.record.rounds[-1] == self.round:
            self.status = "stopped"

    @property
    def record(self) -> Record:
        """Return the results on the first test set."""
        return next(iter(self.records.values()))

    @property
    def best(self) -> tuple[int, float] | None:
        """Return the best round and its accuracy, or None if no round has been evaluated.

        The best round is the first round with the highest accuracy on the test set that
        `selection_view` selects. Round 0, the initial model, does not count.
        """
        curve = self.records[selection_view(tuple(self.records))].curve
        trained = [each for each in curve if each[0] >= 1]
        return max(trained, key=lambda each: each[1], default=None)

    def to_tree(self, versions: dict[int, int]) -> Tree:
        """Return the state as a tree that torch.load can read with weights_only=True.

        The records are not part of it: they are read from the tables. versions: the version of each
        client state. The client states are saved in separate files.
        """
        values = {name: getattr(self, name) for name in SAVED}
        values["stopped"] = self.stopped
        values["wandb_id"] = None  # earlier versions need the key
        return values | {"format": CHECKPOINT_FORMAT, "server": self.server, "clients": versions}

    @classmethod
    def from_tree(
        cls, saved: Tree, records: dict[str, Record], device: torch.device, directory: Path
    ) -> "State":
        """Rebuild a state from the result of `to_tree`.

        records: the results up to the round of the state, by test set. directory: the run
        directory. It contains the files of the client states.
        """
        return cls(
            server=tree.to(saved["server"], device),
            records=records,
            clients=ClientStates(directory / files.CLIENT_STATES, saved["clients"]),
            stopped=saved.get("stopped", {}),  # checkpoints of earlier versions lack it
            **{name: saved[name] for name in SAVED},
        )
