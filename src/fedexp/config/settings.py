"""Check the values on the top level of the configuration.

conf/config.yaml explains these values and sets their defaults.
"""

import math
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
    ShareBelow1,
)
from fedexp.data.views import TEST_VIEWS, require_list

# what to test (`evaluate`): the global model, personal models, the clients' own test examples
GLOBAL, PERSONAL, OWN = "global", "personal", "own"


class Stop(Checked, prefix="stop."):
    """The conditions that end a run before its last round (config node `stop`).

    None disables a condition.
    """

    patience: CountOrNone
    metric: Literal["validation_accuracy", "test_accuracy", None]
    minutes: PositiveOrNone


class LocalEvaluation(Checked, prefix="local_evaluation."):
    """The rounds in which local models are tested (node `local_evaluation`)."""

    every: CountOrNone  # test every n-th round; None: as often as the global model


class Seeds(Checked, prefix="seeds."):
    """Independent seeds (config node `seeds`). Each defaults to the top-level key `seed`."""

    partition: CountFrom0
    sampling: CountFrom0
    training: CountFrom0


class Settings(Checked):
    """The values on the top level of the configuration, without its nodes."""

    seed: CountFrom0
    rounds: Count
    num_clients: Count
    participation: PositiveShare
    weighting: Literal["examples", "uniform"]
    eval_interval: Count
    targets: PositiveShares
    target_fractions: PositiveShares
    # None: after every round, or less often if saving is slow compared with the rounds
    checkpoint_interval: CountOrNone
    data_dir: str
    resume: str | None
    augment: bool
    test_views: list[str]
    # when to save the global model: n: after every n-th round; [rounds]: after these rounds; None:
    # only in checkpoints
    keep_models: Any = None
    keep_local_models: Any = None  # the same for the clients' local models
    evaluate: list[str] = field(default_factory=lambda: [GLOBAL])  # what to test
    evaluate_on: Literal["test", "validation", "both", None] = (
        None  # None: the validation set if there is one, otherwise the test set
    )
    # fraction of each client's examples that form the test set; 0: the data set's own test set
    test_per_client: ShareBelow1 = 0.0
    # a key of summary.json; None: the validation accuracy, if there is one
    objective: str | None = None
    objective_direction: Literal["max", "min", None] = None  # None: the declared direction
    accept_changed_data: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_rounds("keep_models", self.keep_models, first=0)
        require_rounds("keep_local_models", self.keep_local_models, first=1)
        require_list("test_views", self.test_views, TEST_VIEWS)
        require_list("evaluate", self.evaluate, (GLOBAL, PERSONAL, OWN))

    def keeps_local_models(self, round: int) -> bool:
        """Return whether the clients' local models from a round are saved."""
        return is_chosen(round, self.keep_local_models)

    def keeps_model(self, round: int) -> bool:
        """Return whether the global model after a round is saved.

        The model is saved in the rounds that `keep_models` selects. It is also saved before and
        after each round whose local models are saved.
        """
        return is_chosen(round, self.keep_models) or any(
            map(self.keeps_local_models, (round, round + 1))
        )

    @property
    def cohort_size(self) -> int:
        """Return the cohort size |S_t| = max(floor(r K), 1) (FedNTD 4.1).

        r is the participation and K the number of clients. A small tolerance is added, since
        0.29 * 100 in floating point would give 28.
        """
        return max(math.floor(self.participation * self.num_clients + 1e-9), 1)


def require_rounds(key: str, value: Any, first: int) -> None:
    """Raise ConfigError unless the value is n (every n-th round), a list of rounds, or None.

    first: the smallest round that the list may contain.
    """
    if value is None:
        return
    numbers, least = (value, first) if isinstance(value, list) else ([value], 1)
    good = all(type(number) is int and least <= number < 2**63 for number in numbers)
    wanted = (
        f"n to save each n-th round, a list of rounds from {first} on, such as [1,100], or null"
    )
    require(good and len(numbers) > 0, key, value, wanted)


def is_chosen(round: int, chosen: Any) -> bool:
    """Return whether `chosen` selects a round.

    See `require_rounds` for the allowed values. If `chosen` is n, the first selected round is n.
    """
    if chosen is None:
        return False
    return round in chosen if isinstance(chosen, list) else round >= 1 and round % chosen == 0
