"""Centred kernel alignment (CKA), a similarity of two models' features on the same examples."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedexp_papers.analyses.base import Analysis, Measured
from fedexp_papers.analyses.test_set import collect_features, load_model, require_features


def linear_cka(one: Tensor, other: Tensor) -> float:
    """Return the linear CKA of two feature matrices, in [0, 1].

    CKA = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) for features X [n, D] and Y [n, D'] of the same
    n examples, after the mean of each column is subtracted. The value is 1 if the features are
    equal up to a rotation and a scale, and nan if all rows of X or of Y are equal.

    S. Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019,
    section 3, with the linear kernel.
    """
    x, y = (each.double() - each.double().mean(0) for each in (one, other))
    norm = torch.linalg.matrix_norm
    return float(norm(y.T @ x) ** 2 / (norm(x.T @ x) * norm(y.T @ y)))


class CKA(Analysis):
    """`cka.csv`: linear CKA between the global model's test-set features before and after a round.

    The value is 1 if the features are equal up to a rotation and a scale (Kornblith et al., ICML
    2019).
    """

    file = "cka.csv"
    columns = ("round", "cka")
    means: ClassVar = {"cka": "cka"}

    def check_run(self, simulation: Any) -> None:
        super().check_run(simulation)
        require_features(simulation.runtime.net.module, "analysis=cka")

    def rows(self, measured: Measured) -> list[dict[str, Any]]:
        runtime, models = measured.runtime, (measured.result.before, measured.result.server)
        features = [collect_features(runtime, load_model(runtime, model)) for model in models]
        return [{"round": measured.record.round, "cka": linear_cka(*features)}]
