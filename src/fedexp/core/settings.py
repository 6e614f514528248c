"""The top level of the configuration as checked values; their defaults and meanings stand in
conf/config.yaml."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedexp.core.errors import require, require_choice
from fedexp.core.views import EVALUATE_ON, require_list, require_views

GLOBAL, PERSONAL = "global", "personal"  # whose models are tested (`evaluate`)

# of clients
OPTIMIZERS = ("sgd", "nesterov", "adam", "adamw", "adamax", "adagrad", "rmsprop", "adadelta")
# of the clients' learning rate, from round to round
SCHEDULES = ("exponential", "constant", "step", "cosine")
# those in which the rate of a round depends on the number of all rounds
SCHEDULES_OVER_ALL_ROUNDS = ("cosine",)


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Local training of a client in a round: `epochs` over its own examples (config node
    `local`)."""

    epochs: int
    batch_size: int
    optimizer: str
    lr: float
    lr_decay: float
    momentum: float
    weight_decay: float
    schedule: str = "exponential"
    step_rounds: int = 10  # of schedule=step: rounds between two decays
    lr_min: float = 0.0  # of schedule=cosine: where it would end after the last round
    warmup: int = 0  # rounds of a linear rise before the schedule begins

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "local.epochs", self.epochs, "at least 1")
        require(self.batch_size >= 1, "local.batch_size", self.batch_size, "at least 1")
        require_choice("local.optimizer", self.optimizer, OPTIMIZERS)
        require(0 < self.lr < math.inf, "local.lr", self.lr, "a finite number greater than 0")
        require(
            0 < self.lr_decay <= 1,
            "local.lr_decay",
            self.lr_decay,
            "greater than 0 and at most 1 (1 = constant)",
        )
        require(
            0 <= self.momentum < 1, "local.momentum", self.momentum, "at least 0 and less than 1"
        )
        require(
            0 <= self.weight_decay < math.inf,
            "local.weight_decay",
            self.weight_decay,
            "finite and at least 0",
        )
        nesterov = self.optimizer != "nesterov" or self.momentum > 0
        require(
            nesterov,
            "local.momentum",
            self.momentum,
            "greater than 0 with local.optimizer=nesterov",
        )
        require_choice("local.schedule", self.schedule, SCHEDULES)
        require(self.step_rounds >= 1, "local.step_rounds", self.step_rounds, "at least 1")
        most = self.lr if self.lr > 0 else math.inf  # else it has been said of lr
        require(
            0 <= self.lr_min <= most,
            "local.lr_min",
            self.lr_min,
            f"at least 0 and at most local.lr={self.lr}",
        )
        require(self.warmup >= 0, "local.warmup", self.warmup, "at least 0 (rounds)")

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


@dataclass(frozen=True, kw_only=True)
class Public:
    """The server's public set (config node `public`), split off the training data before they are
    partitioned."""

    fraction: float
    balanced: bool

    def __post_init__(self) -> None:
        require(
            0 <= self.fraction < 1, "public.fraction", self.fraction, "at least 0 and less than 1"
        )

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


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The validation set (config node `validation`): training examples that nobody trains on."""

    fraction: float
    per_client: bool

    def __post_init__(self) -> None:
        require(
            0 <= self.fraction < 1,
            "validation.fraction",
            self.fraction,
            "at least 0 and less than 1",
        )

    def choose(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return floor(fraction * count) of the numbers 0 to count - 1, drawn at random,
        ascending."""
        return np.sort(rng.choice(count, int(self.fraction * count + 1e-9), replace=False))


NONE_HELD_OUT = Validation(fraction=0.0, per_client=False)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a run ends before its last round (config node `stop`); None: it does not."""

    patience: int | None
    metric: str | None
    minutes: float | None

    def __post_init__(self) -> None:
        require(
            self.patience is None or self.patience >= 1,
            "stop.patience",
            self.patience,
            "at least 1, or null",
        )
        if self.metric is not None:
            require_choice("stop.metric", self.metric, ("validation_accuracy", "test_accuracy"))
        good = self.minutes is None or 0 < self.minutes < math.inf
        require(good, "stop.minutes", self.minutes, "a number of minutes above 0, or null")


NO_STOP = Stop(patience=None, metric=None, minutes=None)


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Independent seeds (config node `seeds`); each defaults to `seed`."""

    partition: int
    sampling: int
    training: int

    def __post_init__(self) -> None:
        for name in ("partition", "sampling", "training"):
            value = getattr(self, name)
            require(
                0 <= value < 2**63,
                f"seeds.{name} (default: seed)",
                value,
                "an integer of at least 0",
            )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The scalars of the top level."""

    seed: int
    rounds: int
    num_clients: int
    participation: float
    weighting: str
    eval_interval: int
    targets: list[float]
    target_fractions: list[float]
    # None: after every round, or as often as takes little of the time
    checkpoint_interval: int | None
    data_dir: str
    resume: str | None
    augment: bool
    profile: bool
    test_views: list[str]
    # n: of every n-th round; [rounds]; None: those of the checkpoints alone
    keep_models: Any = None
    keep_local_models: Any = None  # likewise, of the clients of these rounds
    evaluate: list[str] = field(default_factory=lambda: [GLOBAL])  # whose models
    evaluate_on: str | None = None  # None: the validation set where there is one, else the test set
    objective: str | None = None  # a number of summary.json; None: the validation accuracy, or none
    objective_direction: str | None = None  # max or min; None: by the name
    accept_changed_data: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "seed", self.seed, "an integer of at least 0")
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1")
        require(self.num_clients >= 1, "num_clients", self.num_clients, "at least 1")
        require(
            0 < self.participation <= 1,
            "participation",
            self.participation,
            "greater than 0 and at most 1",
        )
        require_choice("weighting", self.weighting, ("examples", "uniform"))
        require(self.eval_interval >= 1, "eval_interval", self.eval_interval, "at least 1")
        interval = self.checkpoint_interval
        require(
            interval is None or interval >= 1,
            "checkpoint_interval",
            interval,
            "at least 1, or null",
        )
        require_rounds("keep_models", self.keep_models, first=0)
        require_rounds("keep_local_models", self.keep_local_models, first=1)
        for key in ("targets", "target_fractions"):
            for value in getattr(self, key):
                require(
                    0 < value <= 1, key, value, "a list of numbers greater than 0 and at most 1"
                )
        require_views(self.test_views)
        require_subjects(self.evaluate)
        if self.evaluate_on is not None:
            require_choice("evaluate_on", self.evaluate_on, EVALUATE_ON)
        if self.objective_direction is not None:
            require_choice("objective_direction", self.objective_direction, ("max", "min"))

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
