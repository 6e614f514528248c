"""The mean activations of a model's neurons."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime


@torch.no_grad()
def class_means(runtime: ClientRuntime, model: Mapping[str, Params]) -> list[np.ndarray]:
    """Return the mean activations of the neurons in each fully connected hidden layer.

    The activations are averaged over the test examples of each class. For a layer with d neurons,
    the array is float64 [C, d], with nan for classes without test examples.

    model: a dict with `params` and `buffers`.
    """
    labels, classes = runtime.data.y_test, runtime.data.num_classes
    runtime.net.set_buffers(model["buffers"])
    sums: list[Tensor] = []
    for index in torch.arange(len(labels), device=runtime.device).split(runtime.evaluation_batch):
        x, y = runtime.load_test(index)
        layers = [
            layer.to(torch.float64) for layer in runtime.net.hidden_activations(model["params"], x)
        ]
        sums = sums or [layer.new_zeros(classes, layer.shape[1]) for layer in layers]
        for total, layer in zip(sums, layers, strict=True):
            total.index_add_(0, y, layer)
    counts = torch.bincount(labels, minlength=classes).to(torch.float64)[:, None]
    return [(total / counts).cpu().numpy() for total in sums]
