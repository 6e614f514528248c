"""Gradient diversity: how much the clients' gradients differ (FedNTD Definition 2, Eq. 8)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp_papers.analyses.base import Analysis, Measured
from fedexp_papers.analyses.layers import squared_norms


def mean_squared_norm(gradients: Params, weights: Tensor) -> dict[str, Tensor]:
    """Return the mean squared norm sum_k w_k ||g_k||^2 per layer and in total, as float64 scalars.

    gradients: leaves [S, ...]; weights: [S], with sum 1.
    """
    return {
        layer: (weights.to(norms) * norms).sum()
        for layer, norms in squared_norms(gradients).items()
    }


def squared_norm_of_mean(gradients: Params, weights: Tensor) -> dict[str, Tensor]:
    """Return the squared norm of the mean, ||sum_k w_k g_k||^2, per layer and in total.

    The values are float64 scalars. gradients: leaves [S, ...]; weights: [S], with sum 1.
    """
    mean = {
        name: torch.tensordot(weights.to(leaf), leaf, 1)[None] for name, leaf in gradients.items()
    }
    return {layer: norm[0] for layer, norm in squared_norms(mean).items()}


def gradient_diversity(gradients: Params, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Return the gradient diversity Lambda >= 1 for each layer and in total.

    Lambda = (1/K sum_k ||g_k||^2) / ||1/K sum_k g_k||^2 for K clients with equal weights; see
    FedNTD (NeurIPS 2022), Definition 2, Eq. 8. `gradients`, with leaves [K, ...], contains the
    gradient g_k of each client's loss at the same model. Each value is a float64 scalar. It is 1 if
    all gradients are equal, and nan or inf if their mean is zero. If `weights` [K] is given, the
    weights divided by their sum replace 1/K.
    """
    first = next(iter(gradients.values()))
    given = first.new_ones(len(first)) if weights is None else weights
    share = given.to(torch.float64) / given.to(torch.float64).sum()
    above, below = mean_squared_norm(gradients, share), squared_norm_of_mean(gradients, share)
    return {layer: above[layer] / below[layer] for layer in above}


class GradientDiversity(Analysis):
    """`gradient_diversity.csv`: diversity of the clients' gradients at the global model.

    The file has a row for each round and layer; the layer `total` is the whole model. A client's
    gradient is the gradient of the mean cross-entropy over all its training examples, without
    augmentation and with the model in eval mode. `gradient_diversity` uses equal weights (Eq. 8),
    and `weighted_gradient_diversity` uses the aggregation weights. `mean_squared_norm` and
    `squared_norm_of_mean` are the numerator and denominator of `gradient_diversity`.
    """

    file = "gradient_diversity.csv"
    columns = (
        *("round", "layer", "clients", "gradient_diversity", "weighted_gradient_diversity"),
        *("mean_squared_norm", "squared_norm_of_mean"),
    )
    means: ClassVar = {name: name for name in ("gradient_diversity", "weighted_gradient_diversity")}

    def check_run(self, simulation: Any) -> None:
        super().check_run(simulation)
        if simulation.runtime.heads is not None:
            raise ConfigError(
                "analysis=gradient_diversity: is not defined for"
                f" {type(simulation.algorithm).__name__}, because its model has a separate head for"
                " each task"
            )

    def rows(self, measured: Measured) -> list[dict[str, Any]]:
        clients, given = measured.clients, measured.exchange.round.federation
        parts = [given.parts[client] for client in clients]
        gradients = local_gradients(measured.simulation.runtime, measured.exchange.sent, parts)
        uniform = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
        weights = torch.as_tensor(given.weights[clients])
        columns = {
            "gradient_diversity": gradient_diversity(gradients),
            "weighted_gradient_diversity": gradient_diversity(gradients, weights),
            "mean_squared_norm": mean_squared_norm(gradients, uniform),
            "squared_norm_of_mean": squared_norm_of_mean(gradients, uniform),
        }
        rows = []
        for layer in columns["gradient_diversity"]:
            row = {"round": measured.record.round, "layer": layer, "clients": len(clients)}
            rows.append(row | {name: float(values[layer]) for name, values in columns.items()})
        return rows


def local_gradients(runtime: ClientRuntime, model: Tree, parts: Sequence[Any]) -> Params:
    """Return the gradient of each client's loss with respect to the parameters of a model.

    The loss is the mean cross-entropy over the client's training examples without augmentation,
    with the model in eval mode. Each tensor has shape [S, ...] for S clients.

    model: a dict with `params` and `buffers`.
    parts: the indices of each client's training examples.
    """
    runtime.net.set_buffers(model["buffers"])
    params = runtime.net.own(model["params"])
    return tree.stack(
        [
            local_gradient(runtime, params, torch.from_numpy(part).to(runtime.device))
            for part in parts
        ]
    )


def local_gradient(runtime: ClientRuntime, params: Params, numbers: torch.Tensor) -> Params:
    """Return the gradient of the mean cross-entropy over a set of training examples.

    numbers: int64 [n], the indices of the training examples. They are processed in batches.
    """
    total = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    for index in numbers.split(runtime.evaluation_batch) if len(numbers) else ():
        x, y = runtime.load_train(index, None)

        def loss(p: Params, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            return F.cross_entropy(runtime.net(p, x).logits, y, reduction="sum") / len(numbers)

        gradient, _ = runtime.net.gradient(loss, params)
        total = {name: leaf + gradient[name] for name, leaf in total.items()}
    return total
