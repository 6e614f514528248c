"""What trackers log in a round, under names such as `test/accuracy`.

W&B shows one section per prefix. The names of columns are declared in `fedexp.metrics.quantity`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedexp.core.errors import ConfigError
from fedexp.data.views import PLAIN, VIEWS, suffix
from fedexp.metrics.forgetting_metric import round_quantities
from fedexp.metrics.quantity import LOSS, TRAIN_LOSS, Quantity, flat_name
from fedexp.trackers.base import RoundRecord

# Values of each metric that W&B's run summary shows; None: only the last value. At most one pattern
# matches a name, since W&B does not define which pattern takes precedence. Exact names take
# precedence over patterns.
SUMMARIES = {
    "test/*": "max,last",
    "validation/*": "max,last",
    "class/*": "max,last",
    "class_augmented/*": "max,last",
    "class_validation/*": "max,last",
    "forgetting/*": "mean,last",
    "local/*": None,
    "personal/*": "max,last",
    "analysis/*": "mean,last",
    "time/*": "mean,last",
    "comm/*": "mean,last",
    "figures/*": None,
    **{column.tracked: "min,last" for each in (LOSS, TRAIN_LOSS) for column in each.columns()},
}


def metric_names() -> dict[str, str]:
    """Return the metric name for each column that rounds.csv can have."""
    names: dict[str, str] = {}
    for column in (column for each in round_quantities() for column in each.columns()):
        names.setdefault(column.name, column.tracked)
    return names


def metric_values(record: RoundRecord, classes: Sequence[str]) -> dict[str, float]:
    """Return a dict that maps metric names to the finite values of a round."""
    names = metric_names()
    values = {
        names.get(column) or Quantity(column).tracked: value
        for column, value in record.values.items()
    }
    analysed: dict[str, str] = {}
    for name, value in record.analysed.items():
        metric = f"analysis/{flat_name(name)}"
        if (other := analysed.setdefault(metric, name)) != name:
            raise ConfigError(f"two values have the name {metric}: {other} and {name}; rename one")
        values[metric] = value
    for view, row in record.tested.items():
        values |= zip(class_metrics(classes, view), row.tolist(), strict=True)
    return {k: value for k, value in values.items() if value is not None and math.isfinite(value)}


def class_metrics(classes: Sequence[str], view: str = PLAIN) -> list[str]:
    """Return the metric name for the accuracy on each class, with a prefix for each test-set view.

    If two names would be equal, such as those of `a/b` and `a_b`, all have the class's number.
    """
    names = [flat_name(name) for name in classes]
    if len({*names}) < len(names):
        names = [f"{number}_{name}" for number, name in enumerate(names)]
    return [f"class{suffix(view)}/{name}" for name in names]


def flat_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return summary.json with one key per target, so that W&B's bar charts can show each target.

    For example, {"0.5": 7, "0.9*best": 12} becomes rounds_to_50pct: 7 and rounds_to_90pct_of_best:
    12. None means that the target was never reached.
    """
    flat = dict(summary)
    for view in VIEWS:
        for target, number in (flat.pop(f"rounds_to_target{suffix(view)}", None) or {}).items():
            flat[target_name(target) + suffix(view)] = number
    return flat


def target_name(target: str) -> str:
    """Name a target, using only letters, digits and underscores.

    W&B cannot sort the run table by names that contain other characters.
    """
    value, _, best = target.partition("*")
    percent = f"{100 * float(value):g}".replace(".", "_")
    return f"rounds_to_{percent}pct" + ("_of_best" if best else "")
