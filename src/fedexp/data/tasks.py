"""Sequences of tasks (config group `scenario`), following CFeD (IJCAI 2022, section 5.1).

A `TaskSequence` is a data set in which every training example belongs to at most one task, and
every test example belongs to exactly one task. This module determines the examples of each task.
The module fedexp.training.division determines which clients train on them, and in which rounds.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch

from fedexp.core.errors import ConfigError, require
from fedexp.core.limits import Checked, Count, Labels, Limit
from fedexp.data.mapped import Stored, join
from fedexp.data.surrogate import inputs_like, load_like
from fedexp.data.types import Data, DataSource, Task


@dataclass(frozen=True)
class TaskSequence:
    data: Data  # the data of all tasks together
    tasks: tuple[Task, ...]


class Scenario(Checked, ABC, prefix="scenario."):
    """Base class of scenarios (config group `scenario`). A scenario divides data into tasks."""

    repeats_examples: ClassVar[bool] = False
    """Whether all tasks have versions of the same training examples, in the same order."""

    rounds_per_task: Count

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the scenario in the configuration."""

    @property
    def kind(self) -> str:
        """Return the entry of `FedAvg.scenarios` that allows an algorithm to use this scenario."""
        return self.name

    @abstractmethod
    def sequence(self, dataset: DataSource, rng: np.random.Generator) -> TaskSequence:
        """Load the data sets that the scenario needs, and divide them into tasks."""

    @abstractmethod
    def task_classes(self, num_classes: int, rng: np.random.Generator) -> Sequence[Sequence[int]]:
        """Return the classes of each task. rng: the generator of `sequence`, before any draw."""

    def problems(self, algorithm: Any) -> Iterator[str]:
        """Yield a message for each reason why an algorithm cannot be used with this scenario."""
        yield from ()

    def mix(self, tasks: Sequence[Task], seed: int) -> Sequence[Task]:
        """Return the tasks after training examples have moved between them."""
        return tasks

    def orders(self, clients: int, tasks: int, seed: int) -> np.ndarray | None:
        """Return the task that each client learns at each stage, int [K, T], from 0.

        None means that all clients learn the tasks in the same order.
        """
        return None

    def replayed(
        self, parts: Sequence[Sequence[np.ndarray]], labels: np.ndarray, seed: int
    ) -> Sequence[Sequence[np.ndarray]]:
        """Return the examples that clients train on, with those of earlier tasks that they replay.

        parts: [T][K], the indices of each client's examples in each task; they may be returned
        unchanged. labels: int [N], the labels of all examples.
        """
        return parts


class OneTask(Scenario):
    """`scenario=none`: a single task that contains all examples and lasts for all rounds."""

    name = "none"

    def __post_init__(self) -> None:
        """Skip the checks until `sequence` is called.

        `rounds_per_task` is the run's number of rounds. This number has been checked before.
        """

    def sequence(self, dataset: DataSource, rng: np.random.Generator) -> TaskSequence:
        super().__post_init__()
        data = dataset.load()
        task = Task(data.name, tuple(range(data.num_classes)), np.arange(len(data.y_train)))
        return TaskSequence(data, (task,))

    def task_classes(self, num_classes: int, rng: np.random.Generator) -> Sequence[Sequence[int]]:
        return [range(num_classes)]


Fractions = Annotated[
    list[float],
    Limit(
        "three fractions that add up to 1, for training, validation and test",
        lambda v: len(v) == 3 and all(0 <= part < 1 for part in v) and abs(sum(v) - 1) < 1e-9,
    ),
]


class MultiTask(Scenario):
    """Base class of scenarios with several tasks. It defines the options of all these scenarios."""

    # fractions for training, validation and test; null: use the data set's own split
    split: Fractions | None
    evaluate_on: Literal["test", "validation"]

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.evaluate_on
        if self.split is None:
            words = "test if scenario.split=null"
            require(name == "test", "scenario.evaluate_on", name, words)
        elif len(self.split) == 3:
            held = self.split[1 if name == "validation" else 2]
            require(held > 0, "scenario.split", self.split, f"greater than 0 for the {name} part")

    def divide(
        self,
        members: Sequence[np.ndarray],
        labels: np.ndarray,
        own_test: np.ndarray,
        rng: np.random.Generator,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the indices of the (training, evaluation) examples of each task, ascending.

        All classes are split by the same fractions. The sizes of the validation and test parts are
        rounded, and all remaining examples are used for training.

        members: the indices of each task's examples. labels: int [n].
        own_test: bool [n], whether an example belongs to the data set's test set.
        """
        if self.split is None:
            return [(part[~own_test[part]], part[own_test[part]]) for part in members]
        found = []
        for part in members:
            train, held = [], []
            for c in np.unique(labels[part]):
                numbers = rng.permutation(np.flatnonzero(labels[part] == c))
                validation, test = (round(share * len(numbers)) for share in self.split[1:])
                train.append(numbers[validation + test :])
                on_test = self.evaluate_on == "test"
                held.append(numbers[validation:][:test] if on_test else numbers[:validation])
            both = (part[np.sort(np.concatenate(each))] for each in (train, held))
            found.append(tuple(both))
        return found


class ClassIncremental(MultiTask):
    """A scenario in which each task has classes that no other task has.

    The model has one head for all classes. It does not know which task a test example belongs to.
    """

    name = "class_incremental"

    num_tasks: Count
    # True: assign classes to tasks at random with seeds.partition; False: in the order of labels
    shuffle_classes: bool
    # the classes of each task; None: num_tasks and shuffle_classes determine the classes
    classes: list[list[int]] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        key, given = "scenario.classes", self.classes or []
        flat = [c for task in given for c in task]
        require(len(set(flat)) == len(flat), key, given, "lists in which no class is repeated")
        require(all(given), key, given, "lists with at least one class each")

    def task_classes(self, num_classes: int, rng: np.random.Generator) -> list[list[int]]:
        """Return the classes of each task.

        All tasks have the same number of classes if possible. Otherwise, some tasks have one class
        more. For example, 10 classes are divided into 3 tasks with 3, 3 and 4 classes.
        """
        if self.classes is not None:
            wrong = [c for task in self.classes for c in task if not 0 <= c < num_classes]
            require(not wrong, "scenario.classes", wrong, f"labels from 0 to {num_classes - 1}")
            return [sorted(task) for task in self.classes]
        good, words = self.num_tasks <= num_classes, f"at most {num_classes}, one task per class"
        require(good, "scenario.num_tasks", self.num_tasks, words)
        order = rng.permutation(num_classes) if self.shuffle_classes else np.arange(num_classes)
        edges = [i * num_classes // self.num_tasks for i in range(self.num_tasks + 1)]
        return [sorted(order[start:stop].tolist()) for start, stop in pairwise(edges)]

    def sequence(self, dataset: DataSource, rng: np.random.Generator) -> TaskSequence:
        data = dataset.load()
        classes = self.task_classes(data.num_classes, rng)
        x, y, own_test = pool_examples([data], data)
        members = [np.flatnonzero(np.isin(y, labels)) for labels in classes]
        parts = self.divide(members, y, own_test, rng)
        names = [f"classes {', '.join(map(str, labels))}" for labels in classes]
        return assemble(data, x, y, parts, names, classes)


FurtherDataSets = Annotated[
    list[DataSource], Limit("a list of data sets for the second and later tasks", bool)
]


class DomainIncremental(MultiTask):
    """A scenario in which each task is a different data set with the same classes.

    The first task is `dataset`.
    """

    name = "domain_incremental"

    domains: FurtherDataSets  # options of the group `dataset`, one for each later task
    classes: Labels | None  # use only these labels, renumbered from 0; null: use all labels

    def sequence(self, dataset: DataSource, rng: np.random.Generator) -> TaskSequence:
        first = dataset.load()
        every = [first, *(load_like(domain, first) for domain in self.domains)]
        for data in every[1:]:
            if data.num_classes != first.num_classes and self.classes is None:
                raise ConfigError(
                    f"scenario.domains: {data.name} has {data.num_classes} classes, but"
                    f" {first.name} has {first.num_classes}; all tasks must have the same classes"
                    " (scenario.classes=[0,1,2] uses only the classes 0, 1 and 2)"
                )
        chosen = list(range(first.num_classes)) if self.classes is None else list(self.classes)
        fewest = min(data.num_classes for data in every)
        wrong = [c for c in chosen if not 0 <= c < fewest]
        require(not wrong, "scenario.classes", wrong, "labels that exist in every data set")
        for data in every[1:]:
            require_same_names(first, data, chosen)
        x, y, own_test = pool_examples(every, first)
        domain = np.repeat(
            np.arange(len(every)), [len(data.y_train) + len(data.y_test) for data in every]
        )
        wanted = np.isin(y, chosen)
        members = [np.flatnonzero(wanted & (domain == number)) for number in range(len(every))]
        parts = self.divide(members, y, own_test, rng)
        renumber = np.full(max(int(y.max()), *chosen) + 1, -1, dtype=np.int64)
        renumber[chosen] = np.arange(len(chosen))
        sums = " ".join(data.checksum for data in every)
        kept = replace(first, classes=tuple(first.classes[c] for c in chosen))
        kept = replace(kept, checksum=sums)
        names, labels = [data.name for data in every], [list(range(len(chosen)))] * len(every)
        return assemble(kept, x, renumber[y], parts, names, labels)

    def task_classes(self, num_classes: int, rng: np.random.Generator) -> Sequence[Sequence[int]]:
        return [range(num_classes)] * (len(self.domains) + 1)


def require_same_names(first: Data, other: Data, labels: Sequence[int]) -> None:
    """Raise ConfigError if a class has different labels in two data sets.

    Otherwise, the model would be trained to predict two labels for the same class. Class names that
    occur in only one of the data sets are ignored.

    labels: the labels to check.
    """
    mine = {first.classes[c]: c for c in labels}
    for name, label in ((other.classes[c], c) for c in labels):
        if mine.get(name, label) != label:
            raise ConfigError(
                f"scenario.domains: the class {name} has the label {mine[name]} in {first.name} and"
                f" {label} in {other.name}; all tasks must use the same labels (for texts,"
                " class.txt or dataset.classes sets the order of the classes)"
            )


def pool_examples(every: Sequence[Data], like: Data) -> tuple[Stored, np.ndarray, np.ndarray]:
    """Return the training and test examples of several data sets together.

    Returns (inputs [n, ...], labels [n], mask of the examples from a test set, bool [n]). The
    inputs are converted to the form of `like`.
    """
    splits = [(data, split) for data in every for split in ("train", "test")]
    labels = [getattr(data, f"y_{split}").numpy() for data, split in splits]
    flags = [np.full(len(y), split == "test") for y, (_, split) in zip(labels, splits, strict=True)]
    x = join([inputs_like(data, like, split) for data, split in splits])
    return x, np.concatenate(labels), np.concatenate(flags)


def assemble(
    like: Data,
    x: Stored,
    y: np.ndarray,
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    names: Sequence[str],
    classes: Sequence[Sequence[int]],
) -> TaskSequence:
    """Return the TaskSequence that consists of the given tasks.

    like: data from which all other attributes are copied, except owners and domains.
    x, y: inputs [n, ...] and labels int [n] from `pool_examples`.
    parts: indices of the (training, evaluation) examples of each task.
    names: name of each task.
    classes: classes of each task.

    Raises ConfigError if a task has no training or no evaluation examples.
    """
    for name, (train, held) in zip(names, parts, strict=True):
        if not len(train) or not len(held):
            raise ConfigError(
                f"scenario: the task {name} has {len(train)} training and {len(held)} test"
                " examples; it needs at least one of each"
            )
    rows = np.concatenate([train for train, _ in parts])
    tests = np.concatenate([held for _, held in parts])
    edges = np.cumsum([0, *(len(train) for train, _ in parts)]).tolist()
    data = replace(
        like,
        x_train=x[torch.from_numpy(rows)],
        y_train=torch.from_numpy(y[rows]),
        x_test=x[torch.from_numpy(tests)],
        y_test=torch.from_numpy(y[tests]),
        test_tasks=torch.from_numpy(
            np.repeat(np.arange(len(parts)), [len(held) for _, held in parts])
        ),
        # they number the examples of the data set in its own order
        owners=None,
        test_owners=None,
        domains=(),
        train_domains=None,
        test_domains=None,
    )
    numbers = [np.arange(start, stop) for start, stop in pairwise(edges)]
    return TaskSequence(
        data, tuple(Task(n, tuple(c), r) for n, c, r in zip(names, classes, numbers, strict=True))
    )
