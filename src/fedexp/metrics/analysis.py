"""The `analysis` group: what a run measures beside its tests, in chosen rounds, into a file of its
own each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedexp.core.errors import require
from fedexp.core.limits import Checked, Count, CountOrNone, Limit
from fedexp.core.tree import Params
from fedexp.metrics import weight_divergence as divergence
from fedexp.metrics.cka import linear_cka
from fedexp.metrics.forgetting import in_out_local
from fedexp.metrics.gradient_diversity import (
    gradient_diversity,
    mean_squared_norm,
    squared_norm_of_mean,
)
from fedexp.metrics.layers import TOTAL

Row = dict[str, Any]
Rounds = Annotated[
    list[int],
    Limit("a list of rounds from 1 on, such as [1,50,100]", lambda v: len(v) > 0 and min(v) >= 1),
]


@dataclass(frozen=True)
class Epochs:
    """Accuracies of local models at P points of their training: before it, which is epoch 0, and
    after epochs."""

    # [S]: the epochs that each client was tested after; none: it was not
    numbers: Sequence[Sequence[int]]
    # float64 [S, P, C]: of the classes, on the test set; nan for a class that it lacks
    accuracy: np.ndarray
    test_accuracy: np.ndarray  # float64 [S, P]: on the test set
    # float64 [S, P]: on the client's own training examples, not augmented
    train_accuracy: np.ndarray


@dataclass(frozen=True)
class Analysed:
    """A round as its analyses see it: models, data and weights of the S clients that took part."""

    round: int
    clients: Sequence[int]
    counts: np.ndarray  # int [S, C]: their training labels
    weights: np.ndarray  # [S]: of the aggregation
    start: Params  # the distributed global model
    # float64 [C], of its classes on the test set; None: it was not evaluated
    start_accuracy: np.ndarray | None
    # the trained models, leaves [S, ...]; None where clients send no whole model
    local: Params | None
    epochs: Epochs | None  # None: nobody was tested in the middle of its training
    # of each client's loss at the distributed model, leaves [S, ...]
    gradients: Callable[[], Params]
    # of the test examples, [n, D]: of the global model before the round, and after it
    features: Callable[[], tuple[Tensor, Tensor]]


class Analysis(Checked, prefix="analysis."):
    """Base of the group. Analyses change nothing in a run: they draw no random numbers and leave
    all models alone."""

    file: ClassVar[str] = ""  # of the run directory; empty: none

    @property
    def parts(self) -> "Sequence[Analysis]":
        """Return the analyses that this option stands for."""
        return (self,)

    def is_due(self, round: int, last: int) -> bool:
        """Return whether a round is measured; last: the number of rounds."""
        return False

    def rows(self, found: Analysed) -> list[Row]:
        """Return the rows of the file for a round; all rounds have the same columns."""
        raise NotImplementedError


class NoAnalysis(Analysis):
    """Nothing is measured."""

    @property
    def parts(self) -> Sequence[Analysis]:
        return ()


NO_ANALYSIS = NoAnalysis()


class InRounds(Analysis):
    """An analysis in chosen rounds: those of `rounds`, or every n-th round and the last."""

    rounds: Rounds | None
    every: Count

    def is_due(self, round: int, last: int) -> bool:
        if self.rounds is not None:
            return round in self.rounds
        return round % self.every == 0 or round == last


class WeightDivergence(InRounds):
    """`weight_divergence.csv`: distances of each local model from the global model and from the
    other local models.

    A row for each round, client and layer, `total` for all layers together. `l1` and `l2`: from the
    distributed global model; `others_l1` and `others_l2`: mean over the other clients of the round;
    `distribution_distance`, of `total`: the distance of the client's labels from the class
    accuracies of the global model, where that was evaluated.
    """

    file = "weight_divergence.csv"

    def rows(self, found: Analysed) -> list[Row]:
        if found.local is None:
            return []
        values = {}
        for norm in divergence.NORMS:
            values[norm] = divergence.from_global(found.local, found.start, norm)
            values[f"others_{norm}"] = divergence.from_others(found.local, norm)
        distance = np.full(len(found.clients), np.nan)
        if found.start_accuracy is not None:
            distance = divergence.distribution_distance(found.start_accuracy, found.counts)
        return [
            {"round": found.round, "client": client, "layer": layer}
            | {name: float(one[layer][i]) for name, one in values.items()}
            | {"distribution_distance": float(distance[i]) if layer == TOTAL else math.nan}
            for i, client in enumerate(found.clients)
            for layer in values["l1"]
        ]


class GradientDiversity(InRounds):
    """`gradient_diversity.csv`: diversity of the gradients of the round's clients at the
    distributed global model.

    A row for each round and layer, `total` for all layers together. The gradients are those of the
    mean cross-entropy over all training examples of a client, not augmented, the model in eval
    mode. `gradient_diversity` has equal weights (Eq. 8), `weighted_gradient_diversity` those of the
    aggregation; the parts of the former stand beside it.
    """

    file = "gradient_diversity.csv"

    def rows(self, found: Analysed) -> list[Row]:
        gradients, count = found.gradients(), len(found.clients)
        uniform = torch.full((count,), 1 / count, dtype=torch.float64)
        columns = {
            "gradient_diversity": gradient_diversity(gradients),
            "weighted_gradient_diversity": gradient_diversity(
                gradients, torch.as_tensor(found.weights)
            ),
            "mean_squared_norm": mean_squared_norm(gradients, uniform),
            "squared_norm_of_mean": squared_norm_of_mean(gradients, uniform),
        }
        return [
            {"round": found.round, "layer": layer, "clients": count}
            | {name: float(values[layer]) for name, values in columns.items()}
            for layer in columns["gradient_diversity"]
        ]


class CKA(InRounds):
    """`cka.csv`: linear CKA of the global model's features before and after a round, on the test
    set: 1 where they are equal up to a rotation and a scale (Kornblith et al., ICML 2019)."""

    file = "cka.csv"

    def rows(self, found: Analysed) -> list[Row]:
        return [{"round": found.round, "cka": linear_cka(*found.features())}]


class LocalEpochs(InRounds):
    """`local_epochs.csv`: accuracy of local models before their training and after each of its
    epochs (FedNTD Fig. 6).

    A row for each round, client and epoch, 0 before training: accuracy on the test set, on the
    client's in-local and out-local distribution (FedNTD Definition 1), and on its own training
    examples, not augmented.
    """

    file = "local_epochs.csv"
    between: bool  # after every epoch; False: before the first and after the last alone
    clients: CountOrNone  # the first so many of a round; None: all of them

    def rows(self, found: Analysed) -> list[Row]:
        epochs = found.epochs
        if epochs is None:
            return []
        inside, outside = in_out_local(epochs.accuracy, found.counts[:, None])
        return [
            {
                "round": found.round,
                "client": client,
                "epoch": epoch,
                "test_accuracy": float(epochs.test_accuracy[i, place]),
                "in_local_accuracy": float(inside[i, place]),
                "out_local_accuracy": float(outside[i, place]),
                "train_accuracy": float(epochs.train_accuracy[i, place]),
            }
            for i, client in enumerate(found.clients)
            for place, epoch in enumerate(epochs.numbers[i])
        ]


class SeveralAnalyses(InRounds):
    """Several analyses in one run; each has the same rounds unless its options say otherwise."""

    members: list[Analysis]

    def __post_init__(self) -> None:
        super().__post_init__()
        files = [each.file for each in self.parts]
        require(len(set(files)) == len(files), "analysis.members", files, "different analyses")

    @property
    def parts(self) -> Sequence[Analysis]:
        return [part for member in self.members for part in member.parts]
