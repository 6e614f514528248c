"""Personalised test: what a model is worth to each client, on test data with the client's own
labels.

A client's own distribution is its share of the test set by its label distribution p_k, p_kc = n_kc
/ n_k over its training examples; in a stream of tasks, over those of all tasks up to the round.
Test examples of a class count alike for every client, so the expectation over that distribution is
a weighted mean of the class accuracies, exact and without another pass over the test set.
"""

import numpy as np

from fedexp.metrics import forgetting
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.metrics.history import History

WORST = 0.1  # of the clients


def personal_accuracy(accuracy: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """A_k = sum_c p_kc A_kc, [..., K], for class accuracies [..., K, C] (or [C], one model for all)
    and counts [K, C].

    FedNTD (NeurIPS 2022) Definition 1, Eq. 6, of each client's own model. Weights of classes that
    the test set lacks are spread over the others; nan where it has none of the client's.
    """
    accuracy = np.asarray(accuracy, dtype=np.float64)
    counts = np.asarray(counts, dtype=np.float64)
    return forgetting.in_out_local(
        accuracy[..., None, :] if accuracy.ndim == 1 else accuracy, counts
    )[0]


def personal_forgetting(drop: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """F_k = sum_c p_kc (max_{1<=t<T} A_kc^(t) - A_kc^(T)), [K], from the differences [K, C] (or
    [C]) and counts [K, C].

    FedNTD Eq. 5 with the client's label distribution in the place of the mean over classes. Not
    clamped at 0; nan while T < 2.
    """
    return personal_accuracy(drop, counts)


def spread(values: np.ndarray, low_is_bad: bool) -> tuple[float, float, float]:
    """Return mean, (population) standard deviation, and mean over the worst tenth of the clients,
    [K] -> three numbers.

    The worst tenth are the ceil(K / 10) clients with the lowest values, or the highest where those
    are bad. nan is left out; all three are nan where nothing else is there.
    """
    known = np.sort(np.asarray(values, dtype=np.float64))
    known = known[~np.isnan(known)]
    if not len(known):
        return float("nan"), float("nan"), float("nan")
    count = int(np.ceil(WORST * len(known) - 1e-9))
    worst = known[:count] if low_is_bad else known[-count:]
    return float(known.mean()), float(known.std()), float(worst.mean())


def columns(name: str, accuracy: np.ndarray, forgotten: np.ndarray) -> dict[str, float]:
    """Return the columns of one kind of model, from what each client has of it, [K] and [K]."""
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
    """`personal_*`: accuracy and forgetting of each client's own model on its own distribution,
    over all clients.

    Where the algorithm has no personal models, it is the global model. Where it has,
    `personal_global_*` says the same of the global model. With local evaluation `personal_local_*`
    is of the models that the clients of the round have trained: accuracy, and what of their own
    distribution they lost in local training (Flashback's drop with p_k).
    """

    own: bool  # the algorithm gives clients models of their own
    local: bool  # local models are evaluated

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
