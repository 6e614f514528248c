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
from fedexp_papers.analyses.test_set import load_model

Norms = dict[str, Tensor]  # layer -> value


def squared_means(gradients: Params, weights: Tensor | None = None) -> tuple[Norms, Norms]:
    """Return the mean squared norm and the squared norm of the mean, per layer and in total.

    These are sum_k w_k ||g_k||^2 and ||sum_k w_k g_k||^2, as float64 scalars. Their ratio is the
    gradient diversity Lambda >= 1 of FedNTD (NeurIPS 2022), Definition 2, Eq. 8: 1 if all gradients
    are equal, and nan or inf if their mean is zero. `gradients`, with leaves [K, ...], contains the
    gradient g_k of each client's loss at the same model. The weights w_k are `weights` [K], divided
    by their sum, or 1/K as in Eq. 8.
    """
    first = next(iter(gradients.values()))
    given = first.new_ones(len(first)) if weights is None else weights
    share = given.to(torch.float64) / given.to(torch.float64).sum()
    mean = {
        name: torch.tensordot(share.to(leaf), leaf, 1)[None] for name, leaf in gradients.items()
    }
    norms = squared_norms(gradients)
    above = {layer: (share.to(values) * values).sum() for layer, values in norms.items()}
    return above, {layer: values[0] for layer, values in squared_norms(mean).items()}


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
        above, below = squared_means(gradients)
        weighted, of_mean = squared_means(gradients, torch.as_tensor(given.weights[clients]))
        return [
            {
                "round": measured.record.round,
                "layer": layer,
                "clients": len(clients),
                "gradient_diversity": float(above[layer] / below[layer]),
                "weighted_gradient_diversity": float(weighted[layer] / of_mean[layer]),
                "mean_squared_norm": float(above[layer]),
                "squared_norm_of_mean": float(below[layer]),
            }
            for layer in above
        ]


def local_gradients(runtime: ClientRuntime, model: Tree, parts: Sequence[Any]) -> Params:
    """Return the gradient of each client's loss with respect to the parameters of a model.

    The loss is the mean cross-entropy over the client's training examples without augmentation,
    with the model in eval mode. Each tensor has shape [S, ...] for S clients.

    model: a dict with `params` and `buffers`.
    parts: the indices of each client's training examples.
    """
    params = load_model(runtime, model)
    numbers = [torch.tensor(part, device=runtime.device) for part in parts]
    return tree.stack([local_gradient(runtime, params, each) for each in numbers])


def local_gradient(runtime: ClientRuntime, params: Params, numbers: Tensor) -> Params:
    """Return the gradient of the mean cross-entropy over a set of training examples.

    numbers: int64 [n], the indices of the training examples. They are processed in batches.
    """
    total = tree.zeros_like(params)
    for index in numbers.split(runtime.evaluation_batch) if len(numbers) else ():
        x, y = runtime.load_train(index, None)

        def loss(p: Params, x: Tensor = x, y: Tensor = y) -> Tensor:
            return F.cross_entropy(runtime.net(p, x).logits, y, reduction="sum") / len(numbers)

        gradient, _ = runtime.net.gradient(loss, params)
        total = tree.add(total, gradient)
    return total
