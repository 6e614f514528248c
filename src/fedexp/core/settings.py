"""The top level of the configuration as checked values; their defaults and meanings stand in
conf/config.yaml."""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal, get_args

import numpy as np

from fedexp.core.errors import require
from fedexp.core.limits import (
    Checked,
    Count,
    CountFrom0,
    CountOrNone,
    NonNegative,
    Positive,
    PositiveOrNone,
    PositiveShare,
    PositiveShares,
    ShareBelow1,
)
from fedexp.core.views import require_list, require_views

GLOBAL, PERSONAL = "global", "personal"  # whose models are tested (`evaluate`)

Optimizer = Literal["sgd", "nesterov", "adam", "adamw", "adamax", "adagrad", "rmsprop", "adadelta"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
# of the clients' learning rate, from round to round
LrSchedule = Literal["exponential", "constant", "step", "cosine"]
# those in which the rate of a round depends on the number of all rounds
SCHEDULES_OVER_ALL_ROUNDS = ("cosine",)


class LocalTraining(Checked, prefix="local."):
    """Local training of a client in a round: `epochs` over its own examples (config node
    `local`)."""

    epochs: Count
    batch_size: Count
    optimizer: Optimizer
    lr: Positive
    lr_decay: PositiveShare  # 1: constant
    momentum: ShareBelow1
    weight_decay: NonNegative
    schedule: LrSchedule = "exponential"
    step_rounds: Count = 10  # of schedule=step: rounds between two decays
    lr_min: NonNegative = 0.0  # of schedule=cosine: where it would end after the last round
    warmup: CountFrom0 = 0  # rounds of a linear rise before the schedule begins

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = "greater than 0 with local.optimizer=nesterov"
        good = self.optimizer != "nesterov" or self.momentum > 0
        require(good, "local.momentum", self.momentum, wanted)
        good = not 0 < self.lr < self.lr_min  # of a wrong lr it has been said
        require(good, "local.lr_min", self.lr_min, f"at most local.lr={self.lr}")

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """Return the learning rate of round 1, 2, ... (of a task), which is constant within a
        round.

        rounds: all rounds (of a task), which schedule=cosine needs. With t rounds since the warm-up
        of w rounds: exponential lr * lr_decay^t (FedNTD B.3), step lr * lr_decay^floor(t /
        step_rounds), cosine lr_min + (lr - lr_min) (1 + cos(pi t / (rounds - w))) / 2 (Loshchilov
        and Hutter, ICLR 2017, Eq. 5, without restarts), and before, in round i = 1 .. w, lr * i /
        (w + 1).
        """
        if round <= self.warmup:
            return self.lr * round / (self.warmup + 1)
        passed = round - self.warmup - 1
        match self.schedule:
            case "constant":
                return self.lr
            case "step":
                return self.lr * self.lr_decay ** (passed // self.step_rounds)
            case "cosine":
                assert rounds is not None, "the caller knows all rounds"
                share = min(passed / (rounds - self.warmup), 1.0)
                return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * share)) / 2
        return self.lr * self.lr_decay**passed


class Public(Checked, prefix="public."):
    """The server's public set (config node `public`), split off the training data before they are
    partitioned."""

    fraction: ShareBelow1
    balanced: bool

    def split(self, labels: np.ndarray, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        """Return the numbers of the public examples, ascending: floor(fraction * N) of labels [N],
        at random or, balanced, of each class as many as of the others (up to one, and where a class
        is too small, the others make up for it)."""
        total = int(self.fraction * len(labels) + 1e-9)
        if not self.balanced:
            return np.sort(rng.choice(len(labels), total, replace=False))
        piles = [rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)]
        # Deal one of each class after the other; the order of the classes within a turn is random.
        turns = np.concatenate([np.arange(len(pile)) for pile in piles])
        order = np.lexsort((rng.random(len(turns)), turns))
        return np.sort(np.concatenate(piles)[order[:total]])


class Validation(Checked, prefix="validation."):
    """The validation set (config node `validation`): training examples that nobody trains on."""

    fraction: ShareBelow1
    per_client: bool

    def choose(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return floor(fraction * count) of the numbers 0 to count - 1, drawn at random,
        ascending."""
        return np.sort(rng.choice(count, int(self.fraction * count + 1e-9), replace=False))


NONE_HELD_OUT = Validation(fraction=0.0, per_client=False)


class Stop(Checked, prefix="stop."):
    """When a run ends before its last round (config node `stop`); None: it does not."""

    patience: CountOrNone
    metric: Literal["validation_accuracy", "test_accuracy", None]
    minutes: PositiveOrNone


NO_STOP = Stop(patience=None, metric=None, minutes=None)


class Seeds(Checked, prefix="seeds."):
    """Independent seeds (config node `seeds`); each defaults to `seed`."""

    partition: CountFrom0
    sampling: CountFrom0
    training: CountFrom0


class Settings(Checked):
    """The scalars of the top level."""

    seed: CountFrom0
    rounds: Count
    num_clients: Count
    participation: PositiveShare
    weighting: Literal["examples", "uniform"]
    eval_interval: Count
    targets: PositiveShares
    target_fractions: PositiveShares
    # None: after every round, or as often as takes little of the time
    checkpoint_interval: CountOrNone
    data_dir: str
    resume: str | None
    augment: bool
    profile: bool
    test_views: list[str]
    # n: of every n-th round; [rounds]; None: those of the checkpoints alone
    keep_models: Any = None
    keep_local_models: Any = None  # likewise, of the clients of these rounds
    evaluate: list[str] = field(default_factory=lambda: [GLOBAL])  # whose models
    evaluate_on: Literal["test", "validation", "both", None] = (
        None  # None: the validation set where there is one, else the test set
    )
    objective: str | None = None  # a number of summary.json; None: the validation accuracy, or none
    objective_direction: Literal["max", "min", None] = None  # max or min; None: by the name
    accept_changed_data: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_rounds("keep_models", self.keep_models, first=0)
        require_rounds("keep_local_models", self.keep_local_models, first=1)
        require_views(self.test_views)
        require_subjects(self.evaluate)

    def keeps_local_models(self, round: int) -> bool:
        """Return whether the models that the clients train in a round are kept."""
        return is_among(round, self.keep_local_models)

    def keeps_model(self, round: int) -> bool:
        """Return whether the global model after a round is kept: where `keep_models` says so, and
        before and after a round whose local models are kept."""
        return is_among(round, self.keep_models) or any(
            map(self.keeps_local_models, (round, round + 1))
        )

    @property
    def tests_personal(self) -> bool:
        """Return whether each client's own model is tested on its own distribution."""
        return PERSONAL in self.evaluate

    @property
    def cohort_size(self) -> int:
        """Return the cohort size |S_t| = max(floor(r K), 1) (FedNTD 4.1); the tolerance keeps 0.29
        * 100 from becoming 28."""
        return max(math.floor(self.participation * self.num_clients + 1e-9), 1)


def subjects_of(word: str) -> list[str]:
    """Return the list that one word stands for as `evaluate`; the global model is tested in any
    case."""
    return [GLOBAL, PERSONAL] if word == PERSONAL else [word]


def require_rounds(key: str, value: Any, first: int) -> None:
    """Raise ConfigError unless the value chooses rounds: n (every n-th), a list of rounds from
    `first` on, or None."""
    numbers = value if isinstance(value, list) else [1 if value is None else value]
    least = first if isinstance(value, list) else 1
    good = all(type(number) is int and least <= number < 2**63 for number in numbers)
    wanted = f"n for every n-th round, a list of rounds from {first} on, such as [1,100], or null"
    require(good and len(numbers) > 0, key, value, wanted)


def is_among(round: int, chosen: Any) -> bool:
    """Return whether a round is among those that `require_rounds` allows to choose; every n-th
    begins with n."""
    if chosen is None:
        return False
    return round in chosen if isinstance(chosen, list) else round >= 1 and round % chosen == 0


def require_subjects(subjects: Sequence[str]) -> None:
    """Raise ConfigError unless what `evaluate` lists is known and different, and the global model
    is the first."""
    require_list("evaluate", subjects, (GLOBAL, PERSONAL))
