"""Personalised test: each model's accuracy on test data with the client's label distribution.

A client's test distribution is the test set re-weighted by the client's label distribution p_k,
p_kc = n_kc / n_k over its training examples; in a stream of tasks, over its examples of all tasks
up to the round. All clients use the same test examples of a class, so the expectation over the
distribution is a weighted mean of the class accuracies. It is exact and needs no further pass over
the test set.
"""

import numpy as np

from fedexp.metrics import forgetting
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.metrics.history import History

WORST = 0.1  # share of the clients


def personal_accuracy(accuracy: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return A_k = sum_c p_kc A_kc for each client, [..., K].

    accuracy: class accuracies [..., K, C], or [C] for one model; counts: [K, C]. FedNTD (NeurIPS
    2022) Definition 1, Eq. 6, for each client's personal model. The weights of classes that the
    test set lacks are spread over the other classes; the value is nan if it lacks all of the
    client's classes.
    """
    accuracy = np.asarray(accuracy, dtype=np.float64)
    counts = np.asarray(counts, dtype=np.float64)
    return forgetting.in_out_local(
        accuracy[..., None, :] if accuracy.ndim == 1 else accuracy, counts
    )[0]


def personal_forgetting(drop: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return F_k = sum_c p_kc (max_{1<=t<T} A_kc^(t) - A_kc^(T)) for each client, [K].

    drop: the differences, [K, C] or [C]; counts: [K, C]. FedNTD Eq. 5 with the client's label
    distribution instead of the mean over classes. The value is not clamped at 0; it is nan while T
    < 2.
    """
    return personal_accuracy(drop, counts)


def spread(values: np.ndarray, low_is_bad: bool) -> tuple[float, float, float]:
    """Return the mean, the standard deviation and the mean of the worst tenth of values [K].

    The standard deviation is that of the population.

    The worst tenth are the ceil(K / 10) clients with the lowest values if `low_is_bad`, otherwise
    with the highest. nan values are ignored; all three results are nan if all values are.
    """
    known = np.sort(np.asarray(values, dtype=np.float64))
    known = known[~np.isnan(known)]
    if not len(known):
        return float("nan"), float("nan"), float("nan")
    count = int(np.ceil(WORST * len(known) - 1e-9))
    worst = known[:count] if low_is_bad else known[-count:]
    return float(known.mean()), float(known.std()), float(worst.mean())


def columns(name: str, accuracy: np.ndarray, forgotten: np.ndarray) -> dict[str, float]:
    """Return the columns for one kind of model from the clients' accuracies [K] and forgetting
    [K]."""
    found: dict[str, float] = {}
    for key, values, low_is_bad in (("accuracy", accuracy, True), ("forgetting", forgotten, False)):
        mean, deviation, worst = spread(values, low_is_bad)
        found |= {
            f"{name}_{key}": mean,
            f"{name}_{key}_std": deviation,
            f"{name}_{key}_worst": worst,
        }
    return found


class Personal(ForgettingMetric):
    """`personal_*`: accuracy and forgetting of each client's personal model on the client's
    distribution, over all clients.

    If the algorithm has no personal models, the global model is tested instead. If it has them,
    `personal_global_*` are the same values for the global model. With local evaluation,
    `personal_local_*` describe the models that the round's clients have trained: their accuracy,
    and the drop on the client's distribution during local training (Flashback's drop with p_k).
    """

    own: bool  # whether the algorithm has personal models
    local: bool  # whether local models are evaluated

    @property
    def needs_personal(self) -> bool:
        return self.own

    def round_values(self, history: History) -> dict[str, float]:
        counts = history.counts_until(history.rounds[-1])
        drop = forgetting.backward_transfer_per_class(history.matrix)
        accuracy = history.class_accuracy[-1]
        of_global = personal_accuracy(accuracy, counts), personal_forgetting(drop, counts)
        if not self.own:
            values = columns("personal", *of_global)
        else:
            assert history.personal_accuracy is not None, "recorded in every evaluated round"
            mine = (
                personal_accuracy(history.personal_accuracy, counts),
                personal_forgetting(history.personal_drop, counts),
            )
            values = columns("personal", *mine) | columns("personal_global", *of_global)
        if self.local:
            found = self.client_values(history)
            none = np.empty(0)
            names = ("personal_local_accuracy", "personal_local_forgetting")
            values |= columns("personal_local", *(found.get(name, none) for name in names))
        return values

    def local_values(self, history: History, index: int) -> dict[str, np.ndarray]:
        if not self.local:
            return {}
        round, local = history.local_rounds[index], history.local_class_accuracy[index]
        counts = history.counts_until(round)[history.sampled[index]]
        drops = np.maximum(0.0, history.distributed(round) - local)
        lost = personal_forgetting(drops if round > 1 else np.full_like(drops, np.nan), counts)
        return {
            "personal_local_accuracy": personal_accuracy(local, counts),
            "personal_local_forgetting": lost,
        }
