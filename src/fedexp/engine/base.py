"""What every engine takes and gives: the clients of one round in, their messages and new states out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from fedexp.algorithms.base import Batch, FedAvg
from fedexp.data.augment import Augmentation, Normalise, load_batch
from fedexp.data.types import ImageData
from fedexp.engine.network import FunctionalNetwork
from fedexp.engine.schedule import Schedule
from fedexp.settings import LocalTraining
from fedexp.tree import Params, Tree

EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Cohort:
    """The sampled clients of one round; all sequences in the order of `clients`."""

    round: int
    clients: Sequence[int]
    schedules: Sequence[Schedule]
    states: Sequence[Tree]
    plans: Sequence[Tree]


@dataclass(frozen=True)
class Trained:
    """What came back from the cohort."""

    messages: Tree  # leaves [|S|, ...]
    states: list[Tree]
    losses: torch.Tensor  # [|S|]: mean objective over the local steps
    buffers: Params  # leaves [|S|, ...]: running statistics of the local models
    class_correct: torch.Tensor | None  # int64 [|S|, C]: right answers of the local models on the test set
    evaluation_seconds: float = 0.0  # spent on the latter


@dataclass(frozen=True)
class Evaluation:
    class_correct: torch.Tensor  # int64 [C]
    loss: torch.Tensor  # scalar: mean cross-entropy over the test set


@dataclass(frozen=True)
class Workbench:
    """Model, data and local training of a run, on its device."""

    net: FunctionalNetwork
    data: ImageData
    normalise: Normalise
    augmentation: Augmentation | None
    local: LocalTraining
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.data.x_train.device

    def load_train(self, index: torch.Tensor, draws: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Examples by number, index [..., B]: (x, y), augmented where draws are given."""
        augmentation = self.augmentation if draws is not None else None
        x = load_batch(self.data.x_train, index, draws, augmentation, self.normalise, self.dtype)
        return x, self.data.y_train[index]

    @torch.no_grad()
    def evaluate(self, params: Params) -> Evaluation:
        """Class-wise right answers and mean loss on the whole test set."""
        self.net.hold(params)
        labels, num_classes = self.data.y_test, self.data.num_classes
        correct = torch.zeros(num_classes, dtype=torch.int64, device=self.device)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in torch.arange(len(labels), device=self.device).split(EVALUATION_BATCH):
            x = load_batch(self.data.x_test, index, None, None, self.normalise, self.dtype)
            y, logits = labels[index], self.net(params, x).logits
            loss += F.cross_entropy(logits, y, reduction="sum")
            correct += torch.bincount(y[logits.argmax(-1) == y], minlength=num_classes)
        return Evaluation(correct, loss / len(labels))


class ScheduledData:
    """One client's batches in the order of its schedule (the ClientData of the hooks); no padding."""

    def __init__(self, bench: Workbench, schedule: Schedule):
        self.bench = bench
        self.index = schedule.index.to(bench.device)
        self.draws = None if schedule.draws is None else schedule.draws.to(bench.device)
        self.lengths = schedule.lengths.tolist()

    def batches(self) -> Iterator[Batch]:
        for step, length in enumerate(self.lengths):
            draws = None if self.draws is None else self.draws[step, :length]
            x, y = self.bench.load_train(self.index[step, :length], draws)
            yield Batch(x, y, None, step)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.bench.load_train(index, None)


class Engine(Protocol):
    """How the clients of a round are trained."""

    def train(
        self, algorithm: FedAvg, bench: Workbench, server: Tree, cohort: Cohort, lr: float, evaluate_local: bool
    ) -> Trained: ...


def to_tensors(plan: Tree, device: torch.device) -> Tree:
    """A plan's numpy arrays on the device."""
    return {k: torch.as_tensor(np.asarray(v), device=device) for k, v in plan.items()}
