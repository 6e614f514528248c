"""Compute the results of a run that are written to summary.json."""

from typing import Any

from fedexp.core.errors import ConfigError
from fedexp.data.views import VALIDATION, rename_for_view, selection_view
from fedexp.metrics.record import Record
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir import files
from fedexp.training.rows import json_value, merge_values, round_row, task_history
from fedexp.training.simulation import Simulation
from fedexp.training.state import State

# keys of summary.json that do not contain results of rounds
RESERVED = (
    "status",
    "algorithm",
    "dataset",
    "scenario",
    "partition",
    "model",
    "seed",
    "seeds",
    "sweep",
    "identity",
    "versions",
    "commit",
    "hardware",
    "checksums",
    "parts",
    "data",
    "peak_memory",
)


def summary_of(simulation: Simulation, state: State) -> dict[str, Any]:
    """Return the results of a run up to the given state, for summary.json."""
    views = tuple(state.records)
    validated = VALIDATION in views
    best = state.best[0] if validated and state.best is not None else None
    parts = []
    for view, record in state.records.items():
        values = view_summary(simulation, record, best)
        reached = values.pop("rounds_to_target")
        parts.append(rename_for_view(values, view))
        if view == selection_view(views):
            parts.append({"rounds_to_target": reached})
        elif not validated:
            parts.append(rename_for_view({"rounds_to_target": reached}, view))
    every = simulation.local_evaluation.every
    optional = {
        "alignment": state.alignment,
        "local_evaluation": {"every": every} if every else {},
        "left_out": simulation.left_out,
        "schedule": list_changes(simulation),
        "stopped": state.stopped if state.status == "stopped" else {},
        "hint": failure_hint(simulation, state),
    }
    parts.append({name: value for name, value in optional.items() if value})
    if validated:
        parts.append({"best_round": best})
    if state.status == "diverged":
        parts.append({"not_finite": state.not_finite})
    speed = state.examples / state.train_seconds if state.train_seconds else None
    last = {"rounds": state.round, "seconds": state.seconds, "train_samples_per_second": speed}
    found = merge_values(files.SUMMARY, dict.fromkeys(RESERVED), *parts, last)
    return {name: value for name, value in found.items() if name not in RESERVED}


def view_summary(simulation: Simulation, record: Record, best: int | None) -> dict[str, Any]:
    """Return the results of a run in one view.

    best: the best round on the validation set, or None to use the round with the highest accuracy
        in this view.
    """
    settings = simulation.settings
    rounds, values = record.rounds, record.accuracy
    best_accuracy = max(values[1:], default=values[-1])
    if best is not None:
        best_accuracy = values[rounds.index(best)]
    targets = settings.targets, settings.target_fractions
    metrics = simulation.metrics.summary(record)
    return merge_values(
        files.SUMMARY,
        {"accuracy": values[-1], "best_accuracy": best_accuracy},
        {name: json_value(value) for name, value in metrics.items()},
        task_history(simulation, record).summary() if simulation.has_tasks else {},
        {"rounds_to_target": rounds_to_target(rounds, values, *targets)},
    )


def list_changes(simulation: Simulation) -> list[dict[str, Any]]:
    """Return a dict for each change of the clients' data.

    It contains the first round in which the change applies, and the new partition."""
    names = ("scheme", "alpha", "shards_per_client", "shares")
    found = []
    for first, stage in simulation.changes:
        info = stage.partition.info
        known = {name: info[name] for name in names if name in info}
        found.append({"round": first, **known, "hash": stage.partition.hash})
    return found


def failure_hint(simulation: Simulation, state: State) -> str:
    """Return the algorithm's hint if the run failed, or an empty string if it did not.

    A run has failed if it diverged, or if its accuracy never reached twice the accuracy of random
    guessing.
    """
    best = max((value for number, value in state.record.curve if number >= 1), default=1.0)
    failed = state.status == "diverged" or best * simulation.runtime.data.num_classes < 2
    return simulation.algorithm.hint if failed else ""


def check_result_names(simulation: Simulation) -> None:
    """Raise ConfigError if two results of a run have the same name.

    To find the names before files are written, the metrics are computed for an example state.
    Other errors in a metric are ignored, because they are reported during the run.
    """
    state = simulation.example_state()
    try:
        round_row(simulation, state, {}, None)
        summary_of(simulation, state)
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
