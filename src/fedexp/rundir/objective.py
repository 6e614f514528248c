"""The objective of a run: the value in summary.json that a hyperparameter search optimises."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedexp.core.errors import ConfigError, nearest
from fedexp.data.views import PLAIN, VALIDATION, VIEWS, configured_views, name_in_view
from fedexp.metrics.forgetting_metric import quantities
from fedexp.metrics.quantity import ACCURACY, BEST_ACCURACY, BEST_ROUND, SECONDS, SPEED, Column
from fedexp.metrics.tasks import FORMULAS

DEFAULT = Column(ACCURACY, VALIDATION).key
TARGETS = "rounds_to_target"  # mapping from targets to rounds; a table has rounds_to_target_0.5
OTHERS = (SECONDS.key, SPEED.key, BEST_ROUND.key)


def objective_name(config: Mapping[str, Any]) -> str | None:
    """Return the key of summary.json to optimise, or None if the run has no objective.

    The default is the validation accuracy if the run is evaluated on a validation set. config: the
    run's configuration.
    """
    name = config.get("objective")
    if name is None:
        return DEFAULT if VALIDATION in configured_views(config) else None
    return str(name)


def declared_direction(name: str) -> str | None:
    """Return max or min for a number in summary.json, or None for one that fedexp does not make."""
    if name.startswith(TARGETS):
        return "min"
    columns = (column for each in quantities() for column in each.columns())
    return next((each.quantity.better for each in columns if each.key == name), None)


def direction_of(name: str, asked: str | None) -> str:
    """Return `asked` (max or min), or the declared direction if `asked` is None.

    Raises ConfigError if neither is known, because the number is of a user's own metric.
    """
    found = asked or declared_direction(name)
    if found is None:
        raise ConfigError(
            f"objective={name}: is not a number of fedexp, so its direction is unknown; add"
            " objective_direction=max or objective_direction=min"
        )
    return found


def objective_value(summary: Mapping[str, Any], name: str) -> float | None:
    """Return the value of an objective, or None if the summary has no finite number for it."""
    value = summary.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def check_objective(name: str, views: Iterable[str], further: Iterable[str]) -> None:
    """Raise ConfigError unless summary.json will have the key `name`.

    views: the test sets of the run. further: the keys that forgetting metrics add.
    """
    names = [ACCURACY.key, BEST_ACCURACY.key, *FORMULAS, *further]
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
