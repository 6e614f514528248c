"""Measures of forgetting: pure functions of class-wise test accuracies.

`cw` [T+1, C] holds the class accuracies of the global model in the evaluated rounds; row 0 is the
initial model. Where only every i-th round is evaluated, "previous round" means the previous
evaluated one. nan marks a class that the test set lacks; it is left out of every mean. A measure
without enough rounds is nan.
"""

import numpy as np

from fedexp.metrics.accuracy import class_accuracy, class_mean


def backward_transfer_per_class(cw: np.ndarray) -> np.ndarray:
    """max_{1<=t<T} (A_c^(t) - A_c^(T)), float64 [C]; negative for a class that ends above its
    earlier peak.

    FedNTD (NeurIPS 2022) Eq. 5 before the mean over classes. The initial model is excluded; all nan
    while T < 2.
    """
    cw = np.asarray(cw, dtype=np.float64)
    if len(cw) < 3:
        return np.full(cw.shape[1], np.nan)
    return cw[1:-1].max(0) - cw[-1]


def backward_transfer(cw: np.ndarray) -> float:
    """Forgetting F = 1/C sum_c max_{1<=t<T} (A_c^(t) - A_c^(T)), from `cw` [T+1, C]; nan while T <
    2.

    FedNTD (NeurIPS 2022) Eq. 5, printed in its tables. Not clamped at 0. F grows with T: compare
    equal T only.
    """
    return float(class_mean(backward_transfer_per_class(cw)))


def local_round_drop(previous: np.ndarray, local: np.ndarray) -> np.ndarray:
    """F_{k,t} = 1/C sum_c max(0, A_c^(t-1) - A_{k,c}^(t)), in [0, 1].

    Flashback (arXiv 2402.05558) section 3: `previous` [..., C] is the distributed global model,
    `local` [..., C] a local model after its training (they broadcast, result [...]). The printed
    formula min(0, -(A_t - A_{t-1})) would collect gains with a minus sign; the text says "only
    drops", which is what this is.
    """
    return class_mean(np.maximum(0.0, np.asarray(previous, dtype=np.float64) - local))


def round_drop(cw: np.ndarray) -> np.ndarray:
    """F_t = 1/C sum_c max(0, A_c^(t-1) - A_c^(t)) for t = 2..T, float64 [T-1], from `cw` [T+1, C].

    Flashback section 3 (t > 1, so the initial model does not count), with the sign of
    `local_round_drop`.
    """
    return local_round_drop(cw[1:-1], cw[2:])


def forgetting_degree(global_before: np.ndarray, local: np.ndarray, xi: float = 1e-6) -> np.ndarray:
    """tau = (A_c(global) - A_c(local)) / (A_c(global) + xi), raw, in (-inf, 1]; > 0 forgotten, 1
    all lost, < 0 gained.

    FedKA (MM 2023) Eq. 1: global model before, local model after local training; [C] and [S, C] ->
    [S, C]. `xi` is the paper's "small positive constant"; a class the global model does not know
    gives about -A/xi.
    """
    before = np.asarray(global_before, dtype=np.float64)
    return (before - local) / (before + xi)


def _expected(accuracy: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """sum_c w_c A_c / sum_c w_c over the classes whose accuracy is known."""
    known = ~np.isnan(accuracy)
    weights = np.where(known, weights, 0.0)
    return class_accuracy((np.where(known, accuracy, 0.0) * weights).sum(-1), weights.sum(-1))


def in_out_local(accuracy: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy on the in-local and the out-local distribution, each [...].

    FedNTD (NeurIPS 2022) Definition 1, Eqs. 6-7: in = <A, p>, p_c = n_c / n; out = <A, q>, q_c = (1
    - p_c) / (C - 1). The global test accuracies `accuracy` [..., C] are re-weighted by the training
    label counts `counts` [..., C]. Weights of classes that the test set lacks are spread over the
    others. With one class, out is nan; without examples, both are.
    """
    accuracy, counts = np.broadcast_arrays(
        np.asarray(accuracy, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    )
    p = class_accuracy(counts, counts.sum(-1, keepdims=True))
    return _expected(accuracy, p), _expected(accuracy, (1.0 - p) / max(counts.shape[-1] - 1, 1))


def in_out_joint(accuracy: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """In- and out-local accuracy of the global model [C] on the joint distribution of the sampled
    clients [S, C].

    FedNTD Fig. 4: p = sum_k n_k p^k / sum_k n_k, which is the label distribution of their data put
    together; the same average of the out-local distributions is (1 - p) / (C - 1).
    """
    inside, outside = in_out_local(accuracy, np.asarray(counts).sum(0))
    return float(inside), float(outside)


def normalised_heat_map(cw: np.ndarray) -> np.ndarray:
    """Each round divided by its own sum over classes (FedNTD Fig. 2a, 10), [T+1, C] -> [T+1, C].

    Rows sum to 1; a round in which nothing is right stays 0; nan (absent class) stays nan.
    """
    cw = np.asarray(cw, dtype=np.float64)
    total = np.nansum(cw, -1, keepdims=True)
    return np.divide(cw, total, out=np.where(np.isnan(cw), np.nan, 0.0), where=total > 0)


def consistency(cw: np.ndarray) -> np.ndarray:
    """Cosine of the class accuracies of consecutive rounds (FedNTD Fig. 2b), [T+1, C] -> [T] for t
    = 1..T; 0/0 is 0."""
    cw = np.nan_to_num(np.asarray(cw, dtype=np.float64), nan=0.0)
    norm = np.linalg.norm(cw, axis=-1)
    dot, length = (cw[1:] * cw[:-1]).sum(-1), norm[1:] * norm[:-1]
    return np.divide(dot, length, out=np.zeros(len(dot)), where=length > 0)
