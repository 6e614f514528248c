"""The classes that neurons prefer, and how well two models agree (FedNTD Eq. 19, Table 2)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedexp.core.errors import ConfigError
from fedexp.core.tree import Params
from fedexp.engine.base import ClientRuntime
from fedexp.engine.network import flush_subnormals
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.trackers.base import Callback, RoundRecord, RunInfo
from fedexp_papers.analyses.base import Measured
from fedexp_papers.analyses.test_set import class_means, load_model


def preferences(activations: np.ndarray) -> np.ndarray:
    """Return the preferred class of each neuron, pi_j = argmax_c h_{j,c}, int64 [d].

    `activations` [C, d] contains h_{j,c}, the mean activation of neuron j on the test examples of
    class c. It is nan for a class without test examples. The published Eq. 19 has a sum over the
    examples, which is equivalent if all classes have the same size. In a tie, the first class is
    preferred; dead neurons therefore prefer the first class.
    """
    return np.where(np.isnan(activations), -np.inf, activations).argmax(0)


def dead(activations: np.ndarray) -> int:
    """Return the number of neurons whose mean activation is 0 for all classes.

    activations: mean activations, [C, d].

    """
    return int((np.nan_to_num(activations) == 0).all(0).sum())


def alignment(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of neurons that prefer the same class in two models.

    one, other: the models' mean activations, [C, d].
    """
    return float((preferences(one) == preferences(other)).mean())


class Alignment(ForgettingMetric):
    """`alignment` in summary.json: share of neurons that keep their class in the last round.

    A neuron's class is the class that it prefers (FedNTD Table 2). The metric compares models
    before and after local training, and the global models before and after the round.
    """

    def check_run(self, simulation: Any) -> None:
        network = simulation.runtime.net.module
        if not hasattr(network, "hidden_activations"):
            raise ConfigError(
                "forgetting_metric=alignment: this metric compares the neurons of fully connected"
                f" hidden layers, but {type(network).__name__} has none; use model=cnn or"
                " model=cnn_3fc"
            )

    def callback(self) -> Callback:
        return Aligning()


class Aligning(Callback):
    """Compares the models of the last round for `forgetting_metric=alignment`."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def start(self, info: RunInfo) -> None:
        self.simulation = info.simulation

    def after_round(self, record: RoundRecord) -> None:
        self._rows = []
        if record.result is not None and record.result.is_last:
            measured = Measured(self.simulation, record)
            models = (measured.result.before, measured.result.server)
            with flush_subnormals():
                self._rows = alignment_rows(measured.runtime, *models, measured.models)

    def summary(self) -> dict[str, Any]:
        return {"alignment": self._rows} if self._rows else {}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = state["rows"]


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
    models = (before, after, *local)
    means = [class_means(runtime, load_model(runtime, model)) for model in models]
    rows = []
    for number, (start, end, *trained) in enumerate(zip(*means, strict=True), 1):
        found = [alignment(start, each) for each in trained]
        rows.append(
            {
                "layer": number,
                "neurons": start.shape[1],
                "dead": dead(start),
                "local": float(np.mean(found)) if found else None,
                "local_std": float(np.std(found)) if found else None,
                "aggregated": alignment(start, end),
            }
        )
    return rows
