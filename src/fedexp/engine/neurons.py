"""Mean activations of a model's neurons on the test examples of each class."""

from collections.abc import Mapping

import numpy as np
import torch

from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime


@torch.no_grad()
def class_means(bench: ClientRuntime, model: Mapping[str, Params]) -> list[np.ndarray]:
    """Return the mean activation on the test examples of each class, float64 [C, d] for each fully
    connected hidden layer; nan for a class that the test set lacks. model: `params` and
    `buffers`."""
    labels, classes = bench.data.y_test, bench.data.num_classes
    bench.net.set_buffers(model["buffers"])
    sums: list[torch.Tensor] = []
    for index in torch.arange(len(labels), device=bench.device).split(bench.evaluation_batch):
        x, y = bench.load_test(index)
        layers = [
            layer.to(torch.float64) for layer in bench.net.hidden_activations(model["params"], x)
        ]
        sums = sums or [layer.new_zeros(classes, layer.shape[1]) for layer in layers]
        for total, layer in zip(sums, layers, strict=True):
            total.index_add_(0, y, layer)
    counts = torch.bincount(labels, minlength=classes).to(torch.float64)[:, None]
    return [(total / counts).cpu().numpy() for total in sums]
