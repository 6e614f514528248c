"""Centred kernel alignment (CKA), a similarity of two models' features on the same examples."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime
from fedexp.models.own import LogitsOnly, describe_head
from fedexp_papers.analyses.base import Analysis, Measured


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
        module = simulation.runtime.net.module
        if isinstance(module, LogitsOnly):
            raise ConfigError(
                "analysis=cka: needs the model's features, the input of its last layer. To name"
                f" this layer, set model.head, which {describe_head(module.network, None)}"
            )

    def rows(self, measured: Measured) -> list[dict[str, Any]]:
        runtime, features = measured.runtime, []
        for model in (measured.result.before, measured.result.server):
            runtime.net.set_buffers(model["buffers"])
            found = collect_features(runtime, runtime.net.own(model["params"]))
            assert found is not None, "`check_run` rejects models without features"
            features.append(found)
        return [{"round": measured.record.round, "cka": linear_cka(*features)}]


@torch.no_grad()
def collect_features(runtime: ClientRuntime, params: Params) -> Tensor | None:
    """Return the features of the test examples, [n, D], or None if the model has no features."""
    numbers = torch.arange(len(runtime.data.y_test), device=runtime.device)
    batches = []
    for index in numbers.split(runtime.evaluation_batch):
        features: Tensor | None = runtime.net(params, runtime.load_test(index)[0]).features
        if features is None:
            return None
        batches.append(features.flatten(1))
    return torch.cat(batches)
