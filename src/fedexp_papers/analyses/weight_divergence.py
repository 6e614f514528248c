"""Weight divergence: distances of local models from the global model and from each other.

The measures are those of FedNTD section 5.2. A model is a tree of parameters. The models of S
clients are stacked in one tree with leaves [S, ...].
"""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedexp.core import tree
from fedexp.core.tree import Params
from fedexp.metrics import accuracy
from fedexp.metrics.forgetting import normalised_heat_map
from fedexp_papers.analyses.base import Analysis, Measured
from fedexp_papers.analyses.layers import TOTAL, layer_sums, squared_norms

NORMS = ("l1", "l2")


def from_global(local: Params, reference: Params, norm: str = "l1") -> dict[str, Tensor]:
    """Return the distances ||w_G - w_k|| for each layer and in total, float64 [S] each.

    As in FedNTD (NeurIPS 2022) Fig. 8, w_G is the distributed global model (`reference`, leaves
    [...]), and w_k is client k's model after local training (`local`, leaves [S, ...]). norm: `l1`,
    as in Table 3 of the paper's appendix, or `l2`; section 5.2 does not specify the norm.
    """
    gaps = {name: leaf - reference[name] for name, leaf in local.items()}
    if norm == "l1":
        return layer_sums({name: gap.abs() for name, gap in gaps.items()})
    return {layer: value.sqrt() for layer, value in squared_norms(gaps).items()}


def from_others(local: Params, norm: str = "l1") -> dict[str, Tensor]:
    """Return each local model's mean distance from the others, per layer and in total, float64 [S].

    The mean distance of client k's model w_k is 1/(S-1) sum_{j != k} ||w_j - w_k||, or nan if S =
    1. local: the local models, leaves [S, ...]. norm: `l1` or `l2`.
    """
    count = len(next(iter(local.values())))
    distances = [from_global(local, tree.row(local, k), norm) for k in range(count)]
    others = count - 1 or float("nan")
    return {
        layer: torch.stack([each[layer].sum() for each in distances]) / others
        for layer in distances[0]
    }


def distribution_distance(class_accuracy: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the distance of each client's label distribution from the class accuracies, [S].

    The distance is ||A_G - p_k||_1 = sum_c |A_c / sum_c' A_c' - n_kc / n_k|, in [0, 2] (FedNTD,
    NeurIPS 2022, section 5.2, Fig. 8). class_accuracy: class accuracies [C] of the distributed
    global model. They are divided by their sum unless all are 0; the accuracy of a class without
    test examples is set to 0. counts: training labels per client and class, [S, C]. The value is
    nan for a client without examples.
    """
    known = np.nan_to_num(np.asarray(class_accuracy, dtype=np.float64))
    labels = np.asarray(counts, dtype=np.float64)
    shares = accuracy.class_accuracy(labels, labels.sum(1, keepdims=True))
    return np.abs(normalised_heat_map(known[None]) - shares).sum(1)


class WeightDivergence(Analysis):
    """`weight_divergence.csv`: distances of local models from the global model and from each other.

    The file has a row for each round, client and layer; the layer `total` is the whole model. `l1`
    and `l2` are the distances from the global model that the clients received. `others_l1` and
    `others_l2` are the mean distances from the other local models of the round. Rows of `total`
    also have `distribution_distance`, the distance between the client's label distribution and the
    class accuracies of the global model, if it was evaluated.
    """

    file = "weight_divergence.csv"
    columns = (
        *("round", "client", "layer", "l1", "others_l1", "l2", "others_l2"),
        "distribution_distance",
    )
    means: ClassVar = {
        "l1": "weight_divergence_l1",
        "l2": "weight_divergence_l2",
        "others_l1": "weight_divergence_others_l1",
        "others_l2": "weight_divergence_others_l2",
        "distribution_distance": "distribution_distance",
    }

    def rows(self, measured: Measured) -> list[dict[str, Any]]:
        if measured.local is None:
            return []
        values = {}
        for norm in NORMS:
            values[norm] = from_global(measured.local, measured.start, norm)
            values[f"others_{norm}"] = from_others(measured.local, norm)
        distance = np.full(len(measured.clients), np.nan)
        if (accuracy := start_accuracy(measured)) is not None:
            distance = distribution_distance(accuracy, measured.counts)
        return [
            {
                "round": measured.record.round,
                "client": client,
                "layer": layer,
                **{name: float(norms[layer][i]) for name, norms in values.items()},
                "distribution_distance": float(distance[i]) if layer == TOTAL else math.nan,
            }
            for i, client in enumerate(measured.clients)
            for layer in values["l1"]
        ]


def start_accuracy(measured: Measured) -> np.ndarray | None:
    """Return the class accuracies [C] of the model that the clients received, or None.

    They are known only if this model is the global model that was tested after the previous round.
    """
    record = next(iter(measured.record.records.values()))
    before = measured.record.round - 1
    tested = measured.runtime.net.own(measured.result.before["params"])
    if before not in record.rounds or not is_same(measured.start, tested):
        return None
    return record.class_accuracy[record.rounds.index(before)]


def is_same(one: Params, other: Params) -> bool:
    """Return whether two models have the same parameters."""
    return one.keys() == other.keys() and all(
        torch.equal(leaf, other[name]) for name, leaf in one.items()
    )
