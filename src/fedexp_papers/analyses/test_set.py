"""What the layers of a model compute for the examples of the test set."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.models.own import LogitsOnly, describe_head


def load_model(runtime: ClientRuntime, model: Tree) -> Params:
    """Load the running statistics of a model, and return its parameters.

    model: a dict with `params` and `buffers`.
    """
    runtime.net.set_buffers(model["buffers"])
    return runtime.net.own(model["params"])


@torch.no_grad()
def collect(runtime: ClientRuntime, compute: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    """Return what a function computes for all test examples, [n, ...] each, in batches.

    compute: a function that maps inputs [B, ...] to tensors [B, ...].
    """
    numbers = torch.arange(len(runtime.data.y_test), device=runtime.device)
    batches = [
        compute(runtime.load_test(index)[0]) for index in numbers.split(runtime.evaluation_batch)
    ]
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def require_features(module: nn.Module, where: str) -> None:
    """Raise ConfigError if a network does not provide features. where: start of the message."""
    if isinstance(module, LogitsOnly):
        raise ConfigError(
            f"{where}: needs the model's features, the input of its last layer. To name this layer,"
            f" set model.head, which {describe_head(module.network, None)}"
        )


def collect_features(runtime: ClientRuntime, params: Params) -> Tensor:
    """Return the features of the test examples, [n, D]."""
    return collect(runtime, lambda x: [runtime.net(params, x).features.flatten(1)])[0]


def class_means(runtime: ClientRuntime, params: Params) -> list[np.ndarray]:
    """Return the mean activations of the neurons in each fully connected hidden layer.

    The activations are averaged over the test examples of each class. For a layer with d neurons,
    the array is float64 [C, d], with nan for classes without test examples.
    """
    labels, classes = runtime.data.y_test, runtime.data.num_classes
    counts = torch.bincount(labels, minlength=classes).to(torch.float64)[:, None]
    found = []
    for layer in collect(runtime, partial(runtime.net.hidden_activations, params)):
        totals = layer.new_zeros(classes, layer.shape[1], dtype=torch.float64)
        totals.index_add_(0, labels, layer.to(torch.float64))
        found.append((totals / counts).cpu().numpy())
    return found
