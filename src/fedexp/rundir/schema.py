"""Check the content of a run's files before tables are computed from them.

A form describes which values are valid. The forms are:

- a type, None, or a condition (a function that returns a bool)
- a tuple of alternative forms
- a list with one form, which all items of a list must have
- a dict with strings as keys: it maps each required key to the form of its value
- any other dict: its only key is the form of all keys, and its value the form of all values

The functions `check_...` return a short description of the problem, or an empty string.
"""

from __future__ import annotations  # pandas takes long to import

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedexp.data.views import EVALUATE_ON, TEST_VIEWS, VALIDATION, VIEWS, name_in_view

if TYPE_CHECKING:
    import pandas as pd

# statuses of a run that has ended, including runs that ended early
OVER = ("completed", "diverged", "stopped")
STATUSES = (*OVER, "failed")


def fits(value: object, form: Any) -> bool:
    """Return whether a value has this form. Booleans are not numbers."""
    match form:
        case tuple():
            return any(fits(value, each) for each in form)
        case list():
            return isinstance(value, list) and all(fits(item, form[0]) for item in value)
        case dict() if all(isinstance(key, str) for key in form):
            return isinstance(value, dict) and all(
                key in value and fits(value[key], item) for key, item in form.items()
            )
        case dict():
            ((key, item),) = form.items()
            return isinstance(value, dict) and all(
                fits(k, key) and fits(v, item) for k, v in value.items()
            )
        case type():
            return isinstance(value, form) and not isinstance(value, bool)
    return value is None if form is None else bool(form(value))


def misfit(content: Mapping[str, Any], forms: Mapping[str, Any]) -> str | None:
    """Return the first key in `forms` whose value does not have the key's form, or None.

    Missing keys are ignored.
    """
    return next(
        (key for key in forms if key in content and not fits(content[key], forms[key])), None
    )


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 10**9


def is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


NUMBER = (None, int, float)
SHARES = ("accuracy", "best_accuracy", "average_accuracy", "new_task_accuracy", "personal_accuracy")
NUMBERS = ("forgetting", "round_forgetting", "task_forgetting", "personal_forgetting")
END_OF_TASK = {
    "task": is_count,
    "average_accuracy": (None, is_share),
    "new_task_accuracy": (None, is_share),
}
SUMMARY: Mapping[str, Any] = {
    **{name_in_view(name, view): (None, is_share) for name in SHARES for view in VIEWS},
    **{name_in_view(name, view): NUMBER for name in NUMBERS for view in VIEWS},
    **dict.fromkeys(("accuracy", "best_accuracy"), is_share),
    **dict.fromkeys(("algorithm", "dataset"), str),
    **dict.fromkeys(("scenario", "partition", "model", "commit", "sweep"), (None, str)),
    **dict.fromkeys(("seconds", "train_samples_per_second"), NUMBER),
    **dict.fromkeys(("hardware", "versions", "rounds_to_target"), (None, dict)),
    **dict.fromkeys(("data", "peak_memory"), (None, {str: NUMBER})),
    "seed": (None, int),
    "rounds": is_count,
    "best_round": (None, is_count),
    "stopped": dict,
    "tasks": (None, [END_OF_TASK]),
    "alignment": (None, [dict]),
}
REQUIRED = ("algorithm", "dataset", "rounds")  # required for a run that has ended
# also required, unless the run is only evaluated on a validation set
RESULTS = ("accuracy", "best_accuracy")
LOCAL = (
    "in_local_accuracy",
    "out_local_accuracy",
    "global_in_accuracy",
    "global_out_accuracy",
    "personal_local_accuracy",
)
COLUMNS = (*SHARES, *LOCAL, "test_accuracy", "personal_accuracy_worst", "personal_accuracy_std")
# Columns with accuracies. Other columns are not checked, since a user's metric may have any scale.
SHARE_COLUMNS = frozenset(name_in_view(name, view) for name in COLUMNS for view in VIEWS)
# rounds.csv has at least one of these columns
ACCURACIES = ("test_accuracy", name_in_view("test_accuracy", VALIDATION))
LAST_KEY = "choices"  # the last key in config.yaml
GROUPS = ("algorithm", "dataset", "partition", "scenario", "hardware", "tracker", "validation")
CONFIG: Mapping[str, Any] = {
    "choices": dict,
    **dict.fromkeys(GROUPS, (None, dict)),
    "seed": (None, int),
    "rounds": (None, is_count),
    "num_clients": (None, is_count),
    "targets": (None, [(int, float)]),
    "test_views": (None, [lambda value: value in TEST_VIEWS]),
    "evaluate_on": (None, lambda value: value in EVALUATE_ON),
}


def check_values(content: Mapping[str, Any], forms: Mapping[str, Any]) -> str:
    """Describe the first value that does not have its form."""
    wrong = misfit(content, forms)
    return (
        "" if wrong is None else f"has an invalid value for `{wrong}` ({str(content[wrong])[:60]})"
    )


def check_summary(summary: Mapping[str, Any]) -> str:
    """Describe what is wrong with the content of summary.json."""
    status = summary.get("status")
    if status is not None and status not in STATUSES:
        return f"has an unknown status ({str(status)[:60]})"
    return "" if status == "failed" else check_values(summary, SUMMARY)


def check_results(summary: Mapping[str, Any]) -> str:
    """Describe which required keys are missing from the summary of a run that has ended."""
    results = () if name_in_view("accuracy", VALIDATION) in summary else RESULTS
    lacks = [name for name in (*REQUIRED, *results) if name not in summary]
    return f"lacks {', '.join(lacks)}" if lacks else ""


def check_config(config: Mapping[str, Any]) -> str:
    """Describe the first invalid value in config.yaml."""
    return check_values(config, CONFIG)


def check_complete(config: Mapping[str, Any]) -> str:
    """Return a message if config.yaml of a run that has ended is incomplete."""
    if LAST_KEY not in config:
        return f"was not written by a run or is cut short (it lacks `{LAST_KEY}`)"
    return ""


def check_table(table: pd.DataFrame) -> str:
    """Describe what is wrong with a table from `read_table`.

    Problems are invalid cells and accuracies outside [0, 1].
    """
    if problem := table.attrs.get("problem"):
        return str(problem)
    for name in [name for name in table if name in SHARE_COLUMNS]:
        values = table[name].dropna()
        if len(odd := values[~values.between(0, 1)]):
            return f"has {odd.iloc[0]:g} in the column {name}, which is not an accuracy"
    return ""


def accuracy_column(table: pd.DataFrame) -> str | None:
    """Return the column of rounds.csv with the model's accuracy, or None without such a column.

    The test accuracy is preferred to the validation accuracy.
    """
    return next((name for name in ACCURACIES if name in table), None)


def check_rounds(table: pd.DataFrame, last: int | None) -> str:
    """Describe what is wrong with rounds.csv.

    last: the last round according to the summary, or None.
    """
    if accuracy_column(table) is None:
        return "has no column test_accuracy"
    if problem := check_table(table):
        return problem
    if table.empty:
        return f"has no rounds, but the run ended with round {last}; was it cut short?"
    if last is not None and (end := int(table["round"].iloc[-1])) != last:
        return f"ends with round {end}, but the run ended with round {last}; was it cut short?"
    return (
        "has rounds that are not in ascending order" if (np.diff(table["round"]) <= 0).any() else ""
    )


def check_classes(table: pd.DataFrame, rounds: pd.DataFrame) -> str:
    """Describe what is wrong with class_accuracy.csv.

    The table must have all classes for each evaluated round. rounds: the valid table rounds.csv.
    """
    if problem := check_table(table):
        return problem
    evaluated = rounds["round"][rounds[accuracy_column(rounds)].notna()]
    if missing := sorted({*evaluated.tolist()} - {*table["round"].tolist()}):
        return f"lacks round {missing[0]:.0f}, which was evaluated"
    sizes = table.groupby("round").size()
    if sizes.nunique() > 1 or int(table["class"].max()) + 1 != int(sizes.iloc[0]):
        return "has rounds without some of the classes; was it cut short?"
    return ""
