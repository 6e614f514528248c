"""Measures of forgetting: pure functions of class-wise test accuracies.

The argument `cw` [T+1, C] contains the global model's class accuracies A_c^(t) in the evaluated
rounds; row 0 is the initial model. If only every i-th round is evaluated, "previous round" means
the previous evaluated round. The accuracy of a class without test examples is nan; all means ignore
nan. A measure that needs more rounds than are available is nan.
"""

from collections.abc import Sequence

import numpy as np

from fedexp.metrics.accuracy import class_accuracy, class_mean


def forgetting_per_class(cw: np.ndarray) -> np.ndarray:
    """Return each class's drop from its best accuracy, max_{1<=t<T} (A_c^(t) - A_c^(T)), [C].

    This is FedNTD (NeurIPS 2022) Eq. 5 before averaging over the classes. A drop is negative if the
    last accuracy is higher than all earlier accuracies. The initial model is excluded, so all
    values are nan if T < 2. Earlier accuracies that are nan, not tested, are ignored.
    """
    cw = np.asarray(cw, dtype=np.float64)
    if len(cw) < 3:
        return np.full(cw.shape[1], np.nan)
    return np.fmax.reduce(cw[1:-1]) - cw[-1]


def forgetting_f(cw: np.ndarray) -> float:
    """Return the forgetting F = 1/C sum_c max_{1<=t<T} (A_c^(t) - A_c^(T)), or nan if T < 2.

    This is FedNTD (NeurIPS 2022) Eq. 5, the value published in FedNTD's tables. The paper calls it
    backward transfer, whose sign is opposite elsewhere (`fedexp.metrics.task_matrix`). F counts
    from round 1, not from the initial model. It is not clamped at 0, and is often negative in early
    rounds. It grows with T, so compare only runs with equal T.
    """
    return float(class_mean(forgetting_per_class(cw)))


def local_round_drop(previous: np.ndarray, local: np.ndarray) -> np.ndarray:
    """Return the drop during local training, F_{k,t} = 1/C sum_c max(0, A_c^(t-1) - A_{k,c}^(t)).

    The values are in [0, 1]; see Flashback (arXiv 2402.05558) section 3. `previous` [..., C]
    contains the class accuracies of the global model that clients received, and `local` [..., C]
    those of a local model after its training. The two arrays are broadcast; the result has shape
    [...]. The published formula min(0, -(A_t - A_{t-1})) would sum the gains with a minus sign. The
    paper's text says "only drops", and this function follows the text.
    """
    return class_mean(np.maximum(0.0, np.asarray(previous, dtype=np.float64) - local))


def round_drop(cw: np.ndarray) -> np.ndarray:
    """Return the drop in each round, F_t = 1/C sum_c max(0, A_c^(t-1) - A_c^(t)), float64 [T-1].

    The rounds are t = 2..T, so the initial model is not included. The formula is from section 3 of
    Flashback, with the sign of `local_round_drop`. cw: class accuracies, [T+1, C].
    """
    return local_round_drop(cw[1:-1], cw[2:])


def client_drop(sampled: Sequence[np.ndarray], local: Sequence[np.ndarray]) -> np.ndarray:
    """Return each client's drop from its own best accuracies, 1/C sum_c max(0, P_kc - A_kc), [S].

    A_kc [S, C] contains the class accuracies of the local models in the last round, and P_kc those
    of the client's best earlier local model for the class. The value is nan for a client without an
    earlier model. sampled: the clients [S] of each round. local: the class accuracies [S, C] of
    their local models.

    Where every client takes part in every round, the mean of the values is -F^r of FlexFed (arXiv
    2505.13576), Eq. 5: F^r = 1/C sum_c 1/K sum_k min(0, A_kc^r - max_{i<=r} A_kc^i). The paper's
    text of the formula was not available, only a review's; it leaves open which model and which
    examples A_kc^r refers to, and what it is for a client that does not take part.
    """
    clients, last = sampled[-1], np.asarray(local[-1], dtype=np.float64)
    peak = np.full_like(last, np.nan)
    for earlier, accuracy in zip(sampled[:-1], local[:-1], strict=True):
        _, now, then = np.intersect1d(clients, earlier, return_indices=True)
        peak[now] = np.fmax(peak[now], np.asarray(accuracy)[then])
    return local_round_drop(peak, last)


def forgetting_degree(global_before: np.ndarray, local: np.ndarray, xi: float = 1e-6) -> np.ndarray:
    """Return the relative loss tau = (A_c(global) - A_c(local)) / (A_c(global) + xi), in (-inf, 1].

    This is FedKA (MM 2023) Eq. 1, without clipping. `global_before` [C] contains the class
    accuracies of the global model before local training, and `local` [S, C] those of the local
    models after it; the result is [S, C]. A positive value means that accuracy was lost, 1 means
    that all of it was lost, and a negative value means that accuracy was gained. `xi` is the
    paper's "small positive constant". For a class with global accuracy 0, the value is
    -A_c(local)/xi.
    """
    before = np.asarray(global_before, dtype=np.float64)
    return (before - local) / (before + xi)


def _expected(accuracy: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted mean of class accuracies, sum_c w_c A_c / sum_c w_c, ignoring nan."""
    known = ~np.isnan(accuracy)
    weights = np.where(known, weights, 0.0)
    return class_accuracy((np.where(known, accuracy, 0.0) * weights).sum(-1), weights.sum(-1))


def in_out_local(accuracy: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracies on the in-local and the out-local distribution, each [...].

    This is FedNTD (NeurIPS 2022) Definition 1, Eqs. 6-7. The in-local accuracy is <A, p> with p_c =
    n_c / n, and the out-local accuracy is <A, q> with q_c = (1 - p_c) / (C - 1). `accuracy` [...,
    C] contains the class accuracies A on the global test set. `counts` [..., C] contains the
    numbers of training labels n_c. Classes without test examples are left out, and the weights of
    the other classes are divided by their sum. With one class, the out-local accuracy is nan.
    Without training examples, both are nan.
    """
    accuracy, counts = np.broadcast_arrays(
        np.asarray(accuracy, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    )
    p = class_accuracy(counts, counts.sum(-1, keepdims=True))
    return _expected(accuracy, p), _expected(accuracy, (1.0 - p) / max(counts.shape[-1] - 1, 1))


def in_out_joint(accuracy: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return the global model's in- and out-local accuracy on the clients' joint distribution.

    As in FedNTD, Fig. 4, p = sum_k n_k p^k / sum_k n_k is the label distribution of the clients'
    combined data. The average of the out-local distributions with the weights n_k is (1 - p) / (C -
    1). accuracy: the model's class accuracies, [C]. counts: training labels per client and class,
    [S, C].
    """
    inside, outside = in_out_local(accuracy, np.asarray(counts).sum(0))
    return float(inside), float(outside)


def normalised_heat_map(cw: np.ndarray) -> np.ndarray:
    """Divide each round's class accuracies by their sum, [T+1, C] -> [T+1, C].

    Each row of the result sums to 1 (FedNTD Fig. 2a, 10). A row of zeros stays zero, and nan (a
    class without test examples) stays nan.
    """
    cw = np.asarray(cw, dtype=np.float64)
    total = np.nansum(cw, -1, keepdims=True)
    return np.divide(cw, total, out=np.where(np.isnan(cw), np.nan, 0.0), where=total > 0)


def consistency(cw: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of consecutive rounds' class accuracies (FedNTD Fig. 2b).

    [T+1, C] -> [T] for t = 1..T. If all accuracies of a round are 0, the value is 0.
    """
    cw = np.nan_to_num(np.asarray(cw, dtype=np.float64), nan=0.0)
    norm = np.linalg.norm(cw, axis=-1)
    dot, length = (cw[1:] * cw[:-1]).sum(-1), norm[1:] * norm[:-1]
    return np.divide(dot, length, out=np.zeros(len(dot)), where=length > 0)
