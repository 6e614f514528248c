"""The top level of the configuration as checked values; their defaults and meanings stand in
conf/config.yaml."""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from fedexp.core.errors import require
from fedexp.core.limits import (
    Checked,
    Count,
    CountFrom0,
    CountOrNone,
    PositiveOrNone,
    PositiveShare,
    PositiveShares,
)
from fedexp.data.views import require_list, require_views

GLOBAL, PERSONAL = "global", "personal"  # whose models are tested (`evaluate`)


class Stop(Checked, prefix="stop."):
    """When a run ends before its last round (config node `stop`); None: it does not."""

    patience: CountOrNone
    metric: Literal["validation_accuracy", "test_accuracy", None]
    minutes: PositiveOrNone


NO_STOP = Stop(patience=None, metric=None, minutes=None)


class LocalEvaluation(Checked, prefix="local_evaluation."):
    """How often and on how many examples local models are tested (config node
    `local_evaluation`)."""

    every: CountOrNone  # rounds; None: as often as the global model
    examples: CountOrNone  # of each test view; None: all


ALL_LOCAL = LocalEvaluation(every=None, examples=None)


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
    if value is None:
        return
    numbers, least = (value, first) if isinstance(value, list) else ([value], 1)
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
