"""The alignment of neurons over one round (FedNTD Table 2): global model before, local models,
global model after."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedexp.core import tree
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.engine.measures import class_means
from fedexp.metrics import neurons
from fedexp.training.exchange import CohortResult


def measure(
    runtime: ClientRuntime,
    before: Mapping[str, Params],
    after: Mapping[str, Params],
    local: Sequence[Mapping[str, Params]],
) -> list[dict[str, Any]]:
    """Return, for each hidden layer in order: `local`, the alignment of the distributed global
    model with the local models, mean and (population) `local_std` over these, None without any;
    `aggregated`, that with the new global model; `neurons`, and how many of them are `dead` in the
    distributed model."""
    start, end = class_means(runtime, before), class_means(runtime, after)
    trained = [class_means(runtime, model) for model in local]
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
    """Return the models that the clients of a round have trained, in the order of the cohort: those
    of the last exchange in which they send whole models; [] where there is none."""
    for each in reversed(done):
        if found := local_models(
            each.trained.messages, each.trained.buffers, len(each.cohort.clients)
        ):
            return found
    return []


def local_models(messages: Tree, buffers: Tree, count: int) -> list[dict[str, Params]]:
    """Return the trained models among the messages of an exchange, leaves [count, ...]; none where
    clients send no whole model."""
    if "params" not in messages:
        return []
    return [
        {"params": tree.row(messages["params"], i), "buffers": tree.row(buffers, i)}
        for i in range(count)
    ]
