"""The input of all metrics: class accuracies of the global model and of tested local models."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.core.npz import save_npz

if TYPE_CHECKING:
    import torch


# array names in local_class_accuracy.npz -> fields of `History`; `distributed` is optional
LOCAL = {
    "rounds": "local_rounds",
    "sampled": "sampled",
    "accuracy": "local_class_accuracy",
    "distributed": "distributed_accuracy",
}
# fields that contain one array per round
LISTS = ("class_accuracy", "sampled", "local_class_accuracy", "distributed_accuracy", "right")


@dataclass
class History:
    """The class accuracies of one run so far.

    The distributed model of round r is the global model that the clients receive at the start of
    round r. Its accuracies are those of round r - 1. If round r - 1 may not have been evaluated,
    `distributed_accuracy` contains them.
    """

    # int64 [K, C]: number of training labels per client and class; with several tasks or a
    # schedule, one such array for each task or change
    counts: np.ndarray
    rounds_per_task: int = 0  # rounds per task in a scenario with several tasks
    # evaluated rounds, ascending; the first is 0, the initial model
    rounds: list[int] = field(default_factory=list)
    # float64 [C] each; nan for a class without test examples
    class_accuracy: list[np.ndarray] = field(default_factory=list)
    local_rounds: list[int] = field(default_factory=list)
    # int64 [S] each: the clients in each of `local_rounds`
    sampled: list[np.ndarray] = field(default_factory=list)
    local_class_accuracy: list[np.ndarray] = field(default_factory=list)  # float64 [S, C] each
    # float64 [C] each: the models distributed in `local_rounds`; if empty, see `class_accuracy`
    distributed_accuracy: list[np.ndarray] = field(default_factory=list)
    # If the clients' personal models are tested: their latest class accuracies, float64 [K, C], the
    # round of these accuracies, and the best accuracies before this round.
    personal_accuracy: np.ndarray | None = None
    personal_round: int = 0
    personal_peak: np.ndarray | None = None
    # first round of each row of `counts`, if the clients' data change within a run
    starts: tuple[int, ...] = ()
    # If a metric needs single examples: the labels of the M test examples, int64 [M], and for each
    # of `rounds` the correct predictions, bool [M] packed into uint8 [ceil(M / 8)].
    labels: np.ndarray | None = None
    right: list[np.ndarray] = field(default_factory=list)

    def add(self, round: int, class_accuracy: np.ndarray, right: np.ndarray | None = None) -> None:
        """Record the class accuracies [C] of the global model after `round`.

        right: bool [M], whether the prediction for each test example is correct, or None.
        """
        assert not self.rounds or round > self.rounds[-1], "rounds are recorded in order"
        self.rounds.append(round)
        self.class_accuracy.append(np.asarray(class_accuracy, dtype=np.float64))
        if right is not None:
            self.right.append(np.packbits(right))

    def add_local(
        self,
        round: int,
        sampled: np.ndarray,
        class_accuracy: np.ndarray,
        distributed: np.ndarray | None = None,
    ) -> None:
        """Record the class accuracies [S, C] of the models that the sampled clients [S] trained.

        distributed: class accuracies [C] of the model from which the clients started, if this model
        was tested on the same examples.
        """
        assert not self.local_rounds or round > self.local_rounds[-1], (
            "rounds are recorded in order"
        )
        self.local_rounds.append(round)
        self.sampled.append(np.asarray(sampled, dtype=np.int64))
        self.local_class_accuracy.append(np.asarray(class_accuracy, dtype=np.float64))
        if distributed is not None:
            self.distributed_accuracy.append(np.asarray(distributed, dtype=np.float64))

    def add_personal(self, round: int, class_accuracy: np.ndarray) -> None:
        """Record the class accuracies [K, C] of the clients' personal models after `round`.

        nan marks a class that was not tested.
        """
        found = np.array(class_accuracy, dtype=np.float64)
        if self.personal_accuracy is None or self.personal_peak is None:
            self.personal_peak = np.full_like(found, np.nan)
        elif self.personal_round >= 1:  # the initial model does not count
            self.personal_peak = np.fmax(self.personal_peak, self.personal_accuracy)
        self.personal_accuracy, self.personal_round = found, round

    @property
    def personal_drop(self) -> np.ndarray:
        """Return the drop of the personal models, max_{1<=t<T} A_kc^(t) - A_kc^(T), float64 [K, C].

        The values are nan if T < 2.
        """
        assert self.personal_accuracy is not None, "recorded in every evaluated round"
        assert self.personal_peak is not None
        return self.personal_peak - self.personal_accuracy

    def upto(self, round: int) -> "History":
        """Return the history as it was after `round`."""
        evaluated, local = bisect_right(self.rounds, round), bisect_right(self.local_rounds, round)
        return replace(
            self,
            rounds=self.rounds[:evaluated],
            class_accuracy=self.class_accuracy[:evaluated],
            local_rounds=self.local_rounds[:local],
            sampled=self.sampled[:local],
            local_class_accuracy=self.local_class_accuracy[:local],
            distributed_accuracy=self.distributed_accuracy[:local],
            right=self.right[:evaluated],
        )

    @property
    def matrix(self) -> np.ndarray:
        """Return the class accuracies in all evaluated rounds, float64 [rounds, C].

        This is the argument `cw` of the functions in `fedexp.metrics.forgetting`.

        """
        rows = len(self.class_accuracy)
        return np.array(self.class_accuracy).reshape(rows, self.counts.shape[-1])

    def correct(self, last: int | None = None) -> np.ndarray:
        """Return whether the prediction for each test example is correct, bool [T, M].

        The rows are the evaluated rounds without the initial model. last: the number of rows, from
        the last round backwards, or None for all rows.
        """
        assert self.labels is not None, "recorded if a metric needs single examples"
        rows = self.right[1:] if last is None else self.right[1:][-last:]
        return np.unpackbits(self._pack(rows), axis=1, count=len(self.labels)).astype(bool)

    def _pack(self, rows: list[np.ndarray]) -> np.ndarray:
        """Return rows of packed predictions as one array, uint8 [rows, ceil(M / 8)]."""
        assert self.labels is not None
        return np.array(rows, dtype=np.uint8).reshape(len(rows), -(-len(self.labels) // 8))

    def counts_in(self, round: int) -> np.ndarray:
        """Return the label counts per client and class in `round` >= 1, int64 [K, C]."""
        if self.starts:
            return self.counts[max(bisect_right(self.starts, round) - 1, 0)]
        if self.counts.ndim == 2:
            return self.counts
        return self.counts[(round - 1) // self.rounds_per_task]

    def counts_until(self, round: int) -> np.ndarray:
        """Return the label counts per client and class in all tasks up to `round`, int64 [K, C].

        Round 0 belongs to the first task. If a schedule changes the clients' data, the result
        contains only the counts in this round.
        """
        if self.counts.ndim == 2 or self.starts:
            return self.counts_in(round)
        return self.counts[: max(round - 1, 0) // self.rounds_per_task + 1].sum(0)

    def sampled_counts(self, index: int) -> np.ndarray:
        """Return the label counts of the clients in round `local_rounds[index]`, int64 [S, C]."""
        return self.counts_in(self.local_rounds[index])[self.sampled[index]]

    def distributed(self, round: int) -> np.ndarray:
        """Return the class accuracies [C] of the global model distributed in `round`."""
        if self.distributed_accuracy:
            return self.distributed_accuracy[bisect_left(self.local_rounds, round)]
        index = bisect_left(self.rounds, round - 1)
        assert self.rounds[index] == round - 1, "the round before was evaluated"
        return self.class_accuracy[index]

    def to_tree(self) -> "dict[str, torch.Tensor]":
        """Return the history as a dict of tensors that torch.load(weights_only=True) can read."""
        import torch

        empty = np.empty((0, 0, self.counts.shape[-1]))
        arrays = {
            "counts": self.counts,
            "rounds_per_task": np.array(self.rounds_per_task),
            "rounds": np.array(self.rounds, dtype=np.int64),
            "class_accuracy": self.matrix,
            "local_rounds": np.array(self.local_rounds, dtype=np.int64),
            "sampled": np.array(self.sampled or np.empty((0, 0), dtype=np.int64)),
            "local_class_accuracy": np.array(self.local_class_accuracy or empty),
            "personal_round": np.array(self.personal_round),
        }
        if self.distributed_accuracy:
            arrays["distributed_accuracy"] = np.stack(self.distributed_accuracy)
        if self.starts:
            arrays["starts"] = np.array(self.starts)
        if self.labels is not None:
            arrays |= {"labels": self.labels, "right": self._pack(self.right)}
        if self.personal_accuracy is not None and self.personal_peak is not None:
            arrays["personal_accuracy"] = self.personal_accuracy
            arrays["personal_peak"] = self.personal_peak
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @classmethod
    def from_tree(cls, tree: "dict[str, torch.Tensor]") -> "History":
        """Return the history that `to_tree` has converted to a dict of tensors."""
        values: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in tree.items()}
        for name in ("rounds_per_task", "personal_round"):
            values[name] = int(values.get(name, 0))
        for name in ("rounds", "local_rounds"):
            values[name] = values[name].tolist()
        for name in LISTS:
            values[name] = list(values.get(name, ()))
        values["starts"] = tuple(map(int, values.get("starts", ())))
        return cls(**values)

    def save_examples(self, path: Path) -> None:
        """Write example_correct.npz.

        The file contains `rounds` [E], `labels` [M] and `right` uint8 [E, ceil(M / 8)]; numpy's
        unpackbits(right, axis=1, count=M) returns the correct predictions [E, M].
        """
        rounds = np.array(self.rounds)
        save_npz(path, rounds=rounds, labels=self.labels, right=self._pack(self.right))

    def save_local(self, path: Path) -> None:
        """Write local_class_accuracy.npz.

        The file contains the arrays `rounds` [T], `sampled` [T, S], `accuracy` [T, S, C] and, if
        recorded, `distributed` [T, C].
        """
        recorded = {name: getattr(self, key) for name, key in LOCAL.items()}
        save_npz(path, **{name: np.array(values) for name, values in recorded.items() if values})
