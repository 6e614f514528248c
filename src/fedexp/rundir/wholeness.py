"""The content that the files of a run that is over must have: the tables of a sweep rest on them.

Each check returns what is wrong in a few words, or an empty text."""

from __future__ import annotations  # pandas takes long to import

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from fedexp.core.views import EVALUATE_ON, TEST_VIEWS, VALIDATION, VIEWS, named

if TYPE_CHECKING:
    import pandas as pd

# status of a run that has come to its end, or to that it was given
OVER = ("completed", "diverged", "stopped")
STATUSES = (*OVER, "failed")


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 10**9


def is_number(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and type(value) in (int, float)
        and abs(value) < 1e300
        and math.isfinite(value)
    )


def is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1


def is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def is_list(value: object) -> bool:
    return isinstance(value, list)


def is_seed(value: object) -> bool:
    return type(value) is int and abs(value) < 2**64


def or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def numbers_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(
        item is None or is_number(item) for item in value.values()
    )


def ends_of_tasks(value: object) -> bool:
    """Return whether it is `tasks` of a summary: of each task its number and the two accuracies at
    its end."""
    names = ("average_accuracy", "new_task_accuracy")
    return isinstance(value, list) and all(
        isinstance(end, dict)
        and is_count(end.get("task"))
        and all(name in end and or_none(is_share)(end[name]) for name in names)
        for end in value
    )


def numbers_of_layers(value: object) -> bool:
    """Return whether it is `alignment` of a summary: numbers by the name of a pair of models, for
    each layer."""
    return isinstance(value, list) and all(isinstance(layer, dict) for layer in value)


SHARES = ("accuracy", "best_accuracy", "average_accuracy", "new_task_accuracy", "personal_accuracy")
NUMBERS = ("forgetting", "round_forgetting", "task_forgetting", "personal_forgetting")
SUMMARY: Mapping[str, Callable[[object], bool]] = {
    **{named(name, view): or_none(is_share) for name in SHARES for view in VIEWS},
    **{named(name, view): or_none(is_number) for name in NUMBERS for view in VIEWS},
    **dict.fromkeys(("algorithm", "dataset"), is_text),
    **dict.fromkeys(("scenario", "partition", "model", "commit", "sweep"), or_none(is_text)),
    **dict.fromkeys(("seconds", "train_samples_per_second"), or_none(is_number)),
    **dict.fromkeys(("hardware", "versions", "rounds_to_target"), or_none(is_mapping)),
    **dict.fromkeys(("data", "peak_memory"), or_none(numbers_by_name)),
    "seed": or_none(is_seed),
    "rounds": is_count,
    "best_round": or_none(is_count),
    "stopped": is_mapping,
    "tasks": or_none(ends_of_tasks),
    "alignment": or_none(numbers_of_layers),
    "accuracy": is_share,
    "best_accuracy": is_share,
}
REQUIRED = ("algorithm", "dataset", "rounds")  # of a run that is over
RESULTS = ("accuracy", "best_accuracy")  # likewise, on the test set or on the validation set
LOCAL = (
    "in_local_accuracy",
    "out_local_accuracy",
    "global_in_accuracy",
    "global_out_accuracy",
    "personal_local_accuracy",
)
COLUMNS = (*SHARES, *LOCAL, "test_accuracy", "personal_accuracy_worst", "personal_accuracy_std")
# Of the tables; a metric of a user's own may call what it likes an accuracy.
SHARE_COLUMNS = frozenset(named(name, view) for name in COLUMNS for view in VIEWS)
# columns of rounds.csv, of which it has one
ACCURACIES = ("test_accuracy", named("test_accuracy", VALIDATION))
LAST_KEY = "choices"  # of config.yaml
CONFIG: Mapping[str, Callable[[object], bool]] = {
    "choices": is_mapping,
    **dict.fromkeys(
        ("algorithm", "dataset", "partition", "scenario", "hardware", "tracker"),
        or_none(is_mapping),
    ),
    "seed": or_none(is_seed),
    "rounds": or_none(is_count),
    "num_clients": or_none(is_count),
    "targets": or_none(lambda value: isinstance(value, list) and all(map(is_number, value))),
    "test_views": or_none(
        lambda value: isinstance(value, list) and all(view in TEST_VIEWS for view in value)
    ),
    "validation": or_none(is_mapping),
    "evaluate_on": or_none(lambda value: value in EVALUATE_ON),
}


def check_types(content: Mapping[str, Any], types: Mapping[str, Callable[[object], bool]]) -> str:
    """Return which value has not the type that a run writes there."""
    wrong = [key for key, fits in types.items() if key in content and not fits(content[key])]
    return f"holds no valid `{wrong[0]}` ({str(content[wrong[0]])[:60]})" if wrong else ""


def check_summary(summary: Mapping[str, Any]) -> str:
    """Return what is wrong with the content of summary.json."""
    status = summary.get("status")
    if status is not None and status not in STATUSES:
        return f"has a status that no run has ({str(status)[:60]})"
    return "" if status == "failed" else check_types(summary, SUMMARY)


def check_results(summary: Mapping[str, Any]) -> str:
    """Return what the summary of a run that is over lacks."""
    lacks = [name for name in REQUIRED if name not in summary]
    if named("accuracy", VALIDATION) not in summary:
        lacks += [name for name in RESULTS if name not in summary]
    return f"lacks {', '.join(lacks)}" if lacks else ""


def check_config(config: Mapping[str, Any]) -> str:
    """Return what the configuration of a run that is over lacks."""
    if LAST_KEY not in config:
        return f"was not written by a run or is cut short (it lacks `{LAST_KEY}`)"
    return ""


def check_table(table: pd.DataFrame) -> str:
    """Return what is wrong with a table as `read_table` gives it: its cells, and accuracies that
    are none."""
    if problem := table.attrs.get("problem"):
        return str(problem)
    for name in table:
        if name in SHARE_COLUMNS and table[name].dtype.kind in "fiu":
            values = table[name].to_numpy(dtype=float)
            if odd := values[~np.isnan(values) & ~((values >= 0) & (values <= 1))].tolist():
                return f"has {odd[0]:g} in the column {name}, which is no accuracy"
    return ""


def accuracy_column(table: pd.DataFrame) -> str | None:
    """Return the column of rounds.csv with the accuracy of the model, on the test set where it was
    evaluated there; None where there is none."""
    return next((name for name in ACCURACIES if name in table), None)


def check_rounds(table: pd.DataFrame, last: int | None) -> str:
    """Return what is wrong with rounds.csv of a run whose summary has `last` as its last round, or
    None."""
    if accuracy_column(table) is None:
        return "has no column test_accuracy"
    if problem := check_table(table):
        return problem
    if not len(table) or (last is not None and int(table["round"].iloc[-1]) != last):
        end = f"ends with round {int(table['round'].iloc[-1])}" if len(table) else "has no round"
        return f"{end}, the run with {last}; cut short?"
    return "has rounds that do not ascend" if (np.diff(table["round"]) <= 0).any() else ""


def check_classes(table: pd.DataFrame, rounds: pd.DataFrame) -> str:
    """Return what is wrong with class_accuracy.csv beside a sound rounds.csv: it has all classes in
    each round that was evaluated."""
    if problem := check_table(table):
        return problem
    evaluated = rounds["round"][rounds[accuracy_column(rounds)].notna()]
    if missing := sorted({*evaluated.tolist()} - {*table["round"].tolist()}):
        return f"lacks round {missing[0]:.0f}, which was evaluated"
    sizes = table.groupby("round").size()
    if sizes.nunique() > 1 or int(table["class"].max()) + 1 != int(sizes.iloc[0]):
        return "has rounds without some of the classes; cut short?"
    return ""
