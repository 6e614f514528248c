"""Accuracy and forgetting by domain, with the measures of classes."""

from typing import ClassVar

import numpy as np

from fedexp.metrics import forgetting
from fedexp.metrics.accuracy import class_mean
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.metrics.quantity import Quantity, by_name
from fedexp.metrics.record import Record


class ByDomain(ForgettingMetric):
    """`domain_*`: the global model's accuracy and forgetting F, with domains in place of classes.

    `domain_accuracy` is the mean over the domains, `domain_accuracy_worst` the lowest.
    """

    columns: ClassVar = by_name(
        Quantity("domain_accuracy", "max", "test/domain_accuracy", main=True),
        Quantity("domain_accuracy_worst", "max", "test/domain_accuracy_worst", main=True),
        Quantity("domain_forgetting", "min", main=True),
        Quantity("domain_round_forgetting", "min"),
    )
    needs_domains = True

    def round_values(self, record: Record) -> dict[str, float]:
        assert record.domains is not None, "recorded in every evaluated round"
        matrix = record.domains.matrix
        now, drops = matrix[-1], forgetting.round_drop(matrix[-3:])
        return {
            "domain_accuracy": float(class_mean(now)),
            "domain_accuracy_worst": float(np.fmin.reduce(now)),
            "domain_forgetting": forgetting.forgetting_f(matrix),
            "domain_round_forgetting": float(drops[-1]) if drops.size else float("nan"),
        }

    def summary(self, record: Record) -> dict[str, float]:
        """Return the values of the last round, and the mean of the round forgetting."""
        assert record.domains is not None, "recorded in every evaluated round"
        drops = class_mean(forgetting.round_drop(record.domains.matrix))
        return self.round_values(record) | {"domain_round_forgetting": float(drops)}
