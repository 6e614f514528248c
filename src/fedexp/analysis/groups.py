"""The groups of runs that may be averaged: runs with equal values of everything that changes a
result, except their seeds.

The values come from the identities of the runs. A run without one, such as a run of fedexp 0.1, is
compared by its configuration, in the keys that both runs have.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from fedexp.analysis.varying import hashable
from fedexp.rundir.identity import flatten, result_values
from fedexp.rundir.reader import RunDirectory

TESTED = ("test_views", "evaluate", "forgetting_metric", "analysis")
# Nodes in which the runs of a group may differ. The precision may follow from the hardware; one
# that the overrides set is in the names of runs.
WITHIN = ("seed", "seeds", "hardware", *TESTED)
Values = dict[str, Any]  # by dotted key


def group_values(run: RunDirectory) -> Values:
    """Return the values that the runs of a group share."""
    values = chosen(result_values(run.config) if run.identity is None else run.identity)
    return callback_values(run) | values if is_stopped(run) else values


def chosen(values: Values) -> Values:
    return {k: hashable(value) for k, value in values.items() if k.partition(".")[0] not in WITHIN}


def measured_values(run: RunDirectory) -> Values:
    """Return what decides whether the numbers of two runs of a setting are comparable.

    These are the checksums of the data, and the options and versions of metrics. They are not in
    `group_values`, since a run may lack them.
    """
    metrics = {
        key: hashable(value)
        for key, value in (run.identity or {}).items()
        if key.startswith("forgetting_metric.")
    }
    sums = run.summary.get("checksums") or {}
    # further words are those of surrogate sets, which depend on the seed
    return metrics | {f"data ({key})": text.split()[0] for key, text in sums.items() if text}


def is_stopped(run: RunDirectory) -> bool:
    """Return whether a callback ended the run.

    The identity of a run has this callback only since `ends_runs` exists.
    """
    return (run.summary.get("stopped") or {}).get("by") == "callback"


def callback_values(run: RunDirectory) -> Values:
    return chosen(flatten(run.config.get("callback") or {}, "callback"))


def differing_values(one: RunDirectory, other: RunDirectory) -> dict[str, tuple[Any, Any]]:
    """Return the values in which the groups of two runs differ; {} if they are in one group.

    A value is None if the run does not have the key.
    """
    mine, theirs = group_values(one), group_values(other)
    keys = {*mine, *theirs}
    if one.identity is None or other.identity is None:
        mine, theirs = (chosen(result_values(run.config)) for run in (one, other))
        keys = {*mine} & {*theirs}
    if is_stopped(one) or is_stopped(other):
        mine, theirs = callback_values(one) | mine, callback_values(other) | theirs
        keys |= {key for key in (*mine, *theirs) if key.startswith("callback.")}
    pairs = {key: (mine.get(key), theirs.get(key)) for key in sorted(keys)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def split_by_group(runs: Sequence[RunDirectory]) -> list[list[RunDirectory]]:
    """Return the runs of each group."""
    groups: list[list[RunDirectory]] = []
    for run in runs:
        same = next((each for each in groups if not differing_values(each[0], run)), None)
        if same is None:
            groups.append([run])
        else:
            same.append(run)
    return groups


def distinguish(groups: Sequence[Sequence[RunDirectory]]) -> list[Values]:
    """Return for each group the values that tell it from the others, as few as possible.

    Options of the algorithm come first. A key that a group does not have is left out.
    """
    first = [group[0] for group in groups]
    pairs = itertools.combinations(first, 2)
    keys = {key for one, other in pairs for key in differing_values(one, other)}
    values, used = [group_values(run) for run in first], list[str]()
    for key in sorted(keys, key=lambda key: (not key.startswith("algorithm."), key)):
        if count_distinct(values, [*used, key]) > count_distinct(values, used):
            used.append(key)
    return [{key: each[key] for key in used if key in each} for each in values]


def count_distinct(values: Sequence[Values], keys: Sequence[str]) -> int:
    return len({tuple(each.get(key) for key in keys) for each in values})
