"""The objective of a run: the value in summary.json that a hyperparameter search optimises."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedexp.core.errors import ConfigError, nearest
from fedexp.data.views import PLAIN, VALIDATION, VIEWS, configured_views, name_in_view

DEFAULT = name_in_view("accuracy", VALIDATION)
MEASURES = (
    "accuracy",
    "best_accuracy",
    "average_accuracy",
    "new_task_accuracy",
    "forgetting",
    "round_forgetting",
    "task_forgetting",
)
# maximise values whose names contain one of these
RAISED = ("accuracy", "samples_per_second", "learned", "unforgettable")
OTHERS = ("seconds", "train_samples_per_second", "best_round")


def objective_name(config: Mapping[str, Any]) -> str | None:
    """Return the key of summary.json to optimise, or None if the run has no objective.

    The default is the validation accuracy if the run is evaluated on a validation set. config: the
    run's configuration.
    """
    name = config.get("objective")
    if name is None:
        return DEFAULT if VALIDATION in configured_views(config) else None
    return str(name)


def direction_of(name: str, asked: str | None) -> str:
    """Return `asked` (max or min), or the direction implied by the name if `asked` is None."""
    return asked or ("max" if any(word in name for word in RAISED) else "min")


def objective_value(summary: Mapping[str, Any], name: str) -> float | None:
    """Return the value of an objective, or None if the summary has no finite number for it."""
    value = summary.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def check_objective(name: str, views: Iterable[str], further: Iterable[str]) -> None:
    """Raise ConfigError unless summary.json will have the key `name`.

    views: the test views of the run. further: the keys that forgetting metrics add.
    """
    names = [*MEASURES, *further]
    here = list(
        dict.fromkeys([*(name_in_view(each, view) for view in views for each in names), *OTHERS])
    )
    if name in here:
        return
    elsewhere = [view for view in VIEWS if name in {name_in_view(each, view) for each in names}]
    if elsewhere:
        need = (
            "evaluate_on=both"
            if elsewhere[0] == PLAIN
            else "a validation set (validation.fraction=0.1) or a different test view"
        )
        raise ConfigError(f"objective={name}: needs {need}")
    raise ConfigError(
        f"objective={name}: summary.json has no such number{nearest(name, here)}; allowed: "
        f"{', '.join(here)}"
    )
