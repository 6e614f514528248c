"""Additional measurements that a run makes in selected rounds (config group `analysis`).

Each analysis writes its results to a separate file.
"""

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
    Limit(
        "a list of round numbers from 1, such as [1,50,100]", lambda v: len(v) > 0 and min(v) >= 1
    ),
]


@dataclass(frozen=True)
class Epochs:
    """Accuracies of local models at P points during local training."""

    # [S]: for each client, the epochs after which it was tested; 0: before training; empty: not
    # tested
    numbers: Sequence[Sequence[int]]
    # float64 [S, P, C]: class accuracies on the test set; nan for a class without test examples
    accuracy: np.ndarray
    test_accuracy: np.ndarray  # float64 [S, P]: accuracy on the test set
    # float64 [S, P]: accuracy on the client's training examples without augmentation
    train_accuracy: np.ndarray


@dataclass(frozen=True)
class RoundMeasurements:
    """The measurements of one round with S clients. Analyses are computed from these."""

    round: int
    clients: Sequence[int]
    counts: np.ndarray  # int [S, C]: number of training labels per client and class
    weights: np.ndarray  # [S]: aggregation weights
    start: Params  # the distributed global model
    # float64 [C]: class accuracies of `start` on the test set; None: not evaluated
    start_accuracy: np.ndarray | None
    # the trained models, leaves [S, ...]; None: the clients do not send whole models
    local: Params | None
    epochs: Epochs | None  # None: no client was tested during its training
    # returns the gradients of the clients' losses at the distributed model, leaves [S, ...]
    gradients: Callable[[], Params]
    # returns the features [n, D] of the test examples before and after the round (global model)
    features: Callable[[], tuple[Tensor, Tensor]]


class Analysis(Checked, prefix="analysis."):
    """Base class of the analyses.

    An analysis does not change the run: it draws no random numbers and does not modify any model.
    """

    # name of the analysis's file in the run directory; empty: it writes no file
    file: ClassVar[str] = ""
    columns: ClassVar[tuple[str, ...]] = ()  # of its file

    @property
    def parts(self) -> "Sequence[Analysis]":
        """Return the analyses that this one combines. By default, this is only itself."""
        return (self,)

    def is_due(self, round: int, last: int) -> bool:
        """Return whether the analysis measures the given round.

        last: the last round of the run.
        """
        return False

    def rows(self, measured: RoundMeasurements) -> list[Row]:
        """Return the rows to write to the file for one round; all rounds have the same columns."""
        raise NotImplementedError


class NoAnalysis(Analysis):
    """An analysis that measures nothing."""

    @property
    def parts(self) -> Sequence[Analysis]:
        return ()


NO_ANALYSIS = NoAnalysis()


class PeriodicAnalysis(Analysis):
    """Base class of analyses that run only in some rounds.

    These are the rounds listed in `rounds` or, if `rounds` is None, every `every`-th round and the
    last round.
    """

    rounds: Rounds | None
    every: Count

    def is_due(self, round: int, last: int) -> bool:
        if self.rounds is not None:
            return round in self.rounds
        return round % self.every == 0 or round == last


class WeightDivergence(PeriodicAnalysis):
    """`weight_divergence.csv`: distances of local models from the global model and from each other.

    The file has a row for each round, client and layer; the layer `total` is the whole model. `l1`
    and `l2` are the distances from the global model that the clients received. `others_l1` and
    `others_l2` are the mean distances from the other local models of the round. Rows of `total`
    also have `distribution_distance`, the distance between the client's label distribution and the
    class accuracies of the global model, if it was evaluated.
    """

    file = "weight_divergence.csv"
    columns = ("round", "client", "layer", "l1", "others_l1", "l2", "others_l2")
    columns += ("distribution_distance",)

    def rows(self, measured: RoundMeasurements) -> list[Row]:
        if measured.local is None:
            return []
        values = {}
        for norm in divergence.NORMS:
            values[norm] = divergence.from_global(measured.local, measured.start, norm)
            values[f"others_{norm}"] = divergence.from_others(measured.local, norm)
        distance = np.full(len(measured.clients), np.nan)
        if measured.start_accuracy is not None:
            distance = divergence.distribution_distance(measured.start_accuracy, measured.counts)
        rows = []
        for i, client in enumerate(measured.clients):
            for layer in values["l1"]:
                row: Row = {"round": measured.round, "client": client, "layer": layer}
                row |= {name: float(norms[layer][i]) for name, norms in values.items()}
                row["distribution_distance"] = float(distance[i]) if layer == TOTAL else math.nan
                rows.append(row)
        return rows


class GradientDiversity(PeriodicAnalysis):
    """`gradient_diversity.csv`: diversity of the clients' gradients at the global model.

    The file has a row for each round and layer; the layer `total` is the whole model. A client's
    gradient is the gradient of the mean cross-entropy over all its training examples, without
    augmentation and with the model in eval mode. `gradient_diversity` uses equal weights (Eq. 8),
    and `weighted_gradient_diversity` uses the aggregation weights. `mean_squared_norm` and
    `squared_norm_of_mean` are the numerator and denominator of `gradient_diversity`.
    """

    file = "gradient_diversity.csv"
    columns = ("round", "layer", "clients", "gradient_diversity", "weighted_gradient_diversity")
    columns += ("mean_squared_norm", "squared_norm_of_mean")

    def rows(self, measured: RoundMeasurements) -> list[Row]:
        gradients, count = measured.gradients(), len(measured.clients)
        weights = torch.as_tensor(measured.weights)
        uniform = torch.full((count,), 1 / count, dtype=torch.float64)
        columns = {
            "gradient_diversity": gradient_diversity(gradients),
            "weighted_gradient_diversity": gradient_diversity(gradients, weights),
            "mean_squared_norm": mean_squared_norm(gradients, uniform),
            "squared_norm_of_mean": squared_norm_of_mean(gradients, uniform),
        }
        rows = []
        for layer in columns["gradient_diversity"]:
            row: Row = {"round": measured.round, "layer": layer, "clients": count}
            rows.append(row | {name: float(values[layer]) for name, values in columns.items()})
        return rows


class CKA(PeriodicAnalysis):
    """`cka.csv`: linear CKA between the global model's test-set features before and after a round.

    The value is 1 if the features are equal up to a rotation and a scale (Kornblith et al., ICML
    2019).
    """

    file = "cka.csv"
    columns = ("round", "cka")

    def rows(self, measured: RoundMeasurements) -> list[Row]:
        return [{"round": measured.round, "cka": linear_cka(*measured.features())}]


class LocalEpochs(PeriodicAnalysis):
    """`local_epochs.csv`: accuracy of local models before training and after each epoch.

    These values are plotted in FedNTD, Fig. 6. The file has a row for each round, client and epoch;
    epoch 0 is before training. It contains the accuracies on the test set, on the client's in-local
    and out-local distributions (FedNTD Definition 1), and on the client's training examples without
    augmentation.
    """

    file = "local_epochs.csv"
    columns = ("round", "client", "epoch", "test_accuracy", "in_local_accuracy")
    columns += ("out_local_accuracy", "train_accuracy")
    # True: test after every epoch; False: only before the first and after the last epoch
    between: bool
    clients: CountOrNone  # how many clients to test per round, in cohort order; None: all

    def rows(self, measured: RoundMeasurements) -> list[Row]:
        epochs = measured.epochs
        if epochs is None:
            return []
        inside, outside = in_out_local(epochs.accuracy, measured.counts[:, None])
        return [
            {
                "round": measured.round,
                "client": client,
                "epoch": epoch,
                "test_accuracy": float(epochs.test_accuracy[i, place]),
                "in_local_accuracy": float(inside[i, place]),
                "out_local_accuracy": float(outside[i, place]),
                "train_accuracy": float(epochs.train_accuracy[i, place]),
            }
            for i, client in enumerate(measured.clients)
            for place, epoch in enumerate(epochs.numbers[i])
        ]


class SeveralAnalyses(Analysis):
    """The analyses of a run. Each has its own options for rounds."""

    members: list[Analysis]

    def __post_init__(self) -> None:
        super().__post_init__()
        files = [each.file for each in self.parts]
        require(len(set(files)) == len(files), "analysis", files, "different analyses")

    @property
    def parts(self) -> Sequence[Analysis]:
        return [part for member in self.members for part in member.parts]
