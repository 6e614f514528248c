"""Check the keys and types of a checkpoint before it is used.

A file that loads may still have invalid content, for example after an edit by hand. It is then
treated like a file with a wrong checksum: the previous checkpoint is used.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedexp.core.errors import ConfigError
from fedexp.data.views import PLAIN, VIEWS
from fedexp.rundir import files
from fedexp.rundir.files import CHECKPOINT_FORMAT
from fedexp.rundir.schema import fits, misfit

STATUSES = ("running", "completed", "diverged", "stopped")


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def is_share(value: object) -> bool:
    """Return whether a value is an accuracy; nan means that a class or task has no test example."""
    return type(value) is float and (0 <= value <= 1 or math.isnan(value))


def pair(form: Any) -> Callable[[object], bool]:
    """Return the form of a pair (round, value)."""
    return lambda node: (
        isinstance(node, tuple | list)
        and len(node) == 2
        and is_count(node[0])
        and fits(node[1], form)
    )


def is_tested(value: object) -> bool:
    """Return whether a value has all test results of one view, with the right types."""
    whole = isinstance(value, dict) and TESTED.keys() <= value.keys() and not misfit(value, TESTED)
    return whole and {*ARRAYS} <= value["history"].keys()  # type: ignore[index]


# Key -> form of its value, for the test results of one view and for a whole checkpoint.
TESTED: Mapping[str, Any] = {
    "accuracy": [pair(is_share)],
    "tasks": [pair([is_share])],
    "history": {str: torch.Tensor},
}
FORM: dict[str, Any] = {
    **TESTED,
    "round": is_count,
    "examples": is_count,
    "train_seconds": is_seconds,
    "seconds": is_seconds,
    "status": lambda value: value in STATUSES,
    "not_finite": [is_count],
    "wandb_id": (None, str),
    "server": lambda value: isinstance(value, dict) and {"params", "buffers"} <= value.keys(),
    "clients": {is_count: is_count},
    "alignment": [dict],
    "lengths": {lambda key: key in files.TABLES: is_count},
}
OPTIONAL: dict[str, Any] = {  # keys that older checkpoints do not have
    "checksums": {lambda key: key in files.TABLES: is_count},
    "first_view": lambda value: value in VIEWS,
    "views": {lambda view: view in VIEWS and view != PLAIN: is_tested},
    "spans": [lambda value: isinstance(value, dict) and is_count(value.get("first"))],
}
ARRAYS = (
    "counts",
    "rounds_per_task",
    "rounds",
    "class_accuracy",
    "local_rounds",
    "sampled",
    "local_class_accuracy",
)


def check_form(path: Path, state: object) -> None:
    """Raise ConfigError unless a loaded file has the keys and types of a checkpoint."""
    if not isinstance(state, dict):
        raise ConfigError(f"{path}: not a checkpoint (holds {type(state).__name__})")
    if state.get("format") != CHECKPOINT_FORMAT:
        raise ConfigError(
            f"{path}: format {state.get('format')}, this fedexp reads {CHECKPOINT_FORMAT}"
        )
    strange = state.keys() - {*FORM, *OPTIONAL, "format"}
    for word, odd in (("without", FORM.keys() - state.keys()), ("with", strange)):
        if odd:
            names = ", ".join(sorted(map(str, odd)))
            raise ConfigError(f"{path}: not a checkpoint of a run ({word} {names})")
    wrong = misfit(state, FORM | OPTIONAL)
    if wrong is None and not all(is_tested(each) for each in by_view(state).values()):
        wrong = "history"
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong} is not what a checkpoint holds")


def by_view(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return view -> its test results in a checkpoint.

    The first view's results are on the top level. Older checkpoints only have the plain view.
    """
    return {state.get("first_view", PLAIN): state} | state.get("views", {})
