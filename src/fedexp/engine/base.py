"""Input and output of every engine.

An engine trains the clients of one round and returns their messages and new states.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.algorithms.base import Batch, FedAvg
from fedexp.algorithms.heads import by_head
from fedexp.algorithms.local_training import LocalTraining
from fedexp.core import tree
from fedexp.core.rng import generator_for
from fedexp.core.tree import Params, Tree
from fedexp.data.types import Data, Draws
from fedexp.data.views import AUGMENTED, PLAIN, VALIDATION
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.schedule import BatchSchedule
from fedexp.models import Output

# so small that a layer's output is still in the CPU cache when the next layer reads it
EVALUATION_BATCH = 100
EVALUATION_BATCH_CUDA = 1000  # larger, because each batch costs kernel launches


@dataclass(frozen=True)
class Probe:
    """Local steps after which a client's model is tested, also on some training examples."""

    marks: tuple[int, ...]  # local steps, ascending; 0: before the first; empty: no test
    epochs: tuple[int, ...]  # the local epochs that end at the marks
    numbers: Tensor  # int64 [n], indices of the training examples
    max_marks: int  # the largest number of marks in the cohort


@dataclass(frozen=True)
class Cohort:
    """The sampled clients of one round. All sequences are in the order of `clients`."""

    round: int
    clients: Sequence[int]
    roles: Sequence[FedAvg]  # the algorithm whose client-side hooks each client uses
    schedules: Sequence[BatchSchedule]
    states: Sequence[Tree]
    plans: Sequence[Tree]
    personals: Sequence[Tree]  # the server's message to each client, besides the broadcast
    # when each client's model is tested during training; empty: never
    probes: Sequence[Probe] = ()

    def take(self, positions: Sequence[int]) -> "Cohort":
        """Return the part of the cohort at the given positions."""
        part: dict[str, Any] = {}
        for name, values in vars(self).items():
            if name != "round" and len(values):
                part[name] = [values[i] for i in positions]
        return replace(self, **part)

    def longest_first(self) -> list[int]:
        """Return the positions of the clients, those with the most local steps first."""
        return sorted(range(len(self.clients)), key=lambda i: -self.schedules[i].steps)

    def shares(self, count: int) -> list[list[int]]:
        """Split the positions into at most `count` shares with about equal numbers of steps.

        No share is empty.
        """
        shares: list[list[int]] = [[] for _ in range(min(count, len(self.clients)))]
        steps = [0] * len(shares)
        for position in self.longest_first():
            least = steps.index(min(steps))
            shares[least].append(position)
            steps[least] += self.schedules[position].steps
        return shares


@dataclass(frozen=True)
class Trained:
    """The results of training a cohort or a part of it."""

    messages: Tree  # leaves [|S|, ...]
    states: list[Tree]
    losses: Tensor  # [|S|]: mean objective over the local steps
    buffers: Params  # leaves [|S|, ...]: running statistics of the local models
    class_correct: dict[str, Tensor] | None
    """Test view -> int64 [|S|, C]: correct predictions of the local models on the test set."""
    evaluation_seconds: float = 0.0  # time for `class_correct` and for probes
    probed: dict[str, Tensor] | None = None
    """Correct predictions at the M marks of the probes, -1 if not tested.

    `test`: int64 [|S|, M, C]. `train`: int64 [|S|, M].
    """


# fields of Trained whose leaves have the clients as their first dimension
STACKED = ("messages", "losses", "buffers", "class_correct", "probed")


class Gather:
    """Collects the parts of a cohort's results in the cohort's order.

    Each part is copied to its place, so that no model is stored twice.
    """

    def __init__(self, count: int):
        self.count = count
        self._states: list[Tree] = [None] * count
        self._stacked: dict[str, Tree] = {}  # field of Trained -> leaves [count, ...]
        self._seconds = 0.0

    def add(self, positions: Sequence[int], part: Trained) -> None:
        """Add the results of a part of the cohort.

        positions: positions of the part's clients in the cohort.
        """

        def put(target: Tensor | None, leaf: Tensor | None) -> None:
            if target is not None and leaf is not None:
                for row, position in enumerate(positions):
                    target[position].copy_(leaf[row])

        leaves = {name: getattr(part, name) for name in STACKED}
        if not self._stacked:
            self._stacked = tree.map(self._allocate, leaves)
        tree.map(put, self._stacked, leaves)
        for position, state in zip(positions, part.states, strict=True):
            self._states[position] = state
        self._seconds += part.evaluation_seconds

    def _allocate(self, leaf: Tensor | None) -> Tensor | None:
        return None if leaf is None else leaf.new_empty(self.count, *leaf.shape[1:])

    def result(self, parallel: int = 1) -> Trained:
        """Return the results of the whole cohort.

        parallel: number of parts that were trained at the same time. The evaluation time is divided
        by it.
        """
        seconds = self._seconds / parallel
        return Trained(states=self._states, evaluation_seconds=seconds, **self._stacked)


@dataclass(frozen=True)
class Evaluation:
    """Numbers of correct predictions, and losses, on the test set or on some of its batches."""

    class_correct: Tensor  # int64 [C]
    task_correct: Tensor  # int64 [T]
    losses: Tensor  # float64 [batches]: sum of the cross-entropy over each batch
    examples: int  # size of the whole test set

    @property
    def loss(self) -> Tensor:
        """Return the mean cross-entropy over the test set, a scalar."""
        return self.losses.sum() / self.examples

    @classmethod
    def joined(cls, parts: "Sequence[Evaluation]") -> "Evaluation":
        """Return the evaluation on the whole test set.

        The result does not depend on how the batches were split.

        parts: evaluations in the order of the batches.
        """
        correct = torch.stack([part.class_correct for part in parts]).sum(0)
        tasks = torch.stack([part.task_correct for part in parts]).sum(0)
        return cls(correct, tasks, torch.cat([part.losses for part in parts]), parts[0].examples)


@dataclass(frozen=True)
class ClientRuntime:
    """A run's model, data and local training, on one device."""

    net: FunctionalNetwork
    data: Data
    augmentation: Draws | None
    local: LocalTraining
    dtype: torch.dtype
    heads: Tensor | None = None  # int64 [T, C]: see TaskHeads.heads
    views: tuple[str, ...] = (PLAIN,)  # test views, see fedexp.data.views
    seed: int = 0  # for the augmented view
    # view -> int64 [m], the test examples for local models; all examples of views not listed
    local_examples: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.data.x_train.device

    def load_train(self, index: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (x, y) of the training examples `index` [..., B].

        The examples are augmented if `draws` is given.
        """
        x = self.data.inputs(self.data.x_train, index, draws, self.augmentation, self.dtype)
        return x, self.data.y_train[index]

    def load_test(self, index: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (x, y) of the test examples `index` [B], augmented if `draws` is given.

        draws: random numbers for all test examples, see `test_draws`.
        """
        drawn = None if draws is None else draws[index]
        x = self.data.inputs(self.data.x_test, index, drawn, self.augmentation, self.dtype)
        return x, self.data.y_test[index]

    def tested_on(self, view: str) -> "ClientRuntime":
        """Return the runtime for a view: one that tests on the validation set, or this one."""
        return self._on_validation if view == VALIDATION else self

    @cached_property
    def _on_validation(self) -> "ClientRuntime":
        return replace(self, data=self.data.with_validation_as_test())

    def local_test(self, view: str, round: int) -> "tuple[ClientRuntime, Tensor | None]":
        """Return the runtime on which local models are tested in a view, and its `test_draws`."""
        draws, numbers = self.test_draws(view, round), self.local_examples.get(view)
        if numbers is None:
            return self.tested_on(view), draws
        return self._on_part[view], None if draws is None else draws[numbers]

    @cached_property
    def _on_part(self) -> "dict[str, ClientRuntime]":
        wholes = {view: self.tested_on(view) for view in self.local_examples}
        return {
            view: replace(whole, data=whole.data.tested_on(self.local_examples[view]))
            for view, whole in wholes.items()
        }

    def test_draws(self, view: str, round: int) -> Tensor | None:
        """Return the augmentation's random numbers for all test examples, int64 [M, D].

        They are the same for all models that are tested in a round, and change from round to round.
        Return None unless the view is the augmented one.
        """
        if view != AUGMENTED:
            return None
        assert self.augmentation is not None, "checked when the run was prepared"
        rng = generator_for(self.seed, "augmented test", round)
        draws = self.augmentation.draw(rng, len(self.data.y_test), *self.data.image_size)
        return torch.from_numpy(draws).to(self.device)

    def to(self, device: torch.device) -> "ClientRuntime":
        """Return this runtime on a device, as a copy if the device is another one."""
        if device == self.device:
            return self
        return replace(
            self,
            net=self.net.copy(device),
            data=self.data.to(device),
            heads=None if self.heads is None else self.heads.to(device),
            local_examples={k: v.to(device) for k, v in self.local_examples.items()},
        )

    @property
    def evaluation_batch(self) -> int:
        """Return the number of examples per evaluation batch.

        It is the same on every device if the model uses batch statistics, because it then affects
        the results.
        """
        if self.device.type == "cuda" and not uses_batch_statistics(self.net.module):
            return EVALUATION_BATCH_CUDA
        return EVALUATION_BATCH

    @property
    def evaluation_batches(self) -> int:
        """Return the number of batches in the test set."""
        return -(-len(self.data.y_test) // self.evaluation_batch)

    @torch.no_grad()
    def evaluate(
        self, params: Params, draws: Tensor | None = None, batches: range | None = None
    ) -> Evaluation:
        """Return class-wise correct predictions and losses on the test set.

        draws: see `test_draws`.
        batches: if given, evaluate only these consecutive batches.
        """
        batches = range(self.evaluation_batches) if batches is None else batches
        labels, tasks, device = self.data.y_test, self.data.test_tasks, self.device
        correct = torch.zeros(self.data.num_classes, dtype=torch.int64, device=device)
        task_correct = torch.zeros(self.data.num_tasks, dtype=torch.int64, device=device)
        losses = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for row, number in enumerate(batches):
            start = number * self.evaluation_batch
            end = min(start + self.evaluation_batch, len(labels))
            index = torch.arange(start, end, device=device)
            x, y = self.load_test(index, draws)
            logits = self.class_logits(self.net(params, x).logits, index)
            losses[row] = F.cross_entropy(logits, y, reduction="sum")
            right = (logits.argmax(-1) == y).to(torch.int64)
            # Not bincount, which on CUDA waits for the device to learn the size of its result.
            correct.index_add_(0, y, right)
            task = torch.zeros_like(y) if tasks is None else tasks[index]
            task_correct.index_add_(0, task, right)
        return Evaluation(correct, task_correct, losses, len(labels))

    def class_logits(self, outputs: Tensor, index: Tensor) -> Tensor:
        """Return the class logits of the test examples `index`, [B, outputs] -> [B, C].

        If each task has a head, an example's logits come from its task's head.
        """
        if self.heads is None or self.data.test_tasks is None:
            return outputs
        return by_head(outputs, self.heads[self.data.test_tasks[index]])

    def logits(self, model: Params, numbers: Tensor) -> Tensor:
        """Return a model's logits on training examples without augmentation, [n, C].

        model: parameters and buffers.
        numbers: indices of the training examples.
        """
        return torch.cat([output.logits for output in self._outputs(model, numbers)])

    def features(self, model: Params, numbers: np.ndarray) -> Tensor:
        """Return a model's features of training examples without augmentation, [n, D]."""
        found = self._outputs(model, torch.as_tensor(numbers))
        return torch.cat([output.features for output in found])

    @torch.no_grad()
    def _outputs(self, model: Params, numbers: Tensor) -> list[Output]:
        chunks = numbers.to(self.device).split(self.evaluation_batch)
        return [self.net(model, self.load_train(chunk, None)[0]) for chunk in chunks]


class ScheduledData:
    """One client's batches in the order of its schedule, without padding.

    This is the ClientData that the hooks receive.
    """

    def __init__(self, runtime: ClientRuntime, schedule: BatchSchedule):
        self.runtime = runtime
        self.index = schedule.index.to(runtime.device)
        self.draws = None if schedule.draws is None else schedule.draws.to(runtime.device)
        self.lengths = schedule.lengths.tolist()

    def batches(self) -> Iterator[Batch]:
        for step, length in enumerate(self.lengths):
            draws = None if self.draws is None else self.draws[step, :length]
            x, y = self.runtime.load_train(self.index[step, :length], draws)
            yield Batch(x, y, None, step)

    def take(self, index: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.runtime.load_train(index, draws)

    @property
    def steps(self) -> int:
        return len(self.lengths)


def overrides_local_step(algorithm: FedAvg) -> bool:
    """Return whether an algorithm overrides FedAvg's local step."""
    return type(algorithm).local_step is not FedAvg.local_step


@dataclass(frozen=True)
class Shared:
    """Values that are the same for all clients of a cohort or of a part of it."""

    algorithm: FedAvg
    runtime: ClientRuntime
    server: Tree  # the broadcast, with the model's "buffers"
    lr: float


class Engine(ABC):
    """Base class of the engines, which train a round's clients and evaluate models."""

    def start(self, runtime: ClientRuntime, server: Tree) -> None:  # noqa: B027
        """Do slow work, such as starting processes, before the first round is timed.

        server: a model with its "buffers".
        """

    @abstractmethod
    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        """Return the cohort's results, in the cohort's order."""

    def evaluate(
        self, runtime: ClientRuntime, server: Tree, view: str = PLAIN, round: int = 0
    ) -> Evaluation:
        """Evaluate the global model in a view in a round."""
        runtime.net.set_buffers(server["buffers"])
        return runtime.tested_on(view).evaluate(server["params"], runtime.test_draws(view, round))

    def logits(
        self, runtime: ClientRuntime, models: Sequence[Params], numbers: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return each model's logits on its training examples without augmentation, [n_i, C] each.

        models: parameters and buffers of each model.
        numbers: indices of the training examples for each model.
        """
        return [runtime.logits(model, each) for model, each in zip(models, numbers, strict=True)]

    def close(self) -> None:  # noqa: B027
        """Release the engine's resources, such as processes."""
