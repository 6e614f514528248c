"""Compute the measurements that the option group `analysis` selects after each round."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedexp.algorithms.interfaces import Federation
from fedexp.core import tree
from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params, Tree
from fedexp.engine.base import ClientRuntime
from fedexp.engine.measures import class_means, collect_features
from fedexp.metrics import neurons
from fedexp.metrics.accuracy import class_accuracy
from fedexp.metrics.analysis import CKA, Epochs, GradientDiversity, RoundMeasurements
from fedexp.models.own import LogitsOnly, describe_head
from fedexp.training.exchange import CohortResult
from fedexp.training.simulation import Simulation, class_counts
from fedexp.training.state import State


def analyse(
    simulation: Simulation, state: State, server: Tree, done: Sequence[CohortResult]
) -> dict[str, list[dict[str, Any]]]:
    """Return a dict that maps the name of each analysis file to the rows to add in this round.

    Only the analyses that are due in this round are included.

    state: the state of the run before the round.
    server: the server's state after the round.
    done: the results of the round's exchanges.
    """
    number, last = done[0].cohort.round, simulation.rounds
    due = [part for part in simulation.analysis.parts if part.is_due(number, last)]
    if not due:
        return {}
    trained = [each for each in done if "params" in each.trained.messages]
    measured = round_measurements(simulation, state, server, (trained or done)[-1])
    return {part.file: part.rows(measured) for part in due}


def round_measurements(
    simulation: Simulation, state: State, server: Tree, result: CohortResult
) -> RoundMeasurements:
    """Return the measurements from which the analyses of a round are computed.

    state: the state of the run before the round.
    server: the server's state after the round.
    result: the result of the last exchange in which clients sent models. If clients never sent
        models, this is the result of the last exchange.
    """
    runtime, federation = simulation.runtime, result.round.federation
    clients = list(result.cohort.clients)
    start = runtime.net.own(result.sent["params"])
    local = result.trained.messages.get("params")
    if local is not None:
        local = {name: leaf for name, leaf in local.items() if name in start}
    # The class accuracies of the model sent to the clients are known only if this model is the
    # global model that was tested after the previous round.
    accuracy = None
    tested = state.record.rounds[-1:] == [state.round]
    if tested and is_same(start, runtime.net.own(state.server["params"])):
        accuracy = state.record.class_accuracy[-1]
    return RoundMeasurements(
        round=result.cohort.round,
        clients=clients,
        counts=federation.counts[clients],
        weights=federation.weights[clients],
        start=start,
        start_accuracy=accuracy,
        local=local,
        epochs=local_epoch_accuracies(runtime, federation, result),
        gradients=lambda: local_gradients(
            runtime, result.sent, [federation.parts[client] for client in clients]
        ),
        features=lambda: (
            test_set_features(runtime, state.server),
            test_set_features(runtime, server),
        ),
    )


def is_same(one: Params, other: Params) -> bool:
    """Return whether two models have the same parameters."""
    return one.keys() == other.keys() and all(
        torch.equal(leaf, other[name]) for name, leaf in one.items()
    )


def local_epoch_accuracies(
    runtime: ClientRuntime, federation: Federation, result: CohortResult
) -> Epochs | None:
    """Return the accuracies of the local models at several points of their training.

    Return None if the local models were not tested during their training.
    """
    probed, cohort = result.trained.probed, result.cohort
    if probed is None:
        return None
    totals = class_counts(runtime.tested_on(runtime.views[0]).data)
    correct, own = (probed[name].cpu().numpy() for name in ("test", "train"))
    sizes = np.array([[len(federation.parts[client])] for client in cohort.clients])
    return Epochs(
        numbers=[probe.epochs for probe in cohort.probes],
        accuracy=class_accuracy(correct, totals),
        test_accuracy=correct.sum(-1) / totals.sum(),
        train_accuracy=class_accuracy(np.where(own < 0, np.nan, own), sizes),
    )


def test_set_features(runtime: ClientRuntime, model: Tree) -> torch.Tensor:
    """Return the features that a model computes for the n test examples, [n, D].

    model: a dict with `params` and `buffers`.
    """
    runtime = runtime.tested_on(runtime.views[0])
    runtime.net.set_buffers(model["buffers"])
    features = collect_features(runtime, runtime.net.own(model["params"]))
    assert features is not None, "`check_analyses` rejects models without features"
    return features


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


def check_analyses(simulation: Simulation) -> None:
    """Check that the run can compute every selected analysis.

    Raises ConfigError if an analysis is not defined for the model or the algorithm, or is
    requested for a round after the last one.
    """
    module = simulation.runtime.net.module
    for part in simulation.analysis.parts:
        latest = max(getattr(part, "rounds", None) or [0])
        if latest > simulation.rounds:
            name = part.file.removesuffix(".csv")
            raise ConfigError(
                f"analysis.{name}.rounds: round {latest} is after the last round"
                f" (rounds={simulation.rounds})"
            )
        if isinstance(part, CKA) and isinstance(module, LogitsOnly):
            raise ConfigError(
                "analysis=cka: needs the model's features, the input of its last layer. To name"
                f" this layer, set model.head, which {describe_head(module.network, None)}"
            )
        if isinstance(part, GradientDiversity) and simulation.runtime.heads is not None:
            raise ConfigError(
                f"analysis=gradient_diversity: is not defined for"
                f" {type(simulation.algorithm).__name__}, because its model has a separate head for"
                " each task"
            )


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
