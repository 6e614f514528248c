"""Each client's own test: models on the test examples that a client itself has.

These are the examples that a client holds out (`test_per_client`, or `validation.per_client` for
the validation set), or those that the data set gives it. The pooled test set contains them all.
"""

from typing import ClassVar

import numpy as np

from fedexp.metrics import forgetting
from fedexp.metrics.accuracy import overall_accuracy
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.metrics.personal import ClientResults, spreads
from fedexp.metrics.quantity import Quantity, by_name
from fedexp.metrics.record import Record

# values that tables of results show
MAIN = (
    *("own_accuracy", "own_accuracy_worst", "own_forgetting"),
    "own_global_accuracy_weighted",
)
# the accuracy that PFLlib prints, and its best value over the rounds, which PFLlib reports
OWN_ACCURACY = Quantity("own_accuracy_weighted", "max", "personal/own_accuracy_weighted", main=True)
BEST_OWN_ACCURACY = Quantity(
    "best_own_accuracy_weighted", "max", "personal/best_own_accuracy_weighted", main=True
)
BEST_OWN_ROUND = Quantity("best_own_round", "min", "personal/best_own_round", main=True, whole=True)
KINDS = ("own", "own_global", "own_local")  # prefixes of the names, without an underscore
COLUMNS = (
    *(f"accuracy{part}" for part in ("", "_weighted", "_std", "_worst")),
    *(f"forgetting{part}" for part in ("", "_std", "_worst")),
)


def weighted_mean(accuracy: np.ndarray, examples: np.ndarray) -> float:
    """Return the mean of the clients' accuracies [K], weighted by their test examples [K].

    This is the share of all these examples that are predicted correctly, each by the model of its
    client: the number that PFLlib prints. Clients whose accuracy is nan do not count.
    """
    tested = ~np.isnan(accuracy)
    return overall_accuracy(accuracy[tested] * examples[tested], examples[tested])


def own_matrices(record: Record) -> dict[str, np.ndarray]:
    """Return the clients' accuracies on their own test examples, [evaluated rounds, K] each.

    The keys are those of KINDS for which a model was tested: `own` for the models that clients use,
    which is the global model if they have no others.
    """
    found = {}
    for kind, model in zip(KINDS, ("personal", "global", "local"), strict=True):
        matrix = record.own_matrix(model)
        if not np.isnan(matrix).all():
            found[kind] = matrix
    if "own" not in found:
        found = {"own" if kind == "own_global" else kind: each for kind, each in found.items()}
    return found


def own_results(record: Record) -> ClientResults:
    """Return each client's accuracy and forgetting on its own test examples, [K] each.

    They describe the last evaluated round. The keys are those of `own_matrices`. A client's
    forgetting is max_{1<=t<T} A_k(t) - A_k(T), over the rounds in which the model was tested. A
    local model is tested in the rounds in which its client takes part.
    """
    return {
        kind: (matrix[-1], forgetting.forgetting_per_class(matrix))
        for kind, matrix in own_matrices(record).items()
    }


def best_round(record: Record) -> tuple[float, float]:
    """Return the highest weighted mean of the clients' accuracies, and the first round that has it.

    The models are those that clients use. The initial model counts only if no other was tested. If
    no client has a test example, both values are nan.
    """
    matrix = own_matrices(record).get("own", np.empty((0, 0)))
    assert record.own_examples is not None, "recorded in every evaluated round"
    known = [
        (weighted_mean(row, record.own_examples), number)
        for row, number in zip(matrix, record.rounds, strict=False)
        if not np.isnan(row).all()
    ]
    trained = [each for each in known if each[1] >= 1]
    nothing = float("nan"), float("nan")
    return max(trained or known, key=lambda each: each[0], default=nothing)


class OwnTest(ForgettingMetric):
    """`own_*`: accuracy and forgetting on each client's own test examples, over the clients.

    They describe the models that clients use: the personal models or, without them, the global
    model. With personal models, `own_global_*` describe the global model. `own_local_*` describe
    the models that the cohort trained in the round, if clients send whole models.
    `best_own_accuracy_weighted` is the best `own_accuracy_weighted` of all rounds, and
    `best_own_round` the round that has it.
    """

    columns: ClassVar = by_name(
        *(
            OWN_ACCURACY
            if f"{kind}_{column}" == OWN_ACCURACY.name
            else Quantity(
                name=f"{kind}_{column}",
                better="min" if "std" in column or "forgetting" in column else "max",
                tracked=f"personal/{kind}_{column}",
                main=f"{kind}_{column}" in MAIN,
            )
            for kind in KINDS
            for column in COLUMNS
        )
    )
    further: ClassVar = by_name(BEST_OWN_ACCURACY, BEST_OWN_ROUND)
    needs_own = True
    personal: bool  # whether the algorithm has personal models
    tests_clients: bool  # whether the algorithm has no global model

    def names(self) -> list[str]:
        kinds = [kind for kind in KINDS if kind != "own_global" or self.has_both]
        return [f"{kind}_{column}" for kind in kinds for column in COLUMNS]

    @property
    def has_both(self) -> bool:
        """Return whether there are a global model and personal models."""
        return self.personal and not self.tests_clients

    def round_values(self, record: Record) -> dict[str, float]:
        values = dict.fromkeys(self.names(), float("nan"))
        assert record.own_examples is not None, "recorded in every evaluated round"
        for kind, (accuracy, forgotten) in own_results(record).items():
            values |= spreads(kind, accuracy, forgotten)
            values[f"{kind}_accuracy_weighted"] = weighted_mean(accuracy, record.own_examples)
        return values

    def summary(self, record: Record) -> dict[str, float]:
        best, number = best_round(record)
        found = {BEST_OWN_ACCURACY.name: best, BEST_OWN_ROUND.name: number}
        return self.round_values(record) | found
