"""Measure the alignment of neurons in the last round (`forgetting_metric=alignment`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.engine.measures import class_means
from fedexp.metrics import neurons
from fedexp.training.evaluation import select_model
from fedexp.training.exchange import CohortResult, trained_models
from fedexp.training.simulation import Simulation


def measure_alignment(
    simulation: Simulation, before: Tree, after: Tree, done: Sequence[CohortResult]
) -> list[dict[str, Any]]:
    """Return the rows of `alignment_rows` for this round, or an empty list if no metric needs them.

    before: the server's state before the round.
    after: the server's state after the round.
    """
    if not simulation.metrics.needs_neurons:
        return []
    runtime = simulation.runtime.tested_on(simulation.runtime.views[0])
    return alignment_rows(runtime, select_model(before), select_model(after), trained_models(done))


def alignment_rows(
    runtime: ClientRuntime,
    before: Mapping[str, Params],
    after: Mapping[str, Params],
    local: Sequence[Mapping[str, Params]],
) -> list[dict[str, Any]]:
    """Return the alignment of the neurons in each hidden layer, one row per layer.

    A row has these keys:

    layer: the number of the layer, from 1.
    neurons: the number of neurons in the layer.
    dead: the number of neurons that never respond, in the global model before the round.
    local: the mean alignment of the model before the round with the local models. None if there are
    no local models.
    local_std: the population standard deviation of these alignments, or None.
    aggregated: the alignment of the model before the round with the global model after the round.

    before: the global model before the round.
    after: the global model after the round.
    local: the local models.
    """
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
