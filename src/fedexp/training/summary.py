"""The results that summary.json holds."""

from typing import Any

import numpy as np

from fedexp.data.views import VALIDATION, all_named, choosing, named
from fedexp.metrics.targets import rounds_to_target
from fedexp.rundir import files
from fedexp.training import local_evaluation
from fedexp.training.rows import TAIL, merged, plain, task_history
from fedexp.training.simulation import Simulation
from fedexp.training.state import State, Tested

# Keys of summary.json that are not results of rounds.
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
    "fingerprint",
    "versions",
    "commit",
    "hardware",
    "determinism",
    "data",
    "peak_memory",
)


def summary_of(simulation: Simulation, state: State) -> dict[str, Any]:
    """Return the results for summary.json after a state."""
    views = tuple(state.tested)
    validated = VALIDATION in views
    best = state.best[0] if validated and state.best is not None else None
    of_views = {view: view_summary(simulation, each, best) for view, each in state.tested.items()}
    targets = {view: values.pop("rounds_to_target") for view, values in of_views.items()}
    reached = targets.pop(choosing(views))
    first, *others = (all_named(values, view) for view, values in of_views.items())
    parts = [dict.fromkeys(RESERVED), first]
    if validated:
        parts.append({"best_round": best})
    if state.alignment:
        parts.append({"alignment": state.alignment})
    parts += [{"rounds_to_target": reached}, *others]
    if not validated:
        parts += [{named("rounds_to_target", view): each} for view, each in targets.items()]
    parts.append({"rounds": state.round})
    what_happened = {
        "local_evaluation": local_evaluation.describe(simulation),
        "left_out": simulation.left_out,
        "schedule": changes(simulation),
        "stopped": state.stopped if state.status == "stopped" else {},
    }
    parts.append({name: value for name, value in what_happened.items() if value})
    if state.status == "diverged":
        parts.append({"not_finite": state.not_finite})
    if hint := hint_of(simulation, state):
        parts.append({"hint": hint})
    speed = state.examples / state.train_seconds if state.train_seconds else None
    parts.append({"seconds": state.seconds, "train_samples_per_second": speed})
    found = merged(files.SUMMARY, *parts)
    return {name: value for name, value in found.items() if name not in RESERVED}


def view_summary(simulation: Simulation, tested: Tested, best: int | None) -> dict[str, Any]:
    """Return the results in one view.

    best: round chosen by the validation set. None: the round with the highest accuracy in this
    view.
    """
    settings, last = simulation.settings, tested.accuracy[-1][1]
    trained = {number: value for number, value in tested.accuracy if number >= 1}
    rounds, values = list(trained), list(trained.values())
    metrics = simulation.metrics.summary(tested.history)
    return merged(
        files.SUMMARY,
        {"accuracy": last},
        {"best_accuracy": max(values, default=last) if best is None else trained[best]},
        {name: plain(value) for name, value in metrics.items()},
        task_history(simulation, tested).summary() if simulation.has_tasks else {},
        {
            "rounds_to_target": rounds_to_target(
                rounds, values, settings.targets, settings.target_fractions
            )
        },
    )


def changes(simulation: Simulation) -> list[dict[str, Any]]:
    """Return the first round and the partition of each change of the clients' data."""
    names = ("scheme", "alpha", "shards_per_client", "shares")
    found = []
    for first, stage in simulation.changes:
        known = {name: stage.partition.info[name] for name in names if name in stage.partition.info}
        found.append({"round": first, **known, "hash": stage.partition.hash})
    return found


def hint_of(simulation: Simulation, state: State) -> str:
    """Return the algorithm's hint if the run failed, or an empty string.

    A run has failed if it diverged or never reached twice the accuracy of chance.
    """
    best = max((value for number, value in state.accuracy if number >= 1), default=1.0)
    failed = state.status == "diverged" or best * simulation.runtime.data.num_classes < 2
    return simulation.algorithm.hint if failed else ""


def check_names(simulation: Simulation) -> None:
    """Raise ConfigError if a metric uses a name that is already taken, before files are written.

    The metrics are computed for an initial model with the same accuracy in all classes. Other
    errors in a metric appear during the run.
    """
    history, classes = simulation.new_history(), simulation.runtime.data.num_classes
    history.add(0, np.full(classes, 1 / classes))
    if simulation.metrics.needs_personal:
        history.add_personal(0, np.full((simulation.settings.num_clients, classes), 1 / classes))
    try:
        values = simulation.metrics.round_values(history)
    except Exception:
        return
    columns = ("round", "test_accuracy", "test_loss", "train_loss", "lr", *TAIL)
    merged(files.ROUNDS, dict.fromkeys(columns), values)
    merged(files.SUMMARY, dict.fromkeys(RESERVED), values)
