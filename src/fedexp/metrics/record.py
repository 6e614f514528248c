"""What a run has measured on one test set: the only home of its results.

Each evaluated round adds rows to the tables of the run directory, and a record is read from these
tables, whether the run resumes or has ended. Metrics, figures and trackers read the record.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.data.views import CLASSES, DOMAINS, EXAMPLES, LOCAL, OWN, PERSONAL

if TYPE_CHECKING:
    import pandas as pd

BEFORE = "distributed_accuracy"  # column of LOCAL: the accuracy of the model that clients receive
Row = dict[str, Any]
# the models that are tested on each client's own test examples
OWN_MODELS = ("global", "local", "personal")
# the columns of the tables in the run directory; LOCAL has BEFORE too if it is needed
COLUMNS = {
    CLASSES: ("round", "class", "accuracy"),
    LOCAL: ("round", "client", "class", "accuracy"),
    PERSONAL: ("round", "client", "class", "accuracy"),
    EXAMPLES: ("round", "example", "label", "correct"),
    OWN: ("round", "client", "examples", *OWN_MODELS),
    DOMAINS: ("round", "domain", "accuracy"),
}
# sequences with an item for each evaluated round, and for each round with tested local models
OF_ROUNDS = ("rounds", "class_accuracy", "accuracy", "loss", "task_accuracy", "right", "own")
OF_LOCAL = ("local_rounds", "sampled", "local_class_accuracy", "distributed_accuracy")


def read_only(values: Any, kind: type) -> np.ndarray:
    """Return a copy that a metric, which may be a user's, cannot change for the others."""
    array: np.ndarray = np.array(values, dtype=kind)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Record:
    """The results of one run so far, on one test set.

    Metrics and callbacks, which may be a user's, only read it: its sequences are tuples, its arrays
    are read-only, and the methods that begin with `add` are for the run.

    The distributed model of round r is the global model that the clients receive at the start of
    round r. Its accuracies are those of round r - 1. If round r - 1 may not have been evaluated,
    `distributed_accuracy` contains them.
    """

    # int64 [K, C]: number of training labels per client and class; if the clients' data change
    # within a run, as with several tasks, one such array for each change, [changes, K, C]
    counts: np.ndarray
    starts: tuple[int, ...] = (1,)  # first round of each array of `counts`
    adds_up: bool = False  # whether later data are further data, those of another task
    # If a metric needs single examples: the labels of the M test examples, int64 [M], and for each
    # of `rounds` the correct predictions, bool [M] packed into uint8 [ceil(M / 8)].
    labels: np.ndarray | None = None
    right: Sequence[np.ndarray] = ()
    # evaluated rounds, ascending; the first is 0, the initial model
    rounds: Sequence[int] = ()
    accuracy: Sequence[float] = ()  # on the whole test set
    loss: Sequence[float] = ()  # mean cross-entropy on the whole test set
    # float64 [C] each; nan for a class without test examples
    class_accuracy: Sequence[np.ndarray] = ()
    # [T] each: the accuracy on each task; empty for a run without tasks
    task_accuracy: Sequence[Sequence[float]] = ()
    # int [S] for each round: the clients that took part and did not drop out, also in rounds
    # without a test
    cohorts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    local_rounds: Sequence[int] = ()
    # int64 [S] each: the clients in each of `local_rounds`
    sampled: Sequence[np.ndarray] = ()
    local_class_accuracy: Sequence[np.ndarray] = ()  # float64 [S, C] each
    # float64 [C] each: the models distributed in `local_rounds`; if empty, see `class_accuracy`
    distributed_accuracy: Sequence[np.ndarray] = ()
    # If the clients' personal models are tested: their latest class accuracies, float64 [K, C], the
    # round of these accuracies, and the best accuracies before this round.
    personal_accuracy: np.ndarray | None = None
    personal_round: int = 0
    personal_peak: np.ndarray | None = None
    # If the clients' own tests are evaluated: each client's number of test examples, int64 [K], and
    # for each of `rounds` the accuracies of OWN_MODELS on them, float64 [3, K]; nan: not tested.
    own_examples: np.ndarray | None = None
    own: Sequence[np.ndarray] = ()
    # If the data set has domains: the same record with the domains in place of the classes, so that
    # measures of classes are measures of domains.
    domains: "Record | None" = None

    def __post_init__(self) -> None:
        self._set(counts=read_only(self.counts, np.int64))
        self._set(cohorts=MappingProxyType(dict(self.cohorts)))
        if self.labels is not None:
            self._set(labels=read_only(self.labels, np.int64))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _append(self, **values: Any) -> None:
        self._set(**{name: (*getattr(self, name), value) for name, value in values.items()})

    def add_cohort(self, round: int, clients: Sequence[int]) -> None:
        """Record the clients that took part in a round, also in a round without a test."""
        self._set(cohorts=MappingProxyType({**self.cohorts, round: tuple(clients)}))

    def add(
        self,
        round: int,
        class_accuracy: np.ndarray,
        right: np.ndarray | None = None,
        overall: tuple[float, float] = (float("nan"), float("nan")),
        tasks: Sequence[float] = (),
    ) -> None:
        """Record the class accuracies [C] of the global model after `round`.

        right: bool [M], whether the prediction for each test example is correct, or None.
        overall: the accuracy and the loss on the whole test set. tasks: the accuracy on each task
        [T].
        """
        assert not self.rounds or round > self.rounds[-1], "rounds are recorded in order"
        self._append(rounds=round, accuracy=overall[0], loss=overall[1])
        self._append(class_accuracy=read_only(class_accuracy, np.float64))
        if right is not None:
            self._append(right=read_only(np.packbits(right), np.uint8))
        if tasks:
            self._append(task_accuracy=tuple(tasks))

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
        self._append(local_rounds=round, sampled=read_only(sampled, np.int64))
        self._append(local_class_accuracy=read_only(class_accuracy, np.float64))
        if distributed is not None:
            self._append(distributed_accuracy=read_only(distributed, np.float64))

    def add_personal(self, round: int, class_accuracy: np.ndarray) -> None:
        """Record the class accuracies [K, C] of the clients' personal models after `round`.

        nan marks a class that was not tested.
        """
        found = read_only(class_accuracy, np.float64)
        if self.personal_accuracy is None or self.personal_peak is None:
            peak = np.full_like(found, np.nan)
        elif self.personal_round >= 1:  # the initial model does not count
            peak = np.fmax(self.personal_peak, self.personal_accuracy)
        else:
            peak = self.personal_peak
        self._set(personal_peak=read_only(peak, np.float64))
        self._set(personal_accuracy=found, personal_round=round)

    def add_own(self, accuracies: Mapping[str, np.ndarray], examples: np.ndarray) -> None:
        """Record the accuracies of the last round's models on the clients' own test examples.

        accuracies: float64 [K] for some of OWN_MODELS; nan marks a client whose model was not
        tested. examples: int64 [K], the clients' numbers of test examples.
        """
        untested = np.full(len(examples), np.nan)
        rows = [accuracies.get(name, untested) for name in OWN_MODELS]
        self._append(own=read_only(rows, np.float64))
        self._set(own_examples=read_only(examples, np.int64))

    def own_matrix(self, model: str) -> np.ndarray:
        """Return the accuracies of one of OWN_MODELS in all evaluated rounds, [rounds, K]."""
        position = OWN_MODELS.index(model)
        return np.array([each[position] for each in self.own])

    @property
    def personal_drop(self) -> np.ndarray:
        """Return the drop of the personal models, max_{1<=t<T} A_kc^(t) - A_kc^(T), float64 [K, C].

        The values are nan if T < 2.
        """
        assert self.personal_accuracy is not None, "recorded in every evaluated round"
        assert self.personal_peak is not None
        return self.personal_peak - self.personal_accuracy

    def upto(self, round: int) -> "Record":
        """Return the record as it was after `round`.

        It has no personal models if they were tested again later, since only the latest are kept.
        """
        evaluated, local = bisect_right(self.rounds, round), bisect_right(self.local_rounds, round)
        cut = {name: getattr(self, name)[:evaluated] for name in OF_ROUNDS}
        cut |= {name: getattr(self, name)[:local] for name in OF_LOCAL}
        cut["cohorts"] = {n: clients for n, clients in self.cohorts.items() if n <= round}
        if self.domains is not None:
            cut["domains"] = self.domains.upto(round)
        if self.personal_round > round:
            cut |= {"personal_accuracy": None, "personal_peak": None, "personal_round": 0}
        return replace(self, **cut)

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
        return self._unpack(self.right[1:] if last is None else self.right[1:][-last:])

    def counts_in(self, round: int) -> np.ndarray:
        """Return the label counts per client and class in `round` >= 1, int64 [K, C]."""
        return self._changes[self._begun(round) - 1]

    @property
    def _changes(self) -> np.ndarray:
        return self.counts.reshape(-1, *self.counts.shape[-2:])

    def _begun(self, round: int) -> int:
        """Return the number of changes of the data until `round`. The first is at the start."""
        return max(bisect_right(self.starts, round), 1)

    def counts_until(self, round: int) -> np.ndarray:
        """Return the label counts per client and class in all tasks up to `round`, int64 [K, C].

        Round 0 belongs to the first task. If a schedule changes the clients' data, the result
        contains only the counts in this round.
        """
        begun = self._begun(round)
        return self._changes[:begun].sum(0) if self.adds_up else self._changes[begun - 1]

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

    # --- the tables in the run directory

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Return the evaluated rounds with their accuracies."""
        return list(zip(self.rounds, self.accuracy, strict=True))

    def new_rows(self, round: int) -> dict[str, Iterator[Row]]:
        """Return the rows that `round` adds to each table, by file name."""
        found = {}
        if self.rounds[-1:] == (round,):
            found[CLASSES] = self._class_rows()
            if self.labels is not None:
                found[EXAMPLES] = self._example_rows()
            if self.own:
                found[OWN] = self._own_rows()
            if self.domains is not None:
                found[DOMAINS] = self.domains._class_rows("domain")
        if self.local_rounds[-1:] == (round,):
            found[LOCAL] = self._local_rows()
        if self.personal_accuracy is not None and self.personal_round == round:
            found[PERSONAL] = self._personal_rows()
        return found

    def restore(
        self,
        tables: "Mapping[str, pd.DataFrame]",
        overall: Mapping[int, tuple[float, float]],
        tasks: Mapping[int, Sequence[float]],
    ) -> None:
        """Add the results of all rounds in the tables.

        tables: the tables by file name, with whole rounds. overall: accuracy and loss on the whole
        test set by round. tasks: the accuracy on each task by round.
        """
        classes = self.counts.shape[-1]
        changed, personal = by_round(tables.get(EXAMPLES)), by_round(tables.get(PERSONAL))
        own = by_round(tables.get(OWN))
        if (domains := tables.get(DOMAINS)) is not None and self.domains is None:
            shape = (self.counts.shape[-2], domains["domain"].nunique())
            self._set(domains=Record(np.zeros(shape)))
        for number, rows in by_round(domains).items():
            assert self.domains is not None
            many = self.domains.counts.shape[-1]
            self.domains.add(number, in_classes(rows, "accuracy", many, "domain")[0])
        right = None
        if changed:
            everyone = next(iter(changed.values()))
            self._set(labels=read_only(everyone["label"], np.int64))
            right = np.zeros(len(everyone), dtype=bool)
        for number, rows in by_round(tables.get(CLASSES)).items():
            if right is not None and number in changed:
                right[changed[number]["example"]] = changed[number]["correct"]
            accuracies = in_classes(rows, "accuracy", classes)[0]
            both = overall.get(number, (float("nan"), float("nan")))
            self.add(number, accuracies, right, both, tasks.get(number, ()))
            if number in personal:
                self.add_personal(number, self._personal_matrix(personal[number]))
            if number in own:
                examples, *found = (self._of_clients(own[number], k) for k in COLUMNS[OWN][2:])
                self.add_own(dict(zip(OWN_MODELS, found, strict=True)), np.nan_to_num(examples))
        for number, rows in by_round(tables.get(LOCAL)).items():
            accuracies = in_classes(rows, "accuracy", classes)
            before = in_classes(rows, BEFORE, classes)[0] if BEFORE in rows else None
            self.add_local(number, rows["client"].to_numpy()[::classes], accuracies, before)

    def _class_rows(self, key: str = "class") -> Iterator[Row]:
        for number, accuracy in enumerate(self.class_accuracy[-1].tolist()):
            yield {"round": self.rounds[-1], key: number, "accuracy": accuracy}

    def _local_rows(self) -> Iterator[Row]:
        clients = self.sampled[-1].tolist()
        for row in client_rows(self.local_rounds[-1], clients, self.local_class_accuracy[-1]):
            if self.distributed_accuracy:
                row[BEFORE] = self.distributed_accuracy[-1][row["class"]]
            yield row

    def _personal_rows(self) -> Iterator[Row]:
        """Yield a row for each class that was tested on a client's personal model."""
        assert self.personal_accuracy is not None
        clients = range(len(self.personal_accuracy))
        for row in client_rows(self.personal_round, clients, self.personal_accuracy):
            if not np.isnan(row["accuracy"]):
                yield row

    def _personal_matrix(self, rows: "pd.DataFrame") -> np.ndarray:
        matrix = np.full(self.counts.shape[-2:], np.nan)
        matrix[rows["client"], rows["class"]] = rows["accuracy"]
        return matrix

    def _own_rows(self) -> Iterator[Row]:
        """Yield a row for each client that has test examples of its own."""
        assert self.own_examples is not None
        for client in np.flatnonzero(self.own_examples).tolist():
            row = {"round": self.rounds[-1], "client": client}
            row["examples"] = int(self.own_examples[client])
            values = self.own[-1][:, client].tolist()
            yield row | dict(zip(OWN_MODELS, values, strict=True))

    def _of_clients(self, rows: "pd.DataFrame", column: str) -> np.ndarray:
        """Return a column of a table with one row per client, [K]; nan for other clients."""
        values = np.full(self.counts.shape[-2], np.nan)
        values[rows["client"]] = rows[column]
        return values

    def _example_rows(self) -> Iterator[Row]:
        """Yield a row for each example whose prediction has become correct or wrong.

        The first evaluated round has a row for each example.
        """
        assert self.labels is not None
        now = self._unpack(self.right[-1:])[0]
        before = self._unpack(self.right[-2:-1])[0] if len(self.right) > 1 else ~now
        for example in np.flatnonzero(now != before).tolist():
            row = {"round": self.rounds[-1], "example": example}
            yield row | {"label": int(self.labels[example]), "correct": int(now[example])}

    def _unpack(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return rows of packed predictions as bool [rows, M]."""
        assert self.labels is not None, "recorded if a metric needs single examples"
        packed = np.array(rows, dtype=np.uint8).reshape(len(rows), -(-len(self.labels) // 8))
        return np.unpackbits(packed, axis=1, count=len(self.labels)).astype(bool)


def client_rows(round: int, clients: Iterable[int], accuracies: np.ndarray) -> Iterator[Row]:
    """Yield a row for each client and class. accuracies: [S, C]."""
    for client, of_client in zip(clients, accuracies.tolist(), strict=True):
        for number, accuracy in enumerate(of_client):
            yield {"round": round, "client": client, "class": number, "accuracy": accuracy}


def by_round(table: "pd.DataFrame | None") -> "dict[int, pd.DataFrame]":
    """Return the rows of each round in a table, in ascending order; {} without a table."""
    if table is None:
        return {}
    groups: Any = table.groupby("round")
    return {int(number): rows for number, rows in groups}


def in_classes(rows: "pd.DataFrame", column: str, classes: int, key: str = "class") -> np.ndarray:
    """Return a column of consecutive rows, one row per class (or `key`), as float64 [..., C]."""
    if (rows[key].to_numpy().reshape(-1, classes) != np.arange(classes)).any():
        raise ValueError("the classes are not in order")
    return rows[column].to_numpy(dtype=np.float64).reshape(-1, classes)
