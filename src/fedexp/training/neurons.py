"""The alignment of neurons over one round (FedNTD Table 2): global model before, local models, global model after."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.metrics import neurons
from fedexp.training.exchange import CohortResult


@torch.no_grad()
def class_means(bench: ClientRuntime, model: Mapping[str, Params]) -> list[np.ndarray]:
    """Return the mean activation on the test examples of each class, float64 [C, d] for each fully connected hidden
    layer; nan for a class that the test set lacks. model: `params` and `buffers`."""
    labels, classes = bench.data.y_test, bench.data.num_classes
    bench.net.set_buffers(model["buffers"])
    sums: list[torch.Tensor] = []
    for index in torch.arange(len(labels), device=bench.device).split(bench.evaluation_batch):
        x, y = bench.load_test(index)
        layers = [layer.to(torch.float64) for layer in bench.net.hidden_activations(model["params"], x)]
        sums = sums or [layer.new_zeros(classes, layer.shape[1]) for layer in layers]
        for total, layer in zip(sums, layers, strict=True):
            total.index_add_(0, y, layer)
    counts = torch.bincount(labels, minlength=classes).to(torch.float64)[:, None]
    return [(total / counts).cpu().numpy() for total in sums]


def measure(
    bench: ClientRuntime,
    before: Mapping[str, Params],
    after: Mapping[str, Params],
    local: Sequence[Mapping[str, Params]],
) -> list[dict[str, Any]]:
    """Return, for each hidden layer in order: `local`, the alignment of the distributed global model with the
    local models, mean and (population) `local_std` over these, None without any; `aggregated`, that with the new global
    model; `neurons`, and how many of them are `dead` in the distributed model."""
    start, end = class_means(bench, before), class_means(bench, after)
    trained = [class_means(bench, model) for model in local]
    rows = []
    for i, layer in enumerate(start):
        found = [neurons.alignment(layer, each[i]) for each in trained]
        rows.append(
            {
                "layer": i + 1,
                "neurons": layer.shape[1],
                "dead": neurons.dead(layer),
                "local": float(np.mean(found)) if found else None,
                "local_std": float(np.std(found)) if found else None,
                "aggregated": neurons.alignment(layer, end[i]),
            }
        )
    return rows


def trained_in(done: Sequence[CohortResult]) -> list[dict[str, Params]]:
    """Return the models that the clients of a round have trained, in the order of the cohort: those of the last
    exchange in which they send whole models; [] where there is none."""
    for each in reversed(done):
        if found := local_models(each.trained.messages, each.trained.buffers, len(each.cohort.clients)):
            return found
    return []


def local_models(messages: Tree, buffers: Tree, count: int) -> list[dict[str, Params]]:
    """Return the trained models among the messages of an exchange, leaves [count, ...]; none where clients send no
    whole model."""
    if "params" not in messages:
        return []
    return [{"params": tree.row(messages["params"], i), "buffers": tree.row(buffers, i)} for i in range(count)]
