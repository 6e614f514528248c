"""The interface of the engines, and the values that engines receive and return.

An engine trains the clients of a round and returns their messages and new states.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from fedexp.data.augment import Draws
from fedexp.data.types import Data, ImageData
from fedexp.data.views import AUGMENTED, PLAIN, VALIDATION
from fedexp.engine.batch_norm import uses_batch_statistics
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.schedule import BatchSchedule
from fedexp.models import Output

# small enough that the output of a layer is still in the CPU cache when the next layer reads it
EVALUATION_BATCH = 100
# On CUDA, batches are larger, because each batch costs kernel launches: they have this number of
# examples, or as many images as have this number of values.
EVALUATION_BATCH_CUDA, EVALUATION_VALUES_CUDA = 1000, 1 << 23
Load = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]] | None


@dataclass(frozen=True)
class Cohort:
    """The clients that take part in a round. All sequences are in the order of `clients`."""

    round: int
    clients: Sequence[int]
    roles: Sequence[FedAvg]  # the algorithm whose client-side hooks each client uses
    schedules: Sequence[BatchSchedule]
    states: Sequence[Tree]
    plans: Sequence[Tree]
    personals: Sequence[Tree]  # the server's message to each client, in addition to the broadcast
    # the local steps after which each client's model is copied, ascending; empty: no copies
    marks: Sequence[Sequence[int]] = ()

    def take(self, positions: Sequence[int]) -> "Cohort":
        """Return the clients at the given positions as a smaller cohort."""
        part: dict[str, Any] = {}
        for name, values in vars(self).items():
            if name != "round" and len(values):
                part[name] = [values[i] for i in positions]
        return replace(self, **part)

    def longest_first(self) -> list[int]:
        """Return the positions of the clients. Clients with more local steps come first."""
        return sorted(range(len(self.clients)), key=lambda i: -self.schedules[i].steps)

    def shares(self, count: int) -> list[list[int]]:
        """Split the positions of the clients into parts with about equal numbers of local steps.

        There are at most `count` parts, and no part is empty.
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
    """The results of training a cohort or a part of a cohort."""

    messages: Tree  # leaves [|S|, ...]
    states: list[Tree]
    losses: Tensor  # [|S|]: mean objective over the local steps
    buffers: Params  # leaves [|S|, ...]: running statistics of the local models
    class_correct: dict[str, Tensor] | None
    """The correct predictions of the local models in each test view, int64 [|S|, C].

    None if the local models were not tested.
    """
    evaluation_seconds: float = 0.0  # time for `class_correct`
    # for each client, its parameters and buffers at the marks of the cohort; empty without marks
    epochs: Sequence[list[Params]] = ()


# fields of Trained whose leaves have the clients as their first dimension
STACKED = ("messages", "losses", "buffers", "class_correct")


class Gather:
    """Collects the results of parts of a cohort in the order of the cohort.

    The results of a part are copied into the result of the cohort as soon as they are added, so
    that only one part at a time is stored twice.
    """

    def __init__(self, cohort: Cohort):
        self.count = len(cohort.clients)
        self._states: list[Tree] = [None] * self.count
        self._epochs: list[list[Params]] = [[] for _ in cohort.marks]
        self._stacked: dict[str, Tree] = {}  # field of Trained -> leaves [count, ...]
        self._seconds = 0.0

    def add(self, positions: Sequence[int], part: Trained) -> None:
        """Add the results of a part of the cohort.

        positions: the positions of the part's clients in the cohort.
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
        for position, models in zip(positions, part.epochs, strict=False):
            self._epochs[position] = models
        self._seconds += part.evaluation_seconds

    def _allocate(self, leaf: Tensor | None) -> Tensor | None:
        return None if leaf is None else leaf.new_empty(self.count, *leaf.shape[1:])

    def result(self, parallel: int = 1) -> Trained:
        """Return the results of the whole cohort.

        parallel: the number of parts that were trained at the same time. The evaluation time is
            divided by this number.
        """
        seconds = self._seconds / parallel
        return Trained(
            states=self._states,
            evaluation_seconds=seconds,
            epochs=self._epochs,
            **self._stacked,
        )


@dataclass(frozen=True)
class Tested:
    """Numbers of correct predictions, and losses, on the test set or on some of its batches."""

    class_correct: Tensor  # int64 [C]
    task_correct: Tensor  # int64 [T]
    losses: Tensor  # float64 [batches]: sum of the cross-entropy over each batch
    right: Tensor  # bool [n]: whether the prediction for each of the tested examples is correct
    examples: int  # size of the whole test set

    @property
    def loss(self) -> Tensor:
        """Return the mean cross-entropy per example of the test set, a scalar."""
        return self.losses.sum() / self.examples

    @classmethod
    def joined(cls, parts: "Sequence[Tested]") -> "Tested":
        """Return the evaluation on the whole test set.

        The result does not depend on how the batches were divided into parts.

        parts: the evaluations of all parts, in the order of the batches.
        """
        correct = torch.stack([part.class_correct for part in parts]).sum(0)
        tasks = torch.stack([part.task_correct for part in parts]).sum(0)
        losses = torch.cat([part.losses for part in parts])
        right = torch.cat([part.right for part in parts])
        return cls(correct, tasks, losses, right, parts[0].examples)


@dataclass(frozen=True)
class ClientRuntime:
    """The model, the data and the local training of a run, on one device."""

    net: FunctionalNetwork
    data: Data
    augmentation: Draws | None
    local: LocalTraining
    dtype: torch.dtype
    heads: Tensor | None = None  # int64 [T, C]: see FedAvg.heads
    load: Callable[[], Data] | None = None  # loads `data` on another machine, without features
    views: tuple[str, ...] = (PLAIN,)  # test views, see fedexp.data.views
    seed: int = 0  # for the augmented view

    @property
    def device(self) -> torch.device:
        return self.data.x_train.device

    def load_train(self, index: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels (x, y) of training examples.

        index: int64 [..., B], the indices of the examples.
        draws: the random numbers for the augmentation, or None for no augmentation.
        """
        x = self.data.inputs(self.data.x_train, index, draws, self.augmentation, self.dtype)
        known = self.data.train_features if draws is None else None
        self.net.known.set(x, None if known is None else known[index])
        return x, self.data.y_train[index]

    def load_test(self, index: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels (x, y) of test examples.

        index: int64 [B], the indices of the examples.
        draws: the random numbers for all test examples, from `test_draws`. None: no augmentation.
        """
        drawn = None if draws is None else draws[index]
        x = self.data.inputs(self.data.x_test, index, drawn, self.augmentation, self.dtype)
        known = self.data.test_features if draws is None else None
        self.net.known.set(x, None if known is None else known[index])
        return x, self.data.y_test[index]

    def tested_on(self, view: str) -> "ClientRuntime":
        """Return a runtime for testing in a view.

        For the validation view, the test set of the returned runtime is the validation set. For
        other views, this runtime is returned.
        """
        return self._on_validation if view == VALIDATION else self

    @cached_property
    def _on_validation(self) -> "ClientRuntime":
        return replace(self, data=self.data.with_validation_as_test())

    def test_draws(self, view: str, round: int) -> Tensor | None:
        """Return the random numbers that augment the M test examples, int64 [M, D].

        All models that are tested in a round use the same numbers; each round uses different
        numbers. The result is None if the view is not the augmented view.
        """
        if view != AUGMENTED:
            return None
        assert self.augmentation is not None, "checked when the run was prepared"
        rng = generator_for(self.seed, "augmented test", round)
        height, width = self.data.x_test.shape[1:3]
        draws = self.augmentation.draw(rng, len(self.data.y_test), height, width)
        return torch.from_numpy(draws).to(self.device)

    def to(self, device: torch.device) -> "ClientRuntime":
        """Return this runtime if it is on the given device, else a copy on this device."""
        if device == self.device:
            return self
        return replace(
            self,
            net=self.net.copy(device),
            data=self.data.to(device),
            heads=None if self.heads is None else self.heads.to(device),
        )

    @property
    def evaluation_batch(self) -> int:
        """Return the number of examples per evaluation batch.

        If the model normalises by batch statistics, the number affects the results, so it is the
        same on every device.
        """
        if self.device.type == "cuda" and not uses_batch_statistics(self.net.module):
            values = math.prod(self.data.shape) if isinstance(self.data, ImageData) else math.inf
            return max(EVALUATION_BATCH_CUDA, int(EVALUATION_VALUES_CUDA / values))
        return EVALUATION_BATCH

    @property
    def evaluation_batches(self) -> int:
        """Return the number of batches in the test set."""
        return -(-len(self.data.y_test) // self.evaluation_batch)

    @torch.no_grad()
    def evaluate(
        self, params: Params, draws: Tensor | None = None, batches: range | None = None
    ) -> Tested:
        """Return the correct predictions and the losses of a model on the test set.

        params: the parameters of the model, with or without buffers.
        draws: the random numbers from `test_draws`. None: no augmentation.
        batches: the consecutive batches to evaluate. None: all batches.
        """
        batches = range(self.evaluation_batches) if batches is None else batches
        labels, tasks, device = self.data.y_test, self.data.test_tasks, self.device
        correct = torch.zeros(self.data.num_classes, dtype=torch.int64, device=device)
        task_correct = torch.zeros(self.data.num_tasks, dtype=torch.int64, device=device)
        losses = torch.zeros(len(batches), dtype=torch.float64, device=device)
        right = [torch.zeros(0, dtype=torch.bool, device=device)]
        for row, number in enumerate(batches):
            start = number * self.evaluation_batch
            end = min(start + self.evaluation_batch, len(labels))
            index = torch.arange(start, end, device=device)
            x, y = self.load_test(index, draws)
            logits = self.class_logits(self.net(params, x).logits, index)
            losses[row] = F.cross_entropy(logits, y, reduction="sum")
            right.append(logits.argmax(-1) == y)
            count = right[-1].to(torch.int64)
            # not bincount, which waits for the device on CUDA
            correct.index_add_(0, y, count)
            task = torch.zeros_like(y) if tasks is None else tasks[index]
            task_correct.index_add_(0, task, count)
        return Tested(correct, task_correct, losses, torch.cat(right), len(labels))

    def class_logits(self, outputs: Tensor, index: Tensor) -> Tensor:
        """Return the class logits [B, C] of test examples, given the outputs of the model.

        If the model has a head for each task, the head of the example's task is used.

        outputs: [B, outputs], the outputs of the model.
        index: the indices of the test examples.
        """
        if self.heads is None or self.data.test_tasks is None:
            return outputs
        return by_head(outputs, self.heads[self.data.test_tasks[index]])

    def logits(self, model: Params, numbers: Tensor) -> Tensor:
        """Return the logits of a model on training examples without augmentation, [n, C].

        model: the parameters and buffers of the model.
        numbers: the indices of the training examples.
        """
        return torch.cat([output.logits for output in self._outputs(model, numbers)])

    def features(self, model: Params, numbers: np.ndarray | Tensor, load: Load = None) -> Tensor:
        """Return the features that a model computes for examples without augmentation, [n, D].

        model: the parameters and buffers of the model.
        numbers: the indices of the examples.
        load: `load_test` for test examples. None: `load_train`.
        """
        found = self._outputs(model, torch.as_tensor(numbers), load)
        return torch.cat([output.features for output in found])

    @torch.no_grad()
    def _outputs(self, model: Params, numbers: Tensor, load: Load = None) -> list[Output]:
        load, chunks = load or self.load_train, numbers.to(self.device).split(self.evaluation_batch)
        return [self.net(model, load(chunk, None)[0]) for chunk in chunks]


class ScheduledData:
    """The batches of one client in the order of its schedule, without padding.

    It implements `ClientData`, the protocol of the hooks' argument `data`.
    """

    def __init__(self, runtime: ClientRuntime, schedule: BatchSchedule):
        self.runtime = runtime
        self.index = schedule.index.to(runtime.device)
        self.draws = None if schedule.draws is None else schedule.draws.to(runtime.device)
        self.lengths = schedule.lengths.tolist()
        self.pass_steps = min(schedule.pass_steps, schedule.steps)
        self.whole_pass = schedule.pass_steps

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


@dataclass(frozen=True)
class Shared:
    """The arguments of training that are the same for all clients of a cohort."""

    algorithm: FedAvg
    runtime: ClientRuntime
    server: Tree  # the broadcast, with the model's "buffers"
    lr: float


class Engine(ABC):
    """Base class of the engines. An engine trains the clients of a round and evaluates models."""

    def start(self, runtime: ClientRuntime) -> None:  # noqa: B027
        """Do slow work before the run starts, for example start processes."""

    @abstractmethod
    def train(self, shared: Shared, cohort: Cohort, evaluate_local: bool) -> Trained:
        """Train the clients of a cohort, and return their results in the order of the cohort.

        evaluate_local: whether to test the local models.
        """

    def evaluate(
        self, runtime: ClientRuntime, server: Tree, view: str = PLAIN, round: int = 0
    ) -> Tested:
        """Evaluate the global model in a view.

        server: a dict with the `params` and `buffers` of the model.
        round: the number of the round; it selects the random numbers of the augmented view.
        """
        runtime.net.set_buffers(server["buffers"])
        return runtime.tested_on(view).evaluate(server["params"], runtime.test_draws(view, round))

    def logits(
        self, runtime: ClientRuntime, models: Sequence[Params], numbers: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the logits of each model on training examples without augmentation, [n_i, C] each.

        models: the parameters and buffers of each model.
        numbers: the indices of the training examples for each model.
        """
        return [runtime.logits(model, each) for model, each in zip(models, numbers, strict=True)]

    def close(self) -> None:  # noqa: B027
        """Release the engine's resources, such as processes."""
