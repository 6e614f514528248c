"""Weight divergence: how far local models are from the global model and from one another (FedNTD
section 5.2).

Models are trees of parameters; those of S clients are stacked, leaves [S, ...]. Every function is
made of torch's operations alone, so that it also works inside `torch.func.vmap`.
"""

import numpy as np
import torch
from torch import Tensor

from fedexp.core.tree import Params
from fedexp.metrics import accuracy
from fedexp.metrics.forgetting import normalised_heat_map
from fedexp.metrics.layers import l1_norms, l2_norms

NORMS = {"l1": l1_norms, "l2": l2_norms}


def from_global(local: Params, reference: Params, norm: str = "l1") -> dict[str, Tensor]:
    """||w_G - w_k|| of each layer and in total: `local` [S, ...], `reference` [...] -> float64 [S]
    each.

    FedNTD (NeurIPS 2022) Fig. 8: w_G is the distributed global model, w_k client k's after local
    training. norm: `l1`, as Table 3 of its appendix has it, or `l2`; section 5.2 leaves it open.
    """
    return NORMS[norm]({name: leaf - reference[name] for name, leaf in local.items()})


def from_others(local: Params, norm: str = "l1") -> dict[str, Tensor]:
    """1/(S-1) sum_{j != k} ||w_j - w_k|| of each layer and in total: leaves [S, ...] -> float64 [S]
    each.

    The mean distance of client k's local model from those of the other clients of the round; nan
    where S = 1.
    """
    count = len(next(iter(local.values())))
    rows = [
        from_global(local, {name: leaf[k] for name, leaf in local.items()}, norm)
        for k in range(count)
    ]
    others = count - 1 or float("nan")
    return {layer: torch.stack([row[layer].sum() for row in rows]) / others for layer in rows[0]}


def distribution_distance(class_accuracy: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """||A_G - p_k||_1 = sum_c |A_c / sum_c' A_c' - n_kc / n_k|, float64 [S], in [0, 2].

    FedNTD (NeurIPS 2022) section 5.2, Fig. 8: class accuracies [C] of the distributed global model,
    divided by their sum (0 where all are 0; a class that the test set lacks counts as 0), and the
    clients' training labels [S, C]; nan for a client without examples.
    """
    known = np.nan_to_num(np.asarray(class_accuracy, dtype=np.float64))
    labels = np.asarray(counts, dtype=np.float64)
    shares = accuracy.class_accuracy(labels, labels.sum(1, keepdims=True))
    return np.abs(normalised_heat_map(known[None]) - shares).sum(1)
