"""The values that runs measure, and their names in files, trackers, figures and reports.

A value is declared once, where it is computed: those of metrics in their classes, those of tasks in
`fedexp.metrics.tasks` and `fedexp.metrics.task_matrix`, all others here.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from fedexp.data.views import AUGMENTED, PLAIN, VALIDATION, VIEWS, name_in_view, suffix


@dataclass(frozen=True)
class Quantity:
    """A value that a run measures.

    name: its column in rounds.csv.
    better: max if a larger value is better, min if a smaller one is, None if neither is.
    tracked: its name in trackers, `<section>/<name>`. By default, it is a measure of forgetting.
    key: its key in summary.json, if it is not `name`.
    label: its name in figures and texts. By default, it is `name` with spaces.
    validated: its name in trackers for the validation set, if it has a section of its own.
    tested: whether the value is measured on each test set, so that there is a column for each.
    main: whether tables of results show it.
    whole: whether it is a whole number, such as a round.
    """

    name: str
    better: str | None = None
    tracked: str = ""
    key: str = ""
    label: str = ""
    validated: str = ""
    tested: bool = True
    main: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        of_forgetting = f"forgetting/{flat_name(self.name.removesuffix('_forgetting'))}"
        defaults = {
            "tracked": of_forgetting,
            "key": self.name,
            "label": self.name.replace("_", " "),
        }
        for field, default in defaults.items():
            if not getattr(self, field):
                object.__setattr__(self, field, default)

    def columns(self, views: Iterable[str] = VIEWS) -> "Iterator[Column]":
        """Yield the value's columns in some views of the test set."""
        yield from (Column(self, view) for view in views if self.tested or view == PLAIN)


@dataclass(frozen=True)
class Column:
    """A quantity on one test set (see `fedexp.data.views`)."""

    quantity: Quantity
    view: str = PLAIN

    @property
    def name(self) -> str:
        """Return the column of rounds.csv."""
        return name_in_view(self.quantity.name, self.view)

    @property
    def key(self) -> str:
        """Return the key of summary.json."""
        return name_in_view(self.quantity.key, self.view)

    @property
    def tracked(self) -> str:
        """Return the name in trackers."""
        if self.view == VALIDATION and self.quantity.validated:
            return self.quantity.validated
        return self.quantity.tracked + suffix(self.view)

    @property
    def label(self) -> str:
        """Return the name in figures and texts."""
        text = self.quantity.label
        if self.view == AUGMENTED:
            return f"{text}, augmented\ntest images"
        return text if self.view == PLAIN else f"{VALIDATION} {text.removeprefix('test ')}"


def by_name(*quantities: Quantity) -> dict[str, Quantity]:
    return {each.name: each for each in quantities}


def flat_name(name: str) -> str:
    """Replace dots, slashes and backslashes by underscores.

    W&B would read the text after a dot as a nested value and the text before a slash as a section.
    """
    return re.sub(r"[./\\]", "_", name)


# --- values of every run that no metric computes

ACCURACY = Quantity(
    "test_accuracy",
    "max",
    "test/accuracy",
    key="accuracy",
    label="test accuracy",
    validated="validation/accuracy",
    main=True,
)
LOSS = Quantity("test_loss", "min", "test/loss", validated="validation/loss")
of_training = partial(Quantity, tested=False)
TRAIN_LOSS = of_training(
    "train_loss", "min", "local/train_loss", label="train loss (objective),\nmean over clients"
)
LR = of_training("lr", tracked="local/lr")
TASK = of_training("task", tracked="local/task")
# The phases of a round, in order. The row of a round contains the time that writing the previous
# round took, because the time for writing the row itself is not yet known.
PHASES = ("sampling", "train", "aggregation", "refinement", "evaluation", "writing")
SPEED = of_training("train_samples_per_second", "max", "time/samples_per_second")
SECONDS = of_training("seconds", "min", "time/round")
COSTS = (
    of_training("bytes_up", "min", "comm/bytes_up"),
    of_training("bytes_down", "min", "comm/bytes_down"),
    SPEED,
    *(of_training(f"{phase}_seconds", "min", f"time/{phase}") for phase in PHASES),
    SECONDS,
)
# with cohorts.dropout: how many clients' messages the server received
ARRIVED = of_training("arrived_clients", "max", "comm/arrived_clients")
OF_ROUNDS = (ACCURACY, LOSS, TRAIN_LOSS, LR, TASK, *COSTS, ARRIVED)
# only in summary.json
BEST_ACCURACY = Quantity("best_accuracy", "max", main=True)
BEST_ROUND = of_training("best_round", "min", main=True, whole=True)
ROUNDS = of_training("rounds", "min", whole=True)
OF_RUN = (BEST_ACCURACY, BEST_ROUND, ROUNDS)
