"""Names of metrics in trackers, such as `test/accuracy`. W&B shows one section per prefix.

CSV files use different names: their columns have no prefix.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedexp.data.views import AUGMENTED, PLAIN, VALIDATION, VIEWS, suffix
from fedexp.trackers.base import RoundRecord

NAMES = {  # column of rounds.csv -> section/name; other columns are named by metric_name
    "test_accuracy": "test/accuracy",
    "test_loss": "test/loss",
    "average_accuracy": "test/average_accuracy",
    "new_task_accuracy": "test/new_task_accuracy",
    "global_in_accuracy": "test/in_accuracy",
    "global_out_accuracy": "test/out_accuracy",
    "train_loss": "local/train_loss",
    "lr": "local/lr",
    "task": "local/task",
    "in_local_accuracy": "local/in_accuracy",
    "in_local_accuracy_std": "local/in_accuracy_std",
    "out_local_accuracy": "local/out_accuracy",
    "out_local_accuracy_std": "local/out_accuracy_std",
    "forgetting": "forgetting/F",
    "forgetting_degree": "forgetting/degree",
    "train_samples_per_second": "time/samples_per_second",
    "seconds": "time/round",
    "bytes_up": "comm/bytes_up",
    "bytes_down": "comm/bytes_down",
}
# Values of each metric that W&B's run summary shows; None: only the last value. At most one pattern
# matches a name, since W&B does not define which pattern takes precedence. Exact names take
# precedence over patterns.
SUMMARIES = {
    "test/*": "max,last",
    "test/loss": "min,last",
    "test/loss_augmented": "min,last",
    "validation/*": "max,last",
    "validation/loss": "min,last",
    "class/*": "max,last",
    "class_augmented/*": "max,last",
    "class_validation/*": "max,last",
    "forgetting/*": "mean,last",
    "local/*": None,
    "local/train_loss": "min,last",
    "personal/*": "max,last",
    "analysis/*": "mean,last",
    "time/*": "mean,last",
    "comm/*": "mean,last",
    "figures/*": None,
}


def metric_values(record: RoundRecord, classes: Sequence[str]) -> dict[str, float]:
    """Return a dict that maps metric names to the finite values of a round."""
    values = {metric_name(column): value for column, value in record.values.items()}
    values |= {f"analysis/{flat_name(name)}": value for name, value in record.analysed.items()}
    for view, row in record.tested.items():
        for name, value in zip(classes, row.tolist(), strict=True):
            values[class_metric(name, view)] = value
    return {k: value for k, value in values.items() if value is not None and math.isfinite(value)}


def metric_name(column: str) -> str:
    """Return the metric name for a column of rounds.csv.

    Only forgetting metrics add columns, so any unknown column is treated as a forgetting metric.
    """
    if column.endswith(end := suffix(AUGMENTED)):
        return metric_name(column.removesuffix(end)) + end
    if column.startswith(start := f"{VALIDATION}_"):
        rest = column.removeprefix(start)
        return (
            f"{VALIDATION}/{rest}"
            if rest in ("accuracy", "loss")
            else metric_name(rest) + suffix(VALIDATION)
        )
    if column in NAMES:
        return NAMES[column]
    if column.endswith("_seconds"):
        return f"time/{column.removesuffix('_seconds')}"
    if column.startswith("personal_"):
        return f"personal/{flat_name(column.removeprefix('personal_'))}"
    return f"forgetting/{flat_name(column.removesuffix('_forgetting'))}"


def class_metric(name: str, view: str = PLAIN) -> str:
    """Return the metric name for the accuracy on a class, with a prefix for each test-set view."""
    return f"class{suffix(view)}/{flat_name(name)}"


def flat_name(name: str) -> str:
    """Replace dots, slashes and backslashes by underscores.

    W&B would read the text after a dot as a nested value and the text before a slash as a section.
    """
    return re.sub(r"[./\\]", "_", name)


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
