"""Check a metric of forgetting."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedexp.core.errors import ConfigError, HookFailed
from fedexp.core.storage import read_table
from fedexp.metrics.forgetting_metric import ForgettingMetric, Metrics
from fedexp.metrics.record import Record
from fedexp.rundir import files
from fedexp.testing.federation import configure, record, require, simulate
from fedexp.trackers.base import Callbacks
from fedexp.training.summary import check_result_names

ROUNDS, INTERVAL = 4, 3
Values = Mapping[str, Any]  # a number, or one for each client, by name


def check_metric(
    metric: ForgettingMetric,
    matrix: Any = None,
    expected: Values | None = None,
    summary: Values | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Check a metric on results by hand and in a run of four rounds.

    The checks are:

    - After the last row of `matrix`, `round_values` gives the numbers in `expected`, and `summary`
      those in `summary`. A list in `expected` has the values of `local_values`.
    - A run accepts the names and the numbers, and each value is defined in some round.
    - The values depend only on the record: on that of an earlier round too, in any order, twice.
    - A class without examples changes no value.
    - `figures` draws after the initial model and at the end.
    - It also works in a run that tests only rounds 3 and 4, in which the number of a round is not
      its position in the record.

    matrix: class accuracies by hand, [rounds, C], first those of the initial model, nan for a class
        without test examples; or a `Record`, for a metric that reads other results.
    """
    name = type(metric).__name__
    if matrix is not None:
        compare_by_hand(metric, matrix, expected or {}, summary or {})
    with TemporaryDirectory() as folder:
        simulation = simulate(configure(overrides), ROUNDS, forgetting_metric=[metric])
        check_result_names(simulation)
        watching = Callbacks(filter(None, [metric.callback()]))
        found = record(simulation, Path(folder), observers=watching).record
        table = read_table(Path(folder, files.ROUNDS)).set_index("round")
    used = copy.deepcopy(metric)
    ending = values_of(used, found)
    for key in (*metric.names(), *metric.further):
        values = table[key] if key in table else [ending["summary"][key]]
        require(
            not np.isnan(values).all(),
            f"{name}: {key} is nan in all {ROUNDS} rounds, so nothing is checked; select what it"
            " needs with overrides=[...]",
        )
    # only the latest personal models are in a record
    rounds = found.rounds[-1:] if metric.needs_personal else found.rounds[::-1]
    for number in rounds:
        then = found.upto(number)
        alone = values_of(copy.deepcopy(metric), then)
        words = f"{name}: after round {number}, a second call"
        compare(values_of(used, then), alone, words, "values may depend only on the record")
        in_run = {key: table.at[number, key] for key in metric.names()}
        words = f"{name}: after round {number} of a run"
        compare({"round_values": in_run}, alone, words, "values may depend only on the record")
    words, advice = f"{name}: with a class without examples", "leave out nan in class accuracies"
    compare(values_of(used, with_absent_class(found)), ending, words, advice)
    for then in (found.upto(0), found):
        for file, draw in metric.figures(then).items():
            drawn = draw()
            require(
                isinstance(drawn, Figure),
                f"{name}: the figure {file} is a {type(drawn).__name__}; must be a matplotlib"
                " Figure",
            )
    run_with_gaps(metric, overrides)


def run_with_gaps(metric: ForgettingMetric, overrides: Sequence[str]) -> None:
    """Raise AssertionError if a metric fails in a run that does not test every round."""
    try:
        config = configure([*overrides, f"eval_interval={INTERVAL}"])
        simulation = simulate(config, ROUNDS, forgetting_metric=[copy.deepcopy(metric)])
    except ConfigError:  # an override needs a test after every round
        return
    watching = Callbacks(filter(None, [metric.callback()]))
    with TemporaryDirectory() as folder:
        try:
            record(simulation, Path(folder), observers=watching)
        except HookFailed as error:
            raise AssertionError(
                f"{error}, with eval_interval={INTERVAL}; record.rounds has the numbers of the"
                " rounds in the record"
            ) from error


def compare_by_hand(
    metric: ForgettingMetric, matrix: Any, expected: Values, summary: Values
) -> None:
    """Compare the values of a metric with those that its author has calculated."""
    name = type(metric).__name__
    require(bool(expected or summary), f"{name}: matrix needs expected={{...}} or summary={{...}}")
    record = matrix
    if not isinstance(record, Record):
        rows = np.asarray(matrix, dtype=np.float64)
        record = Record(np.ones((1, rows.shape[1]), np.int64))
        for number, row in enumerate(rows):
            record.add(number, row)
    found = values_of(metric, record)
    of_clients = {key: value for key, value in expected.items() if np.ndim(value)}
    of_round = {key: value for key, value in expected.items() if key not in of_clients}
    wanted = {"round_values": of_round, "client_values": of_clients, "summary": summary}
    for hook, values in wanted.items():
        unknown = [key for key in values if key not in found[hook]]
        known = ", ".join(found[hook]) or "nothing"
        require(not unknown, f"{name}: {hook} gives {known}, but not {', '.join(unknown)}")
    compare(found, wanted, f"{name}: on the matrix by hand", "or the calculation is wrong")


def values_of(metric: ForgettingMetric, record: Record) -> dict[str, Values]:
    """Return the values of a metric after the last round of a record, by hook."""
    metrics = Metrics([metric])
    return {
        "round_values": metrics.round_values(record),
        "client_values": metrics.client_values(record),
        "summary": metrics.summary(record),
    }


def compare(
    found: Mapping[str, Values], wanted: Mapping[str, Values], what: str, advice: str
) -> None:
    """Raise AssertionError if a value, by hook and name, is not within 1e-9 of the wanted one."""
    for hook, values in found.items():
        for key, value in wanted[hook].items():
            same = np.allclose(values[key], value, rtol=1e-9, atol=1e-12, equal_nan=True)
            require(same, f"{what}, {hook} gives {key}={values[key]}, not {value}; {advice}")


def with_absent_class(record: Record) -> Record:
    """Return the record with a further class that neither clients nor the test set have."""

    def widened(values: np.ndarray, value: float = math.nan) -> np.ndarray:
        return np.concatenate([values, np.full_like(values[..., :1], value)], axis=-1)

    names = ("class_accuracy", "local_class_accuracy", "distributed_accuracy")
    changed: dict[str, Any] = {
        each: tuple(map(widened, getattr(record, each))) for each in names
    } | {"counts": widened(record.counts, 0)}
    for each in ("personal_accuracy", "personal_peak"):
        if (values := getattr(record, each)) is not None:
            changed[each] = widened(values)
    return replace(record, **changed)
