"""Personalised test: each model's accuracy on test data with the client's label distribution.

The label distribution of client k is p_kc = n_kc / n_k, where n_kc is the number of its training
examples of class c. In a sequence of tasks, n_kc includes the examples of all tasks up to the
round. The accuracy on this distribution is the mean of the class accuracies on the whole test set
with the weights p_kc. It is exact and needs no further pass over the test set.
"""

from typing import ClassVar

import numpy as np

from fedexp.metrics import forgetting
from fedexp.metrics.forgetting_metric import ForgettingMetric
from fedexp.metrics.quantity import Quantity, by_name
from fedexp.metrics.record import Record

# values that tables of results show
MAIN = (
    *("personal_accuracy", "personal_accuracy_worst", "personal_forgetting"),
    "personal_global_accuracy",
)
# accuracy and forgetting of each client, [K] each, by the name of the model
ClientResults = dict[str, tuple[np.ndarray, np.ndarray]]
WORST = 0.1  # fraction of the clients that `spread` calls the worst


def own_mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean of class values over each client's label distribution, [..., K].

    For the class accuracies A_kc of each client's personal model, this is the client's accuracy
    A_k = sum_c p_kc A_kc (FedNTD, NeurIPS 2022, Definition 1, Eq. 6). For the drops
    max_{1<=t<T} A_kc^(t) - A_kc^(T), it is the client's forgetting F_k: Eq. 5 with a mean weighted
    by the label distribution instead of the plain mean over classes. F_k is not clamped at 0, and
    is nan if T < 2.

    values: accuracies or drops, [..., K, C], or [C] if all clients use one model. counts: training
    labels per client and class, [K, C]. The weights of classes without test examples are
    distributed over the other classes in proportion. The value is nan if none of the client's
    classes has test examples.
    """
    values = np.asarray(values, dtype=np.float64)
    counts = np.asarray(counts, dtype=np.float64)
    return forgetting.in_out_local(values[..., None, :] if values.ndim == 1 else values, counts)[0]


def spread(values: np.ndarray, low_is_bad: bool) -> tuple[float, float, float]:
    """Return the mean, the standard deviation and the mean of the worst tenth of values [K].

    The standard deviation is the population standard deviation. The worst tenth contains ceil(K /
    10) clients: those with the lowest values if `low_is_bad` is true, otherwise those with the
    highest values. nan values are ignored. If all values are nan, all three results are nan.
    """
    known = np.sort(np.asarray(values, dtype=np.float64))
    known = known[~np.isnan(known)]
    if not len(known):
        return float("nan"), float("nan"), float("nan")
    count = int(np.ceil(WORST * len(known) - 1e-9))
    worst = known[:count] if low_is_bad else known[-count:]
    return float(known.mean()), float(known.std()), float(worst.mean())


def spreads(name: str, accuracy: np.ndarray, forgotten: np.ndarray) -> dict[str, float]:
    """Return mean, deviation and worst tenth of the clients' accuracies [K] and forgetting [K].

    name: prefix of the names of the columns.

    """
    found: dict[str, float] = {}
    for key, values, low_is_bad in (("accuracy", accuracy, True), ("forgetting", forgotten, False)):
        mean, deviation, worst = spread(values, low_is_bad)
        found |= {
            f"{name}_{key}": mean,
            f"{name}_{key}_std": deviation,
            f"{name}_{key}_worst": worst,
        }
    return found


def client_results(record: Record) -> ClientResults:
    """Return each client's accuracy and forgetting, [K] each, in the last evaluated round.

    The keys are `personal` for the models that clients use, which is the global model if they have
    no others, and otherwise also `personal_global` for the global model.
    """
    counts = record.counts_until(record.rounds[-1])
    drop = forgetting.forgetting_per_class(record.matrix)
    of_global = own_mean(record.class_accuracy[-1], counts), own_mean(drop, counts)
    if record.personal_accuracy is None:
        return {"personal": of_global}
    mine = own_mean(record.personal_accuracy, counts), own_mean(record.personal_drop, counts)
    return {"personal": mine, "personal_global": of_global}


class Personal(ForgettingMetric):
    """`personal_*`: accuracy and forgetting of the personal models, over all clients.

    Each personal model is tested on its client's label distribution. If the algorithm has no
    personal models, `personal_*` describe the global model. Otherwise, `personal_global_*` are the
    values for the global model, if there is one. With local evaluation, `personal_local_*` describe
    the local models of the cohort: their accuracy, and the drop of accuracy on the client's
    distribution during local training (Flashback's drop, weighted by p_k).
    """

    columns: ClassVar = by_name(
        *(
            Quantity(
                name=f"{model}{key}{part}",
                better="min" if part == "_std" or key == "forgetting" else "max",
                tracked=f"personal/{model.removeprefix('personal_')}{key}{part}",
                main=f"{model}{key}{part}" in MAIN,
            )
            for model in ("personal_", "personal_global_", "personal_local_")
            for key in ("accuracy", "forgetting")
            for part in ("", "_std", "_worst")
        )
    )
    of_clients = ("personal_local_accuracy", "personal_local_forgetting")
    own: bool  # whether the algorithm has personal models
    local: bool  # whether local models are evaluated
    tests_clients: bool  # whether the algorithm has no global model

    def names(self) -> list[str]:
        used = {"personal_global": self.has_both, "personal_local": self.local}
        hidden = tuple(f"{model}_" for model in used if not used[model])
        return [name for name in self.columns if not name.startswith(hidden)]

    @property
    def has_both(self) -> bool:
        """Return whether there are a global model and personal models."""
        return self.own and not self.tests_clients

    @property
    def needs_personal(self) -> bool:  # type: ignore[override]
        return self.own

    def round_values(self, record: Record) -> dict[str, float]:
        values: dict[str, float] = {}
        for model, (accuracy, forgotten) in client_results(record).items():
            if model == "personal" or self.has_both:
                values |= spreads(model, accuracy, forgotten)
        if self.local:
            found = self.client_values(record)
            none = np.empty(0)
            of_clients = [found.get(name, none) for name in self.of_clients]
            values |= spreads("personal_local", *of_clients)
        return values

    def local_values(self, record: Record, index: int) -> dict[str, np.ndarray]:
        if not self.local:
            return {}
        round, local = record.local_rounds[index], record.local_class_accuracy[index]
        counts = record.counts_until(round)[record.sampled[index]]
        drops = np.maximum(0.0, record.distributed(round) - local)
        lost = own_mean(drops if round > 1 else np.full_like(drops, np.nan), counts)
        return {
            "personal_local_accuracy": own_mean(local, counts),
            "personal_local_forgetting": lost,
        }
